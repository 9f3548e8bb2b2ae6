"""Token-major rows out of and into a paged cache: blocks of positions, each layer in a tensor of its own.

A page is one block of one head in one layer, `block_size` positions of K and V in whatever order the engine's kernel
likes them. The order is data: `PageMap` says where in a page each element of a position lies. Kernels mostly use an
order that strides can say, tiles too (kvlog.engines.page_order); then a run of rows is a strided copy for each plane.
Any other goes through an index.

Cost: a row whose keys lie in columns has each of its elements in a cache line of its own, 32,768 of them for a row of
128 KiB, and no order of copying makes them fewer; a run of rows in one block shares them. So long runs are copied layer
by layer, while the lines are near, and short ones all at once. Measured: tests/bench/paged_copy.py.

    layers[layer][block, head, element of the page]      what the engine has
    map.table[position in the block, plane, dim]         which element of the page
    rows[n, layer, plane, head, dim]                     what the log has
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvlog.engines.page_order import plane_orders, view_plane
from kvlog.errors import LocalProtocolError
from kvlog.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvlog.engines.device_queue import Mark
    from kvlog.engines.page_order import PlaneOrder
    from kvlog.engines.row_store import StepRows
    from kvlog.layout import Layout

__all__ = ["PageMap", "PagedRows", "PagedStore"]

_TABLE_AXES: Final = 3
_PAGE_AXES: Final = 3
_BY_LAYER: Final = 1 << 13
"""Elements of a plane in one layer from which on a call for each layer costs less than the cache lines it saves."""

_WORDS: Final = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class PageMap:
    """Where in a page the elements of each position lie.

    Args:
        table: offsets in a page, a permutation of 0 to its size − 1. Shape: [block_size, planes, head_dim].

    Raises:
        LocalProtocolError: it is no permutation; the probe has misread the kernel.
    """

    def __init__(self, table: npt.NDArray[np.int64]) -> None:
        assert table.ndim == _TABLE_AXES, "[block_size, planes, head_dim]"
        if not np.array_equal(np.sort(table, axis=None), np.arange(table.size)):
            raise LocalProtocolError(problem="the map of a page is no permutation of its elements")
        self.table = table
        self.orders = plane_orders(table)

    @property
    def block_size(self) -> int:
        """Positions in a page."""
        return int(self.table.shape[0])


class PagedStore:
    """All layers of an engine's paged cache on the CPU.

    Args:
        layers: one view each, of the same shape, strides and item size. Shape: [blocks, heads, page size]. Not copied;
            the engine must keep them as long as this lives.
        page_map: order of a page.
        layout: of a row.
    """

    def __init__(self, layers: Sequence[npt.NDArray[np.generic]], page_map: PageMap, layout: Layout) -> None:
        first = layers[0]
        pages = (layout.kv_heads, page_map.table.size)
        assert first.ndim == _PAGE_AXES, "[blocks, heads, page size]"
        assert first.shape[1:] == pages, "pages that the map describes"
        assert len(layers) == layout.layers, "a view a layer"
        assert first.itemsize == DTYPE_BYTES[layout.dtype], "elements of the layout's dtype"
        self._layout = layout
        self._row_bytes = layout.row_bytes
        self._shape = (-1, layout.layers, layout.planes, layout.kv_heads, layout.head_dim)
        self._word = np.dtype(_WORDS[DTYPE_BYTES[layout.dtype]])
        self._map = page_map
        self._layers = tuple(layers)
        self._parts = _parts(self._layers)
        orders = page_map.orders or ()
        self._views = [[view_plane(part, order) for order in orders] for part in self._parts]

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return self._map.block_size

    @property
    def blocks(self) -> int:
        """Blocks of the cache."""
        return int(self._layers[0].shape[0])

    @property
    def layout(self) -> Layout:
        """Of a row."""
        return self._layout

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._row_bytes

    @property
    def is_replicated(self) -> bool:
        """Every rank computes the same rows: a latent vector belongs to all heads, so one rank logs for all."""
        return self._layout.planes == 1

    def open_rows(self) -> PagedRows:
        """One request's rows."""
        return PagedRows(self)

    def gather_step(self, sources: Sequence[tuple[StepRows, int]]) -> None:
        """Nothing: rows are read when they are written to the ring."""

    def drain(self) -> None:
        """Nothing."""

    def fence(self) -> None:
        """Nothing: blocks can be written as soon as they are given."""

    def gather(self, blocks: Sequence[int], start: int, out: memoryview) -> None:
        """Copy rows [start, start + len(out) / row_bytes) of a block table into `out`, token-major.

        Args:
            blocks: the request's block table, from position 0.
            start: first position.
            out: writable, C-contiguous, format B, whole rows; not kept.
        """
        rows = self._as_rows(out)
        for block, first, count, at in self._runs(blocks, start, len(rows)):
            self._copy_run(rows[at : at + count], block, first, into_cache=False)

    def scatter(self, blocks: Sequence[int], start: int, rows: memoryview, after: Mark | None = None) -> None:
        """Put whole token-major rows at positions from `start` on; `rows` is read before this returns and not kept."""
        assert after is None, "this store has no stream"
        source = self._as_rows(rows)
        for block, first, count, at in self._runs(blocks, start, len(source)):
            self._copy_run(source[at : at + count], block, first, into_cache=True)

    def _copy_run(self, rows: npt.NDArray[np.generic], block: int, first: int, *, into_cache: bool) -> None:
        layer, orders = 0, self._map.orders
        for part, views in zip(self._parts, self._views, strict=True):
            some = rows[:, layer : layer + len(part)]
            layer += len(part)
            if orders is None:
                self._copy_indexed(some, part[:, block], first, into_cache=into_cache)
                continue
            for plane, view in enumerate(views):
                order, ours = orders[plane], some[:, :, plane]
                if len(order.sizes) > 1:
                    ours = ours.reshape((*ours.shape[:3], *order.sizes))
                _copy_plane(ours, view[block], (order, first), into_cache=into_cache)

    def _copy_indexed(
        self, rows: npt.NDArray[np.generic], pages: npt.NDArray[np.generic], first: int, *, into_cache: bool
    ) -> None:
        """By the map's table: [layers, heads, page] on one side, [n, layers, planes, heads, dim] on the other."""
        where = self._map.table[first : first + len(rows)]
        if into_cache:
            pages[:, :, where] = rows.transpose(1, 3, 0, 2, 4)
        else:
            rows[...] = pages[:, :, where].transpose(2, 0, 3, 1, 4)

    def _runs(self, blocks: Sequence[int], start: int, count: int) -> Iterator[tuple[int, int, int, int]]:
        """Cut positions at block borders: (block, first position in it, positions, index of the first row)."""
        size, at = self.block_size, 0
        assert start + count <= size * len(blocks), "positions that the block table has"
        while at < count:
            index, first = divmod(start + at, size)
            many = min(size - first, count - at)
            yield blocks[index], first, many, at
            at += many

    def _as_rows(self, data: memoryview) -> npt.NDArray[np.generic]:
        """View whole rows as [n, layers, planes, heads, dim]."""
        assert len(data) % self._row_bytes == 0, "whole rows"
        return np.frombuffer(data, self._word).reshape(self._shape)


class PagedRows:
    """One request's rows in a paged cache: a RowCache over its block table.

    `length` is what may be read: set by `settle` to the watermark of the step that has just been computed, because
    blocks are given before they are filled.
    """

    def __init__(self, store: PagedStore) -> None:
        self._store = store
        self._blocks: list[int] = []
        self._length = 0

    @property
    def length(self) -> int:
        """Positions whose KV may be read, from 0 without a hole."""
        return self._length

    @property
    def blocks(self) -> Sequence[int]:
        """The block table."""
        return self._blocks

    def take_blocks(self, blocks: Sequence[int], *, anew: bool) -> None:
        """The request holds more blocks, or, `anew`, other ones."""
        if anew:
            self._blocks = []
            self._length = 0
        self._blocks += blocks

    @property
    def is_pending(self) -> bool:
        """No: what is computed can be read."""
        return False

    def give_up_blocks(self) -> None:
        """Nothing is under way."""
        self.take_blocks((), anew=True)

    def close(self) -> None:
        """Nothing is kept."""

    def settle(self, length: int) -> None:
        """Positions below `length` are computed, as far as there are blocks; may be less than before."""
        self._length = min(length, len(self._blocks) * self._store.block_size)

    def copy_rows(self, start: int, out: memoryview) -> None:
        """Copy rows [start, start + len(out) / row_bytes) into `out`, token-major.

        Args:
            start: first position.
            out: writable, C-contiguous, format B, whole rows; not kept.
        """
        assert 0 <= start <= start + len(out) // self._store.row_bytes <= self._length, (
            "rows that are computed"
        )
        self._store.gather(self._blocks, start, out)

    def load_rows(self, rows: memoryview) -> None:
        """Append whole token-major rows at position `length`; `rows` is read before this returns and not kept."""
        self._store.scatter(self._blocks, self._length, rows)
        self._length += len(rows) // self._store.row_bytes

    def cut(self, length: int) -> None:
        """Forget all positions from `length` on."""
        assert 0 <= length <= self._length, "a cut does not invent rows"
        self._length = length


def _copy_plane(
    rows: npt.NDArray[np.generic],
    page: npt.NDArray[np.generic],
    at: tuple[PlaneOrder, int],
    *,
    into_cache: bool,
) -> None:
    """One plane of a run: [n, layers, heads, *sizes] on one side, [start, layers, heads, *sizes] on the other."""
    (order, first), count = at, len(rows)
    if count == 1 or not order.step:
        for index, start in enumerate(order.starts[first : first + count]):
            _copy(rows[index], page[start], into_cache=into_cache)
        return
    cached = page[order.starts[first] : order.starts[first + count - 1] + 1 : order.step]
    if rows.size < _BY_LAYER * rows.shape[1]:
        _copy(rows, cached, into_cache=into_cache)
        return
    crosses = into_cache and len(order.sizes) == 1 and order.step < order.strides[0]
    near = _near(rows) if crosses else None
    for layer in range(rows.shape[1]):
        mine = rows[:, layer]
        if near is not None:
            near[...] = mine
            mine = near
        _copy(mine, cached[:, layer], into_cache=into_cache)


def _near(rows: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Room for one layer of a run, as [n, heads, dim]: head by head, with gaps.

    What goes into columns is read across rows. Rows of the log lie a power of two apart, so that whole runs of them
    fall into a few sets of a cache; 64 bytes between them spread them out. 1.3 GB/s instead of 0.55, rows of 128 KiB.
    """
    count, _, heads, dim = rows.shape
    gap = 64 // rows.itemsize
    return np.empty((heads, count, dim + gap), rows.dtype)[..., :dim].transpose(1, 0, 2)


def _copy(rows: npt.NDArray[np.generic], cached: npt.NDArray[np.generic], *, into_cache: bool) -> None:
    if into_cache:
        cached[...] = rows
    else:
        rows[...] = cached


def _parts(layers: tuple[npt.NDArray[np.generic], ...]) -> list[npt.NDArray[np.generic]]:
    """All layers as one array [layers, blocks, heads, page] where they lie equally far apart, else one array each."""
    first = layers[0]
    at = [layer.__array_interface__["data"][0] for layer in layers]
    step = at[1] - at[0] if len(layers) > 1 else 0
    alike = all(layer.strides == first.strides and layer.shape == first.shape for layer in layers)
    assert alike, "layers of one shape"
    if all(place == at[0] + index * step for index, place in enumerate(at)):
        return [as_strided(first, (len(layers), *first.shape), (step, *first.strides))]
    return [layer[None] for layer in layers]
