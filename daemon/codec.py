"""Which codec rows are encoded with now: the operator's, or for `auto` what measuring says."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from daemon.telemetry import Event
from kvlog.records import Codec
from kvlog.wire.choose import choose, measure

if TYPE_CHECKING:
    from daemon.primary import Publisher
    from daemon.telemetry import Telemetry
    from kvlog.layout import Layout
    from kvlog.wire.choose import Choice

__all__ = ["CodecChooser"]

_AGAIN_SECONDS = 60.0
_SAMPLE_BYTES_MIN = 16 << 10
_SAMPLE_BYTES_MAX = 1 << 20

_NAMED = {"raw": Codec.RAW, "lz4": Codec.LZ4, "split_zstd": Codec.SPLIT_ZSTD}


class CodecChooser:
    """One a daemon. `auto` measures the codecs on real rows once in a while, and the log while appends wait."""

    def __init__(self, setting: str, cores: float, publisher: Publisher, telemetry: Telemetry) -> None:
        self._fixed = _NAMED.get(setting)
        self._cores = cores
        self._publisher = publisher
        self._telemetry = telemetry
        self._current = self._fixed or Codec.RAW
        self._measured_at: float | None = None
        self._measuring = asyncio.Lock()
        self.choice: Choice | None = None

    async def choose(self, rows: memoryview, layout: Layout) -> Codec:
        """The codec for these rows; measures in a thread when it is time to."""
        if self._fixed is not None or len(rows) < _SAMPLE_BYTES_MIN or self._measuring.locked():
            return self._current
        now = time.monotonic()
        if self._measured_at is None or now - self._measured_at > _AGAIN_SECONDS:
            async with self._measuring:
                self._measured_at = now
                await self._measure(rows, layout)
        return self._current

    async def _measure(self, rows: memoryview, layout: Layout) -> None:
        size = min(len(rows), _SAMPLE_BYTES_MAX) // layout.row_bytes * layout.row_bytes
        if size == 0:
            return
        sample = memoryview(bytes(rows[:size]))
        figures = await asyncio.to_thread(measure, sample, layout.dtype, clock_ns=time.perf_counter_ns)
        throughput = self._publisher.throughput()
        choice = choose(figures, append_bytes_per_second=throughput, cores=self._cores)
        if self.choice is None or choice.codec is not self._current:
            self._telemetry.say(Event.CODEC_CHOSEN, codec=choice.codec.name.lower(), reason=choice.reason)
        self.choice = choice
        self._current = choice.codec
