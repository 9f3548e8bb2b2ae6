"""A compacted topic as a map, on a writer and a reader of its one partition."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from kvlog.errors import LocalProtocolError, LogTruncated, LogUnavailable, OutcomeUnknown
from kvlog.ids import Offset, Partition
from kvlog.log.base import TableRow
from kvlog.log.kafka_batches import Message

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvlog.log.base import PartitionBounds
    from kvlog.log.kafka_reader import KafkaReader
    from kvlog.log.kafka_writer import KafkaWriter

__all__ = ["KafkaTable", "ReadOnlyWriter"]

_ONLY = Partition(0)
_READ_BYTES = 1 << 20
_POLL_SECONDS = 0.5


class ReadOnlyWriter:
    """Stands for a table's writer where the log was opened to read only."""

    trouble = ""

    async def append_message(self, partition: Partition, message: Message) -> Awaitable[Offset]:  # noqa: ARG002
        """Refuse.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError(problem="this log was opened to read only")

    async def close(self) -> None:
        """Nothing is held."""


class KafkaTable:
    """A Table over Kafka; see base.Table for what is promised.

    Args:
        writer: started; closed with the table.
        reader: closed with the table.
        bounds: asks for the table's log start offset and high watermark.
        timeout_seconds: how long `put` and `refresh` may take.
    """

    def __init__(
        self,
        writer: KafkaWriter | ReadOnlyWriter,
        reader: KafkaReader,
        bounds: Callable[[], Awaitable[PartitionBounds]],
        *,
        timeout_seconds: float,
    ) -> None:
        self._writer = writer
        self._reader = reader
        self._bounds = bounds
        self._timeout_seconds = timeout_seconds
        self._assigned = False

    async def put(self, key: bytes, value: bytes | None) -> None:
        """See base.Table.put.

        Raises:
            LogUnavailable: it may or may not be stored; put it again, which is harmless.
            RowTooLarge: the value is larger than the topic takes.
        """
        try:
            async with asyncio.timeout(self._timeout_seconds):
                await (await self._writer.append_message(_ONLY, Message(key, value, [])))
        except (OutcomeUnknown, TimeoutError) as error:
            problem = str(error) or f"not stored within {self._timeout_seconds} s: {self._writer.trouble}"
            raise LogUnavailable(where="table", problem=problem) from error

    async def refresh(self) -> Sequence[TableRow]:
        """See base.Table.refresh. Of a key that changed twice since the last call, only the newest value comes.

        Raises:
            LogUnavailable: it could not be read to its end now; the next call goes on from there.
            LogReplaced: the topic was recreated; forget all rows, the next call brings those of the new one.
        """
        bounds = await self._bounds()
        if not self._assigned:
            self._reader.assign({_ONLY: bounds.log_start})
            self._assigned = True
        rows: dict[bytes, bytes | None] = {}
        try:
            async with asyncio.timeout(self._timeout_seconds):
                while self._reader.positions()[_ONLY] < bounds.high_watermark:
                    await self._read_into(rows)
        except TimeoutError:
            raise LogUnavailable(where="table", problem="not read to its end in time") from None
        return [TableRow(key, value) for key, value in rows.items()]

    async def close(self) -> None:
        """See base.Table.close."""
        await self._writer.close()
        await self._reader.close()

    async def _read_into(self, rows: dict[bytes, bytes | None]) -> None:
        try:
            found = await self._reader.read(bytes_max=_READ_BYTES, timeout_seconds=_POLL_SECONDS)
        except LogTruncated as error:
            # Records were deleted below; what is left is the table.
            self._reader.seek(_ONLY, Offset(int(str(error.log_start))))
            return
        for read in found:
            if read.message.key is not None:
                # Popped first, so that rows stand in the order of their last change.
                rows.pop(read.message.key, None)
                value = read.message.value
                # A copy: a row is kept for long, and a view would keep all that was fetched with it.
                rows[read.message.key] = None if value is None else bytes(value)
