"""The msgpack header of a message: record values to bytes and back, strictly.

A header is one msgpack array with a fixed number of fields in a fixed order (FIELDS), the first four of every kind
being kind, session, epoch and writer. An array, not a map: it is smaller and quicker, it cannot hold a key twice, and
one value has one encoding, which the chain needs. What a map would give, optional fields, the format version gives
instead: a version fixes the fields, and a reader knows two versions.

The kind stands in the preamble, for a quick look, and again here, so that the chain tells a Truncate to 2 from an End
for reason 2.

One value, one encoding, on reading too: a header that is not byte for byte what we would have written (a
long form of a small integer, trailing bytes) is refused, so equal records have equal header bytes whoever
wrote them.

Enumerations are small integers with their own numbers here, never reused. A number that this build does not
know is UnknownVersion: it is a newer writer's, not damage.

Token ids are one bin of u32 LE. A varint would save one byte of four, on records whose rows are ten
thousand times larger, and cost 20 times the time: `struct` reads one token in 0.3 µs and 4,096 in 130 µs,
and a fixed width gives the count by division, which bounds the memory before anything is unpacked.

The bounds are those of Limits whose values are part of the format (header_bytes, delta_tokens,
session_tokens, shards, decoded_bytes) and those below. All nodes must use the same ones: a record that one
reader refuses and another takes splits them. For the same reason `record_bytes`, an operator's setting, is
obeyed on writing only.

Cost: 10-20 µs to write or to read the header of a one-token delta, half of it the checks; writing checks
like reading, so that no record gets into the log that no reader takes.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TypeVar, assert_never

import msgpack

from kvlog.errors import DecodeError, InvalidSessionId, LocalProtocolError, UnknownVersion
from kvlog.ids import (
    Digest,
    Epoch,
    NodeId,
    Nonce,
    Offset,
    Position,
    Seq,
    SessionId,
    Shard,
    Writer,
    parse_session_id,
)
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT, Limits
from kvlog.records import Claim, Codec, Delta, End, EndReason, Kind, Record, Snapshot, Truncate, kind_of
from kvlog.wire.frame import FORMAT_VERSION

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = [
    "FIELDS",
    "NODE_ID_BYTES_MAX",
    "READ_VERSIONS",
    "URI_BYTES_MAX",
    "header_bytes",
    "read_header",
]

NODE_ID_BYTES_MAX = 255
"""A node's name; long enough for any host name (253), short enough to keep a claim small."""

URI_BYTES_MAX = 1024
"""A snapshot's address; the longest object key of S3."""

_ID_BYTES = 16
_U8_MAX = (1 << 8) - 1
_U16_MAX = (1 << 16) - 1
_U64_MAX = (1 << 64) - 1
_OFFSET_MAX = (1 << 63) - 1
"""Kafka's offsets are signed 64-bit; an epoch is an offset plus one, seq counts no faster than they do."""
_PLANES_MAX = 2
_TOKEN_BYTES = 4

_COMMON = ("kind", "session", "epoch", "writer")
_CLAIM = (
    *_COMMON,
    *("nonce", "node", "context", "model", "weights", "shards"),
    *("dtype", "layers", "planes", "kv_heads", "head_dim"),
)

FIELDS: Mapping[Kind, tuple[str, ...]] = MappingProxyType(
    {
        Kind.CLAIM: _CLAIM,
        Kind.DELTA: (*_COMMON, "seq", "shard", "start", "tokens", "context", "codec", "payload_checksum"),
        Kind.TRUNCATE: (*_COMMON, "seq", "length"),
        Kind.SNAPSHOT: (*_CLAIM, "next_seq", "chain", "lengths", "covered", "uri", "content"),
        Kind.END: (*_COMMON, "seq", "reason"),
    },
)
"""The fields of a version 1 header, in the order of the array."""

_DTYPES = MappingProxyType({1: DType.BFLOAT16, 2: DType.FLOAT16, 3: DType.FLOAT32, 4: DType.UINT8})
_DTYPE_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_REASONS = MappingProxyType({1: EndReason.REQUEST, 2: EndReason.TTL, 3: EndReason.FORGET})
_REASON_NUMBERS = {reason: number for number, reason in _REASONS.items()}
_KINDS = {int(kind): kind for kind in Kind}
_CODECS: Mapping[int, Codec] = MappingProxyType({int(codec): codec for codec in Codec})

_Enumerated = TypeVar("_Enumerated")


class _Packers(threading.local):
    """A packer is not thread-safe and takes three times as long to make as to use: one for each thread."""

    def __init__(self) -> None:
        self.pack = msgpack.Packer().pack


_packers = _Packers()


def header_bytes(record: Record, *, version: int = FORMAT_VERSION, limits: Limits = DEFAULT) -> bytes:
    """The header of a record; what the chain is computed over, and what goes into `frame`.

    Raises:
        LocalProtocolError: the version is none that we write, or a field is out of the bounds that every
            reader checks: such a record would be refused by all, so it is never made.
    """
    if version not in _FORMATS:
        raise LocalProtocolError(problem=f"format version {version} is not one of {READ_VERSIONS}")
    form, kind = _FORMATS[version], kind_of(record)
    try:
        values = form.write(record)
        form.read(kind, values, limits)
        header: bytes = _packers.pack(values)
        _check_length(header, limits)
    except (DecodeError, struct.error, UnicodeEncodeError) as error:
        problem = error.fields["problem"] if isinstance(error, DecodeError) else str(error)
        raise LocalProtocolError(record=kind.name, problem=problem) from None
    return header


def read_header(
    kind: int, header: bytes, *, version: int = FORMAT_VERSION, limits: Limits = DEFAULT
) -> Record:
    """The record of a header.

    Args:
        kind: the kind byte as it stands.
        header: believed to be whole (`read_frame` has compared its checksum); not believed otherwise.
        version: the format version as it stands.
        limits: see the module's text for which of them count.

    Raises:
        UnknownVersion: a version, kind, codec, dtype or reason that this build does not know.
        DecodeError: not a header of this kind: wrong types, lengths or ranges, or not in its one encoding.
    """
    if version not in _FORMATS:
        raise UnknownVersion(problem=f"format version {version}; this build reads {READ_VERSIONS}")
    form = _FORMATS[version]
    if kind not in form.fields:
        raise UnknownVersion(
            problem=f"kind {kind}; version {version} has {[int(known) for known in form.fields]}"
        )
    _check_length(header, limits)
    values = _unpack(header)
    record = form.read(_KINDS[kind], values, limits)
    if _packers.pack(values) != header:
        raise DecodeError(problem="the header is not in its one encoding")
    return record


def _check_length(header: bytes, limits: Limits) -> None:
    if len(header) > limits.header_bytes:
        raise DecodeError(problem=f"the header has {len(header)} bytes, {limits.header_bytes} is the most")


_ARRAY_MAX = 256
"""Elements of one array: more than any of ours (fields, shards), few enough to keep nested claims small."""


def _unpack(header: bytes) -> list[object]:
    """One msgpack array; each length it claims is checked against a bound before memory is taken."""
    try:
        values = msgpack.unpackb(
            header,
            max_array_len=_ARRAY_MAX,
            max_map_len=0,
            max_ext_len=0,
            max_str_len=URI_BYTES_MAX,
            max_bin_len=len(header),
        )
    # msgpack's own errors are ValueErrors, all but the one for a timestamp of a strange length.
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise DecodeError(problem=f"the header is not msgpack that we read: {type(error).__name__}") from None
    if type(values) is not list:
        raise DecodeError(problem=f"the header is a {type(values).__name__}, not an array")
    return values


def _check_fields(values: list[object], kind: Kind) -> None:
    names = FIELDS[kind]
    if len(values) != len(names):
        raise DecodeError(problem=f"a {kind.name} has {len(names)} fields, this one {len(values)}")
    if values[0] != kind or type(values[0]) is not int:
        raise DecodeError(problem=f"the preamble says {kind.name}, the header does not")


class _Fields:
    """The values of one header by name, each checked as it is taken."""

    __slots__ = ("_by_name", "limits")

    def __init__(self, values: list[object], kind: Kind, limits: Limits) -> None:
        self._by_name = dict(zip(FIELDS[kind], values, strict=True))
        self.limits = limits

    def integer(self, name: str, low: int, high: int) -> int:
        return _integer(name, self._by_name[name], low, high)

    def position(self, name: str) -> Position:
        return Position(self.integer(name, 0, self.limits.session_tokens))

    def sixteen(self, name: str) -> bytes:
        return _sixteen(name, self._by_name[name])

    def text(self, name: str, bytes_max: int) -> str:
        value = self._by_name[name]
        if type(value) is not str or not 0 < len(value.encode()) <= bytes_max:
            raise DecodeError(problem=f"{name} is not a text of 1 to {bytes_max} bytes")
        if any(c < " " or "\x7f" <= c <= "\x9f" for c in value):
            raise DecodeError(problem=f"{name} has a control character")
        return value

    def session(self) -> SessionId:
        return _session(self._by_name["session"])

    def enumerated(self, name: str, known: Mapping[int, _Enumerated]) -> _Enumerated:
        return _enumerated(name, self._by_name[name], known)

    def lengths(self, shards: int) -> tuple[Position, ...]:
        value = self._by_name["lengths"]
        if type(value) is not list or len(value) != shards:
            raise DecodeError(problem=f"lengths is not an array of {shards}, one for each shard")
        high = self.limits.session_tokens
        return tuple(Position(_integer("lengths", each, 0, high)) for each in value)


def _integer(name: str, value: object, low: int, high: int) -> int:
    """Bool is an int to Python; to us it is not."""
    if type(value) is not int or not low <= value <= high:
        raise DecodeError(problem=f"{name} is not an integer of {low} to {high}")
    return value


def _sixteen(name: str, value: object) -> bytes:
    if type(value) is not bytes or len(value) != _ID_BYTES:
        raise DecodeError(problem=f"{name} is not {_ID_BYTES} bytes")
    return value


def _session(value: object) -> SessionId:
    if type(value) is not str:
        raise DecodeError(problem="session is not a text")
    try:
        return parse_session_id(value)
    except InvalidSessionId as error:
        raise DecodeError(problem=f"session: {error.fields['problem']}") from None


def _enumerated(name: str, value: object, known: Mapping[int, _Enumerated]) -> _Enumerated:
    number = _integer(name, value, 0, _U8_MAX)
    if number not in known:
        raise UnknownVersion(problem=f"{name} {number}; this build reads {list(known)}")
    return known[number]


def _tokens(value: object, count_max: int) -> tuple[int, ...]:
    if type(value) is not bytes or len(value) % _TOKEN_BYTES:
        raise DecodeError(problem="tokens is not a whole number of u32")
    count = len(value) // _TOKEN_BYTES
    if not 0 < count <= count_max:
        raise DecodeError(problem=f"a delta has 1 to {count_max} tokens, this one {count}")
    return struct.unpack(f"<{count}I", value)


def _write_v1(record: Record) -> list[object]:
    """The array of FIELDS[kind_of(record)], unchecked."""
    common: list[object] = [int(kind_of(record)), record.session, record.epoch, record.writer]
    match record:
        case Claim():
            return common + _write_claim(record)
        case Delta():
            tokens = struct.pack(f"<{len(record.tokens)}I", *record.tokens)
            place = [record.seq, record.shard, record.start]
            return [*common, *place, tokens, record.context, int(record.codec), record.payload_checksum]
        case Truncate():
            return [*common, record.seq, record.length]
        case Snapshot():
            state = [record.next_seq, record.chain, list(record.lengths)]
            return [*common, *_write_claim(record.claim), *state, record.covered, record.uri, record.content]
        case End():
            return [*common, record.seq, _REASON_NUMBERS[record.reason]]
        case _:
            assert_never(record)


def _write_claim(claim: Claim) -> list[object]:
    identity, layout = claim.identity, claim.identity.layout
    return [
        *(claim.nonce, claim.node, claim.context, identity.model, identity.weights, identity.shards),
        *(_DTYPE_NUMBERS[layout.dtype], layout.layers, layout.planes, layout.kv_heads, layout.head_dim),
    ]


def _read_v1(kind: Kind, values: list[object], limits: Limits) -> Record:
    _check_fields(values, kind)
    if kind is Kind.DELTA:
        return _read_delta(values, limits)
    fields = _Fields(values, kind, limits)
    match kind:
        case Kind.CLAIM:
            return _read_claim(fields)
        case Kind.TRUNCATE:
            session, epoch, writer = _read_common(fields)
            return Truncate(session, epoch, writer, _seq(fields, "seq"), fields.position("length"))
        case Kind.SNAPSHOT:
            return _read_snapshot(fields)
        case Kind.END:
            session, epoch, writer = _read_common(fields)
            return End(session, epoch, writer, _seq(fields, "seq"), fields.enumerated("reason", _REASONS))
        case _:
            assert_never(kind)


def _read_common(fields: _Fields) -> tuple[SessionId, Epoch, Writer]:
    return fields.session(), Epoch(fields.integer("epoch", 1, _OFFSET_MAX)), Writer(fields.sixteen("writer"))


def _seq(fields: _Fields, name: str) -> Seq:
    return Seq(fields.integer(name, 0, _OFFSET_MAX))


def _read_claim(fields: _Fields) -> Claim:
    session, epoch, writer = _read_common(fields)
    layout = Layout(
        layers=fields.integer("layers", 1, _U16_MAX),
        planes=fields.integer("planes", 1, _PLANES_MAX),
        kv_heads=fields.integer("kv_heads", 1, _U16_MAX),
        head_dim=fields.integer("head_dim", 1, _U16_MAX),
        dtype=fields.enumerated("dtype", _DTYPES),
    )
    if layout.row_bytes > fields.limits.decoded_bytes:
        raise DecodeError(
            problem=f"a row of {layout.row_bytes} bytes, {fields.limits.decoded_bytes} is the most"
        )
    return Claim(
        session=session,
        epoch=epoch,
        writer=writer,
        nonce=Nonce(fields.sixteen("nonce")),
        node=NodeId(fields.text("node", NODE_ID_BYTES_MAX)),
        identity=Identity(
            model=Digest(fields.sixteen("model")),
            weights=Digest(fields.sixteen("weights")),
            layout=layout,
            shards=fields.integer("shards", 1, fields.limits.shards),
        ),
        context=Digest(fields.sixteen("context")),
    )


def _read_delta(values: list[object], limits: Limits) -> Delta:
    """Without _Fields, whose dictionary and methods would be a third of the time: nearly all records are deltas."""
    _, session, epoch, writer, seq, shard, start, ids, context, codec, payload_checksum = values
    positions, first = limits.session_tokens, _integer("start", start, 0, limits.session_tokens)
    tokens = _tokens(ids, limits.delta_tokens)
    if first + len(tokens) > positions:
        raise DecodeError(problem=f"positions {first} + {len(tokens)} pass {positions}")
    return Delta(
        _session(session),
        Epoch(_integer("epoch", epoch, 1, _OFFSET_MAX)),
        Writer(_sixteen("writer", writer)),
        Seq(_integer("seq", seq, 0, _OFFSET_MAX)),
        Shard(_integer("shard", shard, 0, limits.shards - 1)),
        Position(first),
        tokens,
        Digest(_sixteen("context", context)),
        _enumerated("codec", codec, _CODECS),
        _integer("payload_checksum", payload_checksum, 0, _U64_MAX),
    )


def _read_snapshot(fields: _Fields) -> Snapshot:
    claim = _read_claim(fields)
    return Snapshot(
        claim=claim,
        next_seq=_seq(fields, "next_seq"),
        chain=fields.integer("chain", 0, _U64_MAX),
        lengths=fields.lengths(claim.identity.shards),
        covered=Offset(fields.integer("covered", 0, _OFFSET_MAX)),
        uri=fields.text("uri", URI_BYTES_MAX),
        content=Digest(fields.sixteen("content")),
    )


@dataclass(frozen=True, slots=True)
class _Format:
    """How one format version writes and reads the fields of each kind."""

    fields: Mapping[Kind, tuple[str, ...]]
    write: Callable[[Record], list[object]]
    read: Callable[[Kind, list[object], Limits], Record]


_FORMATS = {1: _Format(fields=FIELDS, write=_write_v1, read=_read_v1)}
"""Versions N and N - 1, by number. N = 1 is the first, so there is one."""

READ_VERSIONS = tuple(_FORMATS)
"""The format versions that this build reads and can write."""
