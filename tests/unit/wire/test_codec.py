"""Payload codecs: what goes in comes out, and a payload that lies gets nothing from us."""

from __future__ import annotations

import struct
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import lz4.block
import numpy as np
import pytest
import zstandard

from kvlog.errors import DecodeError, LocalProtocolError
from kvlog.layout import DType
from kvlog.limits import DEFAULT, TINY
from kvlog.records import Codec
from kvlog.wire.codec import decode_payload, decode_payload_into, encode_payload, payload_bytes_max
from tests.unit.wire.samples import SAMPLES

WITH_ROWS = [Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD]
BOTH_COMPRESSED = [Codec.LZ4, Codec.SPLIT_ZSTD]
SIZE = 4096
RANDOM = np.random.default_rng(1)


def rows_like_a_cache(size: int = SIZE) -> bytes:
    """Makes bfloat16 rows whose values are normally distributed."""
    words = RANDOM.normal(size=size // 2).astype(np.float32).view(np.uint32)
    return (words >> 16).astype(np.uint16).tobytes()


CONTENTS = {
    "like a cache": rows_like_a_cache(),
    "noise": RANDOM.bytes(SIZE),
    "zeros": bytes(SIZE),
    "ones": b"\xff" * SIZE,
    "counting": bytes(range(256)) * (SIZE // 256),
    "one element": b"\x01\x02\x03\x04",
}


def decoded(payload, codec: Codec, dtype: DType = DType.BFLOAT16, *, size: int = SIZE) -> bytes:
    """Decodes both ways and checks that they agree."""
    out = memoryview(bytearray(size))
    decode_payload_into(payload, codec, dtype, out)
    assert out == decode_payload(payload, codec, dtype, decoded_bytes=size)
    return bytes(out)


def refusal_of(payload, codec: Codec, *, size: int = SIZE, dtype: DType = DType.BFLOAT16) -> DecodeError:
    """Decodes both ways, checks that both refuse with the same words and touch nothing."""
    out = memoryview(bytearray(b"\xaa" * size))
    with pytest.raises(DecodeError) as into:
        decode_payload_into(payload, codec, dtype, out)
    with pytest.raises(DecodeError) as fresh:
        decode_payload(payload, codec, dtype, decoded_bytes=size)
    assert out == b"\xaa" * size
    assert str(into.value) == str(fresh.value)
    return into.value


def split_payload(frame: bytes, others: bytes, *, size: int = SIZE, frame_bytes: int | None = None) -> bytes:
    """Puts a split payload together by hand."""
    return struct.pack("<II", size, len(frame) if frame_bytes is None else frame_bytes) + frame + others


@pytest.mark.parametrize("codec", WITH_ROWS)
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("content", CONTENTS)
def test_codec_round_trip_gives_the_rows(codec: Codec, dtype: DType, content: str) -> None:
    """Every codec gives back every element type's rows, bit for bit, whatever they hold."""
    rows = CONTENTS[content]
    payload = encode_payload(rows, codec, dtype)
    assert rows == decoded(payload, codec, dtype, size=len(rows))
    assert len(payload) <= payload_bytes_max(len(rows), codec)


@pytest.mark.parametrize("codec", WITH_ROWS)
def test_codec_decodes_the_golden_payload(codec: Codec) -> None:
    """Payloads that an older build wrote decode to the rows that went in."""
    sample = SAMPLES[f"delta_{codec.name.lower()}"]
    assert sample.rows == decoded(sample.payload, codec, size=len(sample.rows))


def test_codec_raw_copies_nothing() -> None:
    """Raw is a view both ways; the only copies are the frame's and the block's."""
    rows = bytearray(b"rows")
    payload = encode_payload(rows, Codec.RAW, DType.UINT8)
    view = decode_payload(payload, Codec.RAW, DType.UINT8, decoded_bytes=4)
    rows[0] = ord("R")
    assert bytes(payload) == bytes(view) == b"Rows"


def test_codec_split_of_two_bytes_stores_the_low_halves() -> None:
    """The drawn layout: size, frame size, one zstd frame of the high bytes, the low bytes as they are."""
    payload = encode_payload(b"\x01\xaa\x02\xbb\x03\xcc", Codec.SPLIT_ZSTD, DType.BFLOAT16)
    size, frame_bytes = struct.unpack_from("<II", payload)
    assert (6, 8 + frame_bytes + 3) == (size, len(payload))
    assert zstandard.decompress(payload[8 : 8 + frame_bytes]) == b"\xaa\xbb\xcc"
    assert payload[8 + frame_bytes :] == b"\x01\x02\x03"


def test_codec_split_of_four_bytes_stores_low_halves_then_third_bytes() -> None:
    """The drawn layout of float32: low halves of all elements, then their third bytes."""
    payload = encode_payload(b"\x01\x02\x33\xaa\x03\x04\x44\xbb", Codec.SPLIT_ZSTD, DType.FLOAT32)
    frame_bytes = struct.unpack_from("<II", payload)[1]
    assert zstandard.decompress(payload[8 : 8 + frame_bytes]) == b"\xaa\xbb"
    assert payload[8 + frame_bytes :] == b"\x01\x02\x03\x04\x33\x44"


def test_codec_split_of_one_byte_is_one_frame() -> None:
    """uint8 has no mantissa bytes to store: everything is compressed."""
    payload = encode_payload(b"\x01\x02\x03", Codec.SPLIT_ZSTD, DType.UINT8)
    assert zstandard.decompress(payload[8:]) == b"\x01\x02\x03"


def test_codec_lz4_is_a_size_and_a_block() -> None:
    """The drawn layout: what lz4's own tools call a block with its size before it."""
    payload = encode_payload(CONTENTS["zeros"], Codec.LZ4, DType.BFLOAT16)
    assert lz4.block.decompress(bytes(payload)) == CONTENTS["zeros"]


def test_codec_split_makes_a_cache_smaller() -> None:
    """The point of it all: bfloat16 that is distributed like a cache shrinks by more than a quarter."""
    rows = rows_like_a_cache(1 << 18)
    assert len(rows) / len(encode_payload(rows, Codec.SPLIT_ZSTD, DType.BFLOAT16)) > 1.3


def test_codec_ids_has_no_payload() -> None:
    """A delta of token ids carries nothing, and asking it for rows is the caller's mistake."""
    assert encode_payload(CONTENTS["noise"], Codec.IDS, DType.BFLOAT16) == b""
    assert payload_bytes_max(SIZE, Codec.IDS) == 0
    with pytest.raises(LocalProtocolError, match="token ids only"):
        decode_payload(b"", Codec.IDS, DType.BFLOAT16, decoded_bytes=SIZE)


@pytest.mark.parametrize("codec", WITH_ROWS)
@pytest.mark.parametrize("size", [SIZE - 2, SIZE + 2, 2, 2 * SIZE])
def test_codec_payload_of_another_size_is_refused(codec: Codec, size: int) -> None:
    """The caller knows how many rows a delta has; a payload of any other number is refused."""
    payload = encode_payload(CONTENTS["like a cache"], codec, DType.BFLOAT16)
    assert f"its delta's rows have {size}" in str(refusal_of(payload, codec, size=size))


@pytest.mark.parametrize("codec", WITH_ROWS)
def test_codec_payload_cut_anywhere_is_refused(codec: Codec) -> None:
    """A truncated stream is refused wherever it ends."""
    payload = encode_payload(CONTENTS["like a cache"], codec, DType.BFLOAT16)
    for size in (*range(40), *range(40, len(payload), 97), len(payload) - 1):
        refusal_of(payload[:size], codec)


@pytest.mark.parametrize("codec", WITH_ROWS)
def test_codec_payload_with_trailing_bytes_is_refused(codec: Codec) -> None:
    """Nothing may follow the stream."""
    refusal_of(bytes(encode_payload(CONTENTS["like a cache"], codec, DType.BFLOAT16)) + b"\0", codec)


def test_codec_lz4_stream_shorter_than_it_says_is_refused() -> None:
    """A block that ends early without being damaged is refused by the size of what came out."""
    block = lz4.block.compress(bytes(SIZE - 2), store_size=False)
    assert f"{SIZE - 2} decoded bytes" in str(refusal_of(struct.pack("<I", SIZE) + block, Codec.LZ4))


def test_codec_lz4_stream_longer_than_it_says_is_refused() -> None:
    """A block of more than it says is stopped at the bound."""
    block = lz4.block.compress(bytes(100 * SIZE), store_size=False)
    assert "lz4: " in str(refusal_of(struct.pack("<I", SIZE) + block, Codec.LZ4))


HALF = SIZE // 2
UNSIZED = zstandard.ZstdCompressor(write_content_size=False)
WIDE = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=True)


def wide_window_frame(size: int) -> bytes:
    """Makes a frame of several segments that asks for a window of 128 MiB."""
    stream = zstandard.ZstdCompressor(compression_params=WIDE).compressobj()
    frame = bytearray(stream.compress(bytes(size)) + stream.flush())
    # Descriptor with a 4-byte content size, single segment off; the window descriptor says 2**27.
    return bytes(frame[:4] + b"\x80" + b"\x88" + struct.pack("<I", size) + frame[frame_header_bytes(frame) :])


def frame_header_bytes(frame: bytes | bytearray) -> int:
    """Says where the blocks of a zstd frame begin."""
    return zstandard.frame_header_size(bytes(frame))


FRAMES = {
    "of more": zstandard.compress(bytes(HALF + 1)),
    "of far more": zstandard.compress(bytes(1 << 24)),
    "of less": zstandard.compress(bytes(HALF - 1)),
    "of unknown size": UNSIZED.compress(bytes(HALF)),
    "of a wide window": wide_window_frame(HALF),
    "empty": b"",
    "junk": b"junk" * 5,
    "skippable": struct.pack("<II", 0x184D2A50, HALF) + bytes(HALF),
    "twice": zstandard.compress(bytes(HALF)) * 2,
    "with a tail": zstandard.compress(bytes(HALF)) + b"\0",
    "cut": zstandard.compress(RANDOM.bytes(HALF))[:-1],
    "damaged": zstandard.compress(bytes(HALF))[:-1] + b"\xff",
}


@pytest.mark.parametrize("name", FRAMES)
def test_codec_split_frame_that_is_not_ours_is_refused(name: str) -> None:
    """A zstd frame of another size, count, window or kind is refused."""
    assert "zstd: " in str(refusal_of(split_payload(FRAMES[name], bytes(HALF)), Codec.SPLIT_ZSTD))


def test_codec_split_frame_that_wants_a_wide_window_is_refused_for_that() -> None:
    """A frame that is otherwise right, and that zstd would take with 128 MiB of memory for its window."""
    frame = FRAMES["of a wide window"]
    assert zstandard.ZstdDecompressor().decompress(frame) == bytes(HALF)
    refusal = refusal_of(split_payload(frame, bytes(HALF)), Codec.SPLIT_ZSTD)
    assert f"content {HALF}, window {1 << 27}" in str(refusal)


def test_codec_split_frame_that_lies_about_its_content_is_refused() -> None:
    """A frame whose stated content size fits and whose content does not."""
    honest = zstandard.compress(bytes(HALF))
    lying = zstandard.compress(bytes(HALF + 256))
    assert zstandard.frame_header_size(honest) == zstandard.frame_header_size(lying)
    header = zstandard.frame_header_size(honest)
    assert "zstd: " in str(
        refusal_of(split_payload(honest[:header] + lying[header:], bytes(HALF)), Codec.SPLIT_ZSTD)
    )


@pytest.mark.parametrize("frame_bytes", [0, 5, 0xFFFFFFFF])
def test_codec_split_frame_size_that_lies_is_refused(frame_bytes: int) -> None:
    """The frame's stated size decides where the stored bytes begin, and their number must come out."""
    payload = split_payload(zstandard.compress(bytes(HALF)), bytes(HALF), frame_bytes=frame_bytes)
    refusal_of(payload, Codec.SPLIT_ZSTD)


@pytest.mark.parametrize("codec", BOTH_COMPRESSED)
def test_codec_bomb_takes_no_memory(codec: Codec) -> None:
    """A payload that would decompress to 64 MiB gets no more than the rows that its delta has."""
    bomb = bytes(encode_payload(bytes(64 << 20), codec, DType.UINT8))
    lying = struct.pack("<I", SIZE) + bomb[4:]
    tracemalloc.start()
    try:
        for payload in (bomb, lying):
            refusal_of(payload, codec, dtype=DType.UINT8)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_codec_rows_over_the_bound_are_refused() -> None:
    """However many rows a delta claims, no more than `decoded_bytes` is ever allocated for it."""
    with pytest.raises(DecodeError, match="4096 is the most"):
        decode_payload(b"", Codec.LZ4, DType.UINT8, decoded_bytes=4097, limits=TINY)
    with pytest.raises(DecodeError, match=f"{DEFAULT.decoded_bytes} is the most"):
        decode_payload(b"", Codec.SPLIT_ZSTD, DType.UINT8, decoded_bytes=DEFAULT.decoded_bytes + 1)


def test_codec_flipped_bits_are_refused_or_give_rows_of_the_right_size() -> None:
    """The codec has no checksum of its own (the delta has), but damage never escapes as another error."""
    for codec in BOTH_COMPRESSED:
        payload = bytes(encode_payload(CONTENTS["like a cache"], codec, DType.BFLOAT16))
        for bit in range(0, 8 * len(payload), 61):
            damaged = bytearray(payload)
            damaged[bit // 8] ^= 1 << bit % 8
            assert_refused_or_whole(bytes(damaged), codec)


def assert_refused_or_whole(payload: bytes, codec: Codec) -> None:
    """Decodes, and accepts a DecodeError or rows of the right size."""
    try:
        rows = decode_payload(payload, codec, DType.BFLOAT16, decoded_bytes=SIZE)
    except DecodeError:
        return
    assert len(rows) == SIZE


def test_codec_unaligned_buffers_are_fine() -> None:
    """Rows in a ring and blocks in a pool may begin at any address."""
    rows, payload = CONTENTS["like a cache"], bytearray(1)
    payload += encode_payload(memoryview(b"x" + rows)[1:], Codec.SPLIT_ZSTD, DType.FLOAT32)
    out = memoryview(bytearray(SIZE + 1))[1:]
    decode_payload_into(memoryview(payload)[1:], Codec.SPLIT_ZSTD, DType.FLOAT32, out)
    assert out == rows


def test_codec_in_many_threads_gives_each_its_own() -> None:
    """Threads share no context: what each decodes is what it encoded."""
    sets = [rows_like_a_cache(1 << 16) for _ in range(32)]

    def round_trip(rows: bytes) -> bytes:
        payload = encode_payload(rows, Codec.SPLIT_ZSTD, DType.BFLOAT16)
        return decoded(payload, Codec.SPLIT_ZSTD, size=len(rows))

    with ThreadPoolExecutor(8) as threads:
        assert sets == list(threads.map(round_trip, sets))


def test_codec_part_of_an_element_is_the_callers_fault() -> None:
    """Rows are whole; half an element is a programmer's error on either side."""
    with pytest.raises(AssertionError, match="whole"):
        encode_payload(b"abc", Codec.SPLIT_ZSTD, DType.BFLOAT16)
    with pytest.raises(AssertionError, match="whole"):
        decode_payload_into(b"", Codec.SPLIT_ZSTD, DType.FLOAT32, memoryview(bytearray(6)))
