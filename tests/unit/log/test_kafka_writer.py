"""The producer's decisions, with brokers that answer what the test says."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import ConfigError, LogUnavailable, OutcomeUnknown, RowTooLarge
from kvlog.ids import Partition
from kvlog.log.base import AppendRequest
from kvlog.log.kafka_errors import PRODUCE, Code, Then
from kvlog.log.kafka_writer import KafkaWriter
from tests.unit.log.kafka_fakes import BOUND, OPTIONS, FakeLink, Produced, seen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvlog.ids import Offset
    from kvlog.log.kafka_options import KafkaOptions

P0, P1, P2 = (Partition(p) for p in range(3))
AGAIN = sorted(code for code, then in PRODUCE.items() if then in {Then.AGAIN, Then.TOPIC})
TOO_LARGE = {Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE}
FATAL = sorted(code for code in Code if code not in PRODUCE and code not in TOO_LARGE)


@pytest.fixture
async def link() -> FakeLink:
    """Brokers that take everything: each partition's offsets are those of a log."""
    ends: dict[int, int] = {}

    def take(produced: Produced) -> tuple[int, int]:
        base = ends.get(produced.partition, 0)
        ends[produced.partition] = base + len(produced.values)
        return 0, base

    return FakeLink(produce=take)


async def started(link: FakeLink, options: KafkaOptions = OPTIONS) -> KafkaWriter:
    """A writer on the fake."""
    writer = KafkaWriter(link, BOUND, options)  # type: ignore[arg-type]
    await writer.start()
    return writer


@pytest.fixture
async def writer(link: FakeLink) -> AsyncIterator[KafkaWriter]:
    """A writer on brokers that take everything, unless the test says otherwise."""
    made = await started(link)
    yield made
    await made.close()


async def append(writer: KafkaWriter, partition: Partition, value: bytes) -> asyncio.Future[Offset]:
    """Appends a delta."""
    return await writer.append(AppendRequest(partition=partition, key=b"s", value=value, kind=2, epoch=7))


async def test_appends_of_one_step_share_a_batch(link: FakeLink, writer: KafkaWriter) -> None:
    """What is appended before the loop turns goes as one batch, in order, under one run of sequence numbers."""
    futures = [await append(writer, P0, b"%d" % n) for n in range(5)]
    assert [0, 1, 2, 3, 4] == await asyncio.gather(*futures)
    assert [Produced(0, 0, 1, 0, (b"0", b"1", b"2", b"3", b"4"))] == link.produced
    assert 5 == await (await append(writer, P0, b"next"))
    assert Produced(0, 0, 1, 5, (b"next",)) == link.produced[1]


async def test_one_request_a_broker_carries_all_its_partitions(link: FakeLink, writer: KafkaWriter) -> None:
    """Partitions of one leader share a request, those of another have their own, and later ones wait for the answer."""
    link.gate.clear()
    first = [await append(writer, partition, b"a") for partition in (P0, P1, P2)]
    await asyncio.sleep(0.01)
    second = [await append(writer, P0, b"b"), await append(writer, P0, b"c")]
    await asyncio.sleep(0.01)
    assert 2 == len(link.requests) - 1  # but for the producer id
    link.gate.set()
    await asyncio.gather(*first, *second)
    assert [(0, 0, (b"a",)), (0, 1, (b"a",)), (1, 2, (b"a",)), (0, 0, (b"b", b"c"))] == [
        (produced.node, produced.partition, produced.values) for produced in link.produced
    ]


@pytest.mark.parametrize("code", AGAIN)
async def test_passing_trouble_is_tried_again_with_the_same_numbers(link: FakeLink, code: int) -> None:
    """The same bytes go again until they are taken; a batch that came after waits, and keeps its place."""
    answers = [(code, -1), (code, -1), (0, 0), (0, 1)]
    link.produce = lambda _: answers.pop(0)
    writer = await started(link)
    first = await append(writer, P0, b"first")
    await asyncio.sleep(0.01)
    second = await append(writer, P0, b"second")
    assert [0, 1] == list(await asyncio.wait_for(asyncio.gather(first, second), 5))
    assert [(0, (b"first",))] * 3 + [(1, (b"second",))] == [(p.sequence, p.values) for p in link.produced]
    await writer.close()


@pytest.mark.parametrize("code", FATAL)
async def test_fatal_answer_ends_everything_and_begins_anew(link: FakeLink, code: int) -> None:
    """What cannot pass ends every pending append as unknown; the next ones go under a fresh producer, from 0."""
    take = link.produce
    link.produce = lambda produced: (code, -1) if produced.values == (b"bad",) else take(produced)
    writer = await started(link)
    assert 0 == await (await append(writer, P0, b"good"))
    link.gate.clear()
    pending = [await append(writer, P0, b"bad")]
    await asyncio.sleep(0.01)
    pending += [await append(writer, P0, b"behind it"), await append(writer, P2, b"elsewhere")]
    link.gate.set()
    outcomes = await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 5)
    assert {OutcomeUnknown} == {type(outcome) for outcome in outcomes}
    assert 1 == await asyncio.wait_for(await append(writer, P0, b"fresh"), 5)
    assert Produced(0, 0, 2, 0, (b"fresh",)) == link.produced[-1]
    await writer.close()


async def test_topic_whose_limit_was_lowered_below_our_records_is_refused_until_it_is_raised(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The refusal is the start's: topic, both sizes, the command. Nothing is sent meanwhile, and it ends by itself."""
    monkeypatch.setattr("kvlog.log.kafka_writer._LOOK_REFUSED_SECONDS", 0.0)
    take = link.produce
    link.limit = 1000
    link.produce = lambda produced: (
        (Code.MESSAGE_TOO_LARGE, -1) if len(produced.values[0] or b"") > (link.limit or 0) else take(produced)
    )
    writer = await started(link)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(await append(writer, P0, bytes(5000)), 5)
    sent = len(link.produced)
    for size in (10, 5000, 10):
        with pytest.raises(ConfigError) as refused:
            await append(writer, P0, bytes(size))
        await asyncio.sleep(0.1)
    assert str(refused.value) == str(writer.trouble)
    said = str(refused.value)
    assert all(word in said for word in ("t.records", "1000 bytes", "925696", "max.message.bytes=925696"))
    assert sent == len(link.produced)
    link.limit = 1_000_000
    future = None
    async with asyncio.timeout(5):
        while future is None:
            await asyncio.sleep(0.01)
            with suppress(ConfigError):
                future = await append(writer, P0, bytes(5000))
        assert await future >= 0
    await writer.close()


@pytest.mark.parametrize("code", sorted(TOO_LARGE))
async def test_refused_size_is_learned(link: FakeLink, code: int) -> None:
    """Several messages that are too large together make smaller batches; one that is too large alone is refused."""
    take = link.produce
    link.produce = lambda produced: (
        (code, -1) if len(b"".join(v or b"" for v in produced.values)) > 1000 else take(produced)
    )
    writer = await started(link)
    pair = [await append(writer, P0, bytes(600)) for _ in range(2)]
    await asyncio.wait_for(asyncio.gather(*pair, return_exceptions=True), 5)
    assert {OutcomeUnknown} == {type(future.exception()) for future in pair}
    assert [0, 1] == await asyncio.gather(*[await append(writer, P0, bytes(600)) for _ in range(2)])
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(await append(writer, P0, bytes(1001)), 5)
    with pytest.raises(RowTooLarge):
        await (await append(writer, P0, bytes(1001)))
    assert 2 == await asyncio.wait_for(await append(writer, P0, bytes(600)), 5)
    await writer.close()


async def test_fatal_answer_leaves_what_the_same_answer_made_durable(link: FakeLink) -> None:
    """One partition's trouble does not make another's outcome unknown when the same response settled it."""
    link.produce = lambda produced: (Code.INVALID_PRODUCER_EPOCH, -1) if produced.partition == 0 else (0, 5)
    writer = await started(link)
    bad, good = await append(writer, P0, b"bad"), await append(writer, P1, b"good")
    assert 5 == await asyncio.wait_for(good, 5)
    with pytest.raises(OutcomeUnknown):
        await bad
    await writer.close()


async def test_fatal_answers_in_a_row_never_mix_producers(link: FakeLink) -> None:
    """However often it begins anew, numbers begin at 0 under each producer, and go on in order from there."""
    take, left = link.produce, [8]

    def sometimes(produced: Produced) -> tuple[int, int]:
        left[0] -= 1
        return (Code.INVALID_PRODUCER_EPOCH, -1) if left[0] > 0 and left[0] % 2 else take(produced)

    link.produce = sometimes
    writer = await started(link)
    for n in range(20):
        pending = [await append(writer, partition, b"%d" % n) for partition in (P0, P1, P2)]
        await asyncio.wait_for(asyncio.gather(*pending, return_exceptions=True), 5)
    begun: dict[tuple[int, int], int] = {}
    for produced in link.produced:
        lane = (produced.producer, produced.partition)
        assert begun.get(lane, 0) == produced.sequence
        begun[lane] = produced.sequence + len(produced.values)
    assert 1 < link.producers == max(produced.producer for produced in link.produced)
    await writer.close()


async def test_duplicate_without_an_offset_is_unknown(link: FakeLink) -> None:
    """The broker has it and cannot say where: an offset that nobody can tell is no acknowledgement."""
    link.produce = lambda _: (Code.DUPLICATE_SEQUENCE_NUMBER, -1)
    writer = await started(link)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(await append(writer, P0, b"x"), 5)
    await writer.close()


async def test_duplicate_with_an_offset_is_durable(link: FakeLink) -> None:
    """A second copy that the broker recognised is where the first one is."""
    link.produce = lambda _: (Code.DUPLICATE_SEQUENCE_NUMBER, 9)
    writer = await started(link)
    assert 9 == await asyncio.wait_for(await append(writer, P0, b"x"), 5)
    await writer.close()


async def test_recreated_topic_ends_pending_appends(link: FakeLink, writer: KafkaWriter) -> None:
    """A batch for the old topic must not land in the new one."""
    take = link.produce
    link.produce = lambda _: (Code.UNKNOWN_TOPIC_OR_PARTITION, -1)
    link.topic = seen(0, 0, 1, topic_id=bytes(16))
    with pytest.raises(OutcomeUnknown) as unknown:
        await asyncio.wait_for(await append(writer, P0, b"old"), 5)
    assert "recreated" in str(unknown.value.problem)
    link.produce = take
    assert 0 == await asyncio.wait_for(await append(writer, P0, b"new"), 5)


async def test_another_number_of_partitions_stops_the_writer(link: FakeLink, writer: KafkaWriter) -> None:
    """P never changes: what is pending is unknown, and nothing is taken any more."""
    link.produce = lambda _: (Code.NOT_LEADER_OR_FOLLOWER, -1)
    link.topic = seen(0, 0, 0, 0)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(await append(writer, P0, b"x"), 5)
    with pytest.raises(ConfigError):
        await append(writer, P0, b"y")


@pytest.mark.parametrize("limit", [None, 1_000_000])
@pytest.mark.parametrize("topic_id", [BOUND.topic_id, bytes(16)])
async def test_number_of_partitions_that_is_ours_again_is_written_under_a_fresh_producer(
    link: FakeLink, monkeypatch: pytest.MonkeyPatch, topic_id: bytes, limit: int | None
) -> None:
    """Also where we may not read the topic's settings. Numbers from 0 under the old producer would be duplicates."""
    monkeypatch.setattr("kvlog.log.kafka_writer._LOOK_REFUSED_SECONDS", 0.0)
    take, link.limit = link.produce, limit
    writer = await started(link)
    assert 0 == await (await append(writer, P0, b"before"))
    link.produce = lambda _: (Code.NOT_LEADER_OR_FOLLOWER, -1)
    link.topic = seen(0, 0, 0, 0)
    with pytest.raises(OutcomeUnknown):
        await asyncio.wait_for(await append(writer, P0, b"x"), 5)
    link.topic, link.produce = seen(0, 0, 1, topic_id=topic_id), take
    future = None
    async with asyncio.timeout(5):
        while future is None:
            await asyncio.sleep(0.01)
            with suppress(ConfigError):
                future = await append(writer, P0, b"after")
        with suppress(OutcomeUnknown):  # it was placed just before the topic was seen to be another one
            await future
        await (await append(writer, P0, b"again"))
    before, last = link.produced[0], link.produced[-1]
    assert (b"again",) == last.values
    assert before.producer < last.producer
    await writer.close()


async def test_missing_leader_is_waited_for(link: FakeLink) -> None:
    """A partition without a leader waits for one, however long; the others do not wait for it."""
    link.topic = seen(-1, 0, 0)
    writer = await started(link)
    waiting, other = await append(writer, P0, b"waits"), await append(writer, P1, b"goes")
    assert 0 == await asyncio.wait_for(other, 5)
    await asyncio.sleep(0.2)
    assert not waiting.done()
    link.topic = seen(1, 0, 0)
    assert 0 == await asyncio.wait_for(waiting, 5)
    await writer.close()


async def test_unreachable_broker_is_tried_again_and_said(link: FakeLink, writer: KafkaWriter) -> None:
    """While nothing can be reached appends stay pending, and `trouble` says why; afterwards it is gone."""
    take = link.produce
    down = LogUnavailable(where="b:1", problem="refused")

    def fail(_: Produced) -> tuple[int, int]:
        raise down

    link.produce, link.topic = fail, down
    future = await append(writer, P0, b"x")
    await asyncio.sleep(0.3)
    assert (False, down) == (future.done(), writer.trouble)
    link.produce, link.topic = take, seen(0, 0, 1)
    assert 0 == await asyncio.wait_for(future, 5)
    assert (None, 0) == (writer.trouble, writer.pending_bytes)


async def test_full_buffer_gives_up_with_nothing_placed(link: FakeLink) -> None:
    """`append` waits for room as long as it is told, then says that nothing was sent."""
    writer = await started(link, replace(OPTIONS, pending_bytes_max=2000))
    link.gate.clear()
    future = await append(writer, P0, bytes(1500))
    with pytest.raises(LogUnavailable):
        await append(writer, P1, bytes(1500))
    link.gate.set()
    await future
    assert [0] == [produced.partition for produced in link.produced]
    assert 0 == await (await append(writer, P1, bytes(1500)))
    await writer.close()


async def test_cancelled_append_leaves_no_trace(link: FakeLink) -> None:
    """Who stops waiting for room has appended nothing, and takes no room."""
    writer = await started(link, replace(OPTIONS, pending_bytes_max=2000, append_wait_seconds=5.0))
    link.gate.clear()
    future = await append(writer, P0, bytes(1500))
    waiting = asyncio.create_task(append(writer, P0, b"given up" * 100))
    await asyncio.sleep(0.01)
    waiting.cancel()
    link.gate.set()
    await future
    assert 1 == await (await append(writer, P0, bytes(1900)))
    assert [1500, 1900] == [len(value or b"") for produced in link.produced for value in produced.values]
    await writer.close()
    assert 0 == writer.pending_bytes


async def test_too_large_value_is_refused_before_it_is_sent(link: FakeLink, writer: KafkaWriter) -> None:
    """Both sizes are named, and the writer goes on."""
    limit = OPTIONS.records.record_bytes_max
    with pytest.raises(RowTooLarge) as refused:
        await (await append(writer, P0, bytes(limit + 1)))
    assert {"row_bytes": limit + 1, "record_bytes_max": limit} == refused.value.fields
    assert 0 == await (await append(writer, P0, b"x"))


async def test_close_ends_pending_and_waiting_appends(link: FakeLink) -> None:
    """Closing ends what was placed as unknown and what waited for room as unavailable, at once."""
    writer = await started(link, replace(OPTIONS, pending_bytes_max=2000, append_wait_seconds=5.0))
    link.gate.clear()
    pending = await append(writer, P0, bytes(1500))
    waiting = asyncio.create_task(append(writer, P0, bytes(1500)))
    await asyncio.sleep(0.01)
    await asyncio.wait_for(writer.close(), 3)
    assert isinstance(pending.exception(), OutcomeUnknown)
    with pytest.raises(LogUnavailable):
        await waiting
    assert link.closed


async def test_start_waits_for_a_cluster_that_is_starting(link: FakeLink) -> None:
    """A coordinator that is still loading is asked again."""
    link.producer_codes = [Code.COORDINATOR_LOAD_IN_PROGRESS, Code.COORDINATOR_NOT_AVAILABLE]
    writer = await started(link)
    assert 3 == link.producers
    await writer.close()


async def test_start_without_producer_id_ends_at_its_deadline(link: FakeLink) -> None:
    """A cluster that gives no producer id in time is unavailable, with its reason."""
    link.producer_codes = [Code.COORDINATOR_NOT_AVAILABLE] * 100
    writer = KafkaWriter(link, BOUND, OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(LogUnavailable) as refused:
        await writer.start()
    assert "COORDINATOR_NOT_AVAILABLE" in str(refused.value.problem)
    await writer.close()


async def test_start_without_the_right_to_produce_is_refused(link: FakeLink) -> None:
    """The right that is missing is named."""
    link.producer_codes = [Code.CLUSTER_AUTHORIZATION_FAILED]
    writer = KafkaWriter(link, BOUND, OPTIONS)  # type: ignore[arg-type]
    with pytest.raises(ConfigError) as refused:
        await writer.start()
    assert "IdempotentWrite" in str(refused.value.problem)
    await writer.close()
