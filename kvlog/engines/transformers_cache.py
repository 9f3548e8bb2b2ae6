"""A transformers cache whose rows can be taken out and put in, token-major, with one copy each.

All layers live in one tensor, head-major inside a layer, as the attention kernels like it:

    store[layer, plane, kv_head, position, head_dim]     plane 0 is K, 1 is V; positions beyond `length` are garbage

so a layer's K is a view [1, kv_heads, length, head_dim] and a run of rows is one strided copy of the whole store.
Attention over these views is bit-equal to attention over DynamicCache's own tensors (tests/unit/engines).

Why so (one thread; SmolLM2-135M 23,040 B a row, 8B class 128 KiB a row; medians):

    copy_rows, n = 1       7 µs / 19 µs (memcpy of the same bytes: 2 / 9); a torch copy_ a layer: 440 / 590
    copy_rows, n = 16      37 µs / 190 µs (memcpy: 18 / 250)
    token-major store      copy_rows is a memcpy, but attention over it takes 1.5-2.5 times as long
    token-major mirror     two more copies a layer at each step: 0.9-1.1 ms a step
    DynamicCache           copies the whole cache at each step: 12 ms at 2,000 tokens, growing; here growth doubles

A row's elements are moved as 64-bit words where its heads allow it: numpy moves those at twice the speed of bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from kvlog.errors import LocalProtocolError
from kvlog.layout import DTYPE_BYTES, DType

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvlog.layout import Layout

__all__ = ["TORCH_DTYPES", "ReplicatedCache"]

TORCH_DTYPES = {DType.BFLOAT16: torch.bfloat16, DType.FLOAT16: torch.float16, DType.FLOAT32: torch.float32}

_POSITIONS_FIRST = 256
"""Capacity of a cache's first store; doubled when full."""

_POSITIONS_STEP = 64
"""Capacities are multiples of this, so that every head's part begins at a cache line."""


class ReplicatedCache:
    """One request's cache: a RowCache for the adapter, and a transformers Cache for the model (`model_cache`).

    Args:
        layout: of a row; planes is 2.
        positions_max: the longest it may grow.
    """

    def __init__(self, layout: Layout, positions_max: int) -> None:
        assert layout.planes == 2, "K and V"  # noqa: PLR2004 - the module docstring draws it
        self._layout = layout
        self._positions_max = positions_max
        self._filled = [0] * layout.layers
        self._capacity = 0
        self._store = _empty(layout, 0)
        self._words = _words(self._store)
        self._planes: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.model_cache = Cache(layers=[_StoreLayer(self, index) for index in range(layout.layers)])

    @property
    def length(self) -> int:
        """Positions whose KV all layers hold."""
        return min(self._filled)

    def filled(self, layer: int) -> int:
        """Positions that one layer holds; differs from `length` only in the middle of a forward pass."""
        return self._filled[layer]

    def append(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add one layer's new rows and return all of that layer's, as views.

        Shape: keys, values [1, kv_heads, n, head_dim] → [1, kv_heads, filled + n, head_dim].
        """
        assert keys.dtype == values.dtype == self._store.dtype, "a cast would change the bytes"
        assert keys.shape[0] == 1, "one request in a cache"
        start, count = self._filled[layer], keys.shape[2]
        end = start + count
        self._make_room(end)
        all_keys, all_values = self._planes[layer]
        all_keys.narrow(2, start, count).copy_(keys)
        all_values.narrow(2, start, count).copy_(values)
        self._filled[layer] = end
        return all_keys.narrow(2, 0, end), all_values.narrow(2, 0, end)

    def copy_rows(self, start: int, out: memoryview) -> None:
        """Copy rows [start, start + len(out) / row_bytes) into `out`, token-major.

        Args:
            start: first position.
            out: writable, C-contiguous, format B, whole rows; not kept.
        """
        rows = self._as_rows(out)
        end = start + rows.shape[0]
        assert 0 <= start <= end <= self.length, "rows that the cache holds"
        np.copyto(rows, self._words[:, :, :, start:end].transpose(3, 0, 1, 2, 4))

    def load_rows(self, rows: memoryview) -> None:
        """Append whole token-major rows at position `length`; `rows` is read before this returns and not kept.

        Raises:
            LocalProtocolError: more positions than the model has; send a shorter sequence.
        """
        source = self._as_rows(rows)
        start = self.length
        end = start + source.shape[0]
        self._make_room(end)
        np.copyto(self._words[:, :, :, start:end], source.transpose(1, 2, 3, 0, 4))
        self._filled = [end] * self._layout.layers

    def cut(self, length: int) -> None:
        """Forget all positions from `length` on, and what a failed forward pass left in some layers."""
        assert 0 <= length <= self.length, "a cut does not invent rows"
        self._filled = [length] * self._layout.layers

    def _as_rows(self, data: memoryview) -> npt.NDArray[np.generic]:
        """View whole rows as [n, layers, planes, kv_heads, words of a head]."""
        assert len(data) % self._layout.row_bytes == 0, "whole rows"
        layers, planes, heads, _, words = self._words.shape
        return np.frombuffer(data, self._words.dtype).reshape(-1, layers, planes, heads, words)

    def _make_room(self, positions: int) -> None:
        if positions > self._positions_max:
            raise LocalProtocolError(
                positions=positions, positions_max=self._positions_max, send="fewer tokens"
            )
        if positions <= self._capacity:
            return
        wanted = min(max(positions, 2 * self._capacity, _POSITIONS_FIRST), self._positions_max)
        capacity = -(-wanted // _POSITIONS_STEP) * _POSITIONS_STEP
        store = _empty(self._layout, capacity)
        used = max(self._filled)
        store[:, :, :, :used].copy_(self._store[:, :, :, :used])
        self._store, self._capacity, self._words = store, capacity, _words(store)
        self._planes = [(layer[0].unsqueeze(0), layer[1].unsqueeze(0)) for layer in store]


class _StoreLayer(CacheLayerMixin):
    """What the model sees of one layer of a ReplicatedCache."""

    is_sliding = False

    def __init__(self, cache: ReplicatedCache, index: int) -> None:
        super().__init__()
        self._cache = cache
        self._index = index
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing is left to do: the layout is known before the first token."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the step's rows and return all rows."""
        return self._cache.append(self._index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length with the coming step, and offset, for the attention mask."""
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        """Positions of this layer."""
        return self._cache.filled(self._index)

    def get_max_length(self) -> int:
        """No bound that the mask should know of."""
        return -1


def _empty(layout: Layout, capacity: int) -> torch.Tensor:
    shape = (layout.layers, layout.planes, layout.kv_heads, capacity, layout.head_dim)
    return torch.empty(shape, dtype=TORCH_DTYPES[layout.dtype])


def _words(store: torch.Tensor) -> npt.NDArray[np.generic]:
    """View the store as whole 64-bit words if a head's row is a number of them, else as bytes."""
    by_words = store.shape[-1] * store.element_size() % 8 == 0
    view: npt.NDArray[np.generic] = store.view(torch.int64 if by_words else torch.uint8).numpy()
    return view


assert all(DTYPE_BYTES[name] == dtype.itemsize for name, dtype in TORCH_DTYPES.items()), (
    "two tables, one truth"
)
