"""Cutting a delta by positions, so that every message fits `record_bytes` whatever its rows compress to.

The cut looks at the worst case (nothing compresses, the longest session id, every integer at its widest),
so a piece never has to be cut again after it was encoded, and seq numbers can be given before. The price is
under 1 % of a record.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import RowTooLarge
from kvlog.limits import DEFAULT, Limits
from kvlog.records import Codec
from kvlog.wire.codec import payload_bytes_max
from kvlog.wire.frame import PREAMBLE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["Piece", "check_row", "cut", "delta_bytes_max", "rows_a_record"]

_DELTA_HEADER_BYTES = 345
"""The widest header of a delta, without its tokens; a test builds it.

1 array + 1 kind + 259 session + 9 epoch + 18 writer + 9 seq + 5 shard + 9 start + 5 tokens + 18 context + 2 codec +
9 checksum.
"""
_TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Piece:
    """Positions [first, first + count) of a delta, counted from the delta's own start."""

    first: int
    count: int


def cut(positions: int, *, row_bytes: int, codec: Codec, limits: Limits = DEFAULT) -> Iterator[Piece]:
    """The pieces of a delta, in order; all but the last are as large as a record takes.

    Args:
        positions: how many there are to log; 0 yields nothing.
        row_bytes: bytes of one position.
        codec: how they will be encoded.
        limits: `record_bytes` and `delta_tokens` are the bounds.

    Raises:
        RowTooLarge: one position alone does not fit; `check_row` says so at start.
    """
    count = rows_a_record(row_bytes, codec=codec, limits=limits)
    return (Piece(first, min(count, positions - first)) for first in range(0, positions, count))


def rows_a_record(row_bytes: int, *, codec: Codec, limits: Limits = DEFAULT) -> int:
    """How many positions surely fit one record; at least 1.

    Raises:
        RowTooLarge: not even one does.
    """

    def message_bytes(positions: int) -> int:
        return delta_bytes_max(positions, row_bytes=row_bytes, codec=codec)

    counts = range(1, limits.delta_tokens + 1)
    fitting = bisect_right(counts, limits.record_bytes, key=message_bytes)
    if not fitting:
        raise RowTooLarge(row_bytes=row_bytes, record_bytes_max=limits.record_bytes)
    return fitting


def check_row(row_bytes: int, limits: Limits = DEFAULT) -> None:
    """Refuse at start a row that some codec could make too large for a record.

    Raises:
        RowTooLarge: with the row's size and the record's; raise log.max_record_bytes or use more shards.
    """
    for codec in Codec:
        rows_a_record(row_bytes, codec=codec, limits=limits)


def delta_bytes_max(positions: int, *, row_bytes: int, codec: Codec) -> int:
    """The largest message that a delta of so many positions can become."""
    header = PREAMBLE_BYTES + _DELTA_HEADER_BYTES + _TOKEN_BYTES * positions
    return header + payload_bytes_max(positions * row_bytes, codec)
