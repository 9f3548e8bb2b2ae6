"""One session's history as a list that a person can read: what each record came to, runs drawn together. Pure.

Token ids are kept only when somebody asked to have them revealed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from kvlog.core.effects import (
    DropSession,
    NoteSnapshot,
    SessionBroken,
    SessionClaimed,
    SessionHealed,
)
from kvlog.records import Claim, Codec, Delta, End, Snapshot, Truncate

if TYPE_CHECKING:
    from consumers.reading import Step
    from kvlog.core.effects import RecordRefused
    from kvlog.ids import Offset, SessionId, Writer
    from kvlog.records import Record

__all__ = ["Happening", "Moment", "Timeline"]


class Happening(StrEnum):
    """What a line of a timeline tells."""

    CLAIM = "claim"
    TRUNCATE = "truncate"
    DELTA = "delta"
    SNAPSHOT = "snapshot"
    END = "end"
    REFUSED = "refused"
    BROKEN = "broken"
    HEALED = "healed"
    DROPPED = "dropped"


@dataclass(slots=True)
class Moment:
    """One line: one record, or a run of them that tell the same.

    Args:
        what: which kind of line.
        offset: of the first record.
        last_offset: of the last one.
        timestamp_ms: the log's time of the first one; None after a hole.
        epoch: of the records; None where none could be read.
        node: whose writer it was, by the claims that were read; None: of an unclaimed writer.
        length: the session's length after it; None while nothing is known.
        records: how many.
        payload_bytes: of all of them, as they stand in the log.
        positions: of deltas: how many, over all shards.
        detail: the rest, in words.
        tokens: of deltas of shard 0; empty unless they are to be revealed.
    """

    what: Happening
    offset: Offset
    last_offset: Offset
    timestamp_ms: int | None
    epoch: int | None
    node: str | None
    length: int | None
    records: int = 1
    payload_bytes: int = 0
    positions: int = 0
    detail: str = ""
    tokens: list[int] = field(default_factory=list)

    def absorbs(self, other: Moment) -> bool:
        """Whether the other line tells the same of the next records."""
        return (
            self.what is other.what
            and self.what in {Happening.DELTA, Happening.REFUSED}
            and (self.epoch, self.node, self.detail) == (other.epoch, other.node, other.detail)
        )

    def absorb(self, other: Moment) -> None:
        """Draw both into this line."""
        self.last_offset = other.last_offset
        self.length = other.length
        self.records += other.records
        self.payload_bytes += other.payload_bytes
        self.positions += other.positions
        self.tokens += other.tokens


class Timeline:
    """Collects the moments of one session.

    Args:
        session: whose.
        moments_max: the newest so many are kept; `omitted` counts the others.
        reveal: keep token ids.
    """

    def __init__(self, session: SessionId, *, moments_max: int, reveal: bool) -> None:
        self.session = session
        self._reveal = reveal
        self._nodes: dict[Writer, str] = {}
        self.moments: deque[Moment] = deque(maxlen=moments_max)
        self.omitted = 0
        self.records = 0
        self.bytes = 0
        self.refused: dict[str, int] = {}

    def add(self, step: Step) -> None:
        """Take the next step of the session's partition; steps of other sessions are passed over."""
        if step.session == self.session and step.message is not None:
            self.records += 1
            self.bytes += len(step.message.value)
            self._add_record(step)
        for effect in step.effects:
            match effect:
                case SessionBroken() if effect.session == self.session:
                    detail = f"last good length {effect.length}; only a newer claim can heal it"
                    self._note(step, Happening.BROKEN, detail=detail)
                case SessionHealed() if effect.session == self.session:
                    self._note(step, Happening.HEALED, detail="whole again")
                case DropSession() if effect.session == self.session:
                    self._note(step, Happening.DROPPED, detail=effect.reason.value)
                case _:
                    pass

    def _add_record(self, step: Step) -> None:
        record, refusal = step.record, step.refusal
        if isinstance(record, Claim):
            self._nodes[record.writer] = record.node
        if refusal is not None:
            verdict = refusal.judgement.verdict.value
            self.refused[verdict] = self.refused.get(verdict, 0) + 1
            self._note(step, Happening.REFUSED, detail=_why(refusal, step.problem))
        elif record is not None:
            what, detail = _told(record, step)
            self._note(step, what, detail=detail)

    def _note(self, step: Step, what: Happening, *, detail: str) -> None:
        record = step.record
        moment = Moment(
            what=what,
            offset=step.offset,
            last_offset=step.offset,
            timestamp_ms=step.message.timestamp_ms if step.message else None,
            epoch=record.epoch if record else None,
            node=self._nodes.get(record.writer) if record else None,
            length=step.length if step.session == self.session else None,
            detail=detail,
        )
        if isinstance(record, Delta) and what in {Happening.DELTA, Happening.REFUSED}:
            assert step.message is not None, "a record comes with its message"
            moment.payload_bytes = len(step.message.value)
            moment.positions = len(record.tokens)
            moment.tokens = list(record.tokens) if self._reveal and record.shard == 0 else []
        if self.moments and self.moments[-1].absorbs(moment):
            self.moments[-1].absorb(moment)
            return
        self.omitted += len(self.moments) == self.moments.maxlen
        self.moments.append(moment)


def _told(record: Record, step: Step) -> tuple[Happening, str]:
    match record:
        case Claim():
            return Happening.CLAIM, _claimed(record, step)
        case Truncate():
            return Happening.TRUNCATE, f"a turn begins at position {record.length}"
        case Delta():
            return Happening.DELTA, _encoding(record)
        case Snapshot():
            noted = any(isinstance(effect, NoteSnapshot) for effect in step.effects)
            return Happening.SNAPSHOT, f"{min(record.lengths, default=0)} positions" + (" noted" * noted)
        case End():
            return Happening.END, record.reason.value
        case _:
            assert_never(record)


def _claimed(claim: Claim, step: Step) -> str:
    previous = next((e.previous for e in step.effects if isinstance(e, SessionClaimed)), None)
    if previous is None:
        return "first claim that is known here"
    if previous.writer == claim.writer:
        return f"claimed anew by the same process, from epoch {previous.epoch}"
    return f"taken over from {previous.node}, epoch {previous.epoch}"


def _encoding(delta: Delta) -> str:
    shard = f"shard {delta.shard}, " if delta.shard else ""
    return shard + ("token ids only" if delta.codec is Codec.IDS else delta.codec.name.lower())


def _why(refusal: RecordRefused, problem: str) -> str:
    judgement = refusal.judgement
    said = f"{judgement.verdict.value}: {problem or judgement.why.value}"
    if judgement.expected is None or judgement.actual is None:
        return said
    wide = max(judgement.expected, judgement.actual) >= 1 << 40  # a checksum or a chain reads better in hex
    expected, actual = (
        (f"{judgement.expected:016x}", f"{judgement.actual:016x}")
        if wide
        else (judgement.expected, judgement.actual)
    )
    return f"{said} (expected {expected}, is {actual})"
