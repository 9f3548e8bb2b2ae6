"""The writer of a local log: copies a message, gives it its place in the scribe's queue, and hands out its future."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from kvlog.errors import LogUnavailable, OutcomeUnknown, RowTooLarge

if TYPE_CHECKING:
    from kvlog.ids import Offset, Partition
    from kvlog.log.base import AppendRequest
    from kvlog.log.local_scribe import Scribe

__all__ = ["CLOSE_SECONDS", "LocalWriter"]

CLOSE_SECONDS = 5.0
"""How long closing waits for pending appends; less than systemd's patience, more than any disk's hiccup."""


class LocalWriter:
    """Implements kvlog.log.base.LogWriter; made by LocalLog.writer.

    Order: all appends of one LocalLog, by whichever of its writers, are in the log as `append` returned.
    """

    def __init__(self, scribe: Scribe, *, where: str, partitions: int, record_bytes_max: int) -> None:
        self._scribe = scribe
        self._where = where
        self._partitions = partitions
        self._record_bytes_max = record_bytes_max
        self._pending: dict[asyncio.Future[Offset], Partition] = {}
        self._closed = False

    @property
    def trouble(self) -> LogUnavailable | None:
        """See LogWriter.trouble."""
        return self._scribe.down

    async def append(self, request: AppendRequest) -> asyncio.Future[Offset]:
        """Queue one message; see LogWriter.append. The value's buffer is the caller's again when this returns."""
        assert 0 <= request.partition < self._partitions, (
            f"partition {request.partition} of {self._partitions}"
        )
        if self._closed:
            raise LogUnavailable(where=self._where, problem="this writer was closed")
        value = bytes(request.value)  # for bytes no copy
        if len(value) > self._record_bytes_max:
            refused: asyncio.Future[Offset] = asyncio.get_running_loop().create_future()
            refused.set_exception(RowTooLarge(row_bytes=len(value), record_bytes_max=self._record_bytes_max))
            return refused
        kept = replace(request, key=bytes(request.key), value=value)
        size = len(value) + len(kept.key)
        future = await self._scribe.submit(
            lambda transaction: transaction.append(kept), size=size, partition=request.partition
        )
        self._pending[future] = kept.partition
        future.add_done_callback(self._forget)
        return future

    async def flush(self) -> None:
        """Return when every append so far is durable or has failed."""
        await self._scribe.flush()

    async def close(self) -> None:
        """Write what is pending, for at most CLOSE_SECONDS; what is left then ends as OutcomeUnknown."""
        self._closed = True
        if self._pending:
            with suppress(TimeoutError):
                async with asyncio.timeout(CLOSE_SECONDS):
                    await self._scribe.flush()
        for future, partition in tuple(self._pending.items()):
            if not future.done():
                problem = "the writer was closed before the append was durable"
                future.set_exception(OutcomeUnknown(partition=partition, problem=problem))

    def _forget(self, future: asyncio.Future[Offset]) -> None:
        del self._pending[future]
