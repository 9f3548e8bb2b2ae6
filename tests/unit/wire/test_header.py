"""The header: every field's type and range, one encoding, and the difference between damaged and newer."""

from __future__ import annotations

import math
from dataclasses import replace

import msgpack
import pytest

from kvlog.errors import DecodeError, LocalProtocolError, UnknownVersion
from kvlog.ids import Epoch, NodeId, Position, Seq, SessionId, Shard, Writer
from kvlog.layout import DType
from kvlog.limits import DEFAULT, TINY, Limits
from kvlog.records import Claim, Codec, EndReason, Kind, Record, kind_of
from kvlog.wire.header import FIELDS, READ_VERSIONS, header_bytes, read_header
from tests.unit.wire.samples import CLAIM, DELTA, END, SAMPLES, SNAPSHOT, TRUNCATE

OF_KIND: dict[Kind, Record] = {
    Kind.CLAIM: CLAIM,
    Kind.DELTA: DELTA,
    Kind.TRUNCATE: TRUNCATE,
    Kind.SNAPSHOT: SNAPSHOT,
    Kind.END: END,
}

Bad = tuple[object, ...]

I63 = 1 << 63
NOT_INTEGERS: Bad = (-1, True, None, 1.0, "1", b"1", [])
NOT_SIXTEEN: Bad = (b"", b"x" * 15, b"x" * 17, "x" * 16, 16, None)
NOT_NODES: Bad = (
    "",
    "n" * 256,
    "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * 128,
    "a\nb",
    "a\x9bb",
    "\x7f",
    b"node",
    1,
)
NOT_POSITIONS: Bad = (*NOT_INTEGERS, DEFAULT.session_tokens + 1)
NOT_SESSIONS: Bad = ("", "s" * 257, "a\0b", "a\nb", b"user", 42, None)
NOT_SEQS: Bad = (*NOT_INTEGERS, I63)
NOT_DIMENSIONS: Bad = (*NOT_INTEGERS, 0, 65_536)
NOT_BYTES: Bad = (*NOT_INTEGERS, 256)

IN_ALL: dict[str, Bad] = {
    "kind": (*NOT_BYTES, 0),
    "session": NOT_SESSIONS,
    "epoch": (*NOT_INTEGERS, 0, I63),
    "writer": NOT_SIXTEEN,
}
IN_CLAIMS: dict[str, Bad] = {
    "nonce": NOT_SIXTEEN,
    "node": NOT_NODES,
    "context": NOT_SIXTEEN,
    "model": NOT_SIXTEEN,
    "weights": NOT_SIXTEEN,
    "shards": (*NOT_INTEGERS, 0, DEFAULT.shards + 1),
    "dtype": NOT_BYTES,
    "layers": NOT_DIMENSIONS,
    "planes": (*NOT_INTEGERS, 0, 3),
    "kv_heads": NOT_DIMENSIONS,
    "head_dim": NOT_DIMENSIONS,
}
BAD: dict[Kind, dict[str, Bad]] = {
    Kind.CLAIM: {**IN_ALL, **IN_CLAIMS},
    Kind.DELTA: {
        **IN_ALL,
        "seq": NOT_SEQS,
        "shard": (*NOT_INTEGERS, DEFAULT.shards),
        "start": (*NOT_POSITIONS, DEFAULT.session_tokens, DEFAULT.session_tokens - 2),
        "tokens": (b"", b"abc", b"abcde", b"abcd" * (DEFAULT.delta_tokens + 1), [1], "abcd", 1, None),
        "context": NOT_SIXTEEN,
        "codec": NOT_BYTES,
        "payload_checksum": NOT_INTEGERS,
    },
    Kind.TRUNCATE: {**IN_ALL, "seq": NOT_SEQS, "length": NOT_POSITIONS},
    Kind.SNAPSHOT: {
        **IN_ALL,
        **IN_CLAIMS,
        "next_seq": NOT_SEQS,
        "chain": NOT_INTEGERS,
        "lengths": ([], [1], [1, 2, 3], [1, -1], [1, True], [1, DEFAULT.session_tokens + 1], b"ab", 2, None),
        "covered": (*NOT_INTEGERS, I63),
        "uri": ("", "u" * 1025, "s3://a\nb", b"s3://a", None),
        "content": NOT_SIXTEEN,
    },
    Kind.END: {**IN_ALL, "seq": NOT_SEQS, "reason": NOT_BYTES},
}
BAD_FIELDS = [
    (kind, name, value) for kind, fields in BAD.items() for name, bad in fields.items() for value in bad
]


def header_with(kind: Kind, name: str, value: object) -> bytes:
    """Makes the sample header of a kind with one field replaced."""
    values = msgpack.unpackb(header_bytes(OF_KIND[kind]))
    values[FIELDS[kind].index(name)] = value
    return packed(values)


def packed(values: list[object]) -> bytes:
    """Packs a header's array."""
    header: bytes = msgpack.packb(values)
    return header


@pytest.mark.parametrize("name", SAMPLES)
def test_header_of_a_record_reads_as_that_record(name: str) -> None:
    """What is written is read: for every kind, and for every field at its widest."""
    record = SAMPLES[name].record
    assert record == read_header(kind_of(record), header_bytes(record))


@pytest.mark.parametrize("kind", Kind)
def test_header_array_has_the_fields_that_are_named(kind: Kind) -> None:
    """FIELDS names each element of the array, and every kind begins with kind, session, epoch, writer."""
    record = OF_KIND[kind]
    values = dict(zip(FIELDS[kind], msgpack.unpackb(header_bytes(record)), strict=True))
    assert [kind, record.session, record.epoch, record.writer] == list(values.values())[:4]
    assert set(BAD[kind]) == set(values)


def test_header_field_values_stand_under_their_names() -> None:
    """Two fields of one type are not swapped."""
    values = dict(zip(FIELDS[Kind.CLAIM], msgpack.unpackb(header_bytes(CLAIM)), strict=True))
    identity = CLAIM.identity
    assert values["nonce"] == CLAIM.nonce
    assert values["context"] == CLAIM.context
    assert values["model"] == identity.model
    assert values["weights"] == identity.weights
    assert [values[name] for name in ("layers", "planes", "kv_heads", "head_dim")] == [2, 2, 1, 2]
    assert [values["dtype"], values["shards"]] == [1, 2]


@pytest.mark.parametrize(("kind", "name", "value"), BAD_FIELDS)
def test_header_field_out_of_bounds_is_refused(kind: Kind, name: str, value: object) -> None:
    """Each field has a type and a range, and a header that leaves them is refused with the field's name."""
    with pytest.raises(DecodeError) as refusal:
        read_header(kind, header_with(kind, name, value))
    assert not isinstance(refusal.value, UnknownVersion)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (Kind.CLAIM, "dtype", 0),
        (Kind.CLAIM, "dtype", 5),
        (Kind.SNAPSHOT, "dtype", 255),
        (Kind.DELTA, "codec", 4),
        (Kind.END, "reason", 0),
        (Kind.END, "reason", 4),
    ],
)
def test_header_enumeration_unknown_is_newer_not_damaged(kind: Kind, name: str, value: int) -> None:
    """A number that this build has no name for is a newer writer's."""
    with pytest.raises(UnknownVersion, match=f"{name} {value}"):
        read_header(kind, header_with(kind, name, value))


def test_header_of_an_unknown_version_is_newer() -> None:
    """A version that this build does not read is said so, with those it reads."""
    with pytest.raises(UnknownVersion, match=r"format version 2; this build reads \(1,\)"):
        read_header(Kind.END, header_bytes(END), version=2)


@pytest.mark.parametrize("kind", [0, 6, 255])
def test_header_of_an_unknown_kind_is_newer(kind: int) -> None:
    """A kind byte that this build does not know is said so."""
    with pytest.raises(UnknownVersion, match=f"kind {kind}"):
        read_header(kind, header_bytes(END))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("other", Kind)
def test_header_under_another_kind_is_refused(kind: Kind, other: Kind) -> None:
    """No header is one of two kinds: so none can be exchanged for another with the same chain."""
    if kind is not other:
        with pytest.raises(DecodeError):
            read_header(other, header_bytes(OF_KIND[kind]))


def test_header_with_the_right_fields_and_another_kind_is_refused() -> None:
    """A Truncate and an End have as many fields; the kind inside tells them apart, for the chain too."""
    with pytest.raises(DecodeError, match="the preamble says TRUNCATE, the header does not"):
        read_header(Kind.TRUNCATE, header_bytes(END))


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"\xc1",
        b"\x01",
        b"\x80",
        b"\xc0",
        b"\xa5hello",
        b"\x90",
        b"\x91" * 60_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xdc\xff\xff",
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
        b"\x81\xa1a\x01",
        b"\x82\xa1a\x01\xa1a\x02",
        b"\x96\x05\xa1s\x01\xc4\x10" + b"w" * 16 + b"\x01\xd4\x01\x01",
        b"\x96\x05\xa1s\x01\xc4\x10" + b"w" * 16 + b"\x01\xd6\xff\x00\x00\x00\x00",
        b"\x96\x05\xa1s\x01\xc4\x10" + b"w" * 16 + b"\x01\xc7\x03\xff\x00\x00\x00",
        b"\x96\x05\xa2\xc3\x28\x01\xc4\x10" + b"w" * 16 + b"\x01\x01",
        b"\x96\x05\xa3\xed\xa0\x80\x01\xc4\x10" + b"w" * 16 + b"\x01\x01",
    ],
    ids=lambda header: header[:12].hex() or "empty",
)
def test_header_that_is_not_our_msgpack_is_refused(header: bytes) -> None:
    """Cut, nested, huge, keyed, extended or badly spelt msgpack is refused, by a DecodeError and nothing else."""
    with pytest.raises(DecodeError):
        read_header(Kind.END, header)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, {"a": 1}, msgpack.ExtType(1, b""), msgpack.Timestamp(0)]
)
def test_header_field_of_a_type_that_we_never_write_is_refused(value: object) -> None:
    """Floats, maps and extensions have no place in a header."""
    with pytest.raises(DecodeError):
        read_header(Kind.END, header_with(Kind.END, "seq", value))


def test_header_in_a_longer_spelling_is_refused() -> None:
    """A small integer in nine bytes is not what we write; the chain would differ for an equal record."""
    values = header_bytes(TRUNCATE)
    assert values.endswith(b"\x00\xcd\x01\x2c")
    longer = values.removesuffix(b"\x00\xcd\x01\x2c") + b"\x00\xce\x00\x00\x01\x2c"
    assert msgpack.unpackb(longer) == msgpack.unpackb(values)
    with pytest.raises(DecodeError, match="one encoding"):
        read_header(Kind.TRUNCATE, longer)


def test_header_with_trailing_bytes_is_refused() -> None:
    """Nothing may follow the array inside the header."""
    with pytest.raises(DecodeError, match="ExtraData"):
        read_header(Kind.END, header_bytes(END) + b"\x00")


@pytest.mark.parametrize("change", [-1, 1])
def test_header_with_a_field_too_few_or_many_is_refused(change: int) -> None:
    """The version fixes the number of fields."""
    values = msgpack.unpackb(header_bytes(END))
    values = values[:change] if change < 0 else [*values, 0]
    with pytest.raises(DecodeError, match=f"END has 6 fields, this one {6 + change}"):
        read_header(Kind.END, packed(values))


def test_header_over_the_bound_is_refused_before_it_is_read() -> None:
    """The bound on a header holds on reading, whatever the message's size."""
    header = header_bytes(DELTA)
    limits = Limits(header_bytes=30_000, delta_tokens=1024)
    with pytest.raises(DecodeError, match="30001 bytes, 30000 is the most"):
        read_header(Kind.DELTA, header + b"\0" * (30_001 - len(header)), limits=limits)


def test_header_row_larger_than_any_payload_is_refused() -> None:
    """A layout whose single row could never be decoded is refused where it is claimed."""
    values = dict(zip(FIELDS[Kind.CLAIM], msgpack.unpackb(header_bytes(CLAIM)), strict=True))
    values |= {"layers": 65_535, "kv_heads": 65_535, "head_dim": 65_535}
    with pytest.raises(DecodeError, match="a row of"):
        read_header(Kind.CLAIM, packed(list(values.values())))


def test_header_obeys_the_limits_that_it_is_given() -> None:
    """The simulator's tiny bounds are the wire's bounds too."""
    fits = DELTA._replace(tokens=(1, 2, 3, 4), start=Position(60))
    assert fits == read_header(Kind.DELTA, header_bytes(fits, limits=TINY), limits=TINY)
    too_many = header_bytes(DELTA._replace(tokens=(1, 2, 3, 4, 5), start=Position(0)))
    with pytest.raises(DecodeError, match="1 to 4 tokens, this one 5"):
        read_header(Kind.DELTA, too_many, limits=TINY)


@pytest.mark.parametrize(
    "record",
    [
        replace(CLAIM, session=SessionId("")),
        replace(CLAIM, epoch=Epoch(0)),
        replace(CLAIM, writer=Writer(b"short")),
        replace(CLAIM, node=NodeId("\ud800")),
        DELTA._replace(tokens=()),
        DELTA._replace(tokens=(-1,)),
        DELTA._replace(tokens=(1 << 32,)),
        DELTA._replace(shard=Shard(64)),
        DELTA._replace(payload_checksum=1 << 64),
        TRUNCATE._replace(seq=Seq(-1)),
        TRUNCATE._replace(session=SessionId("\ud800")),
        replace(SNAPSHOT, uri="\ud800"),
        replace(SNAPSHOT, lengths=(Position(1),)),
    ],
    ids=repr,
)
def test_header_of_a_record_out_of_bounds_is_never_written(record: Record) -> None:
    """A record that every reader would refuse is refused before it is bytes, as our caller's fault."""
    with pytest.raises(LocalProtocolError) as refusal:
        header_bytes(record)
    assert refusal.value.fields["record"] == kind_of(record).name


def test_header_over_the_bound_is_never_written() -> None:
    """The bound on a header holds on writing."""
    limits = replace(DEFAULT, header_bytes=1200, delta_tokens=4)
    with pytest.raises(LocalProtocolError, match="1200 is the most"):
        header_bytes(
            SAMPLES["snapshot_widest"].record,
            limits=limits,
        )


def test_header_of_an_unknown_version_is_never_written() -> None:
    """The operator's log.format_version must be one that this build knows."""
    with pytest.raises(LocalProtocolError, match="format version 2"):
        header_bytes(END, version=2)


def test_header_read_versions_are_this_and_the_one_before() -> None:
    """N = 1 is the first version, so there is one."""
    assert READ_VERSIONS == (1,)


def test_header_enumerations_have_a_number_for_every_member() -> None:
    """A dtype, codec or reason that is added to the types has its number here, or this test names it."""
    for dtype in DType:
        claim = replace(
            CLAIM, identity=replace(CLAIM.identity, layout=replace(CLAIM.identity.layout, dtype=dtype))
        )
        assert claim == read_header(Kind.CLAIM, header_bytes(claim))
        assert isinstance(claim, Claim)
    for codec in Codec:
        assert DELTA._replace(codec=codec) == read_header(
            Kind.DELTA, header_bytes(DELTA._replace(codec=codec))
        )
    for reason in EndReason:
        assert END._replace(reason=reason) == read_header(Kind.END, header_bytes(END._replace(reason=reason)))
