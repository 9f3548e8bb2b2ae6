"""Starts a program that cannot outlive the demo: `python -m consumers.demo_child PARENT MODULE ARGUMENT...`.

The kernel kills it when its parent dies, however that happens; the wish survives exec. So not even kill -9 of the demo
leaves a node behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

__all__ = ["main"]

_PR_SET_PDEATHSIG = 1
"""Source: prctl(2), <linux/prctl.h>."""


def main(arguments: list[str]) -> None:
    """Become the module that is named. Returns only if the parent has died already."""
    parent, *module = arguments
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == int(parent):  # else it died before we could ask
        os.execv(sys.executable, [sys.executable, "-m", *module])  # noqa: S606 - this interpreter, our arguments


if __name__ == "__main__":
    main(sys.argv[1:])
