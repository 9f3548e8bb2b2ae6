"""Messages of the link: bytes and back, strict, bounded."""

from __future__ import annotations

import struct
from contextlib import nullcontext
from dataclasses import replace

import msgpack
import pytest

from kvlog.errors import DecodeError, LocalProtocolError, UnknownVersion
from kvlog.ids import Position, SessionId
from kvlog.limits import DEFAULT, TINY
from kvlog.link.frames import DaemonFrames, EngineFrames, encode
from kvlog.link.messages import (
    PROTOCOL,
    AttachBlock,
    EngineRank,
    Ping,
    Pong,
    attach_rows_max,
    pack_tokens,
    unpack_checksums,
    unpack_tokens,
)
from tests.unit.link.samples import FROM_DAEMON, FROM_ENGINE, HELLO, OPEN_TURN, TURN_OPENED


def raw(*values: object) -> bytes:
    """A message with any array in it."""
    body: bytes = msgpack.packb(list(values))
    return struct.pack("<I", len(body)) + body


def decode_engine(data: bytes):
    """The first message of an engine's bytes."""
    frames = EngineFrames()
    frames.feed(data)
    return frames.take()


def decode_daemon(data: bytes):
    """The first message of a daemon's bytes."""
    frames = DaemonFrames()
    frames.feed(data)
    return frames.take()


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_frames_message_of_engine_comes_back_equal(message):
    """Encoding and decoding are inverse."""
    assert message == decode_engine(encode(message))


@pytest.mark.parametrize("message", FROM_DAEMON, ids=lambda message: type(message).__name__)
def test_frames_message_of_daemon_comes_back_equal(message):
    """Encoding and decoding are inverse."""
    assert message == decode_daemon(encode(message))


def test_frames_byte_by_byte_give_the_same_messages():
    """A stream has no borders: however it is cut, the same messages come out."""
    frames, out = EngineFrames(), []
    for byte in b"".join(encode(message) for message in FROM_ENGINE):
        frames.feed(bytes([byte]))
        while (message := frames.take()) is not None:
            out.append(message)
    assert list(FROM_ENGINE) == out


def test_frames_every_prefix_of_a_message_asks_for_more():
    """Half a message is not an error."""
    data = encode(OPEN_TURN)
    assert [None] * len(data) == [decode_engine(data[:size]) for size in range(len(data))]


@pytest.mark.parametrize("length", [0, DEFAULT.control_message_bytes + 1, 2**32 - 1])
def test_frames_length_out_of_bounds_is_refused_before_its_bytes_come(length):
    """Nobody makes us wait for, or store, four gigabytes."""
    with pytest.raises(DecodeError, match="a message of"):
        decode_engine(struct.pack("<I", length))


@pytest.mark.parametrize(
    "values",
    [
        (),
        (99,),
        ("6",),
        (True,),
        (6, 1),
        (4,),
        (4, -1),
        (4, 2**64 - 1, 0),
        (4, "1"),
        (4, True),
        (4, 1.0),
        (4, None),
        (3, 1, 2**32),
        (5, ""),
        (5, "a\nb"),
        (5, "x" * 257),
        (5, b"bytes"),
        (5, {}),
        (2, 1, "s", b"123", bytes(16), 0, None, 0, False, b""),
        (2, 1, "s", b"1234", bytes(15), 0, None, 0, False, b""),
        (2, 1, "s", b"1234", bytes(16), 0, "every:0,5ms", 0, False, b""),
        (2, 1, "s", b"1234", bytes(16), 0, 5, 0, False, b""),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0, False),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0, False, "group"),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0, False, bytes(17)),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0, 1, b""),
        (2, 1, "s", b"1234", bytes(16), 0, None, 0, None, b""),
        (1, PROTOCOL, "e", 1, [], 0),
        (1, PROTOCOL, "e", 1, [bytes(16), bytes(16), 1, 2, 1, 8, "float64", 1], 0),
        (1, PROTOCOL, "e", 1, [bytes(16), bytes(16), 0, 2, 1, 8, "float32", 1], 0),
        (1, PROTOCOL, "e", 1, [bytes(16), bytes(16), 1, 2, 1, 8, "float32", 0], 0),
        (1, PROTOCOL, "e", 1, [bytes(16), bytes(16), 1 << 20, 1 << 20, 1 << 20, 1 << 20, "float32", 1], 0),
        (1, PROTOCOL, "e", 1, [bytes(16), bytes(16), 1, 2, 1, 8, "float32", 1], 1),
        (1, PROTOCOL, "e" * 1025, 1, [bytes(16), bytes(16), 1, 2, 1, 8, "float32", 1], 0),
    ],
)
def test_frames_wrong_fields_are_refused(values):
    """Surplus, missing, mistyped and out-of-range fields are junk, and junk is one error."""
    with pytest.raises(DecodeError):
        decode_engine(raw(*values))


@pytest.mark.parametrize(
    "body", [b"\xc1", b"\x80", b"\x91", b"\x06", b"\xdd\xff\xff\xff\xff", b"\x91" * 5000, b"\x91\xd4\x01\x02"]
)
def test_frames_bytes_that_are_no_array_are_refused(body):
    """Whatever msgpack makes of it: reserved bytes, maps, cut arrays, deep nesting, extension types."""
    with pytest.raises(DecodeError):
        decode_engine(struct.pack("<I", len(body)) + body)


def test_frames_hello_of_another_protocol_is_told_apart_from_junk():
    """A daemon can answer an older or newer build instead of dropping it."""
    with pytest.raises(UnknownVersion, match=f"protocol {PROTOCOL - 1}, this build speaks {PROTOCOL}"):
        decode_engine(raw(1, PROTOCOL - 1, "whatever", "follows"))


def test_frames_message_of_the_wrong_side_is_refused():
    """An engine cannot send what only a daemon says, and the other way round."""
    with pytest.raises(DecodeError, match="Pong from an engine"):
        decode_engine(encode(Pong()))
    with pytest.raises(DecodeError, match="Ping from a daemon"):
        decode_daemon(encode(Ping()))


def test_frames_attach_whose_parts_disagree_is_refused():
    """Blocks, checksums and length of an attach are one story."""
    for wrong in (
        replace(TURN_OPENED, attach_length=Position(2)),
        replace(TURN_OPENED, blocks=(AttachBlock(0, 1),)),
        replace(TURN_OPENED, row_checksums=bytes(16)),
    ):
        with pytest.raises(DecodeError, match="disagree"):
            decode_daemon(encode(wrong))


@pytest.mark.parametrize("rank", [[2, 2], [0, 0], [0], [1, True], [-1, 2], 1, [0, 1, 1]], ids=str)
def test_frames_rank_that_an_engine_cannot_have_is_refused(rank):
    """A rank is one of as many as there are."""
    identity = msgpack.unpackb(encode(HELLO)[4:])[4]
    with pytest.raises(DecodeError):
        decode_engine(raw(1, PROTOCOL, "", 0, identity, rank))


@pytest.mark.parametrize(("ranks", "fits"), [(1, False), (2, True), (3, False)])
def test_frames_ranks_have_a_shard_each_or_one_for_all(ranks, fits):
    """Anything between could not be put together again. HELLO's identity has two shards."""
    refusal = nullcontext() if fits else pytest.raises(DecodeError, match="one shard for each rank")
    with refusal:
        decode_engine(encode(replace(HELLO, rank=EngineRank(0, ranks))))
    alike = replace(HELLO, identity=replace(HELLO.identity, shards=1), rank=EngineRank(0, ranks))
    assert alike == decode_engine(encode(alike))


@pytest.mark.parametrize(
    ("shards", "rank", "expected"),
    [
        (2, EngineRank(0, 2), (0, False)),
        (2, EngineRank(1, 2), (1, False)),
        (1, EngineRank(0, 1), (0, False)),
        (1, EngineRank(0, 2), (0, False)),
        (1, EngineRank(1, 2), (0, True)),
    ],
)
def test_hello_of_ranks_that_have_all_the_same_is_of_one_that_writes(shards, rank, expected):
    """The first one; the others have its shard too, and only read."""
    hello = replace(HELLO, identity=replace(HELLO.identity, shards=shards), rank=rank)
    assert expected == (hello.shard, hello.only_reads)


def test_encode_message_over_the_limit_is_our_callers_fault():
    """Limits bind the sender too; the error names both numbers."""
    large = replace(OPEN_TURN, tokens=pack_tokens(tuple(range(2000))))
    with pytest.raises(LocalProtocolError) as caught:
        encode(large, TINY)
    assert TINY.control_message_bytes == caught.value.message_bytes_max


def test_encode_value_that_does_not_fit_is_our_callers_fault():
    """What the other side would refuse is not sent."""
    with pytest.raises(LocalProtocolError):
        encode(replace(HELLO, rank=EngineRank(1, 1 << 16)))
    with pytest.raises(LocalProtocolError):
        encode(replace(OPEN_TURN, session=SessionId("")))


def test_frames_more_tokens_than_a_session_has_are_refused():
    """The number of tokens is bounded by the session, not only by the message."""
    frames = EngineFrames(TINY)
    frames.feed(encode(replace(OPEN_TURN, tokens=pack_tokens(tuple(range(TINY.session_tokens + 1))))))
    with pytest.raises(DecodeError, match="tokens"):
        frames.take()


def test_attach_rows_max_largest_attach_fits_a_message():
    """An attach of the greatest length, a block for each row, can be said."""
    rows = attach_rows_max(TINY)
    blocks = tuple(AttachBlock(2**32 - 1, 1) for _ in range(rows))
    message = replace(TURN_OPENED, attach_length=Position(rows), blocks=blocks, row_checksums=bytes(8 * rows))
    assert encode(message, TINY)


def test_tokens_and_checksums_come_back():
    """Packed arrays are little-endian, whatever the machine."""
    assert b"\x01\x00\x00\x00\xff\xff\xff\xff" == pack_tokens([1, 2**32 - 1])
    assert (1, 2**32 - 1) == unpack_tokens(pack_tokens([1, 2**32 - 1]))
    assert (1, 2**64 - 1, 0) == unpack_checksums(TURN_OPENED.row_checksums)
