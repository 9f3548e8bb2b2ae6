"""Steps that the log's contract tests share."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import AppendRequest
from tests.contract.log_factories import PARTITIONS

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from kvlog.log.base import Log, LogMessage, LogReader, LogWriter

__all__ = [
    "DEADLINE_SECONDS",
    "P0",
    "P1",
    "P2",
    "ZERO",
    "append",
    "collect",
    "end",
    "outlast_unavailable",
    "request",
    "until",
    "values_of",
]

T = TypeVar("T")

DEADLINE_SECONDS = 20.0
"""Nothing here takes so long unless it fails."""

P0, P1, P2 = (Partition(p) for p in range(PARTITIONS))
ZERO = Offset(0)


def request(partition: Partition, value: bytes, key: bytes = b"session") -> AppendRequest:
    """An append of a delta, as far as the log cares."""
    return AppendRequest(partition=partition, key=key, value=value, kind=2, epoch=7)


async def append(writer: LogWriter, partition: Partition, *values: bytes) -> list[Offset]:
    """Appends in order and waits until all are durable."""
    futures = [await writer.append(request(partition, value)) for value in values]
    return list(await asyncio.gather(*futures))


async def collect(reader: LogReader, count: int) -> list[LogMessage]:
    """Polls until there are so many messages, and fails when they do not come."""
    messages: list[LogMessage] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} messages came"
        messages += await reader.poll(bytes_max=1 << 20, timeout_seconds=0.5)
    return messages


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Waits for a condition that comes about by itself."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not await condition():
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.05)


def values_of(messages: Sequence[LogMessage], partition: Partition = P0) -> list[bytes]:
    """One partition's values in the order in which they were read."""
    return [bytes(message.value) for message in messages if message.partition == partition]


async def end(log: Log, partition: Partition = P0) -> Offset:
    """The high watermark."""
    return (await log.bounds(partition)).high_watermark


async def outlast_unavailable(work: Callable[[], Awaitable[T]]) -> T:
    """Does it again until the log is there."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        try:
            return await work()
        except LogUnavailable:
            assert time.monotonic() < deadline, "the log did not come back"
            await asyncio.sleep(0.1)
