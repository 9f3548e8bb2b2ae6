"""How far this node is behind, and how near retention is to what is still needed: measured once in a while.

A session's records are needed from its root on, by whoever does not know it yet: long after this node has folded them.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from kvlog.core.lag import LagMeter, LagSample, Needed, needed_of
from kvlog.core.session import Standing
from kvlog.errors import KvlogError

if TYPE_CHECKING:
    from daemon.index import NodeIndex
    from daemon.node import NodeShell
    from daemon.telemetry import Telemetry
    from kvlog.core.standby import StandbyCore
    from kvlog.ids import Offset, Partition
    from kvlog.log.base import Log, PartitionBounds

__all__ = ["LagWatch"]

_LOOK_SECONDS = 2.0
_ANSWER_SECONDS = 2.0
_SESSIONS_A_SECOND = 5000
"""So many states are looked through on average: 100,000 of one partition take a thirtieth of a second, every 20 s."""


class LagWatch:
    """Measures every partition that is followed, for Prometheus and for the heartbeat."""

    def __init__(self, shell: NodeShell, telemetry: Telemetry, index: NodeIndex) -> None:
        self._shell = shell
        self._telemetry = telemetry
        self._index = index
        self._meters: dict[Partition, LagMeter] = {}
        self._needed: dict[Partition, Needed] = {}
        self._look_again: dict[Partition, float] = {}

    async def run(self, log: Log) -> None:
        """Measure until cancelled."""
        while True:
            await self.look(log)
            await asyncio.sleep(_LOOK_SECONDS)

    async def look(self, log: Log) -> None:
        """Measure once; what cannot be known now is absent, and who needs the log says why."""
        partitions = list(self._shell.core.partitions)
        async with asyncio.TaskGroup() as tasks:
            found = [tasks.create_task(_bounds(log, partition)) for partition in partitions]
        for partition, bounds in zip(partitions, (each.result() for each in found), strict=True):
            meter = self._meters.setdefault(partition, LagMeter())
            self._telemetry.metrics.show_lag(partition, meter.observe(self._sample(partition, bounds)))
        self._index.needed = {int(p): int(one.offset) for p, one in self._needed.items()}
        self._index.truncated = sum(one.sessions_truncated for one in self._needed.values())
        self._telemetry.metrics.sessions_truncated.set(self._index.truncated)

    def _sample(self, partition: Partition, bounds: PartitionBounds | None) -> LagSample:
        """What was applied is read after the watermark, so that nothing counts as lag that is none."""
        core = self._shell.core.partitions[partition]
        if bounds is None:
            return LagSample(_now_ms(), None, None, core.applied)
        needed = self._needed_of(partition, core, bounds.log_start)
        return LagSample(_now_ms(), bounds.log_start, bounds.high_watermark, core.applied, needed.offset)

    def _needed_of(self, partition: Partition, core: StandbyCore, log_start: Offset) -> Needed:
        """The states are looked through when it is their turn; a node that follows thousands has more to do."""
        now = time.monotonic()
        if now >= self._look_again.get(partition, 0.0):
            first = [
                state.first_needed_offset for state in core.sessions() if state.standing is not Standing.ENDED
            ]
            self._look_again[partition] = now + len(first) / _SESSIONS_A_SECOND
            known = [offset for offset in first if offset is not None]
            self._needed[partition] = needed_of(known, applied=core.applied, log_start=log_start)
        return self._needed[partition]


async def _bounds(log: Log, partition: Partition) -> PartitionBounds | None:
    """None: not known now. A broker that hangs must not leave the figures of before on show."""
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            return await log.bounds(partition)
    except (KvlogError, TimeoutError):
        return None


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
