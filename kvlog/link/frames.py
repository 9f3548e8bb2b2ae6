"""Messages to bytes and back: one table of fields per message, strict in both directions, bounded memory.

The bytes are drawn in kvlog.link.messages. msgpack integers, texts and byte strings only; no maps, no
extension types.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import msgpack

from kvlog.checksums import DIGEST_BYTES
from kvlog.errors import ConfigError, DecodeError, InvalidSessionId, LocalProtocolError, UnknownVersion
from kvlog.ids import parse_session_id
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT, Limits
from kvlog.link.messages import (
    GROUP_BYTES_MAX,
    PROTOCOL,
    Acked,
    AttachBlock,
    CloseTurn,
    EndedReason,
    EngineRank,
    Forget,
    FromDaemon,
    FromEngine,
    Hello,
    OpenTurn,
    Ping,
    Pong,
    Rejected,
    RejectReason,
    Release,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    Welcome,
)
from kvlog.modes import SyncMode, parse_sync_mode

if TYPE_CHECKING:
    from collections.abc import Callable
    from enum import StrEnum

__all__ = ["DaemonFrames", "EngineFrames", "encode"]

_LENGTH = struct.Struct("<I")
_U16, _U32, _U64 = (1 << 16) - 1, (1 << 32) - 1, (1 << 64) - 1
_TEXT_BYTES_MAX = 1024
"""Names, reasons and hints; none of ours is longer than a few sentences."""


def _same(value: object) -> object:
    return value


@dataclass(frozen=True, slots=True)
class _Field:
    """How one field goes into msgpack and comes back; `unpack` raises DecodeError."""

    unpack: Callable[[object], object]
    pack: Callable[[object], object] = _same


def _uint(most: int) -> _Field:
    def unpack(value: object) -> int:
        if type(value) is not int or not 0 <= value <= most:
            raise DecodeError(problem=f"expected an integer from 0 to {most}")
        return value

    return _Field(unpack)


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "surrogatepass")) > _TEXT_BYTES_MAX:
        raise DecodeError(problem=f"expected a text of at most {_TEXT_BYTES_MAX} bytes")
    return value


def _bytes(*, length: int | None = None, unit: int = 1) -> _Field:
    def unpack(value: object) -> bytes:
        if not isinstance(value, bytes) or len(value) % unit or (length is not None and len(value) != length):
            wanted = f"{length} bytes" if length is not None else f"a multiple of {unit} bytes"
            raise DecodeError(problem=f"expected {wanted}")
        return value

    return _Field(unpack)


def _group(value: object) -> bytes:
    if not isinstance(value, bytes) or len(value) > GROUP_BYTES_MAX:
        raise DecodeError(problem=f"expected at most {GROUP_BYTES_MAX} bytes")
    return value


def _flag(value: object) -> bool:
    if type(value) is not bool:
        raise DecodeError(problem="expected true or false")
    return value


def _enum(kind: type[StrEnum]) -> _Field:
    def unpack(value: object) -> StrEnum:
        try:
            return kind(_text(value))
        except ValueError:
            raise DecodeError(problem=f"expected one of {', '.join(kind)}") from None

    return _Field(unpack, str)


def _session(value: object) -> str:
    try:
        return parse_session_id(_text(value))
    except InvalidSessionId as error:
        raise DecodeError(problem=f"session id: {error.problem}") from None


def _mode(value: object) -> SyncMode | None:
    if value is None:
        return None
    try:
        return parse_sync_mode(_text(value))
    except ConfigError as error:
        raise DecodeError(problem=str(error.problem)) from None


def _pack_mode(value: object) -> object:
    return None if value is None else str(value)


_SIZES_MAX = 1 << 20
"""Layers, heads, head size, shards: far above any model, far below what overflows a product of four."""


def _identity(value: object) -> Identity:
    if not isinstance(value, list) or len(value) != len(_IDENTITY_FIELDS):
        raise DecodeError(problem="expected an identity")
    model, weights, layers, planes, kv_heads, head_dim, dtype, shards = (
        field.unpack(part) for field, part in zip(_IDENTITY_FIELDS, value, strict=True)
    )
    layout = Layout(layers, planes, kv_heads, head_dim, dtype)  # type: ignore[arg-type]  # checked by the table
    if not (0 < layout.row_bytes <= _U32 and shards):
        raise DecodeError(problem="expected a layout with a row of 1 byte to 4 GiB and at least one shard")
    return Identity(model, weights, layout, shards)  # type: ignore[arg-type]  # checked by the table


_IDENTITY_FIELDS = (
    _bytes(length=DIGEST_BYTES),
    _bytes(length=DIGEST_BYTES),
    *(_uint(_SIZES_MAX) for _ in range(4)),
    _enum(DType),
    _uint(_SIZES_MAX),
)


def _pack_identity(value: object) -> object:
    assert isinstance(value, Identity), "an identity"
    layout = value.layout
    sizes = [layout.layers, layout.planes, layout.kv_heads, layout.head_dim]
    return [value.model, value.weights, *sizes, str(layout.dtype), value.shards]


def _rank(value: object) -> EngineRank:
    if not isinstance(value, list) or len(value) != len(fields(EngineRank)):
        raise DecodeError(problem="expected a rank, and how many there are")
    rank, ranks = (_U16_FIELD.unpack(part) for part in value)
    if not rank < ranks:  # type: ignore[operator]  # checked by the field
        raise DecodeError(problem="a rank that the engine does not have")
    return EngineRank(rank, ranks)  # type: ignore[arg-type]  # checked by the field


def _pack_rank(value: object) -> object:
    assert isinstance(value, EngineRank), "a rank"
    return [value.rank, value.ranks]


_U16_FIELD = _uint(_U16)
_PAIR = struct.Struct("<II")


def _blocks(value: object) -> tuple[AttachBlock, ...]:
    if not isinstance(value, bytes) or len(value) % _PAIR.size:
        raise DecodeError(problem=f"expected a multiple of {_PAIR.size} bytes")
    return tuple(AttachBlock(index, rows) for index, rows in _PAIR.iter_unpack(value))


def _pack_blocks(value: object) -> object:
    assert isinstance(value, tuple), "a tuple of blocks"
    return b"".join(_PAIR.pack(block.index, block.rows) for block in value)


_TEXT = _Field(_text)
_SESSION = _Field(_session)
_INCARNATION_BYTES = 16

_TABLE: dict[int, tuple[type[FromEngine | FromDaemon], tuple[_Field, ...]]] = {
    1: (
        Hello,
        (
            _uint(_U32),
            _TEXT,
            _uint(_U32),
            _Field(_identity, _pack_identity),
            _Field(_rank, _pack_rank),
        ),
    ),
    2: (
        OpenTurn,
        (
            _uint(_U64),
            _SESSION,
            _bytes(unit=4),
            _bytes(length=DIGEST_BYTES),
            _uint(_U64),
            _Field(_mode, _pack_mode),
            _uint(_U32),
            _Field(_flag),
            _Field(_group),
        ),
    ),
    3: (CloseTurn, (_uint(_U64), _uint(_U32))),
    4: (Release, (_uint(_U64),)),
    5: (Forget, (_SESSION,)),
    6: (Ping, ()),
    17: (
        Welcome,
        (
            _uint(_U32),
            _bytes(length=_INCARNATION_BYTES),
            _TEXT,
            _uint(_U64),
            _uint(_U64),
            _uint(_U32),
            _uint(_U32),
            _TEXT,
        ),
    ),
    18: (Rejected, (_enum(RejectReason), _TEXT)),
    19: (
        TurnOpened,
        (
            *(_uint(_U64) for _ in range(3)),
            *(_uint(_U32) for _ in range(3)),
            _Field(_blocks, _pack_blocks),
            _bytes(unit=8),
        ),
    ),
    20: (TurnUnlogged, (_uint(_U64), _enum(UnloggedReason), _TEXT)),
    21: (TurnFenced, (_SESSION, _uint(_U64), _uint(_U64), _uint(_U64))),
    22: (Acked, (_uint(_U64), _uint(_U32))),
    23: (TurnEnded, (_uint(_U64), _enum(EndedReason))),
    24: (Pong, ()),
}
_FIRST_OF_DAEMON = 17
_HELLO = 1
_KIND_OF = {kind: number for number, (kind, _) in _TABLE.items()}


def encode(message: FromEngine | FromDaemon, limits: Limits = DEFAULT) -> bytes:
    """A message as it goes over the socket, length first.

    Raises:
        LocalProtocolError: it is larger than a message may be (fields: message, message_bytes,
            message_bytes_max), or a value does not fit its field; send fewer tokens, or fewer attached rows.
    """
    number = _KIND_OF[type(message)]
    values = [getattr(message, field.name) for field in fields(message)]
    packed = [how.pack(value) for how, value in zip(_TABLE[number][1], values, strict=True)]
    for how, value in zip(_TABLE[number][1], packed, strict=True):
        try:
            how.unpack(value)
        except DecodeError as error:
            raise LocalProtocolError(message=type(message).__name__, problem=error.problem) from None
    body: bytes = msgpack.packb([number, *packed])
    if len(body) > limits.control_message_bytes:
        raise LocalProtocolError(
            message=type(message).__name__,
            message_bytes=len(body),
            message_bytes_max=limits.control_message_bytes,
        )
    return _LENGTH.pack(len(body)) + body


def _decode(body: memoryview, limits: Limits) -> FromEngine | FromDaemon:
    try:
        value = msgpack.unpackb(
            body, raw=False, strict_map_key=True, max_str_len=_TEXT_BYTES_MAX, max_map_len=0
        )
    except (ValueError, RecursionError, msgpack.exceptions.UnpackException):
        raise DecodeError(problem="not a msgpack array") from None
    if not isinstance(value, list) or not value or type(value[0]) is not int or value[0] not in _TABLE:
        raise DecodeError(problem="not a message that this protocol knows")
    number = value[0]
    if number == _HELLO and len(value) > 1 and value[1] != PROTOCOL:
        raise UnknownVersion(problem=f"protocol {str(value[1])[:16]}, this build speaks {PROTOCOL}")
    kind, table = _TABLE[number]
    if len(value) != 1 + len(table):
        raise DecodeError(problem=f"{kind.__name__} with {len(value) - 1} fields, expected {len(table)}")
    message = kind(*(field.unpack(part) for field, part in zip(table, value[1:], strict=True)))  # type: ignore[arg-type]
    _check(message, limits)
    return message


def _check(message: FromEngine | FromDaemon, limits: Limits) -> None:
    """Relations between fields."""
    if isinstance(message, Hello) and message.identity.shards not in (1, message.rank.ranks):
        raise DecodeError(problem="neither one shard for each rank nor one for all of them")
    if isinstance(message, OpenTurn) and len(message.tokens) // 4 > limits.session_tokens:
        raise DecodeError(problem=f"more than {limits.session_tokens} tokens")
    if isinstance(message, TurnOpened):
        rows = sum(block.rows for block in message.blocks)
        if not rows == message.attach_length == len(message.row_checksums) // 8:
            raise DecodeError(problem="blocks, checksums and attach length disagree")


class _Frames:
    """Cuts a byte stream into messages; holds at most one incomplete message."""

    __slots__ = ("_buffer", "_limits")

    def __init__(self, limits: Limits = DEFAULT) -> None:
        self._buffer = bytearray()
        self._limits = limits

    def feed(self, data: bytes) -> None:
        """Take bytes as they came from the socket."""
        self._buffer += data

    def _take(self) -> FromEngine | FromDaemon | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if not 1 <= length <= self._limits.control_message_bytes:
            raise DecodeError(
                problem=f"a message of {length} bytes, 1 to {self._limits.control_message_bytes} are allowed"
            )
        if len(self._buffer) < _LENGTH.size + length:
            return None
        with memoryview(self._buffer) as view:
            message = _decode(view[_LENGTH.size : _LENGTH.size + length], self._limits)
        del self._buffer[: _LENGTH.size + length]
        return message


class EngineFrames(_Frames):
    """What a daemon reads: messages of an engine."""

    __slots__ = ()

    def take(self) -> FromEngine | None:
        """The next whole message, None if more bytes are needed.

        Raises:
            DecodeError: junk; close the link, the stream cannot be read on.
            UnknownVersion: a Hello of another protocol; answer Rejected and close the link.
        """
        message = self._take()
        if message is not None and _KIND_OF[type(message)] >= _FIRST_OF_DAEMON:
            raise DecodeError(problem=f"{type(message).__name__} from an engine")
        return message  # type: ignore[return-value]  # checked by its number


class DaemonFrames(_Frames):
    """What an engine reads: messages of a daemon."""

    __slots__ = ()

    def take(self) -> FromDaemon | None:
        """The next whole message, None if more bytes are needed.

        Raises:
            DecodeError: junk; close the link, the stream cannot be read on.
        """
        message = self._take()
        if message is not None and _KIND_OF[type(message)] < _FIRST_OF_DAEMON:
            raise DecodeError(problem=f"{type(message).__name__} from a daemon")
        return message  # type: ignore[return-value]  # checked by its number
