"""Payload codecs: the rows of a delta to the payload of its message, and back under a hard bound.

    IDS         nothing: the rows are not in the log
    RAW         the rows as they are
    LZ4         0  4  decoded size D, u32 LE
                4  …  one LZ4 block, to the end
    SPLIT_ZSTD  0  4  decoded size D, u32 LE
                4  4  size Z of the zstd frame, u32 LE
                8  Z  one zstd frame (content size in it): the last byte of each element, D / E bytes
            8 + Z  …  the other bytes, D − D / E of them, stored: of 2-byte elements the first byte; of 4-byte
                      elements first all low halves (u16 LE), then all third bytes; of 1-byte elements nothing

E is the element's size. Elements are little endian, so the last byte of a bfloat16, float16 or float32 holds the sign
and the (upper) exponent, whose few values compress; the other bytes are mantissa, which does not, and is stored. uint8
is the fallback: it has no other bytes, so the whole is one zstd frame. Planes, not packed bytes, because numpy shifts
whole planes at 4-17 GB/s and copies strided bytes at 0.3-3.

What comes from the log is not believed: the caller knows the decoded size (positions x row bytes), and
every size inside must agree with it before memory is taken. So no payload makes us allocate more than that
size and a few hundred bytes.

Cost: raw, none to encode, one copy to decode into a block. The rest: tests/bench/codec_table.py measures it.
Safe to call from many threads: zstd contexts are kept per thread; lz4, zstd and numpy give the interpreter
lock back.
Source: https://github.com/lz4/lz4/blob/dev/doc/lz4_Block_format.md, RFC 8878 (Zstandard)
"""

from __future__ import annotations

import struct
import threading
from typing import TYPE_CHECKING, assert_never

import lz4.block
import numpy as np
import zstandard

from kvlog.errors import DecodeError, LocalProtocolError
from kvlog.layout import DTYPE_BYTES, DType
from kvlog.limits import DEFAULT, Limits
from kvlog.records import Codec

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["decode_payload", "decode_payload_into", "encode_payload", "payload_bytes_max"]

_SIZE = struct.Struct("<I")
_SIZES = struct.Struct("<II")

_ZSTD = zstandard.ZstdCompressionParameters(
    strategy=zstandard.STRATEGY_FAST,
    window_log=19,
    hash_log=6,
    chain_log=6,
    search_log=1,
    min_match=7,
    target_length=0,
    write_content_size=True,
    write_checksum=False,
)
"""Level 1 with the smallest hash table and the longest minimum match, so that hardly a match is looked for: what
compresses in exponents is their distribution (Huffman), and short matches only spoil it.

On 900 KiB of SmolLM2's bfloat16 cache, one busy core: ratio 1.445 at 1.4 GB/s, decode 2.4; level 1 as it comes:
1.430 at 0.34, decode 1.6; level 3 is slower again and compresses less. A target_length above 0 would switch Huffman
off, and so do negative levels.
"""

_WINDOW_BYTES_MIN = 1024
"""The smallest window that a zstd frame of several segments can state (RFC 8878, 3.1.1.1.2)."""

_U1 = np.dtype("<u1")
_U2 = np.dtype("<u2")
_U4 = np.dtype("<u4")


class _Contexts(threading.local):
    """A zstd context is not thread-safe and costs more to make than to use: one of each for each thread."""

    def __init__(self) -> None:
        self.compressor = zstandard.ZstdCompressor(compression_params=_ZSTD)
        self.decompressor = zstandard.ZstdDecompressor()


_contexts = _Contexts()


def payload_bytes_max(decoded_bytes: int, codec: Codec) -> int:
    """The most that so many bytes of rows can become, should nothing in them compress.

    Source: LZ4_COMPRESSBOUND in lz4.h; ZSTD_COMPRESSBOUND in zstd.h
    """
    match codec:
        case Codec.IDS:
            return 0
        case Codec.RAW:
            return decoded_bytes
        case Codec.LZ4:
            return _SIZE.size + decoded_bytes + decoded_bytes // 255 + 16
        case Codec.SPLIT_ZSTD:
            return _SIZES.size + decoded_bytes + decoded_bytes // 256 + 64
        case _:
            assert_never(codec)


def encode_payload(rows: Buffer, codec: Codec, dtype: DType) -> bytes | memoryview:
    """The payload for these rows.

    Args:
        rows: whole rows, C-contiguous, at least one.
        codec: how.
        dtype: the element type of the cache; says where the split runs.

    Returns: with RAW a view of `rows`, which must not change until it was framed; otherwise new bytes.
    """
    view = memoryview(rows).cast("B")
    assert len(view) % DTYPE_BYTES[dtype] == 0, "rows must be whole"
    match codec:
        case Codec.IDS:
            return b""
        case Codec.RAW:
            return view
        case Codec.LZ4:
            block: bytes = lz4.block.compress(view, store_size=False)
            return _SIZE.pack(len(view)) + block
        case Codec.SPLIT_ZSTD:
            last, *others = _split(view, DTYPE_BYTES[dtype])
            frame = _contexts.compressor.compress(last)
            return b"".join((_SIZES.pack(len(view), len(frame)), frame, *others))
        case _:
            assert_never(codec)


def decode_payload(
    payload: Buffer,
    codec: Codec,
    dtype: DType,
    *,
    decoded_bytes: int,
    limits: Limits = DEFAULT,
) -> memoryview:
    """The rows of a payload, in memory of their own (with RAW: as a view of the payload).

    Args:
        payload: as it stands in the message.
        codec: as the delta says; not IDS.
        dtype: of the claim under which the delta was written.
        decoded_bytes: positions x row bytes; a payload that says otherwise is refused.
        limits: `decoded_bytes` is the bound on the one above.

    Raises:
        DecodeError: sizes that do not agree, or a damaged, cut or overlong stream.
        LocalProtocolError: a delta of token ids was asked for rows.
    """
    view = memoryview(payload).cast("B")
    if decoded_bytes > limits.decoded_bytes:
        raise DecodeError(problem=f"rows of {decoded_bytes} bytes, {limits.decoded_bytes} is the most")
    match codec:
        case Codec.RAW:
            _check_size(len(view), decoded_bytes)
            return view
        case Codec.LZ4:
            return memoryview(_decode_lz4(view, decoded_bytes))
        case _:
            out = np.empty(decoded_bytes, _U1).data
            decode_payload_into(view, codec, dtype, out)
            return out


def decode_payload_into(payload: Buffer, codec: Codec, dtype: DType, out: memoryview) -> None:
    """Put the rows of a payload where they belong, for example straight into a pool's block.

    Args:
        payload: as it stands in the message.
        codec: as the delta says; not IDS.
        dtype: of the claim under which the delta was written.
        out: writable, C-contiguous, of exactly positions x row bytes. Untouched when an error is raised.

    Raises:
        DecodeError: sizes that do not agree, or a damaged, cut or overlong stream.
        LocalProtocolError: a delta of token ids was asked for rows.
    """
    view, target = memoryview(payload).cast("B"), out.cast("B")
    assert len(target) % DTYPE_BYTES[dtype] == 0, "rows must be whole"
    match codec:
        case Codec.IDS:
            raise LocalProtocolError(problem="a delta of token ids only has no rows to decode")
        case Codec.RAW:
            _check_size(len(view), len(target))
            target[:] = view
        case Codec.LZ4:
            target[:] = _decode_lz4(view, len(target))
        case Codec.SPLIT_ZSTD:
            last, others = _decode_zstd(view, len(target), DTYPE_BYTES[dtype])
            _merge(last, others, target, DTYPE_BYTES[dtype])
        case _:
            assert_never(codec)


def _check_size(actual: int, expected: int) -> None:
    if actual != expected:
        raise DecodeError(problem=f"a payload of {actual} decoded bytes, its delta's rows have {expected}")


def _decode_lz4(view: memoryview, decoded_bytes: int) -> bytes:
    if len(view) < _SIZE.size:
        raise DecodeError(problem="an lz4 payload is shorter than its size field")
    _check_size(_SIZE.unpack_from(view)[0], decoded_bytes)
    try:
        rows: bytes = lz4.block.decompress(view[_SIZE.size :], uncompressed_size=decoded_bytes)
    except lz4.block.LZ4BlockError as error:
        raise DecodeError(problem=f"lz4: {error}") from None
    _check_size(len(rows), decoded_bytes)
    return rows


def _decode_zstd(view: memoryview, decoded_bytes: int, element_bytes: int) -> tuple[bytes, memoryview]:
    """The plane of last bytes and the other bytes, of exactly the sizes that `decoded_bytes` asks for."""
    if len(view) < _SIZES.size:
        raise DecodeError(problem="a split payload is shorter than its size fields")
    stated, frame_bytes = _SIZES.unpack_from(view)
    _check_size(stated, decoded_bytes)
    last_bytes = decoded_bytes // element_bytes
    others = view[_SIZES.size + frame_bytes :]
    if len(others) != decoded_bytes - last_bytes:
        raise DecodeError(problem=f"{len(others)} stored bytes, not {decoded_bytes - last_bytes}")
    return _decode_frame(view[_SIZES.size : _SIZES.size + frame_bytes], last_bytes), others


def _decode_frame(frame: memoryview, content_bytes: int) -> bytes:
    """One zstd frame; zstandard allocates what the frame says of itself, so that is compared first."""
    try:
        said = zstandard.get_frame_parameters(frame)
        if said.content_size != content_bytes or said.window_size > max(content_bytes, _WINDOW_BYTES_MIN):
            problem = (
                f"zstd: content {said.content_size}, window {said.window_size}, not {content_bytes} bytes"
            )
            raise DecodeError(problem=problem)
        return _contexts.decompressor.decompress(frame, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise DecodeError(problem=f"zstd: {error}") from None


def _split(rows: memoryview, element_bytes: int) -> tuple[memoryview, ...]:
    """The last byte of each element, then the other bytes as they are stored; all flat, format B."""
    if element_bytes == 1:
        return (rows,)
    if element_bytes == 2:
        halves = np.frombuffer(rows, _U2)
        return (halves >> 8).astype(_U1).data, halves.astype(_U1).data
    words = np.frombuffer(rows, _U4)
    return (words >> 24).astype(_U1).data, words.astype(_U2).data.cast("B"), (words >> 16).astype(_U1).data


def _merge(last: bytes, others: memoryview, target: memoryview, element_bytes: int) -> None:
    """The inverse of _split, in place."""
    high = np.frombuffer(last, _U1)
    if element_bytes == 1:
        target[:] = last
    elif element_bytes == 2:
        halves = np.frombuffer(target, _U2)
        np.left_shift(high, 8, out=halves, dtype=_U2)
        np.bitwise_or(halves, np.frombuffer(others, _U1), out=halves)
    else:
        words = np.frombuffer(target, _U4)
        np.left_shift(high, 8, out=words, dtype=_U4)
        np.bitwise_or(words, np.frombuffer(others[2 * len(last) :], _U1), out=words)
        np.left_shift(words, 16, out=words)
        np.bitwise_or(words, np.frombuffer(others[: 2 * len(last)], _U2), out=words)
