"""What every child process of the tests gets: it dies with the process that started it, however that one ends.

The kernel ties it to the thread that started the child: start what is to live on from a thread that does, as a test's.
"""

from __future__ import annotations

import ctypes
import os
import signal

__all__ = ["die_with_parent"]

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), <linux/prctl.h>. It survives exec."""

_LIBC = ctypes.CDLL(None)
_PARENT = os.getpid()


def die_with_parent(parent: int = _PARENT) -> None:
    """Ask the kernel for SIGKILL at the parent's end: a `preexec_fn`, so it runs in the child, before the program."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)
