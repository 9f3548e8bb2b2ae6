"""The messages between an engine and its daemon, as values and as bytes.

One message on the socket:

    0        4                 4 + length
    ┌────────┬──────────────────┐
    │ length │ msgpack array    │
    └────────┴──────────────────┘
    length: u32 little-endian, bytes of the array, 1 ≤ length ≤ control_message_bytes
    array:  [kind, field, field, …] in the order of the dataclass, no field optional

The first message of an engine is Hello, the daemon's answer is Welcome (with three file descriptors: ring,
pool read-only, doorbell) or Rejected. `[1, protocol, …]` and `[18, reason, hint]` keep their places in every
protocol version, so that two builds can tell each other why they do not talk.

Decoding is strict: an unknown kind, a missing or surplus field, a wrong type or a value out of range is a
DecodeError, and whoever gets one closes the link.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType

from kvlog.ids import Digest, Epoch, NodeId, Position, SessionId, Shard, Turn
from kvlog.limits import DEFAULT, Limits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.layout import Identity
    from kvlog.modes import SyncMode

__all__ = [
    "DIGEST_NONE",
    "GROUP_BYTES_MAX",
    "ONLY_RANK",
    "PROTOCOL",
    "Acked",
    "AttachBlock",
    "CloseTurn",
    "EndedReason",
    "EngineRank",
    "Forget",
    "FromDaemon",
    "FromEngine",
    "Hello",
    "OpenTurn",
    "Ping",
    "Pong",
    "RejectReason",
    "Rejected",
    "Release",
    "RequestNumber",
    "TurnEnded",
    "TurnFenced",
    "TurnOpened",
    "TurnUnlogged",
    "UnloggedReason",
    "Welcome",
    "attach_rows_max",
    "pack_tokens",
    "unpack_checksums",
    "unpack_tokens",
]

PROTOCOL = 3
"""The version that this build speaks; there is no negotiation, engine and daemon are upgraded together."""

GROUP_BYTES_MAX = 16
"""Of an OpenTurn's group: a digest."""

DIGEST_NONE = Digest(bytes(16))
"""The context of a request without LoRA, media or salt."""

RequestNumber = NewType("RequestNumber", int)
"""Pairs an OpenTurn with its answer; numbered by the engine, unique on one link."""

# A TurnOpened costs 8 bytes a checksum and at most 8 bytes a block, which holds at least one row; 1 KiB for the
# rest.
_ATTACH_BYTES_A_ROW = 16
_ATTACH_BYTES_FIXED = 1024


class RejectReason(StrEnum):
    """Why a daemon does not take an engine."""

    OTHER_PROTOCOL = "other_protocol"
    IDENTITY = "identity"
    ROW_TOO_LARGE = "row_too_large"
    NOT_ALLOWED = "not_allowed"
    OVERLOADED = "overloaded"
    STOPPING = "stopping"


class UnloggedReason(StrEnum):
    """Why a turn is served without being logged; from NO_LINK on, the engine's side says so itself."""

    BUSY = "busy"
    """Another turn of the session is open on this node."""
    FENCED = "fenced"
    """Another node owns the session and was not willing, or won the claim."""
    OWNER_BUSY = "owner_busy"
    """The node that owns the session has a turn of it in progress; the engine asks again."""
    CLAIM_TIMEOUT = "claim_timeout"
    """The claim was not read back in time; the engine asks again."""
    LOG_UNAVAILABLE = "log_unavailable"
    """The log cannot be reached; the engine asks again."""
    NOT_SUPPORTED = "not_supported"
    """Too long, too many turns, a weight version of which this engine is not, or a session that somebody has ended."""
    STOPPING = "stopping"
    """The daemon is about to stop; the engine asks again after it has reconnected."""
    NO_LINK = "no_link"
    """There is no daemon; the engine asks again after it has connected."""
    NO_ANSWER = "no_answer"
    """The daemon did not answer in time; the engine asks again."""
    RANK_MISSING = "rank_missing"
    """Not every rank of the engine asked for the turn in time, or one left before the answer; they ask again."""
    RANKS_DIFFER = "ranks_differ"
    """The ranks of the engine do not ask for the same thing: another model, context, mode or other token ids."""
    NO_SESSION = "no_session"
    """The request does not want to be logged."""

    @property
    def passes(self) -> bool:
        """It may pass while the request runs, so that asking again is worth while."""
        return self in _PASSING


_PASSING = frozenset(
    {
        UnloggedReason.OWNER_BUSY,
        UnloggedReason.CLAIM_TIMEOUT,
        UnloggedReason.LOG_UNAVAILABLE,
        UnloggedReason.STOPPING,
        UnloggedReason.NO_LINK,
        UnloggedReason.NO_ANSWER,
        UnloggedReason.RANK_MISSING,
    },
)


class EndedReason(StrEnum):
    """Why a daemon gave an open turn up."""

    OUTCOME_UNKNOWN = "outcome_unknown"
    """An append may or may not be in the log; the engine opens the turn anew."""
    BROKEN = "broken"
    """Its own record was refused as Gap or Diverged; the engine opens the turn anew."""
    HANDED_OVER = "handed_over"
    """The session was given to another node while the request ran; stays unlogged."""
    RING_CORRUPT = "ring_corrupt"
    """The ring's bytes could not be read; the link is about to close."""
    ROWS_REFUSED = "rows_refused"
    """Entries of this turn did not continue it; stays unlogged."""
    RANK_LOST = "rank_lost"
    """Another rank of the engine, of those that write, has left the turn; all of them open it anew."""

    @property
    def passes(self) -> bool:
        """The engine may open the turn anew."""
        return self in _ENDED_PASSING


_ENDED_PASSING = frozenset(
    {
        EndedReason.OUTCOME_UNKNOWN,
        EndedReason.BROKEN,
        EndedReason.RING_CORRUPT,
        EndedReason.RANK_LOST,
    },
)


@dataclass(frozen=True, slots=True)
class EngineRank:
    """One of the processes that compute an engine's rows together: `rank` of `ranks`, 0 ≤ rank < ranks."""

    rank: int = 0
    ranks: int = 1


ONLY_RANK = EngineRank()
"""An engine of one process."""


@dataclass(frozen=True, slots=True)
class Hello:
    """An engine process introduces itself; the first message on every link.

    Args:
        protocol: PROTOCOL of its build.
        engine: its kind and version, for people: `transformers 5.19`.
        pid: as it sees itself (in its own pid namespace).
        identity: what its cache's bytes are. Either it has a shard for each rank, or one, which all ranks have alike.
        rank: which of the engine's processes it is.
    """

    protocol: int
    engine: str
    pid: int
    identity: Identity
    rank: EngineRank

    @property
    def shard(self) -> Shard:
        """Whose rows its cache has."""
        return Shard(self.rank.rank if self.identity.shards == self.rank.ranks else 0)

    @property
    def only_reads(self) -> bool:
        """Another rank logs the rows that this one has too: it loads, and never writes."""
        return self.rank.rank != self.shard


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """Asks for a turn of a session: to attach what is known of it, and to log what is new.

    Args:
        request: pairs it with the answer.
        session: checked by `parse_session_id`.
        tokens: all token ids known so far, u32 little-endian; see `pack_tokens`.
        context: LoRA, media, salt; DIGEST_NONE without.
        continues: the newest epoch under which this same request was logged before its turn was lost; 0: none. If
            the session has a newer epoch of another writer by now, the answer is FENCED and nothing is claimed: a
            request that was fenced while it had no link must not claim the session back.
        mode: None: the daemon's setting.
        wait_ms: how long the daemon may try to become primary before it answers CLAIM_TIMEOUT.
        take_over: the answer was begun elsewhere, or by this request before: its owner is believed gone, or willing. A
            request that is merely new must not take a session from a node that is in the middle of a turn.
        group: what the ranks of an engine of several processes have in common, of this turn and of no other; the daemon
            opens it when all of them have asked, for all or for none. Empty for an engine of one process.
    """

    request: RequestNumber
    session: SessionId
    tokens: bytes
    context: Digest
    continues: Epoch
    mode: SyncMode | None
    wait_ms: int
    take_over: bool
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class CloseTurn:
    """The request is over; `length` is the end of the last row that was written to the ring, or log_from.

    A turn of several ranks is over when all of them have closed it; the session has what all that write have written.
    """

    turn: Turn
    length: Position


@dataclass(frozen=True, slots=True)
class Release:
    """The blocks that came with TurnOpened have been copied; they may be used again."""

    turn: Turn


@dataclass(frozen=True, slots=True)
class Forget:
    """End the session for good, everywhere."""

    session: SessionId


@dataclass(frozen=True, slots=True)
class Ping:
    """Are you there?"""


@dataclass(frozen=True, slots=True)
class Welcome:
    """The daemon takes the engine; three file descriptors travel with it: ring, pool (read-only), doorbell.

    Args:
        protocol: PROTOCOL.
        incarnation: 16 random bytes of the daemon's process.
        node: its name.
        ring_bytes: size of the ring's memory.
        pool_bytes: size of the pool's memory that is shared; 0: nothing can be attached.
        block_bytes: size of one block of the pool.
        blocks: number of blocks.
        device: where the pool's blocks are: `cpu`, or `cuda:N` (the shared memory is then its staging area).
    """

    protocol: int
    incarnation: bytes
    node: NodeId
    ring_bytes: int
    pool_bytes: int
    block_bytes: int
    blocks: int
    device: str


@dataclass(frozen=True, slots=True)
class Rejected:
    """The daemon does not take the engine and closes the link; `hint` says what to do."""

    reason: RejectReason
    hint: str


@dataclass(frozen=True, slots=True)
class AttachBlock:
    """One pinned block: its index in the pool, and how many rows from its slot 0 belong to the attach."""

    index: int
    rows: int


@dataclass(frozen=True, slots=True)
class TurnOpened:
    """This node is primary of the session and the turn may be logged.

    Args:
        request: of the OpenTurn that it answers.
        turn: goes into every ring entry.
        epoch: goes into every ring entry.
        log_from: rows from here on are to be written to the ring, by the ranks that write; rows below are in the log,
            or on their way to it.
        attach_length: rows that can be attached, from position 0; 0 ≤ attach_length.
        row_bytes: size of one row in the blocks.
        blocks: pinned until Release or the link's end; in order, together attach_length rows.
        row_checksums: xxh3_64 of each attached row, u64 little-endian; see `unpack_checksums`.
    """

    request: RequestNumber
    turn: Turn
    epoch: Epoch
    log_from: Position
    attach_length: Position
    row_bytes: int
    blocks: tuple[AttachBlock, ...]
    row_checksums: bytes


@dataclass(frozen=True, slots=True)
class TurnUnlogged:
    """The request is to be served without being logged; `detail` is for people."""

    request: RequestNumber
    reason: UnloggedReason
    detail: str


@dataclass(frozen=True, slots=True)
class TurnFenced:
    """Another node took the session over: end the request at once, emit nothing more."""

    session: SessionId
    turn: Turn
    epoch: Epoch
    newer_epoch: Epoch


@dataclass(frozen=True, slots=True)
class Acked:
    """The log holds the turn's rows up to `length`, read back by the daemon's own fold."""

    turn: Turn
    length: Position


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The daemon gave the turn up; its further rows are dropped."""

    turn: Turn
    reason: EndedReason


@dataclass(frozen=True, slots=True)
class Pong:
    """The answer to Ping."""


FromEngine = Hello | OpenTurn | CloseTurn | Release | Forget | Ping
FromDaemon = Welcome | Rejected | TurnOpened | TurnUnlogged | TurnFenced | Acked | TurnEnded | Pong


def attach_rows_max(limits: Limits = DEFAULT) -> int:
    """The most rows that one TurnOpened can hand out, whatever the block size; a longer attach is cut to it."""
    return (limits.control_message_bytes - _ATTACH_BYTES_FIXED) // _ATTACH_BYTES_A_ROW


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as u32 little-endian; about 10 ms for a million."""
    return _little(array("I", tokens)).tobytes()


def unpack_tokens(data: bytes) -> tuple[int, ...]:
    """Token ids of an OpenTurn; the decoder has checked that they are whole."""
    return tuple(_little(array("I", data)))


def unpack_checksums(data: bytes) -> tuple[int, ...]:
    """Row checksums of a TurnOpened; the decoder has checked that they are whole."""
    return tuple(_little(array("Q", data)))


def _little(values: array[int]) -> array[int]:
    """Between this machine's byte order and the link's."""
    if sys.byteorder == "big":
        values.byteswap()
    return values
