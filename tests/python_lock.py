"""Whether other threads run while something is done: a step must not stand still for what is done beside it."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Turns", "counted_turns"]

_NEVER_SECONDS = 100.0


@dataclass
class Turns:
    """How often another thread had Python's lock."""

    count: int = 0


@contextmanager
def counted_turns() -> Iterator[Turns]:
    """Count meanwhile. Nobody is asked for the lock, so the other thread has it only where it is given up."""
    turns, stop, interval = Turns(), threading.Event(), sys.getswitchinterval()

    def take_turns() -> None:
        while not stop.is_set():
            time.sleep(0.0001)
            turns.count += 1

    thread = threading.Thread(target=take_turns)
    thread.start()
    while not turns.count:
        time.sleep(0.001)
    sys.setswitchinterval(_NEVER_SECONDS)
    try:
        turns.count = 0
        yield turns
    finally:
        sys.setswitchinterval(interval)
        stop.set()
        thread.join()
