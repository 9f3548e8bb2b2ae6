"""What a shell tells the node's core, as values: what was read, what the engine asks, how effects came out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.core.takeover import Claimant
    from kvlog.ids import Digest, Epoch, Nonce, Offset, Partition, Position, SessionId, Shard, Turn
    from kvlog.layout import Identity
    from kvlog.records import Codec, EndReason, Entry, Record

__all__ = [
    "AppendFailed",
    "CloseTurn",
    "EncodedRows",
    "EndSession",
    "Follow",
    "HoleRead",
    "Input",
    "LogReplacedRead",
    "OpenTurn",
    "RecordRead",
    "RewriteSession",
    "Stop",
    "UnreadableRead",
    "WatermarkFailed",
    "WatermarkRead",
    "WithdrawRequest",
]


@dataclass(frozen=True, slots=True)
class Follow:
    """The shell reads this partition from `first` on; every offset from there is fed in order."""

    partition: Partition
    first: Offset


class RecordRead(NamedTuple):
    """A message was read and decoded. Its payload is referenced by effects, not copied."""

    partition: Partition
    offset: Offset
    entry: Entry


@dataclass(frozen=True, slots=True)
class UnreadableRead:
    """A message's header cannot be read. `key`: its session if the message's key says so beyond doubt, else None."""

    partition: Partition
    offset: Offset
    key: SessionId | None


@dataclass(frozen=True, slots=True)
class HoleRead:
    """The reader could not go on where it was and continues at `offset`."""

    partition: Partition
    offset: Offset


@dataclass(frozen=True, slots=True)
class LogReplacedRead:
    """The log is another one than before; its reading goes on at `offset`."""

    partition: Partition
    offset: Offset


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A request wants to write a session; exactly one TurnOpened or TurnUnlogged answers it.

    Args:
        request: a number to answer under, unique among open requests.
        session: which session.
        tokens: the request's token ids: prompt, and what of the answer is known.
        context: digest of what else the bytes depend on (LoRA, media, cache salt).
        identity: of the engine that asks.
        continues: the newest epoch under which this same request was logged before; NO_EPOCH for a new request. If
            another writer has a newer one by now, the answer is FENCED and nothing is claimed (INV-NO-CLAIM-BACK).
        deadline_ns: on the clock of `tick`; after it the answer is TurnUnlogged.
        rewrites: the core's own word for a RewriteSession; no request says so.
    """

    request: int
    session: SessionId
    tokens: Sequence[int]
    context: Digest
    identity: Identity
    continues: Epoch
    deadline_ns: int
    rewrites: bool = False


@dataclass(frozen=True, slots=True)
class RewriteSession:
    """Log a session of ours again from position 0 under a new claim; exactly one TurnOpened or TurnUnlogged answers it.

    TurnOpened says by `usable` up to where it can be logged again; the turn is then written and closed like any other.
    It ends with TurnEnded as soon as a request for the session comes. At most one waits for its claim.

    Args:
        request: a number to answer under, unique among open requests and these.
        session: must be owned, idle and drained, else the answer is BUSY.
        deadline_ns: on the clock of `tick`; after it the answer is TurnUnlogged.
    """

    request: int
    session: SessionId
    deadline_ns: int


@dataclass(frozen=True, slots=True)
class WithdrawRequest:
    """The request that waits for its turn is gone; it gets no answer, and the claim goes on."""

    session: SessionId
    request: int


@dataclass(frozen=True, slots=True)
class EncodedRows:
    """New rows of a turn, encoded and small enough for one record.

    Args:
        turn: the turn that they belong to; the daemon's own number.
        epoch: the epoch that the turn was opened under.
        shard: the rank that computed them.
        start: the first position.
        tokens: their token ids.
        codec: how `payload` is encoded.
        payload: the bytes that go into the record; referenced until the append is done.
        payload_checksum: of `payload`.
    """

    turn: Turn
    epoch: Epoch
    shard: Shard
    start: Position
    tokens: tuple[int, ...]
    codec: Codec
    payload: memoryview
    payload_checksum: int


@dataclass(frozen=True, slots=True)
class CloseTurn:
    """The request is over; the session stays ours, idle. Unknown turns are ignored: they may have ended meanwhile."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class EndSession:
    """End a session for good; it is claimed first if it is not ours. A turn in progress ends with it."""

    session: SessionId
    reason: EndReason
    claimant: Claimant


@dataclass(frozen=True, slots=True)
class WatermarkRead:
    """The answer to ReadWatermark. `nonce` is 16 fresh random bytes."""

    session: SessionId
    high_watermark: Offset
    nonce: Nonce


@dataclass(frozen=True, slots=True)
class WatermarkFailed:
    """The watermark could not be read; to be said after a pause, since the core asks again at once."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """An AppendRecord's outcome is unknown, or it is certain that nothing was written.

    Either way nothing more is written under that epoch: even a certain loss would leave a gap before the next record.
    For a claim it is to be said after a pause.
    """

    record: Record


@dataclass(frozen=True, slots=True)
class Stop:
    """Open no more turns: answer what waits, end what is in progress. What was sent is still to be drained."""


Input = (
    Follow
    | RecordRead
    | UnreadableRead
    | HoleRead
    | LogReplacedRead
    | OpenTurn
    | RewriteSession
    | WithdrawRequest
    | EncodedRows
    | CloseTurn
    | EndSession
    | WatermarkRead
    | WatermarkFailed
    | AppendFailed
    | Stop
)
