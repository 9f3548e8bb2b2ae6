"""The preamble: its layout byte by byte, and what is told from what by it."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvlog.errors import DecodeError
from kvlog.wire.frame import FORMAT_VERSION, MAGIC, PREAMBLE_BYTES, Frame, Peek, frame, peek, read_frame

HEADER = b"any header"
MESSAGE = frame(2, HEADER, chain=0x1122334455667788, payload=b"rows", version=1)


def resealed(message: bytes) -> bytes:
    """Gives a changed message the checksum that fits it again."""
    (length,) = struct.unpack_from("<I", message, 8)
    seal = xxhash.xxh3_64_intdigest(message[:20] + message[28 : 28 + length])
    return message[:20] + struct.pack("<Q", seal) + message[28:]


def test_frame_layout_is_the_one_drawn() -> None:
    """Every field stands at the offset, in the width and byte order that the module's docstring draws."""
    assert MESSAGE[0:4] == b"KVLG" == MAGIC
    assert MESSAGE[4] == 1 == FORMAT_VERSION
    assert MESSAGE[5] == 2
    assert MESSAGE[6:8] == b"\0\0"
    assert int.from_bytes(MESSAGE[8:12], "little") == len(HEADER)
    assert int.from_bytes(MESSAGE[12:20], "little") == 0x1122334455667788
    assert int.from_bytes(MESSAGE[20:28], "little") == xxhash.xxh3_64_intdigest(MESSAGE[0:20] + HEADER)
    assert MESSAGE[28:] == HEADER + b"rows"
    assert PREAMBLE_BYTES == 28


def test_read_frame_gives_back_what_was_framed() -> None:
    """A frame comes apart into the parts that it was made of."""
    expected = Frame(version=1, kind=2, chain=0x1122334455667788, header=HEADER, payload=memoryview(b"rows"))
    assert expected == read_frame(MESSAGE)
    assert expected == read_frame(memoryview(MESSAGE))


def test_read_frame_payload_is_a_view_of_the_message() -> None:
    """Reading copies no payload."""
    assert read_frame(MESSAGE).payload.obj is MESSAGE


def test_frame_of_nothing_is_a_preamble() -> None:
    """Header and payload may be empty as far as the frame is concerned."""
    message = frame(1, b"", chain=0)
    assert len(message) == PREAMBLE_BYTES
    assert read_frame(message) == Frame(version=1, kind=1, chain=0, header=b"", payload=memoryview(b""))


@pytest.mark.parametrize("size", range(PREAMBLE_BYTES + len(HEADER)))
def test_read_frame_of_a_cut_message_is_refused(size: int) -> None:
    """A message that ends before its header does is not believed, wherever it ends."""
    with pytest.raises(DecodeError):
        read_frame(MESSAGE[:size])


@pytest.mark.parametrize("bit", range(8 * (PREAMBLE_BYTES + len(HEADER))))
def test_read_frame_of_a_flipped_bit_is_refused(bit: int) -> None:
    """No single bit of preamble or header can change unnoticed."""
    damaged = bytearray(MESSAGE)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DecodeError):
        read_frame(bytes(damaged))


def test_read_frame_of_another_magic_names_it() -> None:
    """A foreign producer's message is told from a damaged one of ours."""
    with pytest.raises(DecodeError, match="it begins with 7b226122"):
        read_frame(b'{"a": "a json message that is long enough"}')


def test_read_frame_of_a_length_past_the_end_names_both() -> None:
    """A header length beyond the message says so; nothing is read past the end."""
    with pytest.raises(DecodeError, match=f"said to have 4294967295 bytes, the message has {len(MESSAGE)}"):
        read_frame(MESSAGE[:8] + b"\xff\xff\xff\xff" + MESSAGE[12:])


def test_read_frame_of_reserved_bytes_is_refused() -> None:
    """In a version that we know, the reserved bytes are 0."""
    with pytest.raises(DecodeError, match="reserved"):
        read_frame(resealed(MESSAGE[:6] + b"\1\0" + MESSAGE[8:]))


def test_read_frame_of_a_newer_version_leaves_its_reserved_bytes_alone() -> None:
    """A newer version may use the reserved bytes: it is newer, not damaged, and the caller says so by its number."""
    newer = MESSAGE[:4] + bytes([FORMAT_VERSION + 1, 2, 9, 9]) + MESSAGE[8:]
    assert read_frame(resealed(newer)).version == FORMAT_VERSION + 1


def test_peek_says_what_stands_there() -> None:
    """A look at a whole message."""
    expected = Peek(
        version=1,
        kind=2,
        reserved=0,
        chain=0x1122334455667788,
        header_bytes=len(HEADER),
        header_ok=True,
    )
    assert expected == peek(MESSAGE)


@pytest.mark.parametrize("message", [MESSAGE[:30], MESSAGE.replace(b"any", b"ANY")], ids=["cut", "damaged"])
def test_peek_at_a_damaged_message_still_says_what_stands_there(message: bytes) -> None:
    """A tool sees the fields of a damaged message, and that they are not to be believed."""
    seen = peek(message)
    assert (seen.version, seen.kind, seen.header_bytes) == (1, 2, len(HEADER))
    assert not seen.header_ok


@pytest.mark.parametrize("message", [b"", b"KVLG", b"x" * 28], ids=["empty", "short", "foreign"])
def test_peek_at_something_else_is_refused(message: bytes) -> None:
    """What has no preamble of ours has nothing to look at."""
    with pytest.raises(DecodeError):
        peek(message)
