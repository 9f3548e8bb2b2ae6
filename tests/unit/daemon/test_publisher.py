"""The publisher against a writer that fails: what is dropped, what is told, what goes out."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from daemon.primary import Publisher
from daemon.telemetry import Event, Telemetry
from kvlog.checksums import digest
from kvlog.core.effects import AppendRecord
from kvlog.core.inputs import AppendFailed
from kvlog.errors import ConfigError, KvlogError, LogUnavailable, OutcomeUnknown, RowTooLarge
from kvlog.ids import Epoch, NodeId, Nonce, Offset, Partition, Position, Seq, SessionId, Writer
from kvlog.layout import DType, Identity, Layout
from kvlog.records import Claim, Truncate
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from daemon.node import NodeShell
    from kvlog.log.base import AppendRequest, LogWriter
    from kvlog.records import Record

import pytest

HERE = Partition(0)
WRITER = Writer(bytes(16))
LAYOUT = Layout(layers=1, planes=2, kv_heads=1, head_dim=4, dtype=DType.FLOAT16)
IDENTITY = Identity(digest(b"model"), digest(b"weights"), LAYOUT, shards=1)


class FakeShell:
    """Notes what the publisher tells the core."""

    def __init__(self) -> None:
        self.append: Callable[[AppendRecord], None] = lambda _: None
        self.told: list[object] = []

    def handle(self, _: type, handler: Callable[[AppendRecord], None]) -> None:
        self.append = handler

    def step(self, happened: object) -> None:
        self.told.append(happened)


class FakeWriter:
    """A writer whose appends end as the test says."""

    def __init__(self) -> None:
        self.futures: list[tuple[AppendRequest, asyncio.Future[Offset]]] = []
        self.refuses_at_once = False
        self.trouble: LogUnavailable | None = None
        self.refusal: KvlogError | None = None
        self.refused = 0

    async def append(self, request: AppendRequest) -> asyncio.Future[Offset]:
        if self.refusal is not None:
            self.refused += 1
            raise self.refusal
        future: asyncio.Future[Offset] = asyncio.get_running_loop().create_future()
        self.futures.append((request, future))
        if self.refuses_at_once:
            self.refuses_at_once = False
            future.set_exception(RowTooLarge(row_bytes=2, record_bytes_max=1))
        return future


class Bench:
    """A publisher between the two."""

    def __init__(self) -> None:
        self.shell, self.writer = FakeShell(), FakeWriter()
        self.publisher = Publisher(
            cast("NodeShell", self.shell), Telemetry("a"), queue_bytes=1000, format_version=1
        )

    def send(self, record: Record) -> None:
        self.shell.append(AppendRecord(HERE, record, header_bytes(record), 0, memoryview(b"")))

    async def sent(self, count: int) -> None:
        """Wait until the writer has had so many appends."""
        async with asyncio.timeout(10):
            while len(self.writer.futures) < count:  # noqa: ASYNC110  # with a deadline
                await asyncio.sleep(0.001)

    async def told(self, count: int) -> None:
        """Wait until the core was told so many things."""
        async with asyncio.timeout(10):
            while len(self.shell.told) < count:  # noqa: ASYNC110  # with a deadline
                await asyncio.sleep(0.001)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    """A publisher that runs."""
    bench = Bench()
    running = asyncio.create_task(bench.publisher.run(cast("LogWriter", bench.writer)))
    await asyncio.sleep(0)
    yield bench
    running.cancel()
    await asyncio.wait([running])


def claim_of(session: str, epoch: int, nonce: int = 0) -> Claim:
    """A claim."""
    return Claim(
        session=SessionId(session),
        epoch=Epoch(epoch),
        writer=WRITER,
        nonce=Nonce(digest(b"%d" % nonce)),
        node=NodeId("a"),
        identity=IDENTITY,
        context=digest(b"context"),
    )


def truncate(session: str, epoch: int, seq: int = 0) -> Truncate:
    """An owner's record."""
    return Truncate(SessionId(session), Epoch(epoch), WRITER, Seq(seq), Position(0))


async def test_publisher_after_a_claim_failed_sends_the_next_one_of_the_same_epoch(bench: Bench) -> None:
    """With nothing new in the log the next claim has the same epoch; it and its records must not pass for lost ones."""
    bench.send(truncate("other", 1))  # stays pending, so that nothing is forgotten by the way
    bench.send(claim_of("s", 7))
    await bench.sent(2)
    bench.writer.futures[1][1].set_exception(OutcomeUnknown(partition=0, problem="test"))
    await bench.told(1)
    bench.send(claim_of("s", 7, nonce=1))
    bench.send(truncate("s", 7))
    await bench.sent(4)
    assert [AppendFailed(claim_of("s", 7))] == bench.shell.told


async def test_publisher_after_a_record_failed_sends_nothing_more_of_its_epoch(bench: Bench) -> None:
    """What was queued behind a record of unknown outcome is dropped; other sessions and the next epoch go on."""
    bench.send(truncate("other", 1))
    bench.send(truncate("s", 7))
    await bench.sent(2)
    bench.writer.futures[1][1].set_exception(OutcomeUnknown(partition=0, problem="test"))
    await bench.told(1)
    bench.send(truncate("s", 7, seq=1))
    bench.send(truncate("s", 8))
    await bench.sent(3)
    assert [AppendFailed(truncate("s", 7))] == bench.shell.told
    assert [1, 7, 8] == [request.epoch for request, _ in bench.writer.futures]


async def test_publisher_past_its_bound_has_no_room_until_appends_are_durable(bench: Bench) -> None:
    """Who produces rows waits, so that a log that stands still costs a bounded amount of memory."""
    count = 0
    while bench.publisher.pending_bytes < 1000:
        bench.send(truncate("s", 1, seq=count))
        count += 1
    waiting = asyncio.create_task(bench.publisher.room())
    await bench.sent(count)
    assert not waiting.done()
    for _, future in bench.writer.futures:
        future.set_result(Offset(0))
    async with asyncio.timeout(10):
        await waiting
    assert (0, True) == (bench.publisher.pending_bytes, await bench.publisher.flush(10))


async def test_publisher_sends_nothing_behind_a_loss_whose_callback_has_not_run(bench: Bench) -> None:
    """INV-SILENT: the future has failed and the next record is already awake; it must not go out."""
    bench.send(truncate("s", 7))
    await bench.sent(1)
    bench.writer.futures[0][1].set_exception(OutcomeUnknown(partition=0, problem="test"))
    bench.send(truncate("s", 7, seq=1))  # before the loop has called anybody back
    bench.send(truncate("other", 1))
    await bench.sent(2)
    assert [7, 1] == [request.epoch for request, _ in bench.writer.futures]
    await bench.told(1)
    assert [AppendFailed(truncate("s", 7))] == bench.shell.told


async def test_publisher_sends_nothing_behind_a_record_that_was_refused_at_once(bench: Bench) -> None:
    """INV-SILENT: a record that is too large for the log comes back failed; those queued behind it are dropped."""
    bench.writer.refuses_at_once = True
    for seq in range(3):
        bench.send(truncate("s", 7, seq=seq))
    bench.send(truncate("other", 1))
    await bench.sent(2)
    assert [7, 1] == [request.epoch for request, _ in bench.writer.futures]
    assert [AppendFailed(truncate("s", 7))] == bench.shell.told


async def test_late_append_says_why_the_log_takes_nothing(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replicas that are missing are not seen by reading: who looks for a loop that is stuck must know them too."""
    said: list[dict[str, object]] = []
    monkeypatch.setattr(Telemetry, "say", lambda _, __, **fields: said.append(fields))
    monkeypatch.setattr("daemon.primary._LATE_SECONDS", -1.0)
    bench.send(claim_of("s", 1))
    await bench.sent(1)
    bench.writer.trouble = trouble = LogUnavailable(where="here", problem="NOT_ENOUGH_REPLICAS")
    assert trouble is bench.publisher.trouble
    bench.publisher.alert_late()
    assert "NOT_ENOUGH_REPLICAS" in str(said[0]["problem"])


@pytest.mark.parametrize(
    "refusal",
    [LogUnavailable(where="here", problem="full"), ConfigError(setting="s", problem="small", fix="raise it")],
)
async def test_record_that_waits_while_its_epoch_is_lost_never_goes_out(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, refusal: KvlogError
) -> None:
    """INV-SILENT, also for what was in hand already: others go on as soon as the log takes them, in order."""
    said: list[tuple[Event, dict[str, object]]] = []
    monkeypatch.setattr(Telemetry, "say", lambda _, event, **fields: said.append((event, fields)))
    monkeypatch.setattr("daemon.primary._OUTAGE_PAUSE_SECONDS", 0.001)
    bench.send(truncate("s", 1))
    await bench.sent(1)
    bench.writer.refusal = refusal
    bench.send(truncate("s", 1, seq=1))
    bench.send(truncate("other", 1))
    async with asyncio.timeout(5):
        while bench.writer.refused < 3:  # noqa: ASYNC110  # with a deadline
            await asyncio.sleep(0.001)
    bench.writer.futures[0][1].set_exception(OutcomeUnknown(partition=0, problem="test"))
    await bench.told(1)
    bench.writer.refusal = None
    await bench.sent(2)
    assert [b"s", b"other"] == [request.key for request, _ in bench.writer.futures]
    is_config = isinstance(refusal, ConfigError)
    assert [refusal.fields] * is_config == [fields for event, fields in said if event is Event.LOG_REFUSED]
