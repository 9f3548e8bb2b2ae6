"""Servers that are forks of one process which has imported vLLM: a start takes seconds, not most of a minute.

The test's end of tests.vllm.fork_servers.
"""

from __future__ import annotations

import json
import os
import subprocess
from typing import TYPE_CHECKING

from consumers.vllm_server import MODULE, server_environment
from tests.processes import ProcessEnd, die_with_parent
from tests.vllm.fork_servers import SAID

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["ForkedProcess", "ForkedServers"]

_END_SECONDS = 20.0
_ANY_CODE = -1
"""Who is not its parent never learns a process's exit code."""


class ForkedProcess:
    """A server that is no child of ours; as much of subprocess.Popen as a server needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._end = ProcessEnd(pid)

    def poll(self) -> int | None:
        """None: it lives. Its exit code is not known."""
        return _ANY_CODE if self._end.has_come() else None

    def wait(self, timeout: float = _END_SECONDS) -> int:
        """Wait for its end."""
        if not self._end.has_come(timeout):
            raise subprocess.TimeoutExpired("a server", timeout)
        return _ANY_CODE


class ForkedServers:
    """Started at once; the first launch waits until everything is imported."""

    def __init__(self, python: Path, root: Path, folder: Path) -> None:
        self._log = (folder / "fork-servers.log").open("ab")
        self._process = subprocess.Popen(
            [python, "-m", "tests.vllm.fork_servers", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=folder,
            env={
                **os.environ,
                **server_environment(path=root, witness=folder / "nobody.jsonl"),
                "OMP_NUM_THREADS": "1",  # vLLM sets it for its worker, whose libraries have read it here already
            },
            preexec_fn=die_with_parent,
        )
        self._is_ready = False

    def launch(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, folder: Path, log: Path
    ) -> ForkedProcess:
        """Start a server, the leader of a process group of its own; it is not there yet."""
        self._is_ready = self._is_ready or self._said() == "ready"
        assert self._process.stdin is not None
        wanted = {"arguments": list(arguments), "environment": dict(environment)}
        self._process.stdin.write(json.dumps({**wanted, "folder": str(folder), "log": str(log)}) + "\n")
        self._process.stdin.flush()
        return ForkedProcess(int(self._said()))

    def close(self) -> None:
        """End it, and any server that still lives."""
        self._process.kill()
        self._process.wait()
        self._process.communicate()
        self._log.close()

    def _said(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(SAID):
                return line.removeprefix(SAID).strip()
        raise AssertionError(f"it ended; see {self._log.name}")
