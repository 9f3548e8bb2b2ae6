"""Rows in and out of pages, against the plainest possible reading of the map."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines.paged_rows import PagedRows, PagedStore, PageMap
from kvlog.errors import LocalProtocolError
from kvlog.layout import DType, Layout

LAYERS, HEADS, DIM, BLOCKS, SIZE = 3, 2, 4, 6, 8
LAYOUT = Layout(LAYERS, 2, HEADS, DIM, DType.BFLOAT16)
PAGE = SIZE * 2 * DIM
ORDER = np.arange(PAGE).reshape(SIZE, 2, DIM)


def column_major_keys() -> np.ndarray:
    """As the CPU kernels have it: K as [dim, position], then V as [position, dim]."""
    table = np.empty((SIZE, 2, DIM), np.int64)
    table[:, 0] = np.arange(SIZE * DIM).reshape(DIM, SIZE).T
    table[:, 1] = SIZE * DIM + np.arange(SIZE * DIM).reshape(SIZE, DIM)
    return table


def shuffled() -> np.ndarray:
    """An order that no strides can say, as tiles are."""
    return np.random.default_rng(7).permutation(PAGE).reshape(SIZE, 2, DIM)


TABLES = {"rows": ORDER, "vec": column_major_keys(), "tiles": shuffled()}


def memory(*, together: bool) -> list[np.ndarray]:
    """Each layer's pages, of random bytes, in one allocation or in several of uneven places."""
    rng = np.random.default_rng(3)
    whole = rng.integers(0, 1 << 16, (LAYERS, BLOCKS, HEADS, PAGE), np.uint16)
    if together:
        return list(whole)
    apart = np.zeros((LAYERS + 4, BLOCKS, HEADS, PAGE), np.uint16)
    apart[[0, 2, 5]] = whole
    return [apart[0], apart[2], apart[5]]


def plain(layers: list[np.ndarray], table: np.ndarray, blocks: list[int], position: int) -> bytes:
    """One row, element by element."""
    block, at = blocks[position // SIZE], position % SIZE
    row = [layers[x][block, head, table[at, plane, d]]
           for x in range(LAYERS) for plane in range(2) for head in range(HEADS) for d in range(DIM)]  # fmt: skip
    return np.array(row, np.uint16).tobytes()


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("name", TABLES)
@given(data=st.data())
def test_store_gathers_what_the_map_says_and_scatters_it_back(
    name: str, together: bool, data: st.DataObject
) -> None:
    """Any run of any block table: each element where the map says; scattered elsewhere, it reads the same there."""
    layers = memory(together=together)
    store = PagedStore(layers, PageMap(TABLES[name]), LAYOUT)
    table = data.draw(st.permutations(range(BLOCKS)))
    blocks, others = table[:3], table[3:]
    start = data.draw(st.integers(0, 3 * SIZE - 1))
    count = data.draw(st.integers(1, 3 * SIZE - start))
    rows = bytearray(count * LAYOUT.row_bytes)
    store.gather(blocks, start, memoryview(rows))
    expected = b"".join(plain(layers, TABLES[name], blocks, start + n) for n in range(count))
    assert expected == rows
    before = [layer.copy() for layer in layers]
    store.scatter(others, start, memoryview(bytes(rows)))
    back = bytearray(len(rows))
    store.gather(others, start, memoryview(back))
    assert rows == back
    changed = sum(int((old != new).sum()) for old, new in zip(before, layers, strict=True))
    assert changed <= count * LAYERS * 2 * HEADS * DIM


@pytest.mark.parametrize(("name", "has"), [("rows", True), ("vec", True), ("tiles", False)])
def test_map_knows_whether_strides_say_it(name: str, has: bool) -> None:
    """Kernels that write plain rows and columns are copied without an index."""
    assert has == (PageMap(TABLES[name]).orders is not None)


def test_map_that_is_no_permutation_is_refused() -> None:
    """Two elements in one place would be one element lost."""
    table = ORDER.copy()
    table[0, 0, 0] = 1
    with pytest.raises(LocalProtocolError, match="no permutation"):
        PageMap(table)


def test_rows_are_readable_up_to_the_watermark_and_the_blocks() -> None:
    """Blocks are given before they are filled; a watermark beyond them is cut; it may fall."""
    rows = PagedRows(PagedStore(memory(together=True), PageMap(ORDER), LAYOUT))
    rows.take_blocks([4], anew=True)
    rows.take_blocks([2], anew=False)
    lengths = []
    for length in (0, 5, 16, 17, 3):
        rows.settle(length)
        lengths.append(rows.length)
    assert [0, 5, 16, 16, 3] == lengths
    rows.take_blocks([1], anew=True)
    assert (0, [1]) == (rows.length, list(rows.blocks))


def test_rows_loaded_are_appended_and_cut_again() -> None:
    """As every RowCache has it, over blocks that lie anywhere."""
    store = PagedStore(memory(together=True), PageMap(TABLES["vec"]), LAYOUT)
    rows, others = PagedRows(store), PagedRows(store)
    rows.take_blocks([5, 0], anew=True)
    others.take_blocks([3, 2], anew=True)
    rows.settle(11)
    out = bytearray(11 * LAYOUT.row_bytes)
    rows.copy_rows(0, memoryview(out))
    for begin, end in ((0, 4), (4, 11)):
        others.load_rows(memoryview(out)[begin * LAYOUT.row_bytes : end * LAYOUT.row_bytes])
    again = bytearray(len(out))
    others.copy_rows(0, memoryview(again))
    assert (out, 11) == (again, others.length)
    others.cut(2)
    assert 2 == others.length
