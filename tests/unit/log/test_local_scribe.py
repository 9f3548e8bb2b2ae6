"""The thread that writes a local log: order, bounds, retries, unknown outcomes, closing; its pen fails on demand."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogUnavailable, OutcomeUnknown
from kvlog.ids import Offset, Partition
from kvlog.log import local_scribe
from kvlog.log.base import AppendRequest
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.log.local_pen import Pen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvlog.log.base import LogWriter
    from kvlog.log.local_rows import Transaction
    from kvlog.log.local_store import Database

P0, P1 = Partition(0), Partition(1)
DEADLINE_SECONDS = 20.0


@pytest.fixture
async def log(tmp_path: Path) -> AsyncIterator[LocalLog]:
    """An open log."""
    log = LocalLog(tmp_path / "log", LocalLogOptions(partitions=2))
    await log.open()
    yield log
    await log.close()


class Gate:
    """Keeps the thread from committing until it is opened, and lets the commits fail that it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.failures: list[Exception] = []
        self.tried = 0
        real = Pen.transact

        def transact(
            pen: Pen, database: Database, work: Callable[[Transaction], object], *, size: int = 0
        ) -> object:
            assert self.opened.wait(DEADLINE_SECONDS)
            self.tried += 1
            if self.failures:
                raise self.failures.pop(0)
            return real(pen, database, work, size=size)

        monkeypatch.setattr(Pen, "transact", transact)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A closed gate before every transaction."""
    return Gate(monkeypatch)


def request(value: bytes, partition: Partition = P0) -> AppendRequest:
    """An append."""
    return AppendRequest(partition, b"k", value, 2, 1)


async def values(log: LocalLog) -> list[bytes]:
    """Of partition 0."""
    reader = await log.reader()
    reader.assign({P0: Offset(0)})
    return [bytes(message.value) for message in await reader.poll(bytes_max=1 << 30, timeout_seconds=0.0)]


async def refused(writer: LogWriter) -> LogUnavailable:
    """What `append` raises, once it does."""
    async with asyncio.timeout(DEADLINE_SECONDS):
        while True:
            try:
                await writer.append(request(b"refused?"))
            except LogUnavailable as error:
                return error
            await asyncio.sleep(0.01)


async def test_group_that_fails_without_trace_is_tried_again_in_order(log: LocalLog, gate: Gate) -> None:
    """Appends pending when the disk is full stay pending; they are durable, in order, once there is room."""
    writer = await log.writer()
    gate.failures = [LogUnavailable(where="here", problem="the disk is full")] * 3
    futures = [await writer.append(request(b"%d" % number)) for number in range(5)]
    gate.opened.set()
    assert list(range(5)) == await asyncio.wait_for(asyncio.gather(*futures), DEADLINE_SECONDS)
    assert [b"%d" % number for number in range(5)] == await values(log)


async def test_append_while_the_disk_is_full_is_refused_until_it_is_not(log: LocalLog, gate: Gate) -> None:
    """New appends are refused with the reason while old ones wait; a success ends that at once."""
    writer = await log.writer()
    gate.failures = [LogUnavailable(where="here", problem="the disk is full")] * 3
    waiting = await writer.append(request(b"waiting"))
    gate.opened.set()
    assert {"where": "here", "problem": "the disk is full"} == (await refused(writer)).fields
    assert 0 == await asyncio.wait_for(waiting, DEADLINE_SECONDS)
    assert await (await writer.append(request(b"after"))) > 0


async def test_commit_with_unknown_outcome_ends_everything_pending(log: LocalLog, gate: Gate) -> None:
    """After an I/O error in COMMIT all that was pending is unknown, in that group or not; later appends go on."""
    writer = await log.writer()
    gate.failures = [OutcomeUnknown(problem="disk I/O error")]
    futures = [await writer.append(request(b"%d" % number, Partition(number % 2))) for number in range(4)]
    gate.opened.set()
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert [OutcomeUnknown] * 4 == [type(error) for error in errors]
    assert [0, 1, 0, 1] == [
        error.fields["partition"] for error in errors if isinstance(error, OutcomeUnknown)
    ]
    assert 0 == await (await writer.append(request(b"later")))
    assert [b"later"] == await values(log)


async def test_fault_in_the_thread_leaves_nobody_waiting(log: LocalLog, gate: Gate) -> None:
    """An exception that nobody foresaw ends what is pending as unknown; the thread lives on."""
    writer = await log.writer()
    gate.failures = [ZeroDivisionError("a fault of ours")]
    future = await writer.append(request(b"a"))
    gate.opened.set()
    with pytest.raises(OutcomeUnknown, match="a fault of ours"):
        await future
    assert 0 == await (await writer.append(request(b"b")))


async def test_append_waits_while_the_queue_is_full(
    log: LocalLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the bound on pending bytes `append` does not return until there is room."""
    monkeypatch.setattr(local_scribe, "PENDING_BYTES_MAX", 1000)
    writer = await log.writer()
    first = await writer.append(request(b"x" * 900))
    second = asyncio.create_task(writer.append(request(b"y" * 900)))
    third = asyncio.create_task(writer.append(request(b"z" * 10)))
    done, _ = await asyncio.wait([second, third], timeout=0.1)
    assert set() == done
    gate.opened.set()
    assert [0, 1, 2] == [await first, await (await second), await (await third)]


async def test_append_that_waits_for_room_hears_of_an_outage(
    log: LocalLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever waits for room is refused when the log cannot be written: nothing of it was sent."""
    monkeypatch.setattr(local_scribe, "PENDING_BYTES_MAX", 1000)
    writer = await log.writer()
    first = await writer.append(request(b"x" * 900))
    second = asyncio.create_task(writer.append(request(b"y" * 900)))
    gate.failures = [LogUnavailable(where="here", problem="the disk is full")] * 2
    gate.opened.set()
    with pytest.raises(LogUnavailable):
        await second
    assert 0 == await asyncio.wait_for(first, DEADLINE_SECONDS)
    assert [b"x" * 900] == await values(log)


async def test_close_that_cannot_write_ends_pending_as_unknown(
    log: LocalLog, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing waits a bounded time; what is not durable by then is unknown, and nothing hangs."""
    monkeypatch.setattr("kvlog.log.local.CLOSE_SECONDS", 0.1)
    writer = await log.writer()
    futures = [await writer.append(request(b"%d" % number)) for number in range(3)]
    await log.close()
    errors = await asyncio.gather(*futures, return_exceptions=True)
    assert [OutcomeUnknown] * 3 == [type(error) for error in errors]
    gate.opened.set()


async def test_future_that_was_cancelled_does_not_unsend_its_append(log: LocalLog, gate: Gate) -> None:
    """Who stops waiting leaves the message in its place, for the sake of those after it."""
    writer = await log.writer()
    first = await writer.append(request(b"first"))
    second = await writer.append(request(b"second"))
    first.cancel()
    gate.opened.set()
    assert 1 == await second
    assert [b"first", b"second"] == await values(log)


async def test_error_within_commit_is_unknown_unless_the_disk_is_full(log: LocalLog) -> None:
    """SQLite's COMMIT that fails for want of room left nothing; one that fails otherwise may have."""

    class Failing:
        """A connection whose COMMIT fails."""

        def __init__(self, code: int) -> None:
            self.code = code
            self.in_transaction = False

        def execute(self, sql: str) -> None:
            if sql == "COMMIT":
                error = sqlite3.OperationalError("no")
                error.sqlite_errorcode = self.code
                raise error

    class Opened:
        """As much of a Database as it takes."""

        def __init__(self, code: int) -> None:
            self.connection = Failing(code)

    pen = Pen(log._paths, "", log._options.synchronous)
    with pytest.raises(LogUnavailable):
        pen.transact(Opened(sqlite3.SQLITE_FULL), lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(OutcomeUnknown):
        pen.transact(Opened(sqlite3.SQLITE_IOERR_FSYNC), lambda _: None)  # type: ignore[arg-type]


async def test_appends_of_many_are_few_commits(log: LocalLog, gate: Gate) -> None:
    """What queues up while the log is busy becomes durable in one commit."""
    writer = await log.writer()
    futures = [await writer.append(request(b"%d" % number)) for number in range(500)]
    gate.opened.set()
    assert list(range(500)) == await asyncio.gather(*futures)
    assert gate.tried <= 3
