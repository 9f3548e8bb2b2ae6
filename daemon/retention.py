"""When records came, and after how many bytes: how near retention is to an offset. Pure.

A partition's records are noted as they are read, at marks: the further back, the coarser, so that a log of any length
takes the same memory. An offset between two marks counts as the earlier one, so it is never taken to be younger than it
is. The log itself may keep records for longer (Kafka deletes whole segments).
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.ids import Offset, Partition

__all__ = ["Arrivals", "RetentionRule"]

MARKS_MAX = 4096
"""Of a partition: one a second is more than an hour at full detail. Past it half of the older half goes."""
_MARK_MS = 1000
_MARK_BYTES = 256 << 10


@dataclass(frozen=True, slots=True)
class RetentionRule:
    """What the log keeps of a partition.

    Args:
        seconds: how long a record stays.
        size_bytes: how many bytes stay; None: no limit.
    """

    seconds: float
    size_bytes: int | None

    def left(self, age_seconds: float, bytes_since: int) -> float:
        """The share of its life that a record of this age still has, by what is shorter; negative: it may be gone."""
        by_age = 1 - age_seconds / self.seconds
        return by_age if self.size_bytes is None else min(by_age, 1 - bytes_since / self.size_bytes)


@dataclass(slots=True)
class _Partition:
    """Marks in offset order: an offset, when its record came, and the bytes of those before it."""

    offsets: list[int]
    times_ms: list[int]
    bytes_before: list[int]
    next_offset: int = 0
    bytes_read: int = 0

    def note(self, offset: int, timestamp_ms: int, size: int) -> None:
        if offset < self.next_offset:
            return  # read again
        is_mark = (
            not self.offsets
            or timestamp_ms - self.times_ms[-1] >= _MARK_MS
            or self.bytes_read - self.bytes_before[-1] >= _MARK_BYTES
        )
        if is_mark:
            self.offsets.append(offset)
            self.times_ms.append(timestamp_ms)
            self.bytes_before.append(self.bytes_read)
        if len(self.offsets) > MARKS_MAX:
            for marks in (self.offsets, self.times_ms, self.bytes_before):
                marks[: MARKS_MAX // 2] = marks[: MARKS_MAX // 2 : 2]
        self.next_offset, self.bytes_read = offset + 1, self.bytes_read + size


class Arrivals:
    """The marks of every partition that is read."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, _Partition] = {}

    def note(self, partition: Partition, offset: Offset, timestamp_ms: int, size: int) -> None:
        """A record was read; offsets that were noted before are passed over."""
        found = self._partitions.get(partition)
        if found is None:
            found = self._partitions[partition] = _Partition([], [], [])
        found.note(offset, timestamp_ms, size)

    def forget(self, partition: Partition) -> None:
        """The partition is another one now."""
        self._partitions.pop(partition, None)

    def bytes_read(self, partition: Partition) -> int:
        """Bytes of all records noted so far."""
        found = self._partitions.get(partition)
        return found.bytes_read if found else 0

    def since(self, partition: Partition, offset: Offset, now_ms: int) -> tuple[float, int]:
        """The age of the record at an offset in seconds, and the bytes from it on; (0, 0): none is noted.

        Who asks for what lies before the first mark learns the first mark's, which is the least that it can be.
        """
        found = self._partitions.get(partition)
        if found is None or offset >= found.next_offset:
            return 0.0, 0
        at = max(0, bisect_right(found.offsets, offset) - 1)
        return max(0.0, (now_ms - found.times_ms[at]) / 1000), found.bytes_read - found.bytes_before[at]
