"""Model bytes: a row says which tokens, identity and context it was computed from, and by whom.

    offset  size  field
         0     8  lineage: a hash over session, identity, context and every token up to this position
         8     4  who computed it: a request's number; rows of two computers differ "by rounding"
        12     2  position
        14     1  shard
        15     1  identity (high four bits) and context (low four)

So a row in the wrong place, of other weights or of another history is recognised by looking at it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

from kvlog.checksums import digest
from kvlog.ids import Digest, SessionId
from kvlog.layout import DType, Identity, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence

ROW = struct.Struct("<QIHBB")
ROW_BYTES = ROW.size
_U64 = (1 << 64) - 1

_LAYOUT = Layout(1, 1, 1, ROW_BYTES, DType.UINT8)
_BASE = Identity(digest(b"model"), digest(b"weights"), _LAYOUT, 2)
IDENTITIES = (
    _BASE,
    Identity(_BASE.model, digest(b"newer weights"), _LAYOUT, 2),
    Identity(digest(b"another model"), _BASE.weights, _LAYOUT, 2),
    Identity(_BASE.model, _BASE.weights, Layout(1, 2, 1, ROW_BYTES // 2, DType.UINT8), 2),
    Identity(_BASE.model, _BASE.weights, _LAYOUT, 1),
)
"""A base, and one that differs from it in each field alone: weights, model, layout, shards."""

CONTEXTS: tuple[Digest, ...] = (digest(b"plain"), digest(b"with an adapter"))

_IDENTITY_NUMBERS = {identity: number for number, identity in enumerate(IDENTITIES)}
_CONTEXT_NUMBERS = {context: number for number, context in enumerate(CONTEXTS)}


def identity_number(identity: Identity) -> int:
    """The index in IDENTITIES."""
    return _IDENTITY_NUMBERS[identity]


def context_number(context: Digest) -> int:
    """The index in CONTEXTS."""
    return _CONTEXT_NUMBERS[context]


def session_id(number: int) -> SessionId:
    """The id of the number-th session."""
    return SessionId(f"s{number}")


def lineage_start(session: SessionId, identity: int, context: int) -> int:
    """The lineage before the first token. Hashes of tuples of ints are the same in every process."""
    return hash((int(session[1:]), identity, context, 7)) & _U64


def lineage_next(lineage: int, token: int) -> int:
    """The lineage after one more token."""
    return hash((lineage, token)) & _U64


def lineages(session: SessionId, tokens: Sequence[int], identity: int, context: int) -> list[int]:
    """The lineage at each position."""
    at, out = lineage_start(session, identity, context), []
    for token in tokens:
        at = lineage_next(at, token)
        out.append(at)
    return out


def row(lineage: int, computer: int, position: int, *, shard: int, made_under: int) -> bytes:
    """A row's bytes; `made_under` is identity × 16 + context."""
    return ROW.pack(lineage, computer, position, shard, made_under)


def is_row(found: bytes, lineage: int, position: int, *, shard: int, made_under: int) -> bool:
    """Whether these bytes are right but for who computed them."""
    return found[:8] == lineage.to_bytes(8, "little") and found[12:] == struct.pack(
        "<HBB", position, shard, made_under
    )
