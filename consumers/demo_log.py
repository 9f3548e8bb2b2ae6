"""The demo's own look at the log: what it held of a session, what was stale in it, and copies with a flipped byte.

A copy is what an honest writer would have logged: the same tokens and rows under another session id, in the same
records, with checksums and chain of their own. One byte of one payload is flipped on its way, so the log holds a
damaged record, and every reader meets it there.
"""

from __future__ import annotations

import os
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from consumers.demo_error import DemoError
from consumers.reading import PartitionFold, home_of
from kvlog.checksums import CHAIN_START, chain
from kvlog.core.verdicts import Verdict
from kvlog.errors import KvlogError
from kvlog.ids import Epoch, NodeId, Nonce, Offset, Partition, Position, SessionId, Writer
from kvlog.log.base import AppendRequest
from kvlog.log.settings import make_log
from kvlog.records import Claim, Delta, Truncate, kind_of
from kvlog.wire.frame import frame
from kvlog.wire.header import header_bytes
from kvlog.wire.message import decode

if TYPE_CHECKING:
    from kvlog.core.effects import RecordRefused
    from kvlog.log.base import Log
    from kvlog.log.settings import LogSettings
    from kvlog.records import Entry, Record

__all__ = ["CopiedSession", "DemoLog", "SessionStory"]

_CLIENT_ID = "kvlog-demo"


@dataclass(frozen=True, slots=True)
class SessionStory:
    """What the log says of a session that one node began and another took over.

    Args:
        entries: admitted under the first claim, in order, the claim first.
        length: positions of which the log had rows when the second claim came; all, if none came.
        epoch: of the first claim.
        late: offsets of the first owner's records that came after the second claim.
        stale: those of them that the fold refused as stale.
    """

    entries: tuple[Entry, ...]
    length: int
    epoch: Epoch
    late: tuple[Offset, ...]
    stale: tuple[Offset, ...]


@dataclass(frozen=True, slots=True)
class CopiedSession:
    """A copy in the log. `damaged`: offset and first position of the record with the flipped byte; None: no record."""

    session: SessionId
    damaged: tuple[Offset, Position] | None


class DemoLog:
    """The log, open to read and to append."""

    def __init__(self, log: Log, starts: dict[Partition, Offset]) -> None:
        """Made by `open`. `starts`: where each partition ended then; no session of this demo is before it."""
        self._log = log
        self._starts = starts

    @classmethod
    async def open(cls, settings: LogSettings) -> DemoLog:
        """Open or make it.

        DemoError: it cannot be reached or used; nothing was started.
        """
        log = make_log(settings, client_id=_CLIENT_ID)
        try:
            await log.open()
            starts = {Partition(p): Offset(0) for p in range(log.partitions)}
            for partition in starts:
                starts[partition] = (await log.bounds(partition)).high_watermark
        except KvlogError as error:
            await log.close()
            raise DemoError.of(error, f"The log at {settings.url} cannot be used:") from error
        return cls(log, starts)

    @property
    def where(self) -> str:
        """Its URL."""
        return self._log.where

    async def close(self) -> None:
        """Close it."""
        await self._log.close()

    async def story(self, session: SessionId) -> SessionStory:
        """Fold a session up to now.

        DemoError: the log has no claim of it.
        """
        partition = home_of(session, self._log)
        end = (await self._log.bounds(partition)).high_watermark
        fold = PartitionFold(self._log, partition, first=self._starts[partition], end=end)
        entries: list[Entry] = []
        late: list[Offset] = []
        stale: list[Offset] = []
        length, taken_over = 0, False
        async with aclosing(fold.steps()) as steps:
            async for step in steps:
                record, refusal = step.record, step.refusal
                if step.session != session or step.message is None or record is None:
                    continue
                first = entries[0].record if entries else None
                if isinstance(record, Claim) and refusal is None and first and record.writer != first.writer:
                    taken_over = True
                elif taken_over and first is not None and record.writer == first.writer:
                    late.append(step.offset)
                    stale += [step.offset] if _is_stale(refusal) else []
                elif refusal is None and not taken_over:
                    entries.append(decode(step.message.value))
                    length = step.length or 0
        if not entries:
            raise DemoError(f"The log has no claim of {session}: its node never became its owner.")
        return SessionStory(tuple(entries), length, entries[0].record.epoch, tuple(late), tuple(stale))

    async def copy(self, story: SessionStory, session: SessionId, *, damaged: int | None) -> CopiedSession:
        """Append a session's records again under another id.

        Args:
            story: whose `entries` are copied.
            session: the copy's id; new.
            damaged: index of the entry whose payload gets one flipped byte; a Delta with rows. None: none.
        """
        partition = home_of(session, self._log)
        epoch = Epoch((await self._log.bounds(partition)).high_watermark + 1)
        writer, log_writer = Writer(os.urandom(16)), await self._log.writer()
        try:
            value, where = CHAIN_START, None
            for index, entry in enumerate(story.entries):
                record = _copied(entry.record, session, epoch, writer)
                header = header_bytes(record)
                value = chain(value, header, record.payload_checksum if isinstance(record, Delta) else 0)
                payload = _flipped(entry.payload) if index == damaged else entry.payload
                said = 0 if isinstance(record, Claim) else value
                kind = kind_of(record)
                message = frame(kind, header, chain=said, payload=payload)
                request = AppendRequest(partition, session.encode(), message, kind, epoch)
                offset = await (await log_writer.append(request))
                if index == damaged:
                    assert isinstance(record, Delta), "only rows are damaged"
                    where = (offset, record.start)
        finally:
            await log_writer.close()
        return CopiedSession(session, where)

    async def refusal_at(self, session: SessionId, offset: Offset) -> RecordRefused | None:
        """What our own fold has against the record at this offset; None: it was admitted."""
        partition = home_of(session, self._log)
        end = (await self._log.bounds(partition)).high_watermark
        fold = PartitionFold(self._log, partition, first=self._starts[partition], end=end)
        async with aclosing(fold.steps()) as steps:
            async for step in steps:
                if step.offset == offset and step.refusal is not None:
                    return step.refusal
        return None


def _copied(record: Record, session: SessionId, epoch: Epoch, writer: Writer) -> Record:
    match record:
        case Claim():
            nonce, node = Nonce(os.urandom(16)), NodeId(f"{_CLIENT_ID}-copy")
            return replace(record, session=session, epoch=epoch, writer=writer, nonce=nonce, node=node)
        case Truncate() | Delta():
            return record._replace(session=session, epoch=epoch, writer=writer)
        case _:
            raise DemoError("The session has records that a first turn does not write.")


def _is_stale(refusal: RecordRefused | None) -> bool:
    return refusal is not None and refusal.judgement.verdict is Verdict.STALE


def _flipped(payload: memoryview) -> bytes:
    """One bit of the byte in the middle."""
    changed = bytearray(payload)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)
