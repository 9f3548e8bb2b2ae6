"""The five records of the log, as values. Their bytes are in kvlog.wire, their meaning in kvlog.core.fold.

Every record names its session, its epoch and the writer that claimed it. What comes many times a second is a tuple: to
make a frozen dataclass takes several times as long.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from kvlog.ids import Digest, Epoch, NodeId, Nonce, Offset, Position, Seq, SessionId, Shard, Writer
    from kvlog.layout import Identity

__all__ = [
    "Claim",
    "Codec",
    "Delta",
    "End",
    "EndReason",
    "Entry",
    "Kind",
    "Record",
    "Snapshot",
    "Truncate",
    "kind_of",
]


class Kind(IntEnum):
    """The kind byte of a message."""

    CLAIM = 1
    DELTA = 2
    TRUNCATE = 3
    SNAPSHOT = 4
    END = 5


class Codec(IntEnum):
    """How a delta's payload is encoded (kvlog.wire.codec)."""

    IDS = 0
    """No payload: the rows are not in the log, only the token ids."""
    RAW = 1
    LZ4 = 2
    SPLIT_ZSTD = 3
    """The last byte of each element (sign and exponent) by zstd, the other bytes as they are."""


class EndReason(StrEnum):
    """Why a session ended."""

    REQUEST = "request"
    TTL = "ttl"
    FORGET = "forget"


@dataclass(frozen=True, slots=True)
class Claim:
    """A node takes a newer epoch of a session; the first one in the log wins."""

    session: SessionId
    epoch: Epoch
    writer: Writer
    nonce: Nonce
    node: NodeId
    identity: Identity
    context: Digest


class Delta(NamedTuple):
    """The KV bytes and token ids of positions [start, start + len(tokens)) of one shard, all layers."""

    session: SessionId
    epoch: Epoch
    writer: Writer
    seq: Seq
    shard: Shard
    start: Position
    tokens: tuple[int, ...]
    context: Digest
    codec: Codec
    payload_checksum: int


class Truncate(NamedTuple):
    """Cuts every shard to at most `length` positions; every turn begins with one."""

    session: SessionId
    epoch: Epoch
    writer: Writer
    seq: Seq
    length: Position


class End(NamedTuple):
    """The session is over: length 0, and only a claim may follow."""

    session: SessionId
    epoch: Epoch
    writer: Writer
    seq: Seq
    reason: EndReason


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Points to an object with the session's whole cache as of `covered`; used only when verified at restore."""

    claim: Claim
    next_seq: Seq
    chain: int
    lengths: tuple[Position, ...]
    covered: Offset
    uri: str
    content: Digest

    @property
    def session(self) -> SessionId:
        """The session of the claim that it carries."""
        return self.claim.session

    @property
    def epoch(self) -> Epoch:
        """The epoch of the claim that it carries."""
        return self.claim.epoch

    @property
    def writer(self) -> Writer:
        """The writer of the claim that it carries."""
        return self.claim.writer


Record = Claim | Delta | Truncate | End | Snapshot

_KINDS: dict[type, Kind] = {
    Claim: Kind.CLAIM,
    Delta: Kind.DELTA,
    Truncate: Kind.TRUNCATE,
    Snapshot: Kind.SNAPSHOT,
    End: Kind.END,
}


def kind_of(record: Record) -> Kind:
    """The kind byte of a record's message."""
    return _KINDS[type(record)]


class Entry(NamedTuple):
    """A record as it was decoded from a message, with what the fold needs of its bytes.

    Args:
        record: the record's values.
        header: the header bytes as they stand in the message; what the chain is computed over.
        chain: the chain after this record as its writer computed it; 0 in a Claim or Snapshot.
        payload: the encoded rows, a view of the message; empty but in a Delta.
    """

    record: Record
    header: bytes
    chain: int
    payload: memoryview
