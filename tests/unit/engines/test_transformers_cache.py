"""The store behind a request's cache: rows in and out against the obvious way of doing it."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kvlog.engines.transformers_cache import TORCH_DTYPES, ReplicatedCache
from kvlog.errors import LocalProtocolError
from kvlog.layout import DType, Layout

WORDS = Layout(layers=3, planes=2, kv_heads=2, head_dim=8, dtype=DType.BFLOAT16)
BYTES = Layout(layers=2, planes=2, kv_heads=3, head_dim=3, dtype=DType.FLOAT16)
"""A head's row of 6 bytes is no number of 64-bit words."""


def _fill(cache: ReplicatedCache, layout: Layout, count: int, seed: int = 0) -> torch.Tensor:
    """Appends `count` positions to every layer, as a model does. Returns: [count, layers, 2, kv_heads, head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (count, layout.layers, 2, layout.kv_heads, layout.head_dim)
    rows = torch.randn(shape, generator=generator).to(TORCH_DTYPES[layout.dtype])
    for layer in range(layout.layers):
        keys, values = (rows[:, layer, plane].transpose(0, 1).unsqueeze(0) for plane in (0, 1))
        cache.model_cache.update(keys, values, layer)
    return rows


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("layout", [WORDS, BYTES])
def test_copy_rows_gives_token_major_rows(layout: Layout) -> None:
    """A row is [layers, K and V, kv_heads, head_dim] of one position, whatever the store looks like."""
    cache = ReplicatedCache(layout, 1000)
    rows = torch.cat([_fill(cache, layout, count, count) for count in (5, 1, 1, 300, 1)])
    assert (308, 308 * layout.row_bytes) == (cache.length, len(_bytes(rows)))
    for start, count in ((0, 308), (4, 3), (307, 1), (10, 0)):
        out = bytearray(count * layout.row_bytes)
        cache.copy_rows(start, memoryview(out))
        assert _bytes(rows[start : start + count]) == bytes(out)


@pytest.mark.parametrize("layout", [WORDS, BYTES])
def test_load_rows_in_pieces_gives_back_the_same_rows(layout: Layout) -> None:
    """Attached rows come in blocks of any size and are appended in order."""
    first, second = ReplicatedCache(layout, 1000), ReplicatedCache(layout, 1000)
    expected = _bytes(_fill(first, layout, 270))
    data = memoryview(expected)
    for start in range(0, 270, 90):
        second.load_rows(data[start * layout.row_bytes : (start + 90) * layout.row_bytes])
    out = bytearray(len(expected))
    second.copy_rows(0, memoryview(out))
    assert expected == bytes(out)
    for layer in range(layout.layers):
        ours, theirs = first._planes[layer], second._planes[layer]
        assert all(one[:, :, :270].equal(other[:, :, :270]) for one, other in zip(ours, theirs, strict=True))


def test_update_returns_all_rows_of_the_layer() -> None:
    """The model attends over what it gets back: all positions so far, in order."""
    cache = ReplicatedCache(WORDS, 1000)
    rows = torch.cat([_fill(cache, WORDS, 4, 1), _fill(cache, WORDS, 2, 2)])
    more = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16)
    keys, values = cache.model_cache.update(more, -more, 1)
    assert (1, 2, 7, 8) == tuple(keys.shape)
    assert torch.cat([rows[:, 1, 0].transpose(0, 1)[None], more], 2).equal(keys)
    assert torch.cat([rows[:, 1, 1].transpose(0, 1)[None], -more], 2).equal(values)


def test_length_is_that_of_the_shortest_layer() -> None:
    """In the middle of a forward pass, or after one that died, a position is whole only when all layers have it."""
    cache = ReplicatedCache(WORDS, 1000)
    _fill(cache, WORDS, 4)
    more = torch.ones(1, 2, 1, 8, dtype=torch.bfloat16)
    cache.model_cache.update(more, more, 0)
    assert (4, 5, 4) == (cache.length, cache.filled(0), cache.filled(1))
    cache.cut(4)
    assert [4, 4, 4] == [cache.filled(layer) for layer in range(3)]


def test_cut_then_load_replaces_what_was_there() -> None:
    """A cache that was cut holds the new rows and no byte of the old ones."""
    cache = ReplicatedCache(WORDS, 1000)
    old, new = _fill(cache, WORDS, 20, 1), _fill(ReplicatedCache(WORDS, 100), WORDS, 5, 2)
    cache.cut(10)
    cache.load_rows(memoryview(_bytes(new)))
    out = bytearray(15 * WORDS.row_bytes)
    cache.copy_rows(0, memoryview(out))
    assert _bytes(torch.cat([old[:10], new])) == bytes(out)


def test_load_rows_of_an_unaligned_view_gives_the_same_rows() -> None:
    """Rows may begin at any byte of a buffer."""
    expected = _bytes(_fill(ReplicatedCache(WORDS, 100), WORDS, 3))
    cache = ReplicatedCache(WORDS, 100)
    cache.load_rows(memoryview(b"?" + expected)[1:])
    out = bytearray(len(expected) + 1)
    cache.copy_rows(0, memoryview(out)[1:])
    assert b"\0" + expected == bytes(out)


def test_load_rows_past_the_last_position_is_refused() -> None:
    """A cache does not grow beyond its model, and stays as it was."""
    cache = ReplicatedCache(WORDS, 100)
    cache.load_rows(memoryview(bytes(100 * WORDS.row_bytes)))
    with pytest.raises(LocalProtocolError) as caught:
        cache.load_rows(memoryview(bytes(WORDS.row_bytes)))
    assert (101, 100) == (caught.value.fields["positions"], caught.value.fields["positions_max"])
    assert cache.length == 100


def test_append_of_another_dtype_is_a_fault() -> None:
    """A cast would change the bytes behind the layout's back."""
    cache = ReplicatedCache(WORDS, 100)
    more = torch.ones(1, 2, 1, 8)
    with pytest.raises(AssertionError, match="cast"):
        cache.append(0, more, more)


@pytest.mark.parametrize("layout", [WORDS, BYTES])
def test_store_moves_whole_words_where_it_can(layout: Layout) -> None:
    """Moving 64-bit words is twice as fast in numpy as moving bytes."""
    cache = ReplicatedCache(layout, 100)
    _fill(cache, layout, 1)
    assert (np.int64 if layout is WORDS else np.uint8) == cache._words.dtype
