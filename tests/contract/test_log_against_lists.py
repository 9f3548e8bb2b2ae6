"""A log of any implementation against plain lists, in random steps."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogTruncated
from kvlog.ids import Offset, Partition
from kvlog.log.base import PartitionBounds
from tests.contract.log_steps import DEADLINE_SECONDS, P0, P1, P2, ZERO, append

if TYPE_CHECKING:
    from tests.contract.log_factories import LogFactory


class _Model:
    """The log as plain lists, and random steps against both."""

    def __init__(self, factory: LogFactory, source: random.Random) -> None:
        self.factory = factory
        self.source = source
        self.lists: dict[Partition, list[bytes]] = {p: [] for p in (P0, P1, P2)}
        self.starts: dict[Partition, int] = dict.fromkeys((P0, P1, P2), 0)
        self.positions: dict[Partition, int] = dict.fromkeys((P0, P1, P2), 0)

    async def run(self, steps: int) -> None:
        self.logs = [await self.factory.open(), await self.factory.open()]
        self.writers = [await log.writer() for log in self.logs]
        self.reader = await self.logs[0].reader()
        self.reader.assign(dict.fromkeys(self.positions, ZERO))
        actions = [
            self.append,
            self.append,
            self.append,
            self.poll,
            self.poll,
            self.seek,
            self.truncate,
            self.look,
        ]
        for _ in range(steps):
            await self.source.choice(actions)(self.source.choice(list(self.lists)))
        await self.drain()

    async def append(self, partition: Partition) -> None:
        values = [
            self.source.randbytes(self.source.randrange(3000)) for _ in range(self.source.randrange(1, 6))
        ]
        first = len(self.lists[partition])
        offsets = await append(self.source.choice(self.writers), partition, *values)
        assert list(range(first, first + len(values))) == offsets
        self.lists[partition] += values

    async def poll(self, _: Partition) -> None:
        room = self.source.choice([1, 5000, 1 << 20])
        try:
            messages = await self.reader.poll(bytes_max=room, timeout_seconds=0.01)
        except LogTruncated as error:
            self.truncated(error)
            return
        for message in messages:
            # Also below the log start, when it had been fetched before it was deleted.
            assert self.positions[message.partition] == message.offset
            assert self.lists[message.partition][message.offset] == bytes(message.value)
            self.positions[message.partition] += 1

    def truncated(self, error: LogTruncated) -> None:
        partition = Partition(int(str(error.fields["partition"])))
        assert self.positions[partition] < self.starts[partition]
        assert self.starts[partition] == error.fields["log_start"]
        self.move(partition, self.starts[partition])

    async def seek(self, partition: Partition) -> None:
        self.move(partition, self.source.randint(self.starts[partition], len(self.lists[partition])))

    def move(self, partition: Partition, offset: int) -> None:
        self.reader.seek(partition, Offset(offset))
        self.positions[partition] = offset

    async def truncate(self, partition: Partition) -> None:
        if self.source.random() < 0.5:
            before = self.source.randint(self.starts[partition], len(self.lists[partition]))
            await self.factory.truncate(self.logs[1], partition, Offset(before))
            self.starts[partition] = before

    async def look(self, partition: Partition) -> None:
        expected = PartitionBounds(Offset(self.starts[partition]), Offset(len(self.lists[partition])))
        assert expected == await self.source.choice(self.logs).bounds(partition)
        assert {p: self.positions[p] for p in self.positions} == dict(self.reader.positions())

    async def drain(self) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while any(self.positions[p] < len(self.lists[p]) for p in self.lists):
            assert time.monotonic() < deadline, "the reader did not reach the end"
            await self.poll(P0)


@pytest.mark.parametrize("seed", range(4))
async def test_log_against_lists_agrees_at_every_step(log_factory: LogFactory, seed: int) -> None:
    """Whatever is appended, read, sought and deleted in whatever order, the log is its partitions' lists."""
    await _Model(log_factory, random.Random(seed)).run(steps=150)
