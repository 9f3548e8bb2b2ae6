"""Room, batches and lanes: what waits for the broker."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka.record.default_records import DefaultRecordBatch
from hypothesis import given
from hypothesis import strategies as st

from kvlog.errors import OutcomeUnknown
from kvlog.ids import Partition
from kvlog.log.kafka_batches import Batch, Lane, Message, ProducerId, Room, message_bytes

P0 = Partition(0)
PRODUCER = ProducerId(42, 3)


def message(value: bytes = b"v") -> Message:
    """A message."""
    return Message.of_record(b"key", value, kind=2, epoch=9)


async def test_room_is_given_first_come_first_served() -> None:
    """A small request behind a large one waits its turn."""
    room = Room(10)
    await room.take(8)
    order: list[str] = []

    async def take(name: str, size: int) -> None:
        await room.take(size)
        order.append(name)

    tasks = [asyncio.create_task(take("large", 9)), asyncio.create_task(take("small", 1))]
    await asyncio.sleep(0)
    assert [] == order
    room.give_back(8)
    await asyncio.gather(*tasks)
    assert (["large", "small"], 10) == (order, room.taken)


async def test_room_serves_what_is_larger_than_the_whole() -> None:
    """A request over the bound is served when nothing else is out."""
    room = Room(10)
    await room.take(1)
    waiting = asyncio.create_task(room.take(50))
    await asyncio.sleep(0)
    assert not waiting.done()
    room.give_back(1)
    await waiting
    assert 50 == room.taken


async def test_room_of_a_cancelled_taker_goes_to_the_next() -> None:
    """Whoever is cancelled, even in the step in which its turn came, keeps nothing."""
    room = Room(10)
    await room.take(10)
    gone, next_one = asyncio.create_task(room.take(10)), asyncio.create_task(room.take(4))
    await asyncio.sleep(0)
    room.give_back(10)  # its turn comes, and it is cancelled before it can run
    gone.cancel()
    await next_one
    assert 4 == room.taken
    assert gone.cancelled()


@given(st.lists(st.integers(1, 15), min_size=1, max_size=30), st.randoms())
def test_room_is_never_exceeded_and_ends_empty(sizes: list[int], source) -> None:
    """Whatever is asked for and whoever is cancelled: the bound holds, and all comes back."""
    holders: list[int] = []

    async def use(room: Room, size: int) -> None:
        await room.take(size)
        holders.append(size)
        try:
            # What is granted and has not run yet is taken, too.
            assert sum(holders) <= room.taken
            assert room.taken <= 10 or room.taken in sizes
            await asyncio.sleep(0)
        finally:
            holders.remove(size)
            room.give_back(size)

    async def run() -> None:
        room = Room(10)
        tasks = [asyncio.create_task(use(room, size)) for size in sizes]
        for task in tasks:
            if source.random() < 0.3:
                await asyncio.sleep(0)
                task.cancel()
        outcomes = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert {type(None), asyncio.CancelledError} >= {type(outcome) for outcome in outcomes}
        assert 0 == room.taken

    asyncio.run(run())


async def test_batch_holds_messages_in_order_until_it_is_full() -> None:
    """The first message always fits; after that the size decides."""
    batch = Batch(P0, bytes_max=500)
    assert batch.add(message(bytes(1000)), 0) is not None
    assert batch.add(message(b"x"), 0) is None
    assert 1 == batch.count


async def test_batch_bytes_carry_producer_sequence_and_headers() -> None:
    """A broker and a console consumer find what they look for."""
    batch = Batch(P0, bytes_max=1 << 20)
    batch.add(message(b"a"), 0)
    batch.add(Message(b"gone", None, []), 0)
    batch.build(PRODUCER, 17)
    assert batch.payload is not None
    read = DefaultRecordBatch(bytes(batch.payload))
    assert (42, 3, 17, 0) == (
        read.producer_id,
        read.producer_epoch,
        read.base_sequence,
        read.compression_type,
    )
    first, second = list(read)
    assert (b"key", b"a", [("kind", b"2"), ("epoch", b"9")]) == (first.key, first.value, first.headers)
    assert (b"gone", None) == (second.key, second.value)


async def test_batch_takes_any_buffer() -> None:
    """Values are copied when they are added, whatever buffer they are in."""
    batch = Batch(P0, bytes_max=1 << 20)
    value = bytearray(b"abc")
    batch.add(Message.of_record(b"k", memoryview(value), kind=1, epoch=1), 0)
    value[:] = b"xyz"
    batch.build(PRODUCER, 0)
    assert batch.payload is not None
    assert [b"abc"] == [record.value for record in DefaultRecordBatch(bytes(batch.payload))]


async def test_batch_that_was_built_takes_no_more() -> None:
    """Every try sends the same bytes."""
    batch = Batch(P0, bytes_max=1 << 20)
    batch.add(message(), 0)
    batch.build(PRODUCER, 0)
    assert batch.add(message(), 0) is None


async def test_batch_settles_every_message() -> None:
    """Offsets count up from the base; a future that its owner cancelled is left alone."""
    batch = Batch(P0, bytes_max=1 << 20)
    futures = [batch.add(message(), 0) for _ in range(3)]
    assert all(future is not None for future in futures)
    futures[1].cancel()  # type: ignore[union-attr]
    batch.succeed(7)
    assert [7, 9] == [futures[0].result(), futures[2].result()]  # type: ignore[union-attr]
    lost = Batch(P0, bytes_max=1 << 20)
    future = lost.add(message(), 0)
    lost.lose("why", silently=False)
    with pytest.raises(OutcomeUnknown) as unknown:
        await future  # type: ignore[misc]
    assert {"partition": 0, "problem": "why"} == unknown.value.fields


async def test_lane_numbers_batches_when_they_leave() -> None:
    """Sequence numbers have no hole: they are given when a batch is taken, and kept when it comes back."""
    lane = Lane(P0)
    for n in range(3):
        lane.place(message(b"%d" % n), 1, 1 << 20)
    first = lane.take(PRODUCER)
    lane.place(message(b"3"), 1, 1 << 20)
    lane.return_to_front()
    assert [first, lane.waiting[1]] == lane.batches()
    again = lane.take(PRODUCER)
    assert (again, 3) == (first, lane.sequence)
    lane.land()
    second = lane.take(PRODUCER)
    assert second.payload is not None
    assert 3 == DefaultRecordBatch(bytes(second.payload)).base_sequence
    assert 4 == lane.sequence


async def test_lane_sequence_wraps_as_the_brokers_do() -> None:
    """After 2**31 − 1 comes 0."""
    lane = Lane(P0, sequence=(1 << 31) - 1)
    lane.place(message(), 1, 1 << 20)
    lane.take(PRODUCER)
    assert 0 == lane.sequence


def test_message_bytes_are_enough_for_a_batch_of_its_own() -> None:
    """The room that a message takes is never less than what is sent for it."""

    async def sent(one: Message) -> int:
        batch = Batch(P0, bytes_max=1 << 20)
        batch.add(one, 0)
        batch.build(PRODUCER, 0)
        return len(batch.payload or b"")

    for size in (0, 1, 127, 128, 100_000):
        one = message(bytes(size))
        assert asyncio.run(sent(one)) <= message_bytes(one)
