"""What a core asks its shell to do, as values. The shell carries them out in order; a failure comes back as an input.

Effects of reading (StandbyCore) and of writing (TakeOver, PrimaryCore, NodeCore) are kept apart: a shell that only
reads, for example a tool, never meets the second kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvlog.core.verdicts import Judgement
    from kvlog.ids import Epoch, Offset, Partition, Position, SessionId, Turn
    from kvlog.layout import Layout
    from kvlog.records import Claim, Delta, Record, Snapshot

__all__ = [
    "AppendRecord",
    "CutRows",
    "DropReason",
    "DropSession",
    "Effect",
    "FollowPartition",
    "NoteSnapshot",
    "ReadEffect",
    "ReadWatermark",
    "RecordRefused",
    "Reread",
    "SessionBroken",
    "SessionClaimed",
    "SessionEnded",
    "SessionHealed",
    "StoreRows",
    "TurnAcknowledged",
    "TurnEndReason",
    "TurnEnded",
    "TurnFenced",
    "TurnOpened",
    "TurnUnlogged",
    "UnloggedReason",
    "WriteEffect",
]


class DropReason(StrEnum):
    """Why a reader forgot a session."""

    HOLE = "a hole in what was read"
    REPLACED = "the log is another one"
    UNREADABLE = "a record could not be read"
    LIMIT = "too many sessions"
    ASKED = "asked to"


class StoreRows(NamedTuple):
    """Write the delta's rows into the buffer at (session, shard, start). Rows that cannot be stored become absent."""

    delta: Delta
    payload: memoryview
    layout: Layout


@dataclass(frozen=True, slots=True)
class CutRows:
    """Forget the bytes of every shard from `length` on; pinned blocks stay as they are until released."""

    session: SessionId
    length: Position


@dataclass(frozen=True, slots=True)
class DropSession:
    """Forget all bytes of the session: its state was dropped."""

    session: SessionId
    reason: DropReason


@dataclass(frozen=True, slots=True)
class RecordRefused:
    """Count it, by verdict; nothing is skipped silently. `record` is None where it could not be read."""

    offset: Offset
    record: Record | None
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class Reread:
    """Read the partition again from `offset` and drop what was fetched beyond; all of it is fed to the core as ever."""

    partition: Partition
    offset: Offset


@dataclass(frozen=True, slots=True)
class SessionClaimed:
    """A claim was admitted; `previous` is the claim that it replaced, None for a session new to this reader."""

    claim: Claim
    offset: Offset
    previous: Claim | None


@dataclass(frozen=True, slots=True)
class SessionBroken:
    """Raise an alert: a record of the owner does not fit, and reading it again did not help."""

    session: SessionId
    offset: Offset
    length: Position
    judgement: Judgement


@dataclass(frozen=True, slots=True)
class SessionHealed:
    """A broken session is whole again."""

    session: SessionId
    offset: Offset


@dataclass(frozen=True, slots=True)
class SessionEnded:
    """The session is over; its bytes were cut by the CutRows before this."""

    session: SessionId
    offset: Offset


@dataclass(frozen=True, slots=True)
class NoteSnapshot:
    """Somebody says where a snapshot lies; to be verified before it is used."""

    snapshot: Snapshot
    offset: Offset


ReadEffect = (
    StoreRows
    | CutRows
    | DropSession
    | RecordRefused
    | Reread
    | SessionClaimed
    | SessionBroken
    | SessionHealed
    | SessionEnded
    | NoteSnapshot
)


class UnloggedReason(StrEnum):
    """Why a request is served without being logged."""

    BUSY = "busy"
    """Another turn of the session is in progress on this node; or, of a rewrite, it cannot be now."""
    OWNER_BUSY = "owner_busy"
    """Another node owns the session and has a turn in progress."""
    CLAIM_TIMEOUT = "claim_timeout"
    """The claim was not read back in time; it goes on, and the session may be idle and ours later."""
    FENCED = "fenced"
    """Other claims won, as often as was tried."""
    LOG_UNAVAILABLE = "log_unavailable"
    TOO_LONG = "too_long"
    OVERLOADED = "overloaded"
    """Too many take-overs wait."""
    STOPPING = "stopping"
    SESSION_ENDED = "session_ended"
    """The session has ended since the request was logged: it does not bring it back."""


class TurnEndReason(StrEnum):
    """Why the daemon gave a turn up although its request goes on."""

    OUTCOME_UNKNOWN = "outcome_unknown"
    """An append may or may not be in the log: open the turn again, which claims anew."""
    REFUSED = "refused"
    """An own record was refused as Gap or Diverged: open the turn again, which claims anew and rewrites."""
    ROWS_OUT_OF_ORDER = "rows_out_of_order"
    """Rows did not start where the last ones ended: open the turn again."""
    DROPPED = "dropped"
    """The session's state was dropped here (hole, log replaced): open the turn again."""
    TOO_LONG = "too_long"
    """The session reached the limit of positions: the rest of the request is not logged."""
    SESSION_ENDED = "session_ended"
    """Somebody asked to forget the session."""
    GAVE_WAY = "gave_way"
    """It was a rewrite, and a request for the session came."""
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class FollowPartition:
    """Start to read a partition that this node has not followed, from `offset`."""

    partition: Partition
    offset: Offset


@dataclass(frozen=True, slots=True)
class ReadWatermark:
    """Read the partition's high watermark NOW, at the leader, and answer with `watermark_read` for this session."""

    session: SessionId
    partition: Partition


@dataclass(frozen=True, slots=True)
class AppendRecord:
    """Append to the session's partition, in the order of these effects. Failure comes back as `append_failed`.

    Args:
        record: what it is.
        header: its header bytes, as the chain was computed over them.
        chain: the chain after it; 0 for a Claim.
        payload: the encoded rows that came in with them, handed through; empty for all but a Delta.
    """

    partition: Partition
    record: Record
    header: bytes
    chain: int
    payload: memoryview


@dataclass(frozen=True, slots=True)
class TurnOpened:
    """Answer the request: it is the turn. Pin [0, usable) of the session's blocks for it, as far as bytes are there.

    Args:
        request: the number under which it was asked.
        turn: the turn's number.
        epoch: the epoch that its rows are logged under.
        usable: the prefix whose bytes the engine may attach, by the fold; presence is the buffer's to know.
        log_from: the first position that the engine's rows are wanted from; those below are in the log.
    """

    request: int
    session: SessionId
    turn: Turn
    epoch: Epoch
    usable: Position
    log_from: Position


@dataclass(frozen=True, slots=True)
class TurnUnlogged:
    """Answer the request: serve it without logging."""

    request: int
    session: SessionId
    reason: UnloggedReason
    newer_epoch: Epoch | None = None


@dataclass(frozen=True, slots=True)
class TurnAcknowledged:
    """Tell the engine that the rows of [0, length) were admitted by our own fold of the log."""

    turn: Turn
    session: SessionId
    length: Position


@dataclass(frozen=True, slots=True)
class TurnFenced:
    """Tell the engine to end the request: another node owns the session. It must not be opened again for it."""

    turn: Turn
    session: SessionId
    epoch: Epoch
    newer_epoch: Epoch


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """Tell the engine that this turn is over although its request goes on; it may open it again."""

    turn: Turn
    session: SessionId
    reason: TurnEndReason


WriteEffect = (
    FollowPartition
    | ReadWatermark
    | AppendRecord
    | TurnOpened
    | TurnUnlogged
    | TurnAcknowledged
    | TurnFenced
    | TurnEnded
)

Effect = ReadEffect | WriteEffect
