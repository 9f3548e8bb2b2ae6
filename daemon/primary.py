"""The writing side's last step: the core's records into the log, in order.

    core ──AppendRecord──▶ frame ──▶ one queue a partition ──▶ LogWriter ──▶ durable, or AppendFailed back into the core

A record is framed at once, so afterwards nothing refers to a ring's memory. An append is never given up by a clock:
deadlines only raise an alert.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daemon.backlog import BacklogMeter
from daemon.telemetry import Event
from kvlog.core.effects import AppendRecord
from kvlog.core.inputs import AppendFailed
from kvlog.errors import ConfigError, KvlogError, LogUnavailable
from kvlog.log.base import AppendRequest
from kvlog.records import Claim, kind_of
from kvlog.wire.frame import frame

if TYPE_CHECKING:
    from daemon.node import NodeShell
    from daemon.telemetry import Telemetry
    from kvlog.ids import Epoch, Offset, Partition, SessionId
    from kvlog.log.base import LogWriter
    from kvlog.records import Record

__all__ = ["Publisher"]

_OUTAGE_PAUSE_SECONDS = 0.25
_CLAIM_PAUSE_SECONDS = 0.5
"""Between a claim that failed and the next; after an outage every session of a node claims again."""
_LATE_SECONDS = 10.0
_CALM_BYTES = 2 << 20
"""About two full records: enough to keep the log busy, little for others to wait behind."""


@dataclass(slots=True, eq=False)
class _Pending:
    """A framed record that is not known to be durable."""

    record: Record
    request: AppendRequest
    size: int
    began: float = field(default_factory=time.monotonic)


class Publisher:
    """Appends records, bounded in bytes; who produces rows waits for `room` first.

    The bound is half of the writer's own, so that an append never waits inside the writer: while it did, a record
    before it could be lost, and it would go out behind the loss.
    """

    def __init__(
        self, shell: NodeShell, telemetry: Telemetry, *, queue_bytes: int, format_version: int
    ) -> None:
        self._shell = shell
        self._telemetry = telemetry
        self._queue_bytes = queue_bytes
        self._version = format_version
        self._pending: dict[int, _Pending] = {}
        self._pending_bytes = 0
        self._room = asyncio.Event()
        self._room.set()
        self._calm = asyncio.Event()
        self._calm.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._queues: dict[Partition, asyncio.Queue[_Pending]] = {}
        self._lost: set[tuple[SessionId, Epoch]] = set()
        self._newest: dict[tuple[SessionId, Epoch], asyncio.Future[Offset]] = {}
        self._writer: LogWriter | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._backlog = BacklogMeter()
        self._said_refused = ""
        self.completed = 0
        shell.handle(AppendRecord, self._append)

    @property
    def pending_bytes(self) -> int:
        """Bytes that are queued or on their way."""
        return self._pending_bytes

    @property
    def oldest_seconds(self) -> float:
        """How long the oldest pending record has waited; 0 with none."""
        first = next(iter(self._pending.values()), None)
        return time.monotonic() - first.began if first else 0.0

    @property
    def trouble(self) -> KvlogError | None:
        """Why the log takes nothing just now; None: it does, or it is not known yet that it does not."""
        return self._writer.trouble if self._writer is not None else None

    async def room(self) -> None:
        """Wait until less than the bound is pending."""
        await self._room.wait()

    async def calm(self) -> None:
        """Wait until little is pending: for records that are in no hurry, so that others do not stand behind them."""
        await self._calm.wait()

    def throughput(self) -> float | None:
        """Bytes a second that the log takes when it is the limit; None: it has not been lately."""
        return self._backlog.bytes_per_second

    async def run(self, writer: LogWriter) -> None:
        """Serve the queues until cancelled."""
        self._writer = writer
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for partition, queue in self._queues.items():
                tasks.create_task(self._serve(partition, queue))
            await asyncio.Event().wait()

    async def flush(self, seconds_max: float) -> bool:
        """Wait until nothing is pending; False if that took too long."""
        try:
            async with asyncio.timeout(seconds_max):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def alert_late(self) -> None:
        """Say so while the oldest record has waited for too long; called once in a while."""
        if self.oldest_seconds > _LATE_SECONDS:
            self._telemetry.say(
                Event.APPEND_LATE,
                oldest_seconds=round(self.oldest_seconds, 1),
                pending_bytes=self._pending_bytes,
                problem=str(self.trouble or "none known yet"),
            )

    def _append(self, effect: AppendRecord) -> None:
        record = effect.record
        value = frame(
            kind_of(record), effect.header, chain=effect.chain, payload=effect.payload, version=self._version
        )
        key = record.session.encode()
        request = AppendRequest(effect.partition, key, value, kind_of(record), record.epoch)
        pending = _Pending(record, request, len(value))
        self._pending[id(pending)] = pending
        self._empty.clear()
        self._account(pending.size)
        self._telemetry.metrics.records_appended.inc()
        self._telemetry.metrics.bytes_appended.inc(pending.size)
        queue = self._queues.get(effect.partition)
        if queue is None:
            queue = self._queues[effect.partition] = asyncio.Queue()
            if self._tasks is not None:
                self._tasks.create_task(self._serve(effect.partition, queue))
        queue.put_nowait(pending)

    async def _serve(self, partition: Partition, queue: asyncio.Queue[_Pending]) -> None:
        del partition
        while True:
            pending = await queue.get()
            future = await self._submit(pending)
            if future is None:
                continue
            if future.done():
                self._done(pending, future)
                continue
            self._newest[_tenure_of(pending.record)] = future
            future.add_done_callback(lambda done, pending=pending: self._done(pending, done))  # type: ignore[misc]

    def _is_lost(self, record: Record) -> bool:
        """INV-SILENT: nothing goes out behind a lost record of its epoch, also when its callback has not run yet."""
        tenure = _tenure_of(record)
        newest = self._newest.get(tenure)
        failed = (
            newest is not None and newest.done() and (newest.cancelled() or newest.exception() is not None)
        )
        return tenure in self._lost or failed

    async def _submit(self, pending: _Pending) -> asyncio.Future[Offset] | None:
        """Hand it to the writer; while nothing can be sent, try again, so that order is kept.

        What its epoch had on its way may be lost meanwhile: then it is dropped. None: it is not on its way.
        """
        assert self._writer is not None, "run first"
        while not self._is_lost(pending.record):
            try:
                future = await self._writer.append(pending.request)
            except (LogUnavailable, ConfigError) as error:
                self._say_refused(error)
                await asyncio.sleep(_OUTAGE_PAUSE_SECONDS)
            except KvlogError as error:
                self._failed(pending, error)
                return None
            else:
                self._said_refused = ""
                return future
        self._finish(pending)
        return None

    def _say_refused(self, error: KvlogError) -> None:
        """A topic that an operator has made unusable: said once, with what to do; everything waits as in an outage."""
        if not isinstance(error, ConfigError) or self._said_refused == str(error):
            return
        self._said_refused = str(error)
        self._telemetry.say(Event.LOG_REFUSED, **error.fields)

    def _done(self, pending: _Pending, future: asyncio.Future[Offset]) -> None:
        if self._newest.get(_tenure_of(pending.record)) is future:
            del self._newest[_tenure_of(pending.record)]
        error = None if future.cancelled() else future.exception()
        if future.cancelled() or error is not None:
            self._failed(pending, error)
            return
        now = time.monotonic()
        self._backlog.completed(now, pending.size, self._pending_bytes - pending.size)
        self._telemetry.metrics.append_seconds.observe(now - pending.began)
        self.completed += 1
        if isinstance(pending.record, Claim):
            self._telemetry.claim_times.durable(pending.record.session, now)
        self._finish(pending)

    def _failed(self, pending: _Pending, error: BaseException | None) -> None:
        """Whatever the reason, nothing more may be written under this epoch: not even what is queued already."""
        record = pending.record
        self._telemetry.metrics.appends_failed.inc()
        self._telemetry.say(
            Event.APPEND_FAILED, session=record.session, epoch=record.epoch, problem=str(error or "cancelled")
        )
        if isinstance(record, Claim):
            # Nothing is queued under an epoch that is not won yet; and the next claim may be for the same one again.
            self._finish(pending)
            if self._tasks is not None:
                self._tasks.create_task(self._fail_claim(record))
        else:
            self._lost.add(_tenure_of(record))
            self._finish(pending)
            self._shell.step(AppendFailed(record))

    async def _fail_claim(self, record: Claim) -> None:
        await asyncio.sleep(_CLAIM_PAUSE_SECONDS)
        self._shell.step(AppendFailed(record))

    def _finish(self, pending: _Pending) -> None:
        del self._pending[id(pending)]
        self._account(-pending.size)
        if not self._pending:
            self._empty.set()
            self._lost.clear()  # nothing of those epochs is queued any more, and the core sends no more of them

    def _account(self, size: int) -> None:
        self._pending_bytes += size
        self._telemetry.metrics.append_queue_bytes.set(self._pending_bytes)
        (self._room.set if self._pending_bytes < self._queue_bytes else self._room.clear)()
        (self._calm.set if self._pending_bytes < _CALM_BYTES else self._calm.clear)()


def _tenure_of(record: Record) -> tuple[SessionId, Epoch]:
    return record.session, record.epoch
