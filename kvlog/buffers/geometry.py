"""What both sides of a pool must agree on to find a row in it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PinnedBlock", "PoolGeometry"]


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The shape of a pool's shared memory: `blocks` blocks of `block_bytes`, one after the other.

    Args:
        block_bytes: a block holds block_bytes // row_bytes rows from its beginning; the rest of it is unused.
        blocks: how many blocks the shared memory has.
        device: where the pool itself is: `cpu`, or `cuda:N`, whose shared memory is a staging area on the host.
    """

    block_bytes: int
    blocks: int
    device: str

    @property
    def size_bytes(self) -> int:
        """Size of the shared memory."""
        return self.blocks * self.block_bytes

    def rows_a_block(self, row_bytes: int) -> int:
        """Rows of this size that one block holds; 0: not even one."""
        return self.block_bytes // row_bytes


@dataclass(frozen=True, slots=True)
class PinnedBlock:
    """A block's index in the shared memory, and how many rows from its slot 0 belong to the attach."""

    index: int
    rows: int
