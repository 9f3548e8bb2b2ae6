"""The life of a daemon: pool and socket first, READY, then the log whenever it is there, and an orderly stop.

    start ─▶ pool allocated, socket bound ─▶ READY ─▶ log opened (waits for an absent broker) ─▶ tail, publish, beat
    SIGTERM ─▶ STOPPING ─▶ turns ended, rings drained, appends folded ─▶ goodbye ─▶ socket and log closed

Every long-lived piece runs in one TaskGroup: a failure of one stops the daemon with its error, and systemd starts it
anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from typing import TYPE_CHECKING

from daemon.progress import Progress, Sample
from daemon.telemetry import Event
from kvlog.core import effects as fx
from kvlog.core import inputs
from kvlog.errors import ConfigError, KvlogError, LogUnavailable, OutcomeUnknown
from kvlog.ids import Partition

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from typing import Any

    from daemon.wiring import Parts
    from kvlog.log.base import Log, LogWriter

__all__ = ["Service"]

_TICK_SECONDS = 0.05
_TICK_IDLE_SECONDS = 1.0
"""While there is no claim; a handler that failed may have left inputs behind, which a tick carries on with."""
_HOUSEKEEPING_SECONDS = 1.0
_OPEN_PAUSE_SECONDS_MAX = 5.0
_WATERMARK_SECONDS = 5.0
_WATERMARK_PAUSE_SECONDS = 0.25
_FLUSH_SECONDS = 10.0
_CLOSE_SECONDS = 5.0
"""A log that is away must not keep a daemon from ending."""
_STUCK_SECONDS = 60.0


class Service:
    """Runs the parts that wiring has made."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._stop = asyncio.Event()
        self._log_open = False
        self._tasks: asyncio.TaskGroup | None = None
        self._claiming = asyncio.Event()
        self._log_tasks: list[asyncio.Task[None]] = []
        self._writer: LogWriter | None = None
        shell = parts.shell
        shell.handle(fx.ReadWatermark, self._ask_watermark)
        shell.handle(fx.RecordRefused, self._refused)
        shell.handle(fx.SessionClaimed, self._claimed)
        shell.handle(fx.SessionBroken, self._broken)
        shell.handle(fx.SessionHealed, self._healed)
        shell.handle(fx.SessionEnded, self._ended)
        shell.handle(fx.NoteSnapshot, lambda effect: None)  # noqa: ARG005  # snapshots are only noted so far

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ConfigError: the configuration does not fit this machine or cluster.
        """
        parts = self._parts
        loop = asyncio.get_running_loop()
        try:
            self._serve_metrics()  # first: a port that is taken must not leave a socket's file behind
            parts.server.listen()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                served = [tasks.create_task(c) for c in self._loops()]
                opening = tasks.create_task(self._with_log())
                parts.notifier.ready(self._waiting)
                parts.telemetry.say(
                    Event.DAEMON_READY, socket=str(parts.settings.link.socket), log=parts.log.where
                )
                await self._stop.wait()
                await self._shut_down()
                serving, *others = served
                serving.cancel()  # first, so that engines' links end while those who look after them still run
                await asyncio.wait([serving])
                for task in (*others, opening, *self._log_tasks):
                    task.cancel()
        except* KvlogError as group:
            raise _first(group) from None
        finally:
            parts.pool.close()
            parts.telemetry.say(Event.DAEMON_STOPPED)

    def _loops(self) -> tuple[Coroutine[Any, Any, None], ...]:
        return (self._parts.server.serve(), self._parts.control.run(), self._tick(), self._housekeep())

    def _serve_metrics(self) -> None:
        metrics = self._parts.settings.metrics
        if metrics.port is None:
            return
        try:
            port = self._parts.telemetry.metrics.serve(metrics.host, metrics.port)
        except OSError as error:
            raise ConfigError(
                setting="metrics.port",
                problem=f"{metrics.host}:{metrics.port}: {error.strerror}",
                fix="take another",
            ) from error
        self._parts.index.metrics_address = f"{metrics.host}:{port}"

    # The log

    async def _with_log(self) -> None:
        """Open the log, however long that takes, and start what needs it."""
        parts, log = self._parts, self._parts.log
        await self._open(log)
        parts.index.log_identity = await self._patiently(log.identity)
        followed = parts.settings.follow.partitions
        partitions = range(log.partitions) if followed == "all" else followed
        group = f"{parts.settings.log.topic_prefix}-{parts.settings.node.id}"
        await self._patiently(lambda: parts.tail.open(log, group, [Partition(p) for p in partitions]))
        self._writer = writer = await self._patiently(log.writer)
        self._log_open = True
        assert self._tasks is not None, "run first"
        loops = (
            parts.tail.run(),
            parts.tail.run_commits(),
            parts.publisher.run(writer),
            parts.index.run(log),
            parts.lag.run(log),
            parts.rewriter.run(),
            parts.expirer.run(),
        )
        self._log_tasks = [self._tasks.create_task(c) for c in loops]

    async def _open(self, log: Log) -> None:
        parts = self._parts
        try:
            differences = await self._patiently(log.open)
        except ConfigError as error:
            parts.telemetry.say(Event.LOG_REFUSED, problem=str(error))
            raise
        parts.telemetry.metrics.log_up.set(1)
        parts.telemetry.say(Event.LOG_OPENED, log=log.where, partitions=log.partitions)
        for difference in differences:
            parts.telemetry.say(Event.LOG_DIFFERS, difference=difference)

    async def _patiently(self, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:  # noqa: ANN401  # what the call gives
        """Call until the log answers; says so once."""
        pause, said = 0.1, False
        while True:
            try:
                return await call()
            except LogUnavailable as error:
                if not said:
                    self._parts.telemetry.metrics.log_up.set(0)
                    self._parts.telemetry.say(Event.LOG_UNAVAILABLE, problem=str(error))
                    said = True
                await asyncio.sleep(pause)
                pause = min(2 * pause, _OPEN_PAUSE_SECONDS_MAX)

    def _ask_watermark(self, effect: fx.ReadWatermark) -> None:
        assert self._tasks is not None, "run first"
        self._claiming.set()
        self._parts.telemetry.claim_times.asked(effect.session, time.monotonic())
        self._tasks.create_task(self._watermark(effect))

    async def _watermark(self, effect: fx.ReadWatermark) -> None:
        """At most limits.takeovers_in_flight of these at a time: the core asks once a take-over."""
        parts = self._parts
        if self._log_open:
            try:
                async with asyncio.timeout(_WATERMARK_SECONDS):
                    bounds = await parts.log.bounds(effect.partition)
            except (LogUnavailable, TimeoutError):
                pass
            except KvlogError as error:  # a right taken away, say: only who asks for it suffers
                parts.telemetry.say(Event.LOG_REFUSED, session=effect.session, problem=str(error))
            else:
                parts.shell.step(
                    inputs.WatermarkRead(effect.session, bounds.high_watermark, parts.new_nonce())
                )
                return
        await asyncio.sleep(_WATERMARK_PAUSE_SECONDS)
        parts.shell.step(inputs.WatermarkFailed(effect.session))

    # Time

    async def _tick(self) -> None:
        """Tell the core the time while it needs it: only claims have deadlines, and each begins with a watermark."""
        shell = self._parts.shell
        while True:
            shell.tick()
            if shell.core.takeovers_in_flight:
                await asyncio.sleep(_TICK_SECONDS)
            else:
                self._claiming.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_TICK_IDLE_SECONDS):
                        await self._claiming.wait()

    async def _housekeep(self) -> None:
        progress = Progress(_STUCK_SECONDS)
        parts = self._parts
        pace = min(_HOUSEKEEPING_SECONDS, (parts.notifier.watchdog_seconds or 60.0) / 3)
        while True:
            parts.evictor.evict()
            self._show()
            parts.publisher.alert_late()
            stuck = progress.stuck(time.monotonic(), self._samples())
            if stuck:
                parts.telemetry.say(Event.LOOP_STUCK, loops=list(stuck))
            else:
                parts.notifier.watchdog(self._status())
            await asyncio.sleep(pace)

    def _samples(self) -> dict[str, Sample]:
        parts = self._parts
        up = self._log_open and parts.tail.is_up
        return {
            "publish": Sample(parts.publisher.completed, up and self._could_publish()),
            "fetch": Sample(parts.tail.polls, up),
            "apply": Sample(parts.tail.applied, up and parts.tail.is_applying),
        }

    def _could_publish(self) -> bool:
        """A log that can be read and says why it takes nothing (replicas missing, disk full) is not our being stuck."""
        publisher = self._parts.publisher
        return publisher.pending_bytes > 0 and publisher.trouble is None

    def _show(self) -> None:
        metrics, core = self._parts.telemetry.metrics, self._parts.shell.core
        metrics.append_oldest_seconds.set(self._parts.publisher.oldest_seconds)
        owned = sum(1 for _ in core.primaries())
        known = sum(c.session_count for c in core.partitions.values())
        metrics.sessions.labels("primary").set(owned)
        metrics.sessions.labels("standby").set(known - owned)
        metrics.sessions_broken.set(self._parts.index.broken)
        counts = self._parts.pool.blocks.ledger.counts
        metrics.pool_blocks.labels("free").set(counts.free)
        metrics.pool_blocks.labels("used").set(counts.used)
        metrics.pool_blocks.labels("pinned").set(counts.pinned)

    @property
    def _waiting(self) -> str:
        return f"waiting for the log at {self._parts.log.where}"

    def _status(self) -> str:
        core = self._parts.shell.core
        known = sum(c.session_count for c in core.partitions.values())
        where = "log up" if self._log_open and self._parts.tail.is_up else self._waiting
        return f"{where}, {known} sessions, {self._parts.control.engines} engines"

    # What the fold says

    def _refused(self, effect: fx.RecordRefused) -> None:
        judgement, record = effect.judgement, effect.record
        self._parts.telemetry.metrics.records_refused.labels(judgement.verdict.value).inc()
        self._parts.telemetry.say(
            Event.RECORD_REFUSED,
            offset=effect.offset,
            session=record.session if record else None,
            epoch=record.epoch if record else None,
            verdict=judgement.verdict.value,
            why=judgement.why.value,
        )

    def _claimed(self, effect: fx.SessionClaimed) -> None:
        claim = effect.claim
        self._parts.index.claimed(effect)
        if claim.writer == self._parts.myself.writer:
            self._parts.telemetry.metrics.claims_won.inc()
            times = self._parts.telemetry.claim_times.read_back(claim.session, time.monotonic())
            previous = effect.previous.node if effect.previous else None
            self._parts.telemetry.say(
                Event.TAKEOVER_COMPLETED,
                session=claim.session,
                epoch=claim.epoch,
                offset=effect.offset,
                previous=previous,
                **times,
            )

    def _broken(self, effect: fx.SessionBroken) -> None:
        self._parts.index.broke(effect.session)
        self._parts.telemetry.say(
            Event.SESSION_BROKEN,
            session=effect.session,
            offset=effect.offset,
            length=effect.length,
            verdict=effect.judgement.verdict.value,
            why=effect.judgement.why.value,
        )

    def _healed(self, effect: fx.SessionHealed) -> None:
        self._parts.index.mended(effect.session)
        self._parts.telemetry.say(Event.SESSION_HEALED, session=effect.session, offset=effect.offset)

    def _ended(self, effect: fx.SessionEnded) -> None:
        self._parts.index.mended(effect.session)
        self._parts.telemetry.say(Event.SESSION_ENDED, session=effect.session, offset=effect.offset)

    # The end

    async def _shut_down(self) -> None:
        """Nothing that an engine has handed over is lost: rings are drained and appends folded, within a bound."""
        parts = self._parts
        parts.notifier.stopping()
        parts.telemetry.say(Event.DAEMON_STOPPING)
        parts.control.stop()
        deadline = time.monotonic() + _FLUSH_SECONDS
        await parts.control.drain(_FLUSH_SECONDS / 2)
        parts.shell.step(inputs.Stop())
        if self._log_open and self._writer is not None:
            await parts.publisher.flush(max(0.0, deadline - time.monotonic()))
            for _ in range(int(max(0.0, deadline - time.monotonic()) / _TICK_SECONDS)):
                if parts.shell.core.is_drained():
                    break
                await asyncio.sleep(_TICK_SECONDS)
            with contextlib.suppress(LogUnavailable, OutcomeUnknown, TimeoutError):
                await parts.index.say_goodbye(parts.log)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CLOSE_SECONDS):
                    await self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await parts.log.close()


def _first(group: BaseExceptionGroup[KvlogError]) -> KvlogError:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    assert isinstance(error, KvlogError), "the group was filtered"
    return error
