"""Whole messages: record and bytes, both ways, and what does not belong together."""

from __future__ import annotations

import tracemalloc

import pytest

from kvlog.checksums import chain, checksum
from kvlog.errors import DecodeError, LocalProtocolError, UnknownVersion
from kvlog.ids import Position
from kvlog.limits import DEFAULT, TINY
from kvlog.records import Codec, Entry, Kind, kind_of
from kvlog.wire.frame import FORMAT_VERSION, PREAMBLE_BYTES, frame
from kvlog.wire.header import header_bytes
from kvlog.wire.message import decode, encode
from tests.unit.wire.samples import CLAIM, DELTA, END, ROWS, SAMPLES, SNAPSHOT, TRUNCATE

NEAR = DELTA._replace(start=Position(0))
"""A delta within the tiny limits."""


@pytest.mark.parametrize("name", SAMPLES)
def test_message_decodes_to_what_was_encoded(name: str) -> None:
    """A record, its chain, its header bytes and its payload come back as they went in."""
    sample = SAMPLES[name]
    expected = Entry(
        record=sample.record,
        header=header_bytes(sample.record),
        chain=sample.chain,
        payload=memoryview(sample.payload),
    )
    assert expected == decode(encode(sample.record, chain=sample.chain, payload=sample.payload))


def test_message_of_a_record_is_the_frame_of_its_header() -> None:
    """A shell that has header bytes from its core frames them, and gets the same message."""
    framed = frame(Kind.DELTA, header_bytes(DELTA), chain=9, payload=ROWS)
    assert framed == encode(DELTA, chain=9, payload=ROWS)


def test_message_from_a_view_is_read_in_place() -> None:
    """A fetched buffer is not copied: the payload is a view of it."""
    fetched = bytearray(encode(DELTA, chain=9, payload=ROWS))
    payload = decode(memoryview(fetched)).payload
    fetched[-1] ^= 0xFF
    assert payload[-1] == fetched[-1]


def test_message_header_gives_the_chain() -> None:
    """The chain runs over the header bytes as they stand in the message."""
    entry = decode(encode(DELTA, chain=9, payload=ROWS))
    assert chain(8, header_bytes(DELTA), checksum(ROWS)) == chain(8, entry.header, checksum(entry.payload))


@pytest.mark.parametrize("record", [CLAIM, SNAPSHOT], ids=["claim", "snapshot"])
def test_message_with_a_chain_where_none_belongs_is_refused(record) -> None:
    """Claims and snapshots carry no chain: their writers do not know it."""
    with pytest.raises(LocalProtocolError, match="carries no chain"):
        encode(record, chain=1)
    with pytest.raises(DecodeError, match="carries no chain"):
        decode(frame(kind_of(record), header_bytes(record), chain=1))


@pytest.mark.parametrize(
    "record",
    [CLAIM, SNAPSHOT, TRUNCATE, END, DELTA._replace(codec=Codec.IDS)],
    ids=["claim", "snapshot", "truncate", "end", "ids"],
)
def test_message_with_a_payload_where_none_belongs_is_refused(record) -> None:
    """Only a delta with rows has anything after its header."""
    with pytest.raises(LocalProtocolError, match="1 bytes follow"):
        encode(record, chain=0, payload=b"x")
    with pytest.raises(DecodeError, match="1 bytes follow"):
        decode(frame(kind_of(record), header_bytes(record), chain=0, payload=b"x"))


def test_message_without_the_rows_that_it_names_is_refused() -> None:
    """A delta whose codec has rows has a payload."""
    with pytest.raises(LocalProtocolError, match="rows are missing"):
        encode(DELTA, chain=1)
    with pytest.raises(DecodeError, match="rows are missing"):
        decode(encode(DELTA, chain=1, payload=ROWS)[: -len(ROWS)])


def test_message_over_the_record_bound_is_never_written() -> None:
    """What the log would refuse is refused here, with both sizes."""
    with pytest.raises(LocalProtocolError, match="2048 is the most"):
        encode(NEAR, chain=1, payload=bytes(TINY.record_bytes), limits=TINY)


def test_message_over_the_record_bound_is_read() -> None:
    """`record_bytes` is the operator's, may differ between nodes, and so decides nothing on reading."""
    rows = bytes(TINY.record_bytes)
    assert rows == decode(encode(NEAR, chain=1, payload=rows), TINY).payload


def test_message_of_another_version_is_newer() -> None:
    """An undamaged message of a version that we do not know is told from a damaged one."""
    message = frame(Kind.END, header_bytes(END), chain=1, version=FORMAT_VERSION + 1)
    with pytest.raises(UnknownVersion, match="format version 2"):
        decode(message)


def test_message_of_another_version_is_never_written() -> None:
    """The version is the operator's to choose, from those that this build knows."""
    with pytest.raises(LocalProtocolError, match="format version 3"):
        encode(END, chain=1, version=3)


@pytest.mark.parametrize(
    "header",
    [
        b"\x91" * 60_000,
        b"\xdc\x01\x00" * 20_000,
        b"\xdd\xff\xff\xff\xff" * 10_000,
        b"\xdc\xff\xff",
        b"\x90" * 60_000,
    ],
    ids=["deep", "deep and wide", "huge", "wide", "many"],
)
def test_message_with_a_bomb_for_a_header_takes_no_memory(header: bytes) -> None:
    """Lengths that a header only claims are never allocated: a refusal costs a few copies of it at most."""
    message = frame(Kind.END, header, chain=1)
    tracemalloc.start()
    try:
        with pytest.raises(DecodeError):
            decode(message)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


def test_message_size_is_preamble_header_and_payload() -> None:
    """Nothing else is in a message."""
    header, message = header_bytes(DELTA), encode(DELTA, chain=1, payload=ROWS)
    assert PREAMBLE_BYTES + len(header) + len(ROWS) == len(message) < DEFAULT.record_bytes
