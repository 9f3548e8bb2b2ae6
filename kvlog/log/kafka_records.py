"""The messages in a fetched partition's bytes, with the leader epoch of the last batch.

    batch:   0 base offset i64 | 8 length of what follows i32 | 12 leader epoch i32 | 16 magic i8 | 17 crc u32
            21 attributes i16 | 23 last offset delta i32 | 27 first timestamp i64 | 35 max timestamp i64
            43 producer id i64 | 51 producer epoch i16 | 53 base sequence i32 | 57 records i32 | 61 records
    record:  length | attributes i8 | timestamp delta | offset delta | key | value | headers, each a key and a value
             numbers are zigzag varints; a text or bytes is its length and itself, and length -1 is none

Values stay where they were received: aiokafka's reader copies each, which costs as much as all that is done here for a
record of 64 KiB. What it refuses is refused here (a test holds the two against each other).

Batch checksums are not verified (a third of the CPU): each of our records has its own. Compressed batches are not
unpacked: we never write one, and a foreign one may be a bomb. A batch that cannot be read becomes one empty message for
each of its offsets, so the fold refuses and counts it; nothing is skipped silently.
Source: https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fetched", "FetchedMessage", "read_records"]

_HEAD = struct.Struct(">qiibI")
_ABOUT = struct.Struct(">hiqqqhii")
_ABOUT_AT = 21
_COMPRESSED, _LOG_APPEND_TIME, _CONTROL = 0x07, 0x08, 0x20
_MORE = 0x80
"""Set in each byte of a varint but the last."""
_VARINT_MAX = (1 << 64) - 1
_PREFIX_BYTES = 12
_BATCH_BYTES_MIN = 61
_MAGIC = 2
_OFFSETS_MAX = 1 << 16
"""Empty messages made for one unreadable batch; a real one of our size has fewer messages."""

_NOT_OURS = (ValueError, IndexError)
"""A number that is cut off (IndexError); a length that leads out of the batch, or a text that is none (ValueError)."""


class FetchedMessage(NamedTuple):
    """One message; `value` is a view of what was fetched, None a tombstone, or a foreign producer's."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | memoryview | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a partition's bytes held.

    Args:
        messages: in order.
        next_offset: where to read on; behind the last message where compaction or control batches left a gap.
        epoch: leader epoch of the last batch; -1 without one.
    """

    messages: list[FetchedMessage]
    next_offset: int
    epoch: int


def read_records(data: bytes | memoryview, offset: int) -> Fetched:
    """The messages from `offset` on. The last batch may be cut off by the fetch's size limit; it comes again."""
    messages: list[FetchedMessage] = []
    epoch = -1
    view = memoryview(data)
    for batch in _batches(view):
        base, _, batch_epoch, magic, _ = _HEAD.unpack_from(batch)
        if magic == _MAGIC:
            found, end = _open_batch(batch, base, offset)
        else:
            found, end = [_unreadable(base)] if base >= offset else [], base + 1
        messages += found
        offset = max(offset, end)
        epoch = batch_epoch
    return Fetched(messages, offset, epoch)


def _batches(view: memoryview) -> Iterator[memoryview]:
    at = 0
    while len(view) - at >= _BATCH_BYTES_MIN:
        size = _PREFIX_BYTES + int.from_bytes(view[at + 8 : at + 12], "big", signed=True)
        if size < _BATCH_BYTES_MIN or at + size > len(view):
            return
        yield view[at : at + size]
        at += size


def _open_batch(batch: memoryview, base: int, offset: int) -> tuple[list[FetchedMessage], int]:
    attributes, last_delta, first_ms, max_ms, _, _, _, count = _ABOUT.unpack_from(batch, _ABOUT_AT)
    end = base + last_delta + 1
    if attributes & _CONTROL:
        return [], end
    taken_ms = max_ms if attributes & _LOG_APPEND_TIME else None
    try:
        if attributes & _COMPRESSED:
            raise ValueError(attributes)
        found = _messages(batch, count, base=base, first_ms=first_ms)
    except _NOT_OURS:
        first = max(base, offset)
        return [_unreadable(at) for at in range(first, min(end, first + _OFFSETS_MAX))], end
    if taken_ms is not None:
        found = [FetchedMessage(m.offset, taken_ms, m.key, m.value) for m in found]
    return [message for message in found if message.offset >= offset], end


def _messages(batch: memoryview, count: int, *, base: int, first_ms: int) -> list[FetchedMessage]:
    """Every message of a batch, which must be its records to the last byte; raises one of _NOT_OURS if it is not."""
    found: list[FetchedMessage] = []
    at, size = _BATCH_BYTES_MIN, len(batch)
    headers_seen: bytes | None = None
    for _ in range(count):
        length, at = _varint(batch, at)
        end = at + length
        if end > size:
            raise ValueError(length)
        _, at = _varint(batch, at)
        delta_ms, at = _varint(batch, at)
        delta, at = _varint(batch, at)
        key, at = _bytes(batch, at)
        value, at = _bytes(batch, at)
        headers = bytes(batch[at:end])
        if headers != headers_seen:  # a writer's are the same from message to message
            _check_headers(batch, at, end)
            headers_seen = headers
        at = end
        name = None if key is None else bytes(key)
        found.append(FetchedMessage(base + delta, first_ms + delta_ms, name, value))
    if at != size:
        raise ValueError(at)
    return found


def _check_headers(batch: memoryview, at: int, end: int) -> None:
    """A message's headers, which must be all that is left of it; raises one of _NOT_OURS if they are not."""
    headers, at = _varint(batch, at)
    if headers < 0:
        raise ValueError(headers)
    for _ in range(headers):
        title, at = _bytes(batch, at)
        if title is None:
            raise ValueError(at)
        str(title, "utf-8")
        _, at = _bytes(batch, at)
    if at != end:
        raise ValueError(at)


def _bytes(data: memoryview, at: int) -> tuple[memoryview | None, int]:
    """What stands behind its length, and where it ends."""
    length, at = _varint(data, at)
    if length < 0:
        return None, at
    end = at + length
    if end > len(data):
        raise ValueError(length)
    return data[at:end], end


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    """A zigzag number, and where it ends."""
    byte = data[at]
    at += 1
    if byte < _MORE:  # as nearly always
        return (byte >> 1) ^ -(byte & 1), at
    value, shift = byte & ~_MORE, 7
    while byte & _MORE:
        byte = data[at]
        at += 1
        value |= (byte & ~_MORE) << shift
        if value > _VARINT_MAX:
            raise ValueError(value)
        shift += 7
    return (value >> 1) ^ -(value & 1), at


def _unreadable(offset: int) -> FetchedMessage:
    return FetchedMessage(offset, 0, None, b"")
