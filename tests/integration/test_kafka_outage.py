"""The Kafka log while its broker dies, hangs, comes back, or comes back with less than it had."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogReplaced, LogUnavailable, OutcomeUnknown
from kvlog.ids import Offset
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted, records_topic
from tests.contract.log_steps import (
    P0,
    P1,
    P2,
    ZERO,
    append,
    collect,
    outlast_unavailable,
    request,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from kvlog.log.base import LogWriter
    from tests.kafka.broker import Broker, Cluster

pytestmark = [pytest.mark.kafka, pytest.mark.slow, pytest.mark.timeout(300)]

TIMEOUT_SECONDS = 2.0
"""Of one request: much less than a broker needs to start, so every outage here is longer."""

START_SECONDS = 90.0
BATCH_PREFIX_BYTES = 12


@pytest.fixture
async def fragile_log(fragile_kafka: Cluster, kafka_prefix: str) -> AsyncIterator[KafkaLog]:
    """An open log on a broker that may be killed, with deadlines that an outage exceeds."""
    log = KafkaLog(
        KafkaOptions(
            bootstrap=fragile_kafka.bootstrap,
            topic_prefix=kafka_prefix,
            records=RecordsWanted(partitions=3, replication=1),
            timeout_seconds=TIMEOUT_SECONDS,
            append_wait_seconds=1.0,
            pending_bytes_max=1_000_000,
        )
    )
    await outlast_unavailable(log.open)
    yield log
    await log.close()


async def comes_back(broker: Broker) -> None:
    """Starts a dead broker again while our tasks go on."""
    broker.start_again()
    deadline = time.monotonic() + START_SECONDS
    while not broker.is_serving:
        assert time.monotonic() < deadline, "the broker did not come back"
        await asyncio.sleep(0.05)


def lose_tail(folder: Path, *, keep_batches: int) -> None:
    """Cuts a dead broker's partition after some batches, as a machine that lost its page cache would have."""
    segment = folder / "00000000000000000000.log"
    data = segment.read_bytes()
    at = 0
    for _ in range(keep_batches):
        at += BATCH_PREFIX_BYTES + int.from_bytes(data[at + 8 : at + 12], "big")
    assert at < len(data), "there is a tail to lose"
    with segment.open("r+b") as file:
        file.truncate(at)
    for rest in (*folder.glob("*.snapshot"), *folder.glob("*.index"), *folder.glob("*.timeindex")):
        rest.unlink()


async def one_batch_each(writer: LogWriter, *values: bytes) -> None:
    """Appends values so that each is a batch of its own."""
    for value in values:
        await append(writer, P0, value)


async def test_broker_killed_and_restarted_loses_nothing_acknowledged(
    fragile_kafka: Cluster, fragile_log: KafkaLog
) -> None:
    """Through kill -9 and a restart: appends wait, become durable in order and once, and the same reader reads all."""
    broker = fragile_kafka.brokers[0]
    writer, reader = await fragile_log.writer(), await fragile_log.reader()
    reader.assign({P0: ZERO, P1: ZERO})
    await append(writer, P0, *(b"before %d" % n for n in range(50)))
    first = await collect(reader, 20)
    broker.kill()
    pending = [await writer.append(request(P0, b"during %d" % n)) for n in range(50)]
    await asyncio.sleep(TIMEOUT_SECONDS + 0.5)
    assert not any(future.done() for future in pending)
    with pytest.raises(LogUnavailable):
        await collect(reader, 1_000)
    await comes_back(broker)
    assert list(range(50, 100)) == await asyncio.wait_for(asyncio.gather(*pending), 30)
    assert [100, 101] == await append(writer, P0, b"after 0", b"after 1")
    assert [0] == await append(writer, P1, b"other")
    expected = [b"before %d" % n for n in range(50)] + [b"during %d" % n for n in range(50)]
    read = list(first)
    while len(read) < 103:
        read += await outlast_unavailable(lambda: collect(reader, 1))
    assert [*expected, b"after 0", b"after 1"] == values_of(read, P0)
    assert [b"other"] == values_of(read, P1)


async def test_close_during_outage_ends_pending_appends_as_unknown_at_once(
    fragile_kafka: Cluster, fragile_log: KafkaLog
) -> None:
    """Idempotent batches never expire by themselves; closing ends them, without waiting for the broker."""
    writer = await fragile_log.writer()
    await append(writer, P0, b"durable")
    fragile_kafka.brokers[0].kill()
    pending = [await writer.append(request(P0, b"%d" % n)) for n in range(10)]
    began = time.monotonic()
    await writer.close()
    assert time.monotonic() - began < 2.0
    assert {OutcomeUnknown} == {type(future.exception()) for future in pending}
    with pytest.raises(LogUnavailable):
        await writer.append(request(P0, b"late"))


async def test_append_with_full_buffer_during_outage_gives_up_with_nothing_sent(
    fragile_kafka: Cluster, fragile_log: KafkaLog
) -> None:
    """What waits for the broker is bounded: past it `append` waits its time and says unavailable; nothing is lost."""
    broker = fragile_kafka.brokers[0]
    writer = await fragile_log.writer()
    await append(writer, P0, b"first")
    broker.kill()
    pending = [await writer.append(request(P0, bytes(200_000))) for _ in range(4)]
    with pytest.raises(LogUnavailable) as refused:
        await writer.append(request(P0, bytes(200_000)))
    assert "wait for the broker" in str(refused.value.problem)
    await comes_back(broker)
    assert [1, 2, 3, 4] == await asyncio.wait_for(asyncio.gather(*pending), 30)
    assert [5] == await append(writer, P0, b"last")
    assert 6 == (await fragile_log.bounds(P0)).high_watermark


async def test_broker_that_hangs_holds_nothing_over_its_deadline(
    fragile_kafka: Cluster, fragile_log: KafkaLog
) -> None:
    """A broker that is stopped in mid-work delays; every call ends at its deadline, and all goes on when it wakes."""
    broker = fragile_kafka.brokers[0]
    writer, reader = await fragile_log.writer(), await fragile_log.reader(group="g")
    reader.assign({P0: ZERO})
    await append(writer, P0, b"0")
    await collect(reader, 1)
    broker.pause()
    future = await writer.append(request(P0, b"1"))
    assert [] == list(await reader.poll(bytes_max=1000, timeout_seconds=0.5))
    for call in (
        fragile_log.bounds(P0),
        fragile_log.identity(),
        reader.commit({P0: Offset(1)}),
        fragile_log.writer(),
    ):
        began = time.monotonic()
        with pytest.raises(LogUnavailable):
            await call
        assert time.monotonic() - began < TIMEOUT_SECONDS + 1.0
    assert not future.done()
    broker.resume()
    assert 1 == await asyncio.wait_for(future, 30)
    assert [b"1"] == values_of(await outlast_unavailable(lambda: collect(reader, 1)))
    await outlast_unavailable(lambda: reader.commit({P0: Offset(2)}))


async def test_writer_whose_log_lost_its_tail_says_unknown_and_goes_on(
    fragile_kafka: Cluster, fragile_log: KafkaLog, kafka_prefix: str
) -> None:
    """After a lost tail our sequence numbers are refused: what is pending is unknown, a fresh producer goes on."""
    broker = fragile_kafka.brokers[0]
    writer = await fragile_log.writer()
    await one_batch_each(writer, *(b"%d" % n for n in range(6)))
    broker.kill()
    pending = [await writer.append(request(partition, b"pending")) for partition in (P0, P0, P1)]
    lose_tail(broker.data / f"{records_topic(kafka_prefix)}-0", keep_batches=3)
    await comes_back(broker)
    outcomes = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 30)
    assert [OutcomeUnknown, OutcomeUnknown] == [type(outcome) for outcome in outcomes[:2]]
    assert "OUT_OF_ORDER_SEQUENCE_NUMBER" in str(outcomes[0])
    assert [3, 4] == await append(writer, P0, b"fresh 0", b"fresh 1")
    assert [0] == await append(writer, P2, b"elsewhere")


async def test_reader_whose_log_lost_its_tail_is_told_though_it_grew_again(
    fragile_kafka: Cluster, fragile_log: KafkaLog, kafka_prefix: str
) -> None:
    """Records at offsets that we have read may be others now: the leader epoch gives the new history away."""
    broker = fragile_kafka.brokers[0]
    writer, reader = await fragile_log.writer(), await fragile_log.reader()
    await one_batch_each(writer, *(b"old %d" % n for n in range(6)))
    reader.assign({P0: ZERO, P1: ZERO})
    await collect(reader, 6)
    broker.kill()
    lose_tail(broker.data / f"{records_topic(kafka_prefix)}-0", keep_batches=3)
    await comes_back(broker)
    other = await outlast_unavailable(fragile_log.writer)
    await append(other, P0, *(b"new %d" % n for n in range(10)))
    with pytest.raises(LogReplaced) as replaced:
        await outlast_unavailable(lambda: collect(reader, 1))
    assert P0 == replaced.value.fields["partition"]
    reader.seek(P0, Offset(3))
    assert [b"new %d" % n for n in range(10)] == values_of(await collect(reader, 10))
