"""How many bytes of rows a step may copy so that it takes no longer than it should; no clock, time is passed in.

What a byte costs depends on the engine's cache: 0.6 µs a KiB where rows lie together, 3.4 where each element of a key
lies in a cache line of its own, and less where a run of rows shares those lines. So it is learned from the copies
themselves, as a sender learns a link: half of what was allowed or more, done in less time than allowed, allows up to
twice as much; any copy that took longer allows less at once.
"""

from __future__ import annotations

from typing import Final

__all__ = ["StepPace"]

_BYTES_START: Final = 512 << 10
"""Where nothing is known: 1.8 ms of the dearest layout that was measured."""

_BYTES_MIN: Final = 64 << 10
"""One copy in which the machine stood still must not make the next ones tiny."""

_CHANGE_MAX: Final = 2.0
_DROP_MAX: Final = 0.25


class StepPace:
    """One for each thread that copies.

    Args:
        seconds: that a copy should take at most, > 0; processor time, because a core that was taken away says nothing
            of what copying costs.
        bytes_max: a copy is never allowed more, ≥ 1.
    """

    def __init__(self, seconds: float, bytes_max: int) -> None:
        assert seconds > 0
        assert bytes_max >= 1
        self._seconds = seconds
        self._bytes_max = bytes_max
        self._bytes = min(bytes_max, _BYTES_START)

    @property
    def bytes_now(self) -> int:
        """What the next copy may have."""
        return self._bytes

    def took(self, copied: int, seconds: float) -> None:
        """Learn from a copy of so many bytes; none say nothing."""
        if copied == 0:
            return
        fit = self._seconds / max(seconds, 1e-9)
        if fit < 1:
            fewer = int(min(self._bytes, copied) * max(fit, _DROP_MAX))
            self._bytes = min(self._bytes_max, max(_BYTES_MIN, fewer))
        elif 2 * copied >= self._bytes:
            self._bytes = min(self._bytes_max, int(self._bytes * min(fit, _CHANGE_MAX)))
