"""The reader's decisions, with brokers that answer what the test says."""

from __future__ import annotations

import asyncio
import struct
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.errors import LogReplaced, LogTruncated, LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.kafka_errors import FETCH, Code, Then
from kvlog.log.kafka_reader import KafkaReader
from tests.unit.log.kafka_fakes import BOUND, OPTIONS, TOPIC_ID, FakeLink, fetched, seen
from tests.unit.log.test_kafka_records import batch

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from kvlog.log.kafka_options import KafkaOptions
    from kvlog.log.kafka_protocol import FetchById

P0, P1, P2 = (Partition(p) for p in range(3))
AGAIN = sorted(code for code, then in FETCH.items() if then is Then.AGAIN)


class Shelf:
    """Partitions' batches, one message each, served from any offset."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)
        self.asked: list[tuple[int, int, int]] = []

    def __call__(self, request: FetchById) -> list[tuple[Any, ...]]:
        self.asked += [(part.partition, part.offset, part.epoch) for part in request._parts]
        return [self.row(part.partition, part.offset) for part in request._parts]

    def row(self, partition: int, offset: int) -> tuple[Any, ...]:
        """Up to three messages from an offset on."""
        end = self.lengths[partition]
        records = b"".join(
            bytes(batch(at, b"%d:%d" % (partition, at))) for at in range(offset, min(end, offset + 3))
        )
        return fetched(partition, records=records, end=end)


@pytest.fixture
async def link() -> AsyncIterator[FakeLink]:
    """Brokers with nothing to read; a fetch takes its time."""
    made = FakeLink()
    yield made
    await made.close()


def reader_on(link: FakeLink, options: KafkaOptions = OPTIONS) -> KafkaReader:
    """A reader on the fake."""
    return KafkaReader(link, BOUND, options, None)  # type: ignore[arg-type]


async def read(reader: KafkaReader, count: int, *, bytes_max: int = 1 << 20) -> list[tuple[int, int]]:
    """Polls for so many messages, as (partition, offset)."""
    got: list[tuple[int, int]] = []
    async with asyncio.timeout(5):
        while len(got) < count:
            got += [
                (m.partition, m.offset) for m in await reader.poll(bytes_max=bytes_max, timeout_seconds=0.2)
            ]
    return got


async def test_partitions_of_several_brokers_are_read_in_order(link: FakeLink) -> None:
    """Each partition's messages come in order, whoever leads it, and positions follow what was returned."""
    link.fetch = Shelf(7, 4, 5)
    reader = reader_on(link)
    reader.assign({P0: Offset(0), P1: Offset(1), P2: Offset(0)})
    got = await read(reader, 15)
    for partition, first, end in ((P0, 0, 7), (P1, 1, 4), (P2, 0, 5)):
        assert list(range(first, end)) == [offset for p, offset in got if p == partition]
    assert {P0: 7, P1: 4, P2: 5} == reader.positions()
    await reader.close()


async def test_fetch_says_the_epoch_of_the_last_record(link: FakeLink) -> None:
    """The broker compares histories by it: also when we read something again, and not where we have not been."""
    shelf = link.fetch = Shelf(3, 0, 0)
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    await read(reader, 3)
    await reader.poll(bytes_max=1, timeout_seconds=0.05)
    assert {(0, 0, -1), (0, 3, 7)} == set(shelf.asked)
    reader.seek(P0, Offset(2))
    await read(reader, 1)
    assert (0, 2, 7) in shelf.asked
    reader.seek(P0, Offset(40))
    await reader.poll(bytes_max=1, timeout_seconds=0.3)
    assert (0, 40, -1) in shelf.asked
    await reader.close()


async def test_partition_that_is_assigned_where_it_is_keeps_what_was_read(link: FakeLink) -> None:
    """Its epoch and its fetched messages: a node that follows one partition more loses nothing of the others."""
    shelf = link.fetch = Shelf(3, 4, 0)
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    assert [(0, 0)] == await read(reader, 1, bytes_max=1)
    reader.assign({**reader.positions(), P1: Offset(2)})
    assert {(0, 1), (0, 2), (1, 2), (1, 3)} == set(await read(reader, 4))
    await reader.poll(bytes_max=1, timeout_seconds=0.05)
    assert {(0, 0, -1), (0, 3, 7), (1, 2, -1)} <= set(shelf.asked)
    assert not [asked for asked in shelf.asked if asked[:2] == (0, 1)], "nothing was fetched twice"
    await reader.close()


async def test_log_that_was_replaced_is_read_without_the_old_ones_epoch(link: FakeLink) -> None:
    """What was read of the old log says nothing of the new one."""
    shelf = Shelf(3, 0, 0)
    link.fetch = shelf
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    await read(reader, 3)
    link.fetch = lambda _: [fetched(0, tags={0: struct.pack(">iq", 6, 3)}, end=100)]
    with pytest.raises(LogReplaced):
        await read(reader, 1)
    link.fetch = shelf
    shelf.asked.clear()
    reader.seek(P0, Offset(1))
    await read(reader, 2)
    assert (0, 1, -1) == shelf.asked[0]
    await reader.close()


async def test_poll_returns_what_fits_and_at_least_one(link: FakeLink) -> None:
    """The rest stays, and positions say so."""
    link.fetch = Shelf(3, 0, 0)
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    first = await reader.poll(bytes_max=1, timeout_seconds=1)
    assert ([0], {P0: 1}) == ([m.offset for m in first], reader.positions())
    rest = await reader.poll(bytes_max=10_000, timeout_seconds=1)
    assert ([1, 2], {P0: 3}) == ([m.offset for m in rest], reader.positions())
    await reader.close()


async def test_answer_to_an_old_assignment_is_dropped(link: FakeLink) -> None:
    """What was fetched for a place that its owner has left is not returned, though the offset is the same."""
    link.fetch = Shelf(3, 3, 0)
    reader = reader_on(link)
    link.gate.clear()
    reader.assign({P0: Offset(0), P1: Offset(0)})
    await reader.poll(bytes_max=1, timeout_seconds=0.05)
    reader.assign({P1: Offset(2)})
    link.gate.set()
    assert [(1, 2)] == await read(reader, 1)
    assert {P1: 3} == reader.positions()
    await reader.close()


@pytest.mark.parametrize(
    ("bounds", "error", "fields"),
    [
        ((7, 9), LogTruncated, {"partition": 0, "wanted": 5, "log_start": 7}),
        ((0, 3), LogReplaced, {"partition": 0}),
        ((0, 9), LogReplaced, {"partition": 0}),
    ],
)
async def test_position_out_of_range_is_explained(
    link: FakeLink, bounds: tuple[int, int], error: type[Exception], fields: dict[str, int]
) -> None:
    """Below the log start it is truncated; above the end, or inside without our record, it is another history."""
    link.fetch = lambda _: [fetched(0, Code.OFFSET_OUT_OF_RANGE, end=-1)]
    link.bounds = bounds
    reader = reader_on(link)
    reader.assign({P0: Offset(5)})
    for _ in range(2):  # it is said again for as long as nothing is done about it
        with pytest.raises(error) as told:
            await read(reader, 1)
        assert fields.items() <= told.value.fields.items()  # type: ignore[attr-defined]
    link.fetch = Shelf(9, 0, 0)
    reader.seek(P0, Offset(8))
    assert [(0, 8)] == await read(reader, 1)
    await reader.close()


async def test_fault_of_one_partition_leaves_the_others_going(link: FakeLink) -> None:
    """It is said once at once; then the others' messages come, though nobody has sought it."""
    shelf = Shelf(0, 3, 0)
    link.fetch = lambda request: [
        fetched(0, Code.OFFSET_OUT_OF_RANGE) if row[0] == 0 else row for row in shelf(request)
    ]
    link.bounds = (7, 9)
    reader = reader_on(link)
    reader.assign({P0: Offset(5), P1: Offset(0)})
    with pytest.raises(LogTruncated):
        await read(reader, 1)
    assert [(1, 0), (1, 1), (1, 2)] == await read(reader, 3)
    with pytest.raises(LogTruncated):
        await reader.poll(bytes_max=1, timeout_seconds=0.05)
    await reader.close()


async def test_history_that_parted_is_replaced(link: FakeLink) -> None:
    """The broker's word that our last record's epoch ends before it: the tail was lost, however long the log is."""
    link.fetch = lambda _: [fetched(0, tags={0: struct.pack(">iq", 6, 3)}, end=100)]
    reader = reader_on(link)
    reader.assign({P0: Offset(5)})
    with pytest.raises(LogReplaced) as told:
        await read(reader, 1)
    assert "epoch 6 ends at 3" in str(told.value.problem)
    await reader.close()


async def test_messages_of_a_replaced_log_are_dropped_with_it(link: FakeLink) -> None:
    """What was fetched before the log was found to be another one is not returned after that."""
    answers = [[fetched(0, records=bytes(batch(5, b"old") + batch(6, b"old")), end=7)]]
    parted = fetched(0, tags={0: struct.pack(">iq", 6, 3)}, end=100)
    link.fetch = lambda _: answers.pop() if answers else [parted]
    reader = reader_on(link)
    reader.assign({P0: Offset(5)})
    assert [(0, 5)] == await read(reader, 1, bytes_max=1)
    await asyncio.sleep(0.05)
    for _ in range(2):
        with pytest.raises(LogReplaced):
            await reader.poll(bytes_max=1, timeout_seconds=0.05)
    assert {P0: 6} == reader.positions()
    await reader.close()


@pytest.mark.parametrize(
    "code", [Code.UNKNOWN_TOPIC_ID, Code.INCONSISTENT_TOPIC_ID, Code.UNKNOWN_TOPIC_OR_PARTITION]
)
async def test_topic_with_another_id_voids_every_partition(link: FakeLink, code: int) -> None:
    """Each partition says so; after a seek the new topic is read, by its own id."""
    link.fetch = lambda _: [fetched(0, code), fetched(1, code)]
    reader = reader_on(link)
    reader.assign({P0: Offset(5), P1: Offset(5)})
    link.topic = seen(0, 0, 1, topic_id=bytes(16))
    told = set()
    for _ in range(2):
        with pytest.raises(LogReplaced) as replaced:
            await read(reader, 1)
        told.add(replaced.value.partition)
    assert {0, 1} == told
    link.fetch = Shelf(1, 1, 0)
    reader.seek(P0, Offset(0))
    reader.seek(P1, Offset(0))
    assert {(0, 0), (1, 0)} == set(await read(reader, 2))
    assert bytes(16) == link.requests[-1]._topic_id
    await reader.close()


async def test_topic_of_the_same_id_that_a_broker_does_not_know_yet_is_waited_for(link: FakeLink) -> None:
    """A broker learns of topics a moment later than others."""
    answers = [[fetched(0, Code.UNKNOWN_TOPIC_ID)]]
    shelf = Shelf(1, 0, 0)
    link.fetch = lambda request: answers.pop() if answers else shelf(request)
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    assert [(0, 0)] == await read(reader, 1)
    assert TOPIC_ID == link.requests[-1]._topic_id
    await reader.close()


@pytest.mark.parametrize("code", [*AGAIN, 87, 9999])
async def test_passing_trouble_is_said_and_tried_again(link: FakeLink, code: int) -> None:
    """An empty poll says why it is empty; when the broker answers again, so does the reader."""
    link.fetch = lambda _: [fetched(0, code)]
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    with pytest.raises(LogUnavailable):
        await read(reader, 1)
    link.fetch = Shelf(1, 0, 0)
    got: list[tuple[int, int]] = []
    async with asyncio.timeout(5):
        while not got:
            with suppress(LogUnavailable):  # the answer that was on its way may be one more of the old ones
                got = await read(reader, 1)
    assert [(0, 0)] == got
    assert [] == list(await reader.poll(bytes_max=1, timeout_seconds=0.05))
    await reader.close()


async def test_missing_topic_is_unavailable(link: FakeLink) -> None:
    """A topic that is not there may come back; until then it is said."""
    link.topic = None
    reader = reader_on(link)
    reader.assign({P0: Offset(0)})
    with pytest.raises(LogUnavailable) as told:
        await reader.poll(bytes_max=1, timeout_seconds=0.05)
    assert "does not exist" in str(told.value.problem)
    await reader.close()


async def test_reader_that_is_stuck_gets_new_connections(link: FakeLink) -> None:
    """Data before us and empty answers for `stuck_seconds`: the connections are made anew, and it goes on."""
    link.fetch = lambda _: [fetched(0, end=5)]
    reader = reader_on(link, replace(OPTIONS, stuck_seconds=0.2))
    reader.assign({P0: Offset(0)})
    async with asyncio.timeout(5):
        while not link.drops:
            assert [] == list(await reader.poll(bytes_max=1, timeout_seconds=0.05))
    link.fetch = Shelf(5, 0, 0)
    assert [(0, n) for n in range(5)] == await read(reader, 5)
    await reader.close()


async def test_idle_reader_keeps_its_connections(link: FakeLink) -> None:
    """At the end of the log, standing still is all there is to do."""
    link.fetch = Shelf(0, 0, 0)
    reader = reader_on(link, replace(OPTIONS, stuck_seconds=0.1))
    reader.assign({P0: Offset(0), P1: Offset(0), P2: Offset(0)})
    for _ in range(8):
        assert [] == list(await reader.poll(bytes_max=1, timeout_seconds=0.05))
    assert 0 == link.drops
    await reader.close()


async def test_fetched_and_not_returned_is_bounded(link: FakeLink) -> None:
    """A caller that takes little makes the reader stop fetching, not grow."""
    shelf = link.fetch = Shelf(10_000, 0, 0)
    reader = reader_on(link, replace(OPTIONS, fetch_bytes_max=20))
    reader.assign({P0: Offset(0)})
    for expected in range(50):
        (message,) = await reader.poll(bytes_max=1, timeout_seconds=1)
        assert expected == message.offset
        await asyncio.sleep(0.001)
    assert max(offset for _, offset, _ in shelf.asked) <= 50 + 10
    await reader.close()


async def test_reader_without_assignment_waits_quietly(link: FakeLink) -> None:
    """Nothing assigned is nothing to read, and no request."""
    reader = reader_on(link)
    assert [] == list(await reader.poll(bytes_max=1, timeout_seconds=0.05))
    assert ([], {}) == (link.requests, reader.positions())
    await reader.close()
