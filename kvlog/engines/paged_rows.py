"""Token-major rows out of and into a paged cache: blocks of positions, each layer in a tensor of its own.

A page is one block of one head in one layer, `block_size` positions of K and V in whatever order the engine's kernel
likes them. The order is data: `PageMap` says where in a page each element of a position lies. Kernels mostly use an
order that strides can say; then a run of rows is one strided copy for K and one for V, over all layers at once. One
that strides cannot say (tiles) goes through an index.

    layers[layer][block, head, element of the page]      what the engine has
    map.table[position in the block, plane, dim]         which element of the page
    rows[n, layer, plane, head, dim]                     what the log has
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvlog.errors import LocalProtocolError
from kvlog.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvlog.engines.device_queue import Mark
    from kvlog.engines.row_store import StepRows
    from kvlog.layout import Layout

__all__ = ["PageMap", "PagedRows", "PagedStore"]

_TABLE_AXES: Final = 3
_PAGE_AXES: Final = 3
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
        self.strides = _strides(table)

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
        self._map = page_map
        self._layers = tuple(layers)
        self._parts = _parts(self._layers)
        self._planes = None if page_map.strides is None else [_planes(part, page_map) for part in self._parts]

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
        return self._layout.row_bytes

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
        layer = 0
        for index, part in enumerate(self._parts):
            some = rows[:, layer : layer + len(part)]
            layer += len(part)
            if self._planes is None:
                self._copy_indexed(some, part[:, block], first, into_cache=into_cache)
                continue
            for plane, view in enumerate(self._planes[index]):
                cached = view[:, block, :, first : first + len(rows)].transpose(2, 0, 1, 3)
                if into_cache:
                    cached[...] = some[:, :, plane]
                else:
                    some[:, :, plane] = cached

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
        layout = self._layout
        assert len(data) % layout.row_bytes == 0, "whole rows"
        shape = (-1, layout.layers, layout.planes, layout.kv_heads, layout.head_dim)
        return np.frombuffer(data, _WORDS[DTYPE_BYTES[layout.dtype]]).reshape(shape)


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


def _strides(table: npt.NDArray[np.int64]) -> list[tuple[int, int, int]] | None:
    """Each plane as (offset, stride of a position, stride of a dim), if strides can say it."""
    positions, planes, dims = table.shape
    n, d = np.arange(positions)[:, None], np.arange(dims)[None]
    found = []
    for plane in range(planes):
        part = table[:, plane]
        at = int(part[0, 0])
        a_position = int(part[1, 0]) - at if positions > 1 else 0
        a_dim = int(part[0, 1]) - at if dims > 1 else 0
        if not np.array_equal(part, at + n * a_position + d * a_dim):
            return None
        found.append((at, a_position, a_dim))
    return found


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


def _planes(part: npt.NDArray[np.generic], page_map: PageMap) -> list[npt.NDArray[np.generic]]:
    """Each plane as [layers, blocks, heads, position, dim], a view."""
    positions, _, dims = page_map.table.shape
    *outer, element = part.strides
    assert page_map.strides is not None, "asked before"
    return [
        as_strided(
            part[..., at:],
            (*part.shape[:-1], positions, dims),
            (*outer, a_position * element, a_dim * element),
        )
        for at, a_position, a_dim in page_map.strides
    ]
