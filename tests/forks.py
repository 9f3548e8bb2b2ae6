"""Daemon and engine processes that start at once: a process that has imported everything forks them.

A daemon takes a second of a core to import, an engine with torch and transformers six: together a good part of all the
tests' time. What is forked is a process like any other from there on: its program's main, in a group, environment and
folder of its own, with its exit code.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Self

from tests.nodes import Process
from tests.processes import ProcessEnd, become, die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["ENGINES", "NODES", "ForkedProcess", "Forks"]

NODES = ("daemon.__main__", "daemon.service", "daemon.wiring", "kvlog.engines.__main__")
"""What daemons and synthetic engines import."""

ENGINES = ("kvlog.engines.__main__", "kvlog.engines.transformers")
"""What engines with a real model import."""

_CODE_SECONDS = 20.0
"""From a process's end to its code: who forks is told by a signal, and two busy cores may keep it waiting."""


class ForkedProcess(Process):
    """A grandchild, with its output in a file and its exit code in another."""

    def __init__(self, pid: int, output: Path, began: int) -> None:
        self._output = output
        self._from = began
        self._pid = pid
        self._end = ProcessEnd(pid)
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._poll(0)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for its end; the exit code."""
        code = self._poll(seconds)
        if code is None:
            raise subprocess.TimeoutExpired(f"process {self._pid}", seconds)
        return code

    def _poll(self, seconds: float) -> int | None:
        if self._code is None and self._end.has_come(seconds):
            self._code = _code(_code_file(self._output, self._pid))
        return self._code


def _code_file(output: Path, pid: int) -> Path:
    return output.with_name(f"{output.name}.{pid}")


def _code(file: Path) -> int:
    deadline = time.monotonic() + _CODE_SECONDS
    while not file.exists():
        assert time.monotonic() < deadline, "the process has ended, and nobody said how"
        time.sleep(0.001)
    return int(file.read_text())


class Forks:
    """The process that forks; `start` is what `nodes_started_by` takes, and waits for the imports the first time.

    Args:
        modules: what to import before.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = modules
        self._lock = Lock()

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.forks", *self._modules],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # and what it has forked with it
        self._process.communicate()

    def start(
        self, arguments: Sequence[str], output: Path, environment: dict[str, str] | None = None
    ) -> Process:
        """Start `python -m daemon ...` or `python -m kvlog.engines ...` without the wait."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        output.touch()
        began = output.stat().st_size
        job = {
            "program": arguments[0],
            "arguments": arguments[1:],
            "output": str(output),
            "environment": {**os.environ, **(environment or {})},
            "folder": str(Path.cwd()),
        }
        with self._lock:  # tests start nodes side by side
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            pid = int(self._process.stdout.readline())
        return ForkedProcess(pid, output, began)


def main(modules: Sequence[str]) -> int:
    """Fork a process for each line, a job in JSON, and say its pid. In the process that was forked: its exit code."""
    for name in modules:
        importlib.import_module(name)
    outputs: dict[int, Path] = {}
    signal.signal(signal.SIGCHLD, lambda *_: _tell_ended(outputs))
    for line in sys.stdin:
        job = json.loads(line)
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # its pid is to be known before its end
        pid = os.fork()
        if not pid:
            return _run(job)
        outputs[pid] = Path(job["output"])
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
        print(pid, flush=True)
    return 0


def _tell_ended(outputs: dict[int, Path]) -> None:
    while outputs:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        file = _code_file(outputs.pop(pid), pid)
        if file.parent.exists():  # else nobody is left who wants to know
            partial = file.with_name(f"{file.name}.partial")
            partial.write_text(str(os.waitstatus_to_exitcode(status)))
            partial.rename(file)


def _run(job: dict[str, Any]) -> int:
    """Become the job's process."""
    die_with_parent()
    become(job["output"], job["environment"], job["folder"])
    sys.argv = [job["program"], *job["arguments"]]
    code: int = importlib.import_module(f"{job['program']}.__main__").main(job["arguments"])
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
