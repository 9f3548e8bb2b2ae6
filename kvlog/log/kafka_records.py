"""The messages in a fetched partition's bytes, with the leader epoch of the last batch.

    batch:  0 base offset i64 | 8 length of what follows i32 | 12 leader epoch i32 | 16 magic i8 | 17 crc u32 | ...

Batch checksums are not verified (a third of the CPU): each of our records has its own. Compressed batches are not
unpacked: we never write one, and a foreign one may be a bomb. A batch that cannot be read becomes one empty message for
each of its offsets, so the fold refuses and counts it; nothing is skipped silently.
Source: https://kafka.apache.org/documentation/#recordbatch
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatch

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Fetched", "FetchedMessage", "read_records"]

_HEAD = struct.Struct(">qiibI")
_PREFIX_BYTES = 12
_BATCH_BYTES_MIN = 61
_MAGIC = 2
_OFFSETS_MAX = 1 << 16
"""Empty messages made for one unreadable batch; a real one of our size has fewer messages."""

_NOT_OURS = (KafkaError, ValueError, IndexError, UnicodeDecodeError, struct.error)


class FetchedMessage(NamedTuple):
    """One message; `value` None is a tombstone, or a foreign producer's."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None


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


def read_records(data: bytes, offset: int) -> Fetched:
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


def _open_batch(data: memoryview, base: int, offset: int) -> tuple[list[FetchedMessage], int]:
    batch = DefaultRecordBatch(data)
    end: int = batch.next_offset
    if batch.is_control_batch:
        return [], end
    try:
        if batch.compression_type:
            raise ValueError
        return [
            FetchedMessage(r.offset, r.timestamp, r.key, r.value) for r in batch if r.offset >= offset
        ], end
    except _NOT_OURS:
        first = max(base, offset)
        return [_unreadable(at) for at in range(first, min(end, first + _OFFSETS_MAX))], end


def _unreadable(offset: int) -> FetchedMessage:
    return FetchedMessage(offset, 0, None, b"")
