"""What other programs write into our topics: it reaches the fold as something that it refuses, and holds nothing up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from aiokafka import AIOKafkaProducer

from kvlog.ids import Offset
from kvlog.log.topics import records_topic
from tests.contract.log_steps import P0, ZERO, append, collect, end, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvlog.log.kafka import KafkaLog

pytestmark = pytest.mark.kafka


@pytest.fixture
async def foreign(
    kafka_broker: str, kafka_prefix: str, kafka_log: KafkaLog
) -> AsyncIterator[Callable[..., object]]:
    """Writes a value as another program would, with options of its own."""
    producers: list[AIOKafkaProducer] = []

    async def write(*values: bytes | None, transaction: bool = False, **options: object) -> None:
        if transaction:
            options["transactional_id"] = f"{kafka_prefix}-foreign"
        producer = AIOKafkaProducer(bootstrap_servers=kafka_broker, **options)
        producers.append(producer)
        await producer.start()
        if transaction:
            await producer.begin_transaction()
        for value in values:
            await producer.send(records_topic(kafka_prefix), value=value, key=b"foreign", partition=0)
        if transaction:
            await producer.commit_transaction()
        await producer.flush()

    yield write
    for producer in producers:
        await producer.stop()


async def test_compressed_and_null_and_transactional_messages_pass_as_what_they_are(
    kafka_log: KafkaLog, foreign: Callable[..., object]
) -> None:
    """Compressed batches and null values come as empty values, a transaction's marker as a hole, ours whole."""
    writer, reader = await kafka_log.writer(), await kafka_log.reader()
    await append(writer, P0, b"ours 0")
    await foreign(b"x" * 10_000, b"y" * 10_000, compression_type="gzip", linger_ms=50)  # type: ignore[misc]
    await foreign(None, b"plain")  # type: ignore[misc]
    await foreign(b"in a transaction", transaction=True)  # type: ignore[misc]

    async def marker_is_written() -> bool:
        return 7 == await end(kafka_log)

    await until(marker_is_written)
    assert [7] == await append(writer, P0, b"ours 1")
    reader.assign({P0: ZERO})
    read = [(message.offset, bytes(message.value)) for message in await collect(reader, 7)]
    expected = [b"ours 0", b"", b"", b"", b"plain", b"in a transaction"]
    assert [*enumerate(expected), (7, b"ours 1")] == read
    assert {P0: 8} == reader.positions()
    reader.seek(P0, Offset(6))
    assert [7] == [message.offset for message in await collect(reader, 1)]
