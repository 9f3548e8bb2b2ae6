"""What the log takes, measured only while it is the limit: an idle log's throughput says nothing. Pure."""

from __future__ import annotations

from collections import deque

__all__ = ["BacklogMeter"]

_WAITING_BYTES_MIN = 1 << 20
"""Less than one produce request's worth on its way: the log is not what limits us."""
_SPAN_SECONDS_MIN = 0.2
_INTERVALS_MAX = 512


class BacklogMeter:
    """Bytes a second that became durable in the intervals that began and ended with a backlog."""

    def __init__(self) -> None:
        self._intervals: deque[tuple[float, int]] = deque(maxlen=_INTERVALS_MAX)
        self._since: float | None = None

    def completed(self, now: float, size: int, still_waiting_bytes: int) -> None:
        """A record became durable.

        Args:
            now: monotonic seconds.
            size: of the record, in bytes.
            still_waiting_bytes: appended before or after it, and not durable yet.
        """
        if still_waiting_bytes < _WAITING_BYTES_MIN:
            self._since = None
            return
        if self._since is not None:
            self._intervals.append((now - self._since, size))
        self._since = now

    @property
    def bytes_per_second(self) -> float | None:
        """None: there was no backlog for long enough lately."""
        seconds = sum(span for span, _ in self._intervals)
        if seconds < _SPAN_SECONDS_MIN:
            return None
        return sum(size for _, size in self._intervals) / seconds
