"""One message of each kind, for the tests of the link."""

from __future__ import annotations

from kvlog.ids import Digest, Epoch, NodeId, Position, SessionId, Turn
from kvlog.layout import DType, Identity, Layout
from kvlog.link.messages import (
    DIGEST_NONE,
    PROTOCOL,
    Acked,
    AttachBlock,
    CloseTurn,
    EndedReason,
    EngineRank,
    Forget,
    Hello,
    OpenTurn,
    Ping,
    Pong,
    Rejected,
    RejectReason,
    Release,
    RequestNumber,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    Welcome,
    pack_tokens,
)
from kvlog.modes import SyncKind, SyncMode

IDENTITY = Identity(Digest(bytes(range(16))), Digest(bytes(16)), Layout(2, 2, 4, 8, DType.FLOAT32), shards=2)
SESSION = SessionId("chat-ü-7")
HELLO = Hello(PROTOCOL, "synthetic 1", 4321, IDENTITY, EngineRank(1, 2))
OPEN_TURN = OpenTurn(
    RequestNumber(7),
    SESSION,
    pack_tokens([1, 2, 2**32 - 1]),
    DIGEST_NONE,
    Epoch(9),
    SyncMode(SyncKind.EVERY, 16, 50),
    1500,
    take_over=True,
    group=bytes(range(16)),
)
WELCOME = Welcome(PROTOCOL, bytes(range(16)), NodeId("a"), 1 << 26, 1 << 30, 1 << 20, 1024, "cpu")
TURN_OPENED = TurnOpened(
    RequestNumber(7),
    Turn(3),
    Epoch(2**63),
    Position(5),
    Position(3),
    128,
    (AttachBlock(9, 2), AttachBlock(2, 1)),
    (1).to_bytes(8, "little") + (2**64 - 1).to_bytes(8, "little") + bytes(8),
)
FROM_ENGINE = (
    HELLO,
    OPEN_TURN,
    CloseTurn(Turn(3), Position(77)),
    Release(Turn(2**64 - 1)),
    Forget(SESSION),
    Ping(),
)
FROM_DAEMON = (
    WELCOME,
    Rejected(RejectReason.IDENTITY, "Serve the same weights."),
    TURN_OPENED,
    TurnUnlogged(RequestNumber(0), UnloggedReason.BUSY, ""),
    TurnFenced(SESSION, Turn(3), Epoch(4), Epoch(900)),
    Acked(Turn(3), Position(2**32 - 1)),
    TurnEnded(Turn(3), EndedReason.BROKEN),
    Pong(),
)
