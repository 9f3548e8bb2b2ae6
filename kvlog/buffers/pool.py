"""The block pool: the bytes of all sessions that this node holds, in memory that engines can read.

Allocated once, at start. Rows are copied into blocks (one copy a block), become present only when all of them have been
(`BlockPool.apply`, one call), and are read by engines through pinned blocks: see kvlog.buffers.blocks for where rows
lie, kvlog.buffers.attach for the other side. Row checksums are those of the bytes that were decoded, so that an engine
finds whatever happens to them afterwards.

On `cpu` the pool is a sealed memfd that only this process writes, and torch is not needed: importing it would add more
to the daemon's memory than everything else but the pool. `cuda:N`: kvlog.buffers.pool_cuda.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self

from kvlog.buffers.blocks import BlockTable, Key, LeaseId, PinnedBlocks
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.buffers.memory import SealedMemory, create
from kvlog.checksums import row_checksums
from kvlog.errors import ConfigError, PoolFull
from kvlog.ids import Position
from kvlog.limits import DEFAULT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.buffers.blocks import Piece
    from kvlog.ids import SessionId

__all__ = ["BlockPool", "BlockStore", "Extent", "HostStore", "PoolOptions", "open_pool"]

_DEVICE = re.compile(r"cpu|cuda:\d{1,3}")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """What a pool is made of.

    Args:
        bytes_total: all blocks together; rounded down to whole blocks.
        block_bytes: a block holds block_bytes // row_bytes rows; the largest row must fit. 2 MiB: 16 rows of 128 KiB.
        device: `cpu` or `cuda:N`.
        staging_bytes: host memory through which engines read a `cuda:N` pool; bounds the attaches at one time.
        pinned_share: the most that attaches may pin, in percent.

    Raises:
        ConfigError: a value is out of range.
    """

    bytes_total: int
    block_bytes: int = 2 << 20
    device: str = "cpu"
    staging_bytes: int = 1 << 30
    pinned_share: int = DEFAULT.pinned_blocks_share

    def __post_init__(self) -> None:
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(
                setting="pool.device", problem=f"{self.device!r} is no device", fix="write cpu, or cuda:0"
            )
        for setting, given in (("pool.bytes", self.bytes_total), ("pool.staging_bytes", self.staging_bytes)):
            if not 1 <= self.block_bytes <= given:
                raise ConfigError(
                    setting=setting,
                    problem=f"{given} bytes are less than one block of {self.block_bytes} bytes",
                    fix="make it larger, or pool.block_bytes smaller",
                )

    @property
    def geometry(self) -> PoolGeometry:
        """The pool's own blocks."""
        return PoolGeometry(self.block_bytes, self.bytes_total // self.block_bytes, self.device)


class Extent(NamedTuple):
    """Bytes [at, at + size) of a block."""

    block: int
    at: int
    size: int


class BlockStore(Protocol):
    """Where blocks' bytes are, and how engines get to read them. Used by one thread."""

    @property
    def geometry(self) -> PoolGeometry:
        """The store's blocks."""
        ...

    @property
    def shared_geometry(self) -> PoolGeometry:
        """The blocks of `memory`, as engines see them."""
        ...

    @property
    def memory(self) -> SealedMemory:
        """What engines map, read-only."""
        ...

    def open_views(self, extents: Sequence[Extent]) -> tuple[memoryview, ...]:
        """Host memory for each extent, to be written by the caller."""
        ...

    def store_views(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
        """Bring what was written into `views` to the blocks; they are not used again."""
        ...

    def copy_head(self, source: int, target: int, size: int) -> None:
        """Copy the first bytes of a block to another block."""
        ...

    def read(self, extent: Extent) -> bytes:
        """A copy of some bytes."""
        ...

    def share(self, blocks: Sequence[Extent]) -> tuple[int, ...]:
        """Let engines read the blocks; where they find each of them in `memory`.

        Raises:
            PoolFull: `memory` has no room for so many at one time.
        """
        ...

    def unshare(self, indexes: Sequence[int]) -> None:
        """Engines do not read these any more."""
        ...

    def close(self) -> None:
        """Give the memory back."""
        ...


class HostStore:
    """Blocks in a memfd: what engines read is the blocks themselves."""

    def __init__(self, geometry: PoolGeometry, memory: SealedMemory) -> None:
        self.geometry = self.shared_geometry = geometry
        self.memory = memory

    @classmethod
    def open(cls, options: PoolOptions) -> Self:
        """Allocate the memory.

        Raises:
            ConfigError: it is not there; make pool.bytes smaller.
        """
        geometry = options.geometry
        size_bytes = geometry.size_bytes
        return cls(geometry, create("kvlog-pool", size_bytes, setting="pool.bytes", creator_writes_only=True))

    def open_views(self, extents: Sequence[Extent]) -> tuple[memoryview, ...]:
        """The blocks' own bytes."""
        return tuple([self._view(extent) for extent in extents])

    def store_views(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
        """They are there already."""

    def copy_head(self, source: int, target: int, size: int) -> None:
        """Copy the first bytes of a block to another block."""
        self._view(Extent(target, 0, size))[:] = self._view(Extent(source, 0, size))

    def read(self, extent: Extent) -> bytes:
        """A copy of some bytes."""
        return bytes(self._view(extent))

    def share(self, blocks: Sequence[Extent]) -> tuple[int, ...]:
        """They are shared already, under their own numbers."""
        return tuple(extent.block for extent in blocks)

    def unshare(self, indexes: Sequence[int]) -> None:
        """Nothing was taken."""

    def close(self) -> None:
        """Give the memory back, as soon as no view of it is left."""
        self.memory.close()

    def _view(self, extent: Extent) -> memoryview:
        at = extent.block * self.geometry.block_bytes + extent.at
        return self.memory.view[at : at + extent.size]


class BlockPool:
    """Rows by session, shard and position. Used by one thread, or one event loop.

    What needs no bytes is done on `blocks` itself: mark_absent, touch, uses, ledger.counts.
    """

    def __init__(self, store: BlockStore, *, pinned_share: int) -> None:
        self.store = store
        self.blocks = BlockTable(store.geometry, pinned_share=pinned_share)
        self._shared: dict[LeaseId, tuple[int, ...]] = {}

    @property
    def geometry(self) -> PoolGeometry:
        """What engines have to know of `memory`."""
        return self.store.shared_geometry

    @property
    def memory(self) -> SealedMemory:
        """What engines map; hand out its `reader_fd()` only."""
        return self.store.memory

    def apply(
        self,
        key: Key,
        start: Position,
        rows: memoryview,
        row_bytes: int,
        checksums: Sequence[int] | None = None,
    ) -> bool:
        """Write rows [start, start + n) and make them present; rows that were there from start on are replaced.

        Args:
            rows: whole rows, n ≥ 1, format B, C-contiguous; copied.
            checksums: of each row, if the caller has just verified them; else they are computed.

        Returns:
            Whether they are present: not behind a hole (start > present_prefix).

        Raises:
            PoolFull: no blocks are free; the rows from start on are absent now, those before are still there.
            RowTooLarge: a row is larger than a block.
            LayoutMismatch: the rows before start have another size.
        """
        assert len(rows) % row_bytes == 0, "rows must be whole"
        if start > self.blocks.present_prefix(key):
            return False
        if checksums is None:
            checksums = row_checksums(rows, row_bytes)
        assert len(checksums) * row_bytes == len(rows), "a checksum for each row"
        placement = self.blocks.place(key, start, len(rows) // row_bytes, row_bytes)
        kept, written = start - placement.pieces[0].slot, checksums[:0]
        try:
            self._copy_heads(placement.pieces, row_bytes)
            kept = start
            self._copy_rows(placement.pieces, rows, row_bytes)
            written = checksums
        finally:
            self.blocks.settle(placement, written)
            if kept < start:  # its own block has none of the rows that the pinned one holds before these
                self.blocks.mark_absent(key, Position(kept))
        return True

    def present_prefix(self, key: Key) -> Position:
        """The number of rows from position 0 that are held."""
        return self.blocks.present_prefix(key)

    def cut(self, session: SessionId, length: Position) -> None:
        """Cut every shard of a session to at most `length` rows."""
        self.blocks.cut(session, length)

    def drop(self, session: SessionId) -> None:
        """Give a session's blocks back; the fold goes on without them."""
        self.blocks.drop(session)

    def pin(self, key: Key, length: Position) -> PinnedBlocks:
        """Let an engine read rows [0, length); their bytes do not change until `release`.

        Args:
            length: ≤ present_prefix(key).

        Returns:
            Blocks by their index in `memory`, and the rows' checksums.

        Raises:
            PoolFull: attaches hold their share already; try again when one was released.
        """
        pinned = self.blocks.pin(key, length)
        extents = [Extent(block.index, 0, block.rows * pinned.row_bytes) for block in pinned.blocks]
        try:
            indexes = self.store.share(extents)
        except PoolFull:
            self.blocks.release(pinned.lease)
            raise
        self._shared[pinned.lease] = indexes
        shared = zip(indexes, pinned.blocks, strict=True)
        return replace(pinned, blocks=tuple(PinnedBlock(index, block.rows) for index, block in shared))

    def release(self, lease: LeaseId) -> None:
        """The engine has copied what it needs, or its link has closed; exactly once for each `pin`."""
        self.store.unshare(self._shared.pop(lease))
        self.blocks.release(lease)

    def read(self, key: Key, start: Position, n: int) -> bytes:
        """A copy of present rows [start, start + n), for tools and proofs."""
        return b"".join(
            self.store.read(Extent(span.block, span.slot * span.row_bytes, span.rows * span.row_bytes))
            for span in self.blocks.locate(key, start, n)
        )

    def close(self) -> None:
        """Give the memory back; engines that have mapped it keep it until they close it."""
        self.store.close()

    def _copy_heads(self, pieces: Sequence[Piece], row_bytes: int) -> None:
        for piece in pieces:
            if piece.copy_from is not None:
                self.store.copy_head(piece.copy_from, piece.block, piece.slot * row_bytes)

    def _copy_rows(self, pieces: Sequence[Piece], rows: memoryview, row_bytes: int) -> None:
        extents = _extents(pieces, row_bytes)
        views = self.store.open_views(extents)
        at = 0
        for view in views:
            view[:] = rows[at : at + len(view)]
            at += len(view)
        self.store.store_views(extents, views)


def _extents(pieces: Sequence[Piece], row_bytes: int) -> list[Extent]:
    return [Extent(p.block, p.slot * row_bytes, p.rows * row_bytes) for p in pieces]


def open_pool(options: PoolOptions) -> BlockPool:
    """Allocate a pool on its device.

    Raises:
        ConfigError: the memory or the device is not there; nothing was started.
    """
    if options.device == "cpu":
        return BlockPool(HostStore.open(options), pinned_share=options.pinned_share)
    # Here and not above: torch adds hundreds of megabytes to a daemon that has no device.
    from kvlog.buffers.pool_cuda import open_device_store  # noqa: PLC0415

    return BlockPool(open_device_store(options), pinned_share=options.pinned_share)
