"""The bell of a local log: writers ring it after each commit, and the readers of every process on this machine wake.

A ring is one byte written to the file `bell`, at offset 0; a reader's event loop waits for it with inotify. That costs
the writer one system call however many readers there are, needs no list of them, and leaves nothing behind when either
dies. (Unix datagram sockets need a name for each reader, to be cleaned up after a kill -9, and a send for each; a FIFO
wakes one reader only; the WAL file itself changes several times before a commit counts.)

Where inotify is missing (another system, no instance left of fs.inotify.max_user_instances) or blind (the file was
replaced), the tick of `wait` guarantees progress, slowly; `open` says whether inotify works.
"""

from __future__ import annotations

import asyncio
import ctypes
import functools
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TICK_SECONDS", "Bell", "ring"]

TICK_SECONDS = 0.5
"""The longest that a reader goes without looking, bell or not."""

# Source: inotify(7), linux/inotify.h
_IN_MODIFY = 0x2
_EVENTS_BYTES = 4096
"""One read of events; 256 of them, and the kernel merges equal ones."""


def ring(bell: int) -> None:
    """Wake the readers of all processes.

    Args:
        bell: a descriptor of the bell file, open for writing.
    """
    try:
        os.pwrite(bell, b"\0", 0)
    except OSError:
        # A full disk cannot take even this byte (only the first time: later it is overwritten). The commit is durable
        # already, and readers look at their next tick.
        return


class Bell:
    """The reader's side: counts rings, for one event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inotify: int | None = None
        self._hears = False
        self._rings = 0
        self._waiters: set[asyncio.Future[None]] = set()

    @property
    def rings(self) -> int:
        """How often it rang; take it before looking at the log, and give it to `wait`."""
        return self._rings

    @property
    def hears(self) -> bool:
        """Whether a ring is heard, as far as is known; else only a look says whether there is something."""
        return self._hears

    def open(self) -> bool:
        """Start listening in the running loop. Returns: whether inotify works."""
        if self._inotify is None:
            self._inotify = _inotify_open()
            if self._inotify is not None:
                asyncio.get_running_loop().add_reader(self._inotify, self._heard)
        return self._watch()

    async def wait(self, rings: int, timeout_seconds: float) -> None:
        """Return when it has rung more often than `rings`, or at the timeout, or at the next tick."""
        if self._rings != rings or timeout_seconds <= 0:
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.add(waiter)
        try:
            rung, _ = await asyncio.wait([waiter], timeout=min(timeout_seconds, TICK_SECONDS))
        finally:
            self._waiters.discard(waiter)
            waiter.cancel()
        if not rung:
            self._watch()  # the directory may have been recreated: a watch belongs to a file, not to its name

    def wake(self) -> None:
        """Let all who wait look again, in this process."""
        self._rings += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    def close(self) -> None:
        """Stop listening; who waits is woken."""
        if self._inotify is not None:
            asyncio.get_running_loop().remove_reader(self._inotify)
            os.close(self._inotify)
            self._inotify = None
        self._hears = False
        self.wake()

    def _watch(self) -> bool:
        self._hears = self._inotify is not None and _inotify_watch(self._inotify, self._path)
        return self._hears

    def _heard(self) -> None:
        assert self._inotify is not None, "a closed bell has no reader callback"
        try:
            os.read(self._inotify, _EVENTS_BYTES)
        except BlockingIOError:
            return
        self._watch()  # this may have been the old file's last word; for the same file it changes nothing
        self.wake()


@functools.cache
def _libc() -> ctypes.CDLL:
    """Opened once: to find it anew takes as long as a look at the log."""
    return ctypes.CDLL(None, use_errno=True)


def _inotify_open() -> int | None:
    libc = _libc()
    if not hasattr(libc, "inotify_init1"):
        return None
    file: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    return file if file >= 0 else None


def _inotify_watch(inotify: int, path: Path) -> bool:
    watch: int = _libc().inotify_add_watch(inotify, os.fsencode(path), ctypes.c_uint32(_IN_MODIFY))
    return watch >= 0
