"""Rows to the core: chosen codec, cut to records, encoded, within the publisher's room and the bandwidth cap."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.checksums import checksum
from kvlog.core.inputs import EncodedRows
from kvlog.ids import Position
from kvlog.records import Codec
from kvlog.wire.codec import encode_payload
from kvlog.wire.cut import cut

if TYPE_CHECKING:
    from daemon.intake import IntakeParts
    from kvlog.ids import Epoch, Shard, Turn
    from kvlog.layout import Layout

__all__ = ["OutgoingRows", "publish_rows"]

_THREAD_BYTES_MIN = 64 << 10
"""Below this, handing the encoding to a thread costs more than it saves."""

_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutgoingRows:
    """Rows of one shard and turn, from `start` on.

    Args:
        rows: whole rows of the layout, one a token; empty: only the token ids are logged.
    """

    turn: Turn
    epoch: Epoch
    shard: Shard
    start: Position
    tokens: tuple[int, ...]
    rows: memoryview
    layout: Layout


async def publish_rows(parts: IntakeParts, outgoing: OutgoingRows) -> int:
    """Give them to the core, record by record; returns the bytes of their payloads. `rows` is the caller's again."""
    rows, row_bytes = outgoing.rows, outgoing.layout.row_bytes
    assert len(rows) in {0, len(outgoing.tokens) * row_bytes}, "rows are those of the tokens, or none"
    codec = await parts.codec.choose(rows, outgoing.layout) if len(rows) else Codec.IDS
    size = 0
    for piece in cut(len(outgoing.tokens), row_bytes=row_bytes, codec=codec, limits=parts.limits):
        await parts.publisher.room()
        end = piece.first + piece.count
        payload = await _encoded(rows[piece.first * row_bytes : end * row_bytes], codec, outgoing.layout)
        await parts.pacer.spend(len(payload))
        size += len(payload)
        parts.shell.step(
            EncodedRows(
                turn=outgoing.turn,
                epoch=outgoing.epoch,
                shard=outgoing.shard,
                start=Position(outgoing.start + piece.first),
                tokens=outgoing.tokens[piece.first : end],
                codec=codec,
                payload=payload,
                payload_checksum=checksum(payload),
            )
        )
    return size


async def _encoded(rows: memoryview, codec: Codec, layout: Layout) -> memoryview:
    if codec is Codec.IDS:
        return _EMPTY
    if codec is Codec.RAW:
        return rows
    if len(rows) < _THREAD_BYTES_MIN:
        return memoryview(encode_payload(rows, codec, layout.dtype))
    return memoryview(await asyncio.to_thread(encode_payload, rows, codec, layout.dtype))
