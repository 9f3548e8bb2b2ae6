"""What every log promises (kvlog.log.base), whoever implements it: appending and reading."""

from __future__ import annotations

import asyncio
import random
import time
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogUnavailable, OutcomeUnknown, RowTooLarge
from kvlog.ids import Offset
from kvlog.log.base import PartitionBounds
from tests.contract.log_factories import RECORD_BYTES_MAX
from tests.contract.log_steps import (
    DEADLINE_SECONDS,
    P0,
    P1,
    P2,
    ZERO,
    append,
    collect,
    end,
    request,
    values_of,
)

if TYPE_CHECKING:
    from kvlog.log.base import LogMessage
    from tests.contract.log_factories import LogFactory


# ---------------------------------------------------------------------------------------------------- appending


async def test_append_to_empty_log_starts_at_zero_without_holes(log_factory: LogFactory) -> None:
    """Offsets of a partition begin at 0 and have no holes."""
    writer = await (await log_factory.open()).writer()
    assert [0, 1, 2] == await append(writer, P0, b"a", b"b", b"c")
    assert [0] == await append(writer, P1, b"d")
    assert [3] == await append(writer, P0, b"e")


async def test_append_of_many_tasks_keeps_the_order_of_return(log_factory: LogFactory) -> None:
    """Offsets grow in the order in which `append` returned, however many tasks append at once."""
    log = await log_factory.open()
    writer = await log.writer()
    returned: list[asyncio.Future[Offset]] = []

    async def one(number: int) -> None:
        future = await writer.append(request(P0, b"%d" % number * 50))
        returned.append(future)

    async with asyncio.TaskGroup() as group:
        for number in range(300):
            group.create_task(one(number))
    assert list(range(300)) == await asyncio.gather(*returned)
    assert 300 == await end(log)


async def test_append_of_a_buffer_leaves_it_to_the_caller(log_factory: LogFactory) -> None:
    """A value may be any buffer, and may be overwritten as soon as its future is done."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    buffer = bytearray(b"first")
    await (await writer.append(request(P0, memoryview(buffer))))  # type: ignore[arg-type]
    buffer[:] = b"other"
    await (await writer.append(request(P0, memoryview(buffer))))  # type: ignore[arg-type]
    reader.assign({P0: ZERO})
    assert [b"first", b"other"] == values_of(await collect(reader, 2))


async def test_append_too_large_is_refused_and_the_writer_goes_on(log_factory: LogFactory) -> None:
    """A value over the limit ends as RowTooLarge with both sizes, takes no offset, and harms nothing."""
    log = await log_factory.open()
    writer = await log.writer()
    await append(writer, P0, b"before")
    with pytest.raises(RowTooLarge) as refused:
        await (await writer.append(request(P0, bytes(RECORD_BYTES_MAX + 1))))
    assert RECORD_BYTES_MAX + 1 == refused.value.fields["row_bytes"]
    assert RECORD_BYTES_MAX == refused.value.fields["record_bytes_max"]
    assert [1] == await append(writer, P0, b"after")
    assert 2 == await end(log)


async def test_append_of_the_largest_value_is_taken(log_factory: LogFactory) -> None:
    """The limit itself is allowed, and comes back whole."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    value = random.Random(1).randbytes(RECORD_BYTES_MAX)
    await append(writer, P0, value)
    reader.assign({P0: ZERO})
    assert [value] == values_of(await collect(reader, 1))


async def test_flush_returns_when_appends_are_durable(log_factory: LogFactory) -> None:
    """After a flush every earlier append has its offset."""
    writer = await (await log_factory.open()).writer()
    futures = [await writer.append(request(P0, b"x" * 1000)) for _ in range(50)]
    await writer.flush()
    assert list(range(50)) == [future.result() for future in futures]


async def test_close_of_writer_loses_nothing_silently(log_factory: LogFactory) -> None:
    """After closing, every pending append is in the log or says that its outcome is unknown."""
    log = await log_factory.open()
    writer = await log.writer()
    futures = [await writer.append(request(P0, b"%d" % number)) for number in range(200)]
    await writer.close()
    assert all(future.done() for future in futures)
    errors = [future.exception() for future in futures if future.exception() is not None]
    assert all(isinstance(error, OutcomeUnknown) for error in errors)
    durable = {future.result(): b"%d" % at for at, future in enumerate(futures) if future.exception() is None}
    reader = await log.reader()
    reader.assign({P0: ZERO})
    found = {message.offset: bytes(message.value) for message in await collect(reader, len(durable))}
    assert durable == {offset: found.get(offset) for offset in durable}


async def test_append_to_closed_writer_is_refused(log_factory: LogFactory) -> None:
    """A closed writer takes nothing, and says so before anything is sent."""
    log = await log_factory.open()
    writer = await log.writer()
    await writer.close()
    with pytest.raises(LogUnavailable):
        await writer.append(request(P0, b"late"))
    assert 0 == await end(log)


async def test_append_of_two_handles_interleaves_without_holes(log_factory: LogFactory) -> None:
    """Two processes that write one partition get different offsets, each in its own order, with no hole."""
    logs = [await log_factory.open(), await log_factory.open()]
    writers = [await log.writer() for log in logs]

    async def write(name: int) -> list[Offset]:
        return await append(writers[name], P0, *(b"%d:%d" % (name, number) for number in range(100)))

    mine, theirs = await asyncio.gather(write(0), write(1))
    assert list(range(200)) == sorted(mine + theirs)
    assert (sorted(mine), sorted(theirs)) == (mine, theirs)
    reader = await logs[0].reader()
    reader.assign({P0: ZERO})
    read = await collect(reader, 200)
    assert list(range(200)) == [message.offset for message in read]
    by_offset = {message.offset: bytes(message.value) for message in read}
    assert [b"0:%d" % number for number in range(100)] == [by_offset[offset] for offset in mine]


# ---------------------------------------------------------------------------------------------------- reading


async def test_read_back_equals_what_was_written(log_factory: LogFactory) -> None:
    """Key, value, partition and offset come back as they were written, in order."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    source = random.Random(2)
    written = [(source.randbytes(12), source.randbytes(source.randrange(20_000))) for _ in range(60)]
    for key, value in written:
        await writer.append(request(P1, value, key))
    await writer.flush()
    reader.assign({P1: ZERO})
    read = await collect(reader, 60)
    assert written == [(message.key, bytes(message.value)) for message in read]
    assert [(P1, offset) for offset in range(60)] == [(message.partition, message.offset) for message in read]


async def test_timestamps_are_the_logs_and_do_not_go_back(log_factory: LogFactory) -> None:
    """A message carries the time at which the log took it, and times do not decrease in a partition."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    before = time.time_ns() // 1_000_000
    for number in range(20):
        await append(writer, P0, b"%d" % number)
    after = time.time_ns() // 1_000_000
    reader.assign({P0: ZERO})
    stamps = [message.timestamp_ms for message in await collect(reader, 20)]
    assert sorted(stamps) == stamps
    # The log's clock may differ from ours by some milliseconds where it is another process's.
    assert before - 100 <= stamps[0] <= stamps[-1] <= after + 100


async def test_bounds_follow_appends_and_truncation(log_factory: LogFactory) -> None:
    """Log start and high watermark are what they are now; an empty partition has both at 0."""
    log = await log_factory.open()
    writer = await log.writer()
    assert PartitionBounds(ZERO, ZERO) == await log.bounds(P2)
    await append(writer, P2, b"a", b"b", b"c")
    assert PartitionBounds(ZERO, Offset(3)) == await log.bounds(P2)
    await log_factory.truncate(log, P2, Offset(2))
    assert PartitionBounds(Offset(2), Offset(3)) == await log.bounds(P2)
    assert PartitionBounds(ZERO, ZERO) == await log.bounds(P1)


async def test_poll_without_messages_returns_empty_at_its_timeout(log_factory: LogFactory) -> None:
    """Nothing to read is an empty answer, after about the time that was given."""
    reader = await (await log_factory.open()).reader()
    reader.assign({P0: ZERO, P1: ZERO})
    started = time.monotonic()
    assert [] == list(await reader.poll(bytes_max=1000, timeout_seconds=0.3))
    assert 0.2 <= time.monotonic() - started < 5.0


async def test_poll_wakes_when_another_handle_appends(log_factory: LogFactory) -> None:
    """A waiting poll returns soon after an append, not at its timeout."""
    log, other = await log_factory.open(), await log_factory.open()
    writer, reader = await other.writer(), await log.reader()
    await append(writer, P0, b"first")  # whatever is set up lazily is set up
    reader.assign({P0: ZERO})
    await collect(reader, 1)
    waits = []
    for _ in range(5):
        polling = asyncio.create_task(reader.poll(bytes_max=1000, timeout_seconds=DEADLINE_SECONDS))
        await asyncio.sleep(0.05)
        await append(writer, P0, b"wake up")
        durable = time.monotonic()
        assert [b"wake up"] == values_of(await polling)
        waits.append(time.monotonic() - durable)
    assert sorted(waits)[2] < log_factory.capabilities.wake_seconds


async def test_poll_waiting_costs_no_cpu(log_factory: LogFactory) -> None:
    """A poll that waits sleeps."""
    reader = await (await log_factory.open()).reader()
    reader.assign({P0: ZERO})
    await reader.poll(bytes_max=1000, timeout_seconds=0.1)
    used = time.process_time()
    await reader.poll(bytes_max=1000, timeout_seconds=2.0)
    assert time.process_time() - used < 0.4


async def test_poll_with_little_room_returns_one_message_and_loses_none(log_factory: LogFactory) -> None:
    """A message larger than bytes_max is returned, alone; all come, in order."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    sent = [b"%d" % number * 5000 for number in range(6)]
    await append(writer, P0, *sent)
    reader.assign({P0: ZERO})
    read: list[LogMessage] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(read) < len(sent) and time.monotonic() < deadline:
        some = await reader.poll(bytes_max=6000, timeout_seconds=1.0)
        assert len(some) <= 1
        read += some
    assert sent == values_of(read)


async def test_poll_of_many_partitions_keeps_the_order_of_each(log_factory: LogFactory) -> None:
    """Messages of one partition come in offset order, and none starves."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    sent = {p: [b"%d:%d" % (p, number) for number in range(40)] for p in (P0, P1, P2)}
    for number in range(40):
        for partition, values in sent.items():
            await writer.append(request(partition, values[number]))
    await writer.flush()
    reader.assign(dict.fromkeys(sent, ZERO))
    read = await collect(reader, 120)
    assert sent == {partition: values_of(read, partition) for partition in sent}


async def test_positions_are_what_poll_returns_next(log_factory: LogFactory) -> None:
    """A position is the offset after the last message returned, else where reading was told to begin."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"a", b"b", b"c")
    reader.assign({P0: Offset(1), P1: ZERO})
    assert {P0: 1, P1: 0} == dict(reader.positions())
    assert [1, 2] == [message.offset for message in await collect(reader, 2)]
    assert {P0: 3, P1: 0} == dict(reader.positions())


async def test_assign_replaces_what_was_assigned(log_factory: LogFactory) -> None:
    """Only the partitions of the last `assign` are read, from where it says."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"a0", b"a1")
    await append(writer, P1, b"b0", b"b1")
    reader.assign({P0: ZERO})
    await collect(reader, 2)
    reader.assign({P1: Offset(1)})
    assert [(P1, b"b1")] == [(m.partition, bytes(m.value)) for m in await collect(reader, 1)]
    assert {P1: 2} == dict(reader.positions())
    assert [] == list(await reader.poll(bytes_max=1000, timeout_seconds=0.2))


async def test_assign_at_the_end_reads_what_comes(log_factory: LogFactory) -> None:
    """A position at the high watermark is valid and waits for the next message."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"old")
    reader.assign({P0: await end(log)})
    assert [] == list(await reader.poll(bytes_max=1000, timeout_seconds=0.2))
    await append(writer, P0, b"new")
    assert [b"new"] == values_of(await collect(reader, 1))


async def test_seek_back_reads_again_and_leaves_others_alone(log_factory: LogFactory) -> None:
    """After a seek the partition goes on at the new offset, with nothing from the old place; others do not move."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, *(b"a%d" % number for number in range(5)))
    await append(writer, P1, *(b"b%d" % number for number in range(5)))
    reader.assign({P0: ZERO, P1: ZERO})
    await collect(reader, 10)
    reader.seek(P0, Offset(3))
    assert {P0: 3, P1: 5} == dict(reader.positions())
    assert [b"a3", b"a4"] == values_of(await collect(reader, 2))
    assert {P0: 5, P1: 5} == dict(reader.positions())


async def test_seek_forward_drops_what_was_fetched(log_factory: LogFactory) -> None:
    """Messages between the old place and the new one are not returned, fetched or not."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, *(b"%d" % number for number in range(10)))
    reader.assign({P0: ZERO})
    first = await reader.poll(bytes_max=1, timeout_seconds=DEADLINE_SECONDS)
    assert [b"0"] == values_of(first)
    reader.seek(P0, Offset(8))
    assert [b"8", b"9"] == values_of(await collect(reader, 2))


async def test_poll_cancelled_loses_no_message(log_factory: LogFactory) -> None:
    """Whoever gives up waiting gets the messages at the next poll."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    reader.assign({P0: ZERO})
    for number in range(10):
        polling = asyncio.create_task(reader.poll(bytes_max=1000, timeout_seconds=DEADLINE_SECONDS))
        await asyncio.sleep(0.002 * number)
        polling.cancel()
        await asyncio.gather(polling, return_exceptions=True)
    before = dict(reader.positions())
    await append(writer, P0, b"a", b"b")
    assert {P0: 0} == before
    assert [b"a", b"b"] == values_of(await collect(reader, 2))
