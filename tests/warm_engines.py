"""Engine processes with a real model that start at once: a process that has imported everything forks them.

torch and transformers take six seconds of a core to import: most of a test that starts engines again and again.
What is forked is an engine process like any other from there on: `kvlog.engines`' main, in a session of its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, NoReturn, Self

from tests.nodes import Process
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["ForkedProcess", "WarmEngines"]

_ANY_CODE = -1
"""Who is not its parent never learns a process's exit code."""


class ForkedProcess(Process):
    """A grandchild with its output in a file."""

    def __init__(self, pid: int, output: Path) -> None:
        self._output = output
        self._from = 0
        self._pid = pid
        self._ended = os.pidfd_open(pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._pid

    @property
    def code(self) -> int | None:
        """None while it runs, then any number."""
        return self._poll(0)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for its end."""
        code = self._poll(seconds)
        if code is None:
            raise subprocess.TimeoutExpired("an engine", seconds)
        return code

    def _poll(self, seconds: float) -> int | None:
        if self._ended < 0:
            return _ANY_CODE
        if not select.select([self._ended], [], [], seconds)[0]:
            return None
        os.close(self._ended)
        self._ended = -1
        return _ANY_CODE


class WarmEngines:
    """The process that forks; `start` is a `Node.start_program`, and waits for the imports the first time."""

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_engines"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=die_with_parent,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()  # and every engine with it
        self._process.communicate()

    def start(self, arguments: Sequence[str], output: Path) -> Process:
        """Start `python -m kvlog.engines ...` without the wait."""
        assert arguments[0] == "kvlog.engines"
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps([str(output), *arguments[1:]]) + "\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._process.stdout.readline()), output)


def main() -> None:
    """Fork an engine for each line: a JSON list of its output's path and its arguments."""
    import kvlog.engines.transformers  # noqa: F401  # this is what takes so long

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them here
    for line in sys.stdin:
        output, *arguments = json.loads(line)
        pid = os.fork()
        if not pid:
            _become_engine(output, arguments)
        print(pid, flush=True)


def _become_engine(output: str, arguments: Sequence[str]) -> NoReturn:
    from kvlog.engines.__main__ import main as run

    die_with_parent()
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, output, os.O_WRONLY | os.O_CREAT | os.O_APPEND),
    ):
        fd = os.open(path, flags, 0o600)
        os.dup2(fd, number)
        os.close(fd)
    os.dup2(1, 2)
    code = 1
    try:
        code = run(arguments)
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
