"""The write lock of a local log's directory: one process at a time writes or checkpoints, in turn.

SQLite has a write lock of its own, and we take ours around it for two reasons:

- Waiting for SQLite's lock is polling with sleeps of up to 100 ms, and a busy writer starves the others. Ours is flock,
  which blocks in the kernel, with a turnstile before it: who waits for `write.lock` holds `turn.lock`, so the process
  that has just released the one must queue behind it for the other. Two busy writers alternate.
- SQLite from 3.7.0 up to 3.51.2 can corrupt a database when one connection checkpoints while another writes and
  restarts the WAL (https://www.sqlite.org/wal.html#walresetbug). Under this lock that never happens
  (INV-LOCAL-ONE-WRITER).

The kernel drops the lock when its holder dies. A holder that is stopped (SIGSTOP) keeps it, as it would keep SQLite's:
`holder` says who it is.
"""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Holder", "WriteLock", "holder", "locked"]

_MODE = 0o666
"""Less the umask. Who may use the log is the directory's to say."""

_RETRY_SECONDS = 0.01
"""Pause of `locked`, which is for creating a log: rare, short, and needs a deadline."""


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that holds a write lock, and whether it is stopped (SIGSTOP, or under a debugger)."""

    pid: int
    stopped: bool

    def __str__(self) -> str:
        return f"process {self.pid}" + (", which is stopped," if self.stopped else "")


class WriteLock:
    """Two flock files of one directory, opened, for one thread. Waits end with the holder's transaction or death."""

    def __init__(self, *, turn: Path, write: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._turn = os.open(turn, flags, _MODE)
        try:
            self._write = os.open(write, flags, _MODE)
        except OSError:
            os.close(self._turn)
            raise

    def acquire(self) -> None:
        """Wait for our turn, then for the lock."""
        fcntl.flock(self._turn, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._write, fcntl.LOCK_EX)
        finally:
            fcntl.flock(self._turn, fcntl.LOCK_UN)

    def release(self) -> None:
        """Let the next one write."""
        fcntl.flock(self._write, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close both files, which also drops the lock."""
        os.close(self._write)
        os.close(self._turn)


@contextmanager
def locked(path: Path, *, seconds: float) -> Iterator[None]:
    """Hold a flock on a file that is made if it is missing.

    Raises:
        TimeoutError: another process held it for so long.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _MODE)
    deadline = time.monotonic() + seconds
    try:
        while not _taken(file):
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(_RETRY_SECONDS)
        yield
    finally:
        os.close(file)


def _taken(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def holder(path: Path) -> Holder | None:
    """The process that holds the flock of a file, from /proc; None if nobody does, or it cannot be seen from here.

    Source: proc(5), /proc/locks: `1: FLOCK ADVISORY WRITE 4711 fe:00:131 0 EOF`; in a waiter's line `->` comes second.
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
