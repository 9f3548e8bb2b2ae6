"""Rows of a paged cache, for every order that a kernel could have: gathered and scattered as plain indexing would."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlog.engines.page_order import PlaneOrder, plane_orders
from kvlog.engines.paged_rows import PagedStore, PageMap
from kvlog.layout import DType, Layout

LAYERS, BLOCKS = 3, 6
PERIOD = np.random.default_rng(5).permutation(40_009)
"""Repeated over a cache, with a period that no page has."""

WORDS = {DType.BFLOAT16: np.uint16, DType.FLOAT32: np.uint32}


def rows_of(size: int, dim: int) -> np.ndarray:
    """K and V of a position together, as a GPU kernel has them."""
    return np.arange(size * 2 * dim).reshape(size, 2, dim)


def columns_of(size: int, dim: int) -> np.ndarray:
    """K by dimension, then V by position: the CPU backend's `vec` kernels."""
    table = np.empty((size, 2, dim), np.int64)
    table[:, 0] = np.arange(size * dim).reshape(dim, size).T
    table[:, 1] = size * dim + np.arange(size * dim).reshape(size, dim)
    return table


def tiles_of(size: int, dim: int) -> np.ndarray:
    """K in tiles of 16 positions by pairs of dimensions, V in pairs of positions: as AMX wants 16-bit elements."""
    table = np.empty((size, 2, dim), np.int64)
    keys = np.arange(size * dim).reshape(size // 16, dim // 2, 16, 2)
    table[:, 0] = keys.transpose(0, 2, 1, 3).reshape(size, dim)
    values = size * dim + np.arange(size * dim).reshape(dim // 8, size // 2, 8, 2)
    table[:, 1] = values.transpose(1, 3, 0, 2).reshape(size, dim)
    return table


def anyhow(size: int, dim: int) -> np.ndarray:
    """No order at all."""
    return np.random.default_rng(size * dim).permutation(size * 2 * dim).reshape(size, 2, dim)


ORDERS = {"rows": rows_of, "columns": columns_of, "tiles": tiles_of, "anyhow": anyhow}


def plain(memory: np.ndarray, table: np.ndarray, blocks: list[int], positions: range) -> bytes:
    """Row after row by indexing: [layers, planes, heads, dim]."""
    size = len(table)
    rows = [memory[:, blocks[at // size]][:, :, table[at % size]].transpose(0, 2, 1, 3) for at in positions]
    return b"".join(np.ascontiguousarray(row).tobytes() for row in rows)


@pytest.mark.parametrize("dtype", WORDS)
@pytest.mark.parametrize("name", ORDERS)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_rows_of_any_order_and_run_are_those_of_plain_indexing(
    name: str, dtype: DType, data: st.DataObject
) -> None:
    """Single rows, runs that cross blocks, whole prefills; scattered they read the same, and nothing else changes."""
    size = data.draw(st.sampled_from([16, 32, 128]))
    heads, dim = data.draw(st.sampled_from([(1, 16), (2, 64), (8, 32)]))
    layout = Layout(LAYERS, 2, heads, dim, dtype)
    table = ORDERS[name](size, dim)
    shape = (LAYERS, BLOCKS, heads, size * 2 * dim)
    memory = np.resize(PERIOD, shape).astype(WORDS[dtype])
    store = PagedStore(list(memory), PageMap(table), layout)
    blocks = data.draw(st.permutations(range(BLOCKS)))
    start = data.draw(st.integers(0, 3 * size - 1))
    count = data.draw(st.one_of(st.just(1), st.integers(1, 3 * size - start)))
    rows = bytearray(count * layout.row_bytes)
    store.gather(blocks[:3], start, memoryview(rows))
    assert plain(memory, table, blocks, range(start, start + count)) == rows
    expected = memory.copy()
    for n in range(count):
        index, at = divmod(start + n, size)
        row = np.frombuffer(rows, WORDS[dtype]).reshape(count, LAYERS, 2, heads, dim)[n]
        expected[:, blocks[3 + index]][:, :, table[at]] = row.transpose(0, 2, 1, 3)
    store.scatter(blocks[3:], start, memoryview(bytes(rows)))
    assert np.array_equal(expected, memory)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rows", [(128, (64,), (1,)), (128, (64,), (1,))]),
        ("columns", [(1, (64,), (32,)), (64, (64,), (1,))]),
        ("tiles", [(0, (32, 2), (32, 1)), (0, (8, 8), (256, 2))]),
    ],
)
def test_orders_that_kernels_have_are_said_by_strides(
    name: str, expected: list[tuple[int, tuple[int, ...], tuple[int, ...]]]
) -> None:
    """Plain rows and columns by one digit a dimension, tiles by two."""
    orders = plane_orders(ORDERS[name](32, 64))
    assert orders is not None
    assert expected == [(order.step, order.sizes, order.strides) for order in orders]


def test_order_that_strides_cannot_say_is_not_guessed_at() -> None:
    """One element out of place, or planes of which one has no order: by the table."""
    table = rows_of(16, 16)
    table[3, 1, [4, 5]] = table[3, 1, [5, 4]]
    assert plane_orders(table) is None
    assert plane_orders(anyhow(16, 16)) is None


def test_page_of_one_position_or_one_dimension_has_an_order() -> None:
    """Nothing to step over."""
    assert plane_orders(np.arange(4).reshape(1, 1, 4)) == (PlaneOrder((0,), 1, (4,), (1,)),)
    assert plane_orders(np.arange(4).reshape(4, 1, 1)) == (PlaneOrder((0, 1, 2, 3), 1, (1,), (1,)),)
