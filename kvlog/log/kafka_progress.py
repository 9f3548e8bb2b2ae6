"""Tells a reader that is stuck from one that has nothing to read: by position against the end of the log. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.ids import Partition

__all__ = ["ProgressWatch"]


@dataclass(slots=True)
class _Standing:
    position: int
    since: float


@dataclass(slots=True)
class ProgressWatch:
    """Remembers since when each partition has had something to read and has not moved.

    A broker that cannot be reached is not observed, so an outage never counts as being stuck.

    Args:
        stuck_seconds: how long a partition may stand still with data before it.
    """

    stuck_seconds: float
    _standing: dict[Partition, _Standing] = field(default_factory=dict)

    def observe(self, partition: Partition, *, position: int, end: int, now: float) -> None:
        """Take note of an answer: the next offset to read, and the end of the log as the broker said it just now."""
        standing = self._standing.get(partition)
        if position >= end:
            self._standing.pop(partition, None)
        elif standing is None or standing.position != position:
            self._standing[partition] = _Standing(position, now)

    def stuck(self, now: float) -> frozenset[Partition]:
        """The partitions that have stood still for too long."""
        return frozenset(p for p, s in self._standing.items() if now - s.since >= self.stuck_seconds)

    def forget(self) -> None:
        """Begin anew, after the connection was made anew or the positions were changed by their owner."""
        self._standing.clear()
