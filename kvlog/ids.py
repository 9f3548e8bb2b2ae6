"""Names for numbers and strings that must not be mixed up, and the checks on those that come from outside."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NewType

from kvlog.errors import InvalidSessionId

__all__ = [
    "FIRST_OFFSET",
    "FIRST_POSITION",
    "FIRST_SEQ",
    "NO_EPOCH",
    "SESSION_ID_BYTES_MAX",
    "Digest",
    "Epoch",
    "NodeId",
    "Nonce",
    "Offset",
    "Partition",
    "Position",
    "Seq",
    "SessionId",
    "Shard",
    "Turn",
    "Writer",
    "parse_session_id",
]

SessionId = NewType("SessionId", str)
"""One conversation; UTF-8, 1 to 256 bytes, no control characters. Made only by `parse_session_id`."""

NodeId = NewType("NodeId", str)
"""A node's name in the cluster, set by the operator."""

Epoch = NewType("Epoch", int)
"""The high watermark that a claimer read just before claiming, plus one; from 1. 0: no claim known."""

Offset = NewType("Offset", int)
"""A record's place in its partition, from 0."""

Partition = NewType("Partition", int)
"""A partition's index, from 0."""

Seq = NewType("Seq", int)
"""Number of a Delta, Truncate or End within (session, epoch), over all shards, from 0, without a hole."""

Position = NewType("Position", int)
"""A token's place in its session, from 0."""

Shard = NewType("Shard", int)
"""A tensor-parallel rank's index within a session, from 0."""

Turn = NewType("Turn", int)
"""One request that may write a session, numbered by its daemon from 1; numbers restart with the daemon."""

Writer = NewType("Writer", bytes)
"""16 random bytes: the incarnation of the process that claimed."""

Nonce = NewType("Nonce", bytes)
"""16 random bytes: one claim."""

Digest = NewType("Digest", bytes)
"""16 bytes that stand for a model, a weight version or a context (see checksums.digest)."""

NO_EPOCH = Epoch(0)
FIRST_OFFSET = Offset(0)
FIRST_SEQ = Seq(0)
FIRST_POSITION = Position(0)

SESSION_ID_BYTES_MAX = 256

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@lru_cache(maxsize=4096)  # a session has many records, and each of them says its id twice
def parse_session_id(text: str) -> SessionId:
    """Check a session id that came from outside.

    Raises:
        InvalidSessionId: empty, over 256 UTF-8 bytes, not encodable, or with control characters; send another id.
    """
    if not text:
        raise InvalidSessionId(problem="it is empty")
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise InvalidSessionId(problem="it has a lone surrogate, which is not UTF-8") from None
    if size > SESSION_ID_BYTES_MAX:
        raise InvalidSessionId(problem=f"it is {size} bytes long, {SESSION_ID_BYTES_MAX} is the most")
    if _CONTROL.search(text):  # not str.isprintable: it differs between Python versions
        raise InvalidSessionId(problem="it has a control character")
    return SessionId(text)
