"""The reading side: tail the log, feed the fold, write rows into the pool.

    log ──poll──▶ decode ──▶ core (judge, fold) ──StoreRows──▶ decompress ──▶ pool blocks

One task reads all partitions. It yields to the loop between records, so that a burst never holds up the engines' link.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from daemon.retention import Arrivals
from daemon.telemetry import Event
from kvlog.buffers.blocks import Key
from kvlog.checksums import partition_of
from kvlog.core.effects import CutRows, DropSession, FollowPartition, Reread, StoreRows
from kvlog.core.inputs import Follow, HoleRead, LogReplacedRead, RecordRead, UnreadableRead
from kvlog.errors import (
    DecodeError,
    InvalidSessionId,
    KvlogError,
    LayoutMismatch,
    LogReplaced,
    LogTruncated,
    LogUnavailable,
    PoolFull,
    RowTooLarge,
)
from kvlog.ids import Offset, Partition, SessionId, parse_session_id
from kvlog.records import Codec
from kvlog.wire.codec import decode_payload
from kvlog.wire.message import decode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from daemon.eviction import Evictor
    from daemon.node import NodeShell
    from daemon.telemetry import Telemetry
    from kvlog.buffers.pool import BlockPool
    from kvlog.core.inputs import Input
    from kvlog.ids import Position
    from kvlog.limits import Limits
    from kvlog.log.base import Log, LogMessage, LogReader

__all__ = ["LogTail", "PoolApplier"]

_POLL_BYTES = 8 << 20
_POLL_SECONDS = 0.5
_HOLD_NS = 3_000_000
"""How long records are applied before the loop gets a turn."""
_OUTAGE_PAUSE_SECONDS = 0.25
_COMMIT_SECONDS = 5.0
_COMMIT_SECONDS_MAX = 5.0
_COMMIT_IDLE_SECONDS = 1800.0
"""Committed offsets of manual assignment expire at the broker, so an idle node commits again."""
_ABSENT_SAID_MAX = 1024


class PoolApplier:
    """Carries out what the fold says of bytes."""

    def __init__(
        self, shell: NodeShell, pool: BlockPool, evictor: Evictor, telemetry: Telemetry, limits: Limits
    ) -> None:
        self._pool = pool
        self._evictor = evictor
        self._telemetry = telemetry
        self._limits = limits
        self._absent_said: set[SessionId] = set()
        self._ids_from: dict[SessionId, Position] = {}
        shell.handle(StoreRows, self._store)
        shell.handle(CutRows, self._cut)
        shell.handle(DropSession, self._drop)

    def ids_from(self, session: SessionId) -> Position | None:
        """From which position on the session is logged without rows; None: all of it has rows in the log."""
        return self._ids_from.get(session)

    def _cut(self, effect: CutRows) -> None:
        self._pool.cut(effect.session, effect.length)
        if effect.length <= self._ids_from.get(effect.session, effect.length + 1):
            self._ids_from.pop(effect.session, None)

    def _store(self, effect: StoreRows) -> None:
        """Write the delta's rows; what cannot be written is absent, and the fold goes on."""
        delta, layout = effect.delta, effect.layout
        count, row_bytes = len(delta.tokens), layout.row_bytes
        key = Key(delta.session, delta.shard)
        metrics = self._telemetry.metrics
        self._pool.blocks.touch(delta.session, time.monotonic_ns())
        if delta.codec is Codec.IDS:
            self._ids_from[delta.session] = min(delta.start, self._ids_from.get(delta.session, delta.start))
        try:
            if delta.codec is not Codec.IDS and self._stored(effect, key, count, row_bytes):
                metrics.rows_stored.inc(count)
                return
        except (DecodeError, PoolFull, RowTooLarge, LayoutMismatch) as error:
            self._say_absent(delta.session, error)
        self._pool.blocks.mark_absent(key, delta.start)
        metrics.rows_absent.inc(count)

    def _stored(self, effect: StoreRows, key: Key, count: int, row_bytes: int) -> bool:
        """False behind a hole: rows before these are absent already, so nobody could use them."""
        delta, decoded_bytes = effect.delta, count * row_bytes
        start, codec = delta.start, delta.codec
        if start > self._pool.present_prefix(key):
            return False
        dtype = effect.layout.dtype
        rows = decode_payload(effect.payload, codec, dtype, decoded_bytes=decoded_bytes, limits=self._limits)
        # One row as it is: its checksum is the payload's, which the fold has just verified.
        checksums = (delta.payload_checksum,) if count == 1 and codec is Codec.RAW else None
        try:
            return self._pool.apply(key, start, rows, row_bytes, checksums)
        except PoolFull:
            wanted = 1 + decoded_bytes // self._pool.geometry.block_bytes
            if not self._evictor.evict(blocks_wanted=wanted, keep=delta.session):
                raise
            return self._pool.apply(key, start, rows, row_bytes, checksums)

    def _say_absent(self, session: SessionId, error: KvlogError) -> None:
        """Once a session: a full pool would say it at every record."""
        if session in self._absent_said:
            return
        if len(self._absent_said) >= _ABSENT_SAID_MAX:
            self._absent_said.clear()
        self._absent_said.add(session)
        self._telemetry.say(Event.ROWS_ABSENT, session=session, problem=str(error))

    def _drop(self, effect: DropSession) -> None:
        self._pool.drop(effect.session)
        self._absent_said.discard(effect.session)
        self._ids_from.pop(effect.session, None)
        self._telemetry.say(Event.SESSION_DROPPED, session=effect.session, reason=effect.reason.value)


class LogTail:
    """Follows partitions of an opened log until cancelled."""

    def __init__(self, shell: NodeShell, telemetry: Telemetry, limits: Limits) -> None:
        self._shell = shell
        self._telemetry = telemetry
        self._limits = limits
        self._log: Log | None = None
        self._reader: LogReader | None = None
        self._rewound: set[Partition] = set()
        self.arrivals = Arrivals()
        self.polls = 0
        self.applied = 0
        self.is_up = True
        self.is_applying = False
        shell.handle(Reread, self._reread)
        shell.handle(FollowPartition, self._follow_now)

    async def open(self, log: Log, group: str, partitions: Iterable[Partition]) -> None:
        """Begin at each partition's log start.

        Raises:
            LogUnavailable: try again.
        """
        starts = {p: (await log.bounds(p)).log_start for p in partitions}
        self._log = log
        self._reader = await log.reader(group=group)
        for partition, first in starts.items():
            self._shell.step(Follow(partition, first))
        self._reader.assign(starts)

    async def run(self) -> None:
        """Read until cancelled; outages are waited out."""
        reader = self._reader
        assert reader is not None, "open first"
        while True:
            self.polls += 1
            try:
                await self._once(reader)
                self._say_up(None)
            except LogUnavailable as error:
                self._say_up(error)
                await asyncio.sleep(_OUTAGE_PAUSE_SECONDS)

    async def _once(self, reader: LogReader) -> None:
        try:
            messages = await reader.poll(bytes_max=_POLL_BYTES, timeout_seconds=_POLL_SECONDS)
        except LogTruncated as error:
            self._resume(reader, error)
        except LogReplaced as error:
            await self._restart(reader, error)
        else:
            await self._feed(messages)

    def _say_up(self, error: LogUnavailable | None) -> None:
        was_up, self.is_up = self.is_up, error is None
        self._telemetry.metrics.log_up.set(self.is_up)
        if was_up and not self.is_up:
            self._telemetry.say(Event.LOG_UNAVAILABLE, problem=str(error))
        if self.is_up and not was_up:
            self._telemetry.say(Event.LOG_AVAILABLE_AGAIN)

    async def _feed(self, messages: Sequence[LogMessage]) -> None:
        self._rewound.clear()
        self.is_applying = bool(messages)
        left = iter(messages)
        while self._feed_some(left):  # noqa: ASYNC110 - nothing is waited for: others get a turn
            await asyncio.sleep(0)
        self.is_applying = False

    def _feed_some(self, messages: Iterator[LogMessage]) -> bool:
        """Apply messages until they are over, or others must get a turn. Returns: whether some may be left."""
        records = size_bytes = 0
        until = time.monotonic_ns() + _HOLD_NS
        is_late = False
        for message in messages:
            if message.partition in self._rewound:
                continue  # fetched before the core asked to read from further back
            size = len(message.value)
            records, size_bytes = records + 1, size_bytes + size
            self.arrivals.note(message.partition, message.offset, message.timestamp_ms, size)
            self._shell.step(self._decoded(message))
            self.applied += 1
            if is_late := time.monotonic_ns() > until:
                break
        # Once for all of them: a counter's lock costs as much as a step of the fold.
        self._telemetry.metrics.records_read.inc(records)
        self._telemetry.metrics.bytes_read.inc(size_bytes)
        return is_late

    def _decoded(self, message: LogMessage) -> Input:
        """A record whose key names another session than its header does is trusted in neither."""
        partition, offset = message.partition, message.offset
        session = self._session_of(message)
        try:
            entry = decode(message.value, self._limits)
        except DecodeError:
            return UnreadableRead(partition, offset, session)
        if entry.record.session != session:
            return UnreadableRead(partition, offset, None)
        return RecordRead(partition, offset, entry)

    def _session_of(self, message: LogMessage) -> SessionId | None:
        """The session that the key names; None if it names none, or one that belongs into another partition."""
        assert self._log is not None, "open first"
        try:
            session = parse_session_id(bytes(message.key or b"").decode())
        except (UnicodeDecodeError, InvalidSessionId):
            return None
        return session if partition_of(session, self._log.partitions) == message.partition else None

    def _reread(self, effect: Reread) -> None:
        assert self._reader is not None, "open first"
        self._rewound.add(effect.partition)
        self._reader.seek(effect.partition, effect.offset)

    def _follow_now(self, effect: FollowPartition) -> None:
        assert self._reader is not None, "open first"
        self._reader.assign({**self._reader.positions(), effect.partition: effect.offset})

    def _resume(self, reader: LogReader, error: LogTruncated) -> None:
        """What we wanted is gone: go on at the log start, knowing nothing of what lay before."""
        partition, start = Partition(error.partition), Offset(error.log_start)
        self._telemetry.say(Event.LOG_TRUNCATED, partition=partition, wanted=error.wanted, log_start=start)
        reader.seek(partition, start)
        self._shell.step(HoleRead(partition, start))

    async def _restart(self, reader: LogReader, error: LogReplaced) -> None:
        """The log is another one: everything that is known of it is void."""
        assert self._log is not None, "open first"
        self._telemetry.say(Event.LOG_REPLACED, partition=error.partition, problem=error.problem)
        partition = Partition(error.partition)
        self.arrivals.forget(partition)
        start = (await self._log.bounds(partition)).log_start
        reader.seek(partition, start)
        self._shell.step(LogReplacedRead(partition, start))

    async def run_commits(self) -> None:
        """Publish how far we are, for lag tools: beside the tail, which must not wait for it."""
        reader = self._reader
        assert reader is not None, "open first"
        committed: Mapping[Partition, Offset] = {}
        committed_at, said = 0.0, False
        while True:
            await asyncio.sleep(_COMMIT_SECONDS)
            applied = {p: core.applied for p, core in self._shell.core.partitions.items()}
            if applied == committed and time.monotonic() - committed_at < _COMMIT_IDLE_SECONDS:
                continue
            try:
                async with asyncio.timeout(_COMMIT_SECONDS_MAX):
                    await reader.commit(applied)
            except (KvlogError, TimeoutError) as error:
                if not said:
                    self._telemetry.say(Event.OFFSETS_NOT_COMMITTED, problem=str(error) or "it took too long")
                said = True
            else:
                committed, committed_at, said = applied, time.monotonic(), False
