"""The engine's side of an attach: copy pinned blocks out of the pool, verify the copy, and only then use it.

The daemon keeps pinned rows unchanged until they are released. This side relies on that for nothing: memory rots, links
close in mid-copy, daemons have bugs. Each block is copied into private memory first, each row of that copy is compared
with its checksum, and only verified rows are handed on. What is wrong ends the attach: a shorter prefix, never wrong
bytes.

Beside the engine's steps: Python's lock is free while numpy copies, but not while rows of less than 100 KB are hashed,
and a thread that never blocks keeps it for 5 ms from whoever asks. So this one sleeps for a moment after each MiB.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Self

import numpy as np

from kvlog.buffers.geometry import PinnedBlock
from kvlog.checksums import row_checksums
from kvlog.errors import DecodeError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.buffers.geometry import PoolGeometry

__all__ = ["Attachment", "copy_attached"]

_BYTES_AT_A_TIME: Final = 1 << 20
_PAUSE_SECONDS: Final = 20e-6
"""What the kernel makes of it is about 80 µs, in which whoever waits for Python's lock gets it."""


@dataclass(frozen=True, slots=True)
class Attachment:
    """What a daemon says can be attached: rows from position 0 in these blocks, in order.

    Args:
        row_bytes: size of a row, ≥ 1.
        blocks: where the rows are.
        row_checksums: `checksum` of each row, in order; their number is the attach's length.
    """

    row_bytes: int
    blocks: tuple[PinnedBlock, ...]
    row_checksums: Sequence[int]

    def first(self, rows: int) -> Self:
        """The same, cut to at most so many rows."""
        blocks, left = [], rows
        for block in self.blocks:
            if left <= 0:
                break
            blocks.append(PinnedBlock(block.index, min(block.rows, left)))
            left -= block.rows
        return type(self)(self.row_bytes, tuple(blocks), self.row_checksums[: max(0, rows)])


def copy_attached(
    pool: memoryview, geometry: PoolGeometry, attachment: Attachment, into: Callable[[memoryview], None]
) -> int:
    """Copy block by block into private memory, verify there, and hand the verified rows to `into`.

    Args:
        pool: the pool's shared memory, geometry.size_bytes long.
        geometry: the pool's.
        attachment: comes from another process, so nothing in it is believed.
        into: gets whole rows in order, token-major, read-only; they are gone when it returns.

    Returns:
        Rows handed on, from position 0: all, or those before the first row that did not verify.

    Raises:
        DecodeError: the attachment does not fit the pool or itself; nothing was handed on.
    """
    _check(pool, geometry, attachment)
    row_bytes, done, since = attachment.row_bytes, 0, 0
    theirs, ours = np.frombuffer(pool, np.uint8), np.empty(geometry.block_bytes, np.uint8)
    private = ours.data
    for block in attachment.blocks:
        at, size = block.index * geometry.block_bytes, block.rows * row_bytes
        ours[:size] = theirs[at : at + size]
        good = _verified_rows(private[:size], row_bytes, attachment.row_checksums[done : done + block.rows])
        since += size
        if since >= _BYTES_AT_A_TIME:
            since = 0
            time.sleep(_PAUSE_SECONDS)
        if good:
            into(private[: good * row_bytes].toreadonly())
        done += good
        if good < block.rows:
            break
    return done


def _verified_rows(rows: memoryview, row_bytes: int, expected: Sequence[int]) -> int:
    """How many rows from the first fit their checksums."""
    good = 0
    for actual, wanted in zip(row_checksums(rows, row_bytes), expected, strict=True):
        if actual != wanted:
            break
        good += 1
    return good


def _check(pool: memoryview, geometry: PoolGeometry, attachment: Attachment) -> None:
    if len(pool) < geometry.size_bytes or geometry.block_bytes < 1:
        raise DecodeError(problem="the pool's memory is shorter than its blocks")
    if attachment.row_bytes < 1:
        raise DecodeError(problem="an attach of rows without bytes")
    most = geometry.rows_a_block(attachment.row_bytes)
    for block in attachment.blocks:
        if not 0 <= block.index < geometry.blocks or not 1 <= block.rows <= most:
            raise DecodeError(problem="an attach names rows that are not in the pool", block=block)
    if sum(block.rows for block in attachment.blocks) != len(attachment.row_checksums):
        raise DecodeError(problem="an attach has not one checksum a row")
