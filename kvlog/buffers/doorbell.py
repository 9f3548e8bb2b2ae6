"""An eventfd with which a ring's writer wakes its reader; it carries no data.

Order: the reader clears, then reads the ring until it is empty, then waits. So a ring between clear and wait is seen.
"""

from __future__ import annotations

import os

__all__ = ["Doorbell", "create_doorbell"]


class Doorbell:
    """One end of a doorbell; takes over the descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        """The eventfd: readable while it has been rung and not cleared."""
        return self._fd

    def ring(self) -> None:
        """Wake the reader; costs one system call, never waits."""
        try:
            os.eventfd_write(self._fd, 1)
        except BlockingIOError:  # the counter is full: the reader has been rung often enough
            return

    def clear(self) -> bool:
        """Take all rings so far; whether there was one. Never waits."""
        try:
            return os.eventfd_read(self._fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Give the descriptor back; may be called twice."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def create_doorbell() -> Doorbell:
    """A new doorbell; its descriptor goes to the writer over the link."""
    return Doorbell(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC))
