"""How long the connector's calls take inside vLLM's worker, and what a long one was made of.

Wall time alone says little on a machine that has more to do than cores: a call that was made to wait for a core is as
long as one that worked. So each call's own time is taken too: what it computed, and what it slept, for a lock, for
Python's interpreter lock, for anything else that it asked for. What is left out is the kernel's time in the queue for a
core, and Python's garbage collections, which can hit any line. Page faults and switches of a long call are kept.
"""

from __future__ import annotations

import gc
import resource
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["CallTimes"]

_LONG_MS: Final = 1.0
_KEPT: Final = 40


class CallTimes:
    """The longest of each call: `longest_ms` wall time, `own_ms` without the queue and collections. One thread."""

    def __init__(self) -> None:
        self.longest_ms: dict[str, float] = {}
        self.own_ms: dict[str, float] = {}
        self.calls = 0
        self._long: list[dict[str, Any]] = []
        self._collected = 0.0
        self._collecting_since = 0.0
        gc.callbacks.append(self._collection)

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure one call."""
        collected, queued, before = self._collected, _queued_ms(), _usage()
        busy, wall = time.thread_time(), time.perf_counter()
        try:
            yield
        finally:
            wall_ms = 1000 * (time.perf_counter() - wall)
            collected_ms = 1000 * (self._collected - collected)
            busy_ms = max(0.0, 1000 * (time.thread_time() - busy) - collected_ms)
            queued_ms, counts = _queued_ms() - queued, _since(before)
            own_ms = max(busy_ms, wall_ms - queued_ms - collected_ms) if counts["waits"] else busy_ms
            self.calls += 1
            self.longest_ms[name] = max(self.longest_ms.get(name, 0.0), wall_ms)
            self.own_ms[name] = max(self.own_ms.get(name, 0.0), own_ms)
            if max(wall_ms, own_ms) > _LONG_MS:
                said = {"call": name, "wall_ms": wall_ms, "own_ms": own_ms, "busy_ms": busy_ms}
                self._keep({**said, "collected_ms": collected_ms, "queued_ms": queued_ms, **counts})

    def told(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"calls": self.calls, "own_ms": self.own_ms, "long": self._long}

    def _keep(self, call: dict[str, Any]) -> None:
        """The longest ones."""
        self._long.append(call)
        self._long.sort(key=lambda each: -float(each["wall_ms"]))
        del self._long[_KEPT:]

    def _collection(self, phase: str, _: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            self._collecting_since = now
        else:
            self._collected += now - self._collecting_since


def _usage() -> dict[str, int]:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return {"faults": usage.ru_minflt, "waits": usage.ru_nvcsw, "preempted": usage.ru_nivcsw}


def _since(before: dict[str, int]) -> dict[str, int]:
    return {name: now - before[name] for name, now in _usage().items()}


def _queued_ms() -> float:
    """Milliseconds that this thread was ready to run and had no core."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6
    return 0.0
