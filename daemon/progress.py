"""Whether each loop still makes progress or is idle: what decides if the watchdog is fed. Pure."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress", "Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One look at one loop.

    Args:
        done: a count that grows with every piece of work.
        waiting: whether there is work that it should be doing now; False: idle, or held up by what it cannot help (the
            log is away).
    """

    done: int
    waiting: bool


class Progress:
    """A loop is stuck when it had work all the time and its count has not moved for too long."""

    def __init__(self, stuck_seconds: float) -> None:
        """Args: stuck_seconds: longer than the slowest piece of work."""
        self._stuck_seconds = stuck_seconds
        self._seen: dict[str, tuple[int, float]] = {}

    def stuck(self, now: float, samples: dict[str, Sample]) -> tuple[str, ...]:
        """The loops that are stuck at `now` (monotonic seconds), by name."""
        out = []
        for name, sample in samples.items():
            done, since = self._seen.get(name, (sample.done, now))
            if sample.done != done or not sample.waiting:
                done, since = sample.done, now
            self._seen[name] = (done, since)
            if now - since > self._stuck_seconds:
                out.append(name)
        return tuple(out)
