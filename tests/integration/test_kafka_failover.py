"""Three brokers, one of which dies: what was acknowledged stays, and nobody has to do anything."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted, records_topic
from tests.contract.log_steps import outlast_unavailable, request
from tests.kafka.admin import Admin

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvlog.log.base import LogMessage, LogReader, LogWriter
    from tests.kafka.broker import Cluster

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

PARTITIONS = tuple(Partition(p) for p in range(3))


@pytest.fixture
async def log(three_brokers: Cluster, kafka_prefix: str) -> AsyncIterator[KafkaLog]:
    """An open log with three copies of everything."""
    opened = KafkaLog(
        KafkaOptions(
            bootstrap=three_brokers.bootstrap,
            topic_prefix=kafka_prefix,
            records=RecordsWanted(partitions=3),
            timeout_seconds=10,
        )
    )
    assert [] == list(await outlast_unavailable(opened.open))
    yield opened
    await opened.close()


async def comes(condition: Callable[[], bool]) -> None:
    """Waits for what the tasks beside us bring about."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - what is waited for is a count, not an event
            await asyncio.sleep(0.05)


async def write(writer: LogWriter, stop: asyncio.Event) -> dict[tuple[Partition, Offset], bytes]:
    """Appends to all partitions until told to stop; returns what was acknowledged."""
    futures: list[tuple[Partition, bytes, asyncio.Future[Offset]]] = []
    while not stop.is_set():
        for partition in PARTITIONS:
            value = b"%d:%d" % (partition, len(futures))
            futures.append((partition, value, await writer.append(request(partition, value))))
        await asyncio.sleep(0.005)
    await asyncio.wait_for(writer.flush(), 60)
    return {(partition, future.result()): value for partition, value, future in futures}


async def read(reader: LogReader, stop: asyncio.Event, found: list[LogMessage]) -> None:
    """Reads on through whatever happens."""
    while not stop.is_set():
        try:
            found += await reader.poll(bytes_max=1 << 20, timeout_seconds=0.2)
        except LogUnavailable:
            await asyncio.sleep(0.05)


async def test_leader_killed_in_the_middle_of_writing_and_reading_loses_nothing(
    three_brokers: Cluster, log: KafkaLog, kafka_prefix: str
) -> None:
    """With three copies and one broker dead, appends go on by themselves, in order and once; the reader sees all."""
    writer, reader = await log.writer(), await log.reader()
    reader.assign(dict.fromkeys(PARTITIONS, Offset(0)))
    admin = Admin(three_brokers.bootstrap)
    leader = await admin.leader(records_topic(kafka_prefix), 0)
    await admin.close()
    stop_writing, stop_reading = asyncio.Event(), asyncio.Event()
    found: list[LogMessage] = []
    async with asyncio.TaskGroup() as group:
        group.create_task(read(reader, stop_reading, found))
        writing = group.create_task(write(writer, stop_writing))
        await asyncio.sleep(0.5)
        three_brokers.brokers[leader].kill()
        before = len(found)
        await comes(lambda: len(found) > before + 300 and 3 == len({m.partition for m in found[before:]}))
        stop_writing.set()
        acknowledged = await writing
        await comes(lambda: len(found) >= len(acknowledged))
        stop_reading.set()
    assert acknowledged == {(message.partition, message.offset): bytes(message.value) for message in found}
    for partition in PARTITIONS:
        offsets = [message.offset for message in found if message.partition == partition]
        assert list(range(len(offsets))) == offsets
