"""The wire under any input: what is encoded comes back, and any bytes at all give an Entry or a DecodeError."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import msgpack
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kvlog.checksums import checksum
from kvlog.errors import DecodeError, InvalidSessionId
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
from kvlog.layout import DTYPE_BYTES, DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.records import (
    Claim,
    Codec,
    Delta,
    End,
    EndReason,
    Entry,
    Kind,
    Record,
    Snapshot,
    Truncate,
    kind_of,
)
from kvlog.wire.codec import decode_payload, encode_payload, payload_bytes_max
from kvlog.wire.cut import Piece, cut
from kvlog.wire.frame import frame
from kvlog.wire.header import header_bytes
from kvlog.wire.message import decode, encode

GOLDENS = Path(__file__).parents[1] / "golden" / "wire" / "v1"
MUTATIONS = 400
"""Of each golden; all of them together take about a second."""


def is_session(text: str) -> bool:
    """Says whether a text is a session id."""
    try:
        parse_session_id(text)
    except InvalidSessionId:
        return False
    return True


sixteens = st.binary(min_size=16, max_size=16)
offsets = st.integers(0, (1 << 63) - 1)
u64s = st.integers(0, (1 << 64) - 1)
sessions = st.text(min_size=1, max_size=64).filter(is_session).map(SessionId)
positions = st.integers(0, DEFAULT.session_tokens).map(Position)
layouts = st.builds(
    Layout,
    layers=st.integers(1, 100),
    planes=st.integers(1, 2),
    kv_heads=st.integers(1, 64),
    head_dim=st.integers(1, 256),
    dtype=st.sampled_from(DType),
)
common = {
    "session": sessions,
    "epoch": st.integers(1, (1 << 63) - 1).map(Epoch),
    "writer": sixteens.map(Writer),
}
claims = st.builds(
    Claim,
    **common,
    nonce=sixteens.map(Nonce),
    node=sessions.map(NodeId),
    identity=st.builds(
        Identity,
        model=sixteens.map(Digest),
        weights=sixteens.map(Digest),
        layout=layouts,
        shards=st.integers(1, DEFAULT.shards),
    ),
    context=sixteens.map(Digest),
)
deltas = st.builds(
    Delta,
    **common,
    seq=offsets.map(Seq),
    shard=st.integers(0, DEFAULT.shards - 1).map(Shard),
    start=st.integers(0, DEFAULT.session_tokens - 100).map(Position),
    tokens=st.lists(st.integers(0, (1 << 32) - 1), min_size=1, max_size=100).map(tuple),
    context=sixteens.map(Digest),
    codec=st.sampled_from(Codec),
    payload_checksum=u64s,
)
truncates = st.builds(Truncate, **common, seq=offsets.map(Seq), length=positions)
ends = st.builds(End, **common, seq=offsets.map(Seq), reason=st.sampled_from(EndReason))


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    """Draws a snapshot with a length for each shard of its claim."""
    claim = draw(claims)
    shards = claim.identity.shards
    return Snapshot(
        claim=claim,
        next_seq=Seq(draw(offsets)),
        chain=draw(u64s),
        lengths=tuple(draw(st.lists(positions, min_size=shards, max_size=shards))),
        covered=Offset(draw(offsets)),
        uri=draw(sessions),
        content=Digest(draw(sixteens)),
    )


records = st.one_of(claims, deltas, truncates, ends, snapshots())
scalars = (
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats() | st.text() | st.binary()
)
anything = scalars | st.lists(scalars, max_size=6) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)


def entry_or_refusal(value: bytes) -> Entry | DecodeError:
    """Decodes; any other exception than a DecodeError is the test's failure."""
    try:
        entry = decode(value)
    except DecodeError as refusal:
        return refusal
    assert header_bytes(entry.record) == entry.header
    return entry


@given(record=records, chain=u64s, payload=st.binary(min_size=1, max_size=64))
def test_wire_round_trip_gives_the_record(record: Record, chain: int, payload: bytes) -> None:
    """decode(encode(record)) is the record, with its chain, header bytes and payload."""
    chain = 0 if isinstance(record, Claim | Snapshot) else chain
    payload = payload if isinstance(record, Delta) and record.codec is not Codec.IDS else b""
    entry = decode(encode(record, chain=chain, payload=payload))
    assert (record, chain, payload) == (entry.record, entry.chain, bytes(entry.payload))
    assert header_bytes(record) == entry.header


@given(one=records, other=records)
def test_wire_header_is_one_record_only(one: Record, other: Record) -> None:
    """Different records have different header bytes, over all kinds: so a chain names its records."""
    assert (one == other) is (header_bytes(one) == header_bytes(other))


@given(value=st.binary(max_size=400))
def test_wire_any_bytes_are_an_entry_or_a_refusal(value: bytes) -> None:
    """Bytes of any origin never give another error."""
    assert isinstance(entry_or_refusal(value), DecodeError)


@given(kind=st.integers(0, 7), header=st.binary(max_size=400), payload=st.binary(max_size=20))
def test_wire_any_header_under_a_right_checksum_is_an_entry_or_a_refusal(kind, header, payload) -> None:
    """A buggy producer with right checksums is met by the header's own checks."""
    assert isinstance(entry_or_refusal(frame(kind, header, chain=0, payload=payload)), Entry | DecodeError)


@given(kind=st.sampled_from(Kind), values=st.lists(anything, max_size=21))
def test_wire_any_msgpack_under_a_right_checksum_is_an_entry_or_a_refusal(kind, values) -> None:
    """Well-formed msgpack of any shape is met by the types and ranges of the fields."""
    assert isinstance(entry_or_refusal(frame(kind, msgpack.packb(values), chain=0)), Entry | DecodeError)


@given(record=records, data=st.data())
def test_wire_any_field_replaced_is_an_entry_or_a_refusal(record: Record, data: st.DataObject) -> None:
    """One field of a right header replaced by anything."""
    values = msgpack.unpackb(header_bytes(record))
    values[data.draw(st.integers(0, len(values) - 1))] = data.draw(anything)
    assert isinstance(
        entry_or_refusal(frame(kind_of(record), msgpack.packb(values), chain=0)), Entry | DecodeError
    )


def mutated(message: bytes, chance: random.Random) -> bytes:
    """Flips, cuts, doubles or overwrites at a random place."""
    at, wild = chance.randrange(len(message)), bytearray(message)
    match chance.randrange(5):
        case 0:
            wild[at] ^= 1 << chance.randrange(8)
        case 1:
            del wild[at : at + chance.randrange(1, 9)]
        case 2:
            wild[at:at] = wild[at : at + chance.randrange(1, 33)]
        case 3:
            wild[at : at + 4] = chance.randbytes(4)
        case _:
            wild[at : at + 5] = (
                chance.choice([b"\xdd", b"\xc6", b"\xdb", b"\xdf", b"\xc9"]) + b"\xff\xff\xff\xff"
            )
    return bytes(wild)


def resealed(message: bytes) -> bytes:
    """Gives a mutated message the checksum that fits it, where it is still long enough for one."""
    if len(message) < 28:
        return message
    (length,) = struct.unpack_from("<I", message, 8)
    seal = xxhash.xxh3_64_intdigest(message[:20] + message[28 : 28 + length])
    return message[:20] + struct.pack("<Q", seal) + message[28:]


def test_wire_mutated_goldens_are_entries_or_refusals() -> None:
    """A seeded fuzzer over the goldens: no mutation, with or without a right checksum, gives another error."""
    refused = accepted = 0
    for path in sorted(GOLDENS.iterdir()):
        golden, chance = bytes.fromhex(path.read_text(encoding="ascii")), random.Random(path.stem)
        for _ in range(MUTATIONS):
            wild = mutated(golden, chance)
            for value in (wild, resealed(wild)):
                answer = entry_or_refusal(value)
                refused += isinstance(answer, DecodeError)
                accepted += isinstance(answer, Entry)
    # Both must happen often, or the mutations are too weak or the seal is wrong.
    assert refused > 5_000
    assert accepted > 500


@given(
    dtype=st.sampled_from(DType),
    codec=st.sampled_from([Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD]),
    elements=st.binary(min_size=1, max_size=600),
)
def test_wire_codec_round_trip_gives_the_rows(dtype: DType, codec: Codec, elements: bytes) -> None:
    """decode(encode(rows)) is the rows, within the bound on a payload's size."""
    rows = elements * DTYPE_BYTES[dtype]
    payload = encode_payload(rows, codec, dtype)
    assert rows == decode_payload(payload, codec, dtype, decoded_bytes=len(rows))
    assert len(payload) <= payload_bytes_max(len(rows), codec)


@given(
    dtype=st.sampled_from(DType),
    codec=st.sampled_from([Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD]),
    payload=st.binary(max_size=200),
    elements=st.integers(1, 100),
)
def test_wire_any_payload_is_rows_or_a_refusal(
    dtype: DType, codec: Codec, payload: bytes, elements: int
) -> None:
    """A payload of any bytes gives rows of exactly the size asked for, or a DecodeError."""
    size = elements * DTYPE_BYTES[dtype]
    try:
        rows = decode_payload(payload, codec, dtype, decoded_bytes=size)
    except DecodeError:
        return
    assert len(rows) == size


@given(
    positions=st.integers(0, 20_000),
    row_bytes=st.integers(1, 900_000),
    codec=st.sampled_from(Codec),
)
def test_wire_cut_covers_all_positions_in_order(positions: int, row_bytes: int, codec: Codec) -> None:
    """The pieces of a delta, one after the other, are the delta."""
    at = 0
    for piece in cut(positions, row_bytes=row_bytes, codec=codec):
        assert piece == Piece(at, piece.count)
        assert piece.count >= 1
        at += piece.count
    assert at == positions


def test_wire_checksum_of_nothing_is_the_one_in_the_format() -> None:
    """A delta of token ids carries the checksum of an empty payload, which is not 0."""
    assert checksum(b"") == 0x2D06800538D394C2
