"""How long the connector's calls take inside vLLM's worker, and what a long one was made of.

Wall time alone says little on a machine that has more to do than cores: a call that was made to wait for a core is as
long as one that worked. So each call's processor time is taken too, and of a long one what the kernel says of its
thread: time in the queue for a core, page faults, switches; and Python's garbage collections, which can hit any line.
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
    """The longest of each call: `longest_ms` wall time, `busy_ms` processor time without collections. One thread."""

    def __init__(self) -> None:
        self.longest_ms: dict[str, float] = {}
        self.busy_ms: dict[str, float] = {}
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
            self.calls += 1
            self.longest_ms[name] = max(self.longest_ms.get(name, 0.0), wall_ms)
            self.busy_ms[name] = max(self.busy_ms.get(name, 0.0), busy_ms)
            if max(wall_ms, busy_ms) > _LONG_MS:
                counts = dict(zip(("faults", "waits", "preempted"), _since(before), strict=True))
                said = {"call": name, "wall_ms": wall_ms, "busy_ms": busy_ms, "collected_ms": collected_ms}
                self._keep({**said, "queued_ms": _queued_ms() - queued, **counts})

    def told(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {"calls": self.calls, "busy_ms": self.busy_ms, "long": self._long}

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


def _usage() -> tuple[int, int, int]:
    usage = resource.getrusage(resource.RUSAGE_THREAD)
    return usage.ru_minflt, usage.ru_nvcsw, usage.ru_nivcsw


def _since(before: tuple[int, int, int]) -> list[int]:
    return [now - then for now, then in zip(_usage(), before, strict=True)]


def _queued_ms() -> float:
    """Milliseconds that this thread was ready to run and had no core."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e6
    return 0.0
