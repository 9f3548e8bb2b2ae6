"""What every child process of the tests gets: it dies with the process that started it, however that one ends.

The kernel ties it to the thread that started the child: start what is to live on from a thread that does, as a test's.

It gets a process group of its own, so that it can be killed with its children and a terminal's Ctrl-C is not its. Not a
session: Linux schedules each session as one (sched_autogroup_enabled), and on two busy cores kernel 6.18 let a server's
session keep those of its daemon and its client from running for two to four seconds on end.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ProcessEnd", "become", "die_with_parent"]

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), <linux/prctl.h>. It survives exec."""

_LIBC = ctypes.CDLL(None)
_PARENT = os.getpid()


def die_with_parent(parent: int = _PARENT) -> None:
    """Ask the kernel for SIGKILL at the parent's end: a `preexec_fn`, so it runs in the child, before the program.

    And let it be interrupted: a shell has what it starts in the background ignore SIGINT, and that is inherited.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before we could ask
        os._exit(1)


def become(output: str, environment: Mapping[str, str], folder: str) -> None:
    """Make this process, just forked, what a program begins as: with its own group, folder, environment and output.

    Args:
        output: file that standard output and error are appended to; there is no input.
        environment: all of it.
        folder: to work in.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
    null = os.open(os.devnull, os.O_RDONLY)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for taken, fd in ((null, 0), (file, 1), (file, 2)):
        os.dup2(taken, fd)
    os.close(null)
    os.close(file)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)


class ProcessEnd:
    """The end of a process that need not be a child of ours.

    Args:
        pid: of one that has not been waited for.
    """

    def __init__(self, pid: int) -> None:
        self._fd: int | None = os.pidfd_open(pid)

    def has_come(self, seconds: float = 0.0) -> bool:
        """Wait for it so long at most. Returns: whether the process has ended."""
        if self._fd is not None and select.select([self._fd], [], [], seconds)[0]:
            os.close(self._fd)
            self._fd = None
        return self._fd is None
