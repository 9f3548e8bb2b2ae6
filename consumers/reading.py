"""Reads one partition up to its end as of now and folds it, as a standby does: what every verb that judges is built on.

log ──poll──▶ decode ──▶ StandbyCore (judge, fold) ──▶ Step: the message, its record, what the fold said
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.checksums import partition_of
from kvlog.core.effects import RecordRefused, Reread
from kvlog.core.session import Standing
from kvlog.core.standby import StandbyCore
from kvlog.errors import DecodeError, InvalidSessionId, LogTruncated, LogUnavailable
from kvlog.ids import Offset, Partition, SessionId, parse_session_id
from kvlog.limits import DEFAULT
from kvlog.wire.message import decode

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence

    from kvlog.core.effects import ReadEffect
    from kvlog.limits import Limits
    from kvlog.log.base import Log, LogMessage, LogReader
    from kvlog.records import Entry, Record

__all__ = ["PartitionFold", "Step", "home_of", "session_of"]

_POLL_BYTES = 8 << 20
_POLL_SECONDS = 1.0
_SILENT_SECONDS = 30.0
"""A log that holds records up to the watermark and does not give them for so long is not to be waited for."""


@dataclass(frozen=True, slots=True)
class Step:
    """One message, and what the fold made of it.

    Args:
        offset: where it stands; after a hole, where reading went on.
        message: as it was read; None: a hole.
        record: what it is; None: it could not be read, or a hole.
        session: whose it is; None: in doubt.
        problem: why it could not be read; empty: it could.
        effects: what the fold said, in order; without Reread.
        length: the session's length after it; None while nothing is known of it.
    """

    offset: Offset
    message: LogMessage | None
    record: Record | None
    session: SessionId | None
    problem: str
    effects: tuple[ReadEffect, ...]
    length: int | None = None

    @property
    def refusal(self) -> RecordRefused | None:
        """What the fold had against the record; None: it was admitted."""
        return next((effect for effect in self.effects if isinstance(effect, RecordRefused)), None)


def home_of(session: SessionId, log: Log) -> Partition:
    """The partition that a session's records are in."""
    return Partition(partition_of(session, log.partitions))


def session_of(message: LogMessage, partitions: int) -> SessionId | None:
    """The session that a message's key names; None if it names none, or one that belongs into another partition."""
    try:
        session = parse_session_id(bytes(message.key or b"").decode())
    except (UnicodeDecodeError, InvalidSessionId):
        return None
    return session if partition_of(session, partitions) == message.partition else None


class PartitionFold:
    """One partition's records from an offset to a watermark, folded.

    Args:
        log: open.
        partition: which.
        first: where to begin: the log start, or below the session's first needed offset.
        end: where to stop; the high watermark as of some moment.
        limits: the daemons' bounds; the verdicts depend on them.
    """

    def __init__(
        self, log: Log, partition: Partition, *, first: Offset, end: Offset, limits: Limits = DEFAULT
    ) -> None:
        self._log = log
        self._partition = partition
        self._first = first
        self._end = end
        self._limits = limits
        self.core = StandbyCore(partition, first, limits)

    async def steps(self) -> AsyncGenerator[Step, None]:
        """Every message once, in order, but for those that the fold asked to read again; to be closed (`aclosing`).

        Raises:
            LogUnavailable: the log cannot be read now, or gives nothing for half a minute.
            LogReplaced: the log became another one meanwhile: begin again.
        """
        reader = await self._log.reader()
        try:
            reader.assign({self._partition: self._first})
            while reader.positions()[self._partition] < self._end:
                try:
                    messages = await self._next(reader)
                except LogTruncated as error:
                    yield self._hole(reader, error)
                    continue
                for step in self._fold(reader, messages):
                    yield step
        finally:
            await reader.close()

    async def _next(self, reader: LogReader) -> Sequence[LogMessage]:
        deadline = time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < deadline:
            messages = await reader.poll(bytes_max=_POLL_BYTES, timeout_seconds=_POLL_SECONDS)
            if messages:
                return messages
        at = reader.positions()[self._partition]
        problem = f"partition {self._partition} gives nothing at {at}, below its end {self._end}"
        raise LogUnavailable(where=self._log.where, problem=problem)

    def _fold(self, reader: LogReader, messages: Sequence[LogMessage]) -> list[Step]:
        steps = []
        for message in messages:
            if message.offset >= self._end:
                break
            is_new = message.offset >= self.core.applied
            record, session, problem, effects = self._fed(message)
            rereads = [effect for effect in effects if isinstance(effect, Reread)]
            said = tuple(effect for effect in effects if not isinstance(effect, Reread))
            if said or (is_new and not rereads):
                length = self._length(session)
                steps.append(Step(message.offset, message, record, session, problem, said, length))
            if rereads:
                reader.seek(self._partition, rereads[-1].offset)
                break  # what was fetched beyond is read again
        return steps

    def _fed(
        self, message: LogMessage
    ) -> tuple[Record | None, SessionId | None, str, tuple[ReadEffect, ...]]:
        """A record whose key names another session than its header does is trusted in neither, as in the daemon."""
        session = session_of(message, self._log.partitions)
        try:
            entry: Entry = decode(message.value, self._limits)
        except DecodeError as error:
            return None, session, str(error.fields["problem"]), self.core.unreadable(message.offset, session)
        if entry.record.session != session:
            problem = "its key names another session than its header"
            return None, None, problem, self.core.unreadable(message.offset, None)
        return entry.record, session, "", self.core.read(message.offset, entry)

    def _length(self, session: SessionId | None) -> int | None:
        state = self.core.session(session) if session else None
        return state.length if state and state.standing is not Standing.UNROOTED else None

    def _hole(self, reader: LogReader, error: LogTruncated) -> Step:
        start = Offset(error.log_start)
        reader.seek(self._partition, start)
        return Step(start, None, None, None, "", self.core.hole(start))
