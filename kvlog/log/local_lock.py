"""The write lock of a local log's directory: one process at a time writes or checkpoints.

SQLite has a write lock of its own; ours goes around it for three reasons:

- SQLite from 3.7.0 up to 3.51.2 can corrupt a database when one connection checkpoints while another writes and
  restarts the WAL (https://www.sqlite.org/wal.html#walresetbug). Under this lock that never happens
  (INV-LOCAL-ONE-WRITER).
- SQLite waits with sleeps of up to 100 ms, in which a busy writer comes back again and again. Ours are short, and a
  writer with more to write pauses a little longer than that (`give_way`), so that two busy ones alternate.
- `holder` can name the process that keeps the others waiting.

It is flock, which the kernel drops when its holder dies. It is tried, not waited for in the kernel: a wait there has no
deadline, and a stopped (SIGSTOP) process in the kernel's queue keeps those behind it waiting though the lock is free.
What remains: a process that is stopped while it holds the lock keeps the others from writing, as with any lock.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.errors import LogUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Holder", "WriteLock", "give_way", "holder"]

_RETRY_SECONDS = 0.0005
"""Between two tries; a transaction lasts from 0.3 ms to some 30 ms."""

_MODE = 0o666
"""Less the umask. Who may use the log is the directory's to say."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a write lock, and whether it is stopped (SIGSTOP, or by a debugger)."""

    pid: int
    stopped: bool

    def __str__(self) -> str:
        return f"process {self.pid}" + (", which is stopped," if self.stopped else "")


class WriteLock:
    """One directory's lock file, opened, for one thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)

    @contextmanager
    def held(self, *, seconds: float) -> Iterator[None]:
        """Hold the lock.

        Raises:
            LogUnavailable: another process, which is named, held it for so long; try again.
        """
        deadline = time.monotonic() + seconds
        while not self._taken():
            if time.monotonic() >= deadline:
                who = holder(self._path) or "another process"
                problem = f"{who} has held {self._path.name} for {seconds:.1f} s"
                raise LogUnavailable(where=self._path.parent.absolute().as_uri(), problem=problem)
            time.sleep(_RETRY_SECONDS)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def _taken(self) -> bool:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


def give_way() -> None:
    """Pause until whoever waits for the lock has tried again; for a writer that has more to write."""
    time.sleep(2 * _RETRY_SECONDS)


def holder(path: Path) -> Holder | None:
    """The process that holds the flock of a file, from /proc; None if nobody does, or it cannot be seen from here.

    Source: proc(5), /proc/locks: `1: FLOCK ADVISORY WRITE 4711 fe:00:131 0 EOF`.
    """
    try:
        inode = path.stat().st_ino
        lines = Path("/proc/locks").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        fields = line.split()
        if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
            pid = int(fields[4])
            return Holder(pid, _is_stopped(pid)) if pid > 0 else None
    return None


def _is_stopped(pid: int) -> bool:
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2]
    except OSError:
        return False
    return after_name.split()[0] in {"T", "t"}
