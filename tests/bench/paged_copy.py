"""What it costs to take rows out of a paged cache and to put them back, for orders that attention kernels have.

Rows of 128 KiB, as an 8B model in bfloat16 has them, in blocks of 128; each try at another block that no cache has: a
large model's step reads more than caches hold. memcpy moves the same bytes, from and to other places each time too.
Times are of the processor, since other processes may want the core. Loading is staging (copy out of the pool, verify)
and scattering, as at a take-over.

    python -m tests.bench.paged_copy
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.checksums import row_checksums
from kvlog.engines.paged_rows import PagedStore, PageMap
from kvlog.engines.staged_rows import StagedRows
from kvlog.layout import DType, Layout
from tests.bench.report import Row, show

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["measure_paged"]

_LAYOUT: Final = Layout(layers=32, planes=2, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)
_SIZE: Final = 128
_BLOCKS: Final = 12
_ROWS: Final = (1, 16, 128)
_MIB: Final = 1 << 20


def measure_paged(*, quick: bool = False) -> list[Row]:
    """Each order, single rows and runs."""
    tries = 5 if quick else 25
    cache = _Cache(tries)
    rows = [cache.row(name, order, count) for name, order in _orders().items() for count in _ROWS]
    return [*rows, *(cache.loading(name, order) for name, order in _orders().items()), _staging(tries)]


def _orders() -> dict[str, np.ndarray]:
    size, dim = _SIZE, _LAYOUT.head_dim
    columns = np.empty((size, 2, dim), np.int64)
    columns[:, 0] = np.arange(size * dim).reshape(dim, size).T
    columns[:, 1] = size * dim + np.arange(size * dim).reshape(size, dim)
    tiles = columns.copy()
    tiles[:, 0] = (
        np.arange(size * dim).reshape(size // 16, dim // 2, 16, 2).transpose(0, 2, 1, 3).reshape(size, dim)
    )
    return {
        "K in columns (CPU vec)": columns,
        "K in rows": np.arange(size * 2 * dim).reshape(size, 2, dim),
        "K in tiles": tiles,
    }


class _Cache:
    """A cache of 400 MiB, and rows that go to and fro."""

    def __init__(self, tries: int) -> None:
        page = _SIZE * 2 * _LAYOUT.head_dim
        self._layers = np.ones((_LAYOUT.layers, _BLOCKS, _LAYOUT.kv_heads, page), np.uint16)
        self._rows = np.ones((8 * _SIZE, _LAYOUT.row_bytes), np.uint8)
        self._flushed = np.ones(64 * _MIB, np.uint8)
        self._tries = tries

    def row(self, name: str, order: np.ndarray, count: int) -> Row:
        """A gather of so many rows, against memcpy."""
        store = PagedStore(list(self._layers), PageMap(order), _LAYOUT)

        def gather(number: int) -> None:
            first = 0 if count == _SIZE else number * 13 % (_SIZE - count)
            store.gather([number * 5 % _BLOCKS], first, self._place(number, count))

        def memcpy(number: int) -> None:
            self._place(number, count)[:] = self._place(number + 4 * _SIZE // count, count)

        ours, theirs = self._us(gather), self._us(memcpy)
        return Row(
            measure="paged",
            case=f"gather {count} rows of 128 KiB, {name}",
            unit="µs a row",
            values=tuple(each / count for each in ours),
            against="memcpy",
            their_values=tuple(each / count for each in theirs),
            ratio=float(np.median(ours) / np.median(theirs)),
            also={"min": min(ours) / count},
        )

    def loading(self, name: str, order: np.ndarray) -> Row:
        """A scatter of whole blocks."""
        store = PagedStore(list(self._layers), PageMap(order), _LAYOUT)
        took = self._us(lambda n: store.scatter([n * 5 % _BLOCKS], 0, self._place(n, _SIZE)))
        return Row(
            measure="paged",
            case=f"scatter 128 rows of 128 KiB, {name}",
            unit="GB/s",
            values=tuple(_SIZE * _LAYOUT.row_bytes / each / 1e3 for each in took),
        )

    def _place(self, number: int, count: int) -> memoryview:
        at = number * count % (8 * _SIZE - count + 1)
        return self._rows[at : at + count].reshape(-1).data

    def _us(self, do: Callable[[int], None]) -> list[float]:
        """µs of each try, the first one apart; what the caches held is gone before each."""
        took = []
        for number in range(self._tries + 1):
            self._flushed[:] = number % 251
            began = time.thread_time()
            do(number)
            took.append(1e6 * (time.thread_time() - began))
        return took[1:]


def _staging(tries: int) -> Row:
    """Rows of 128 KiB and of SmolLM2 in bfloat16, verified into memory of a load's own."""
    rates: dict[int, list[float]] = {}
    for row_bytes in (_LAYOUT.row_bytes, 23_040):
        geometry = PoolGeometry(block_bytes=_MIB, blocks=64, device="cpu")
        each = geometry.rows_a_block(row_bytes)
        pool = memoryview(bytearray(geometry.size_bytes)).toreadonly()
        checksums = row_checksums(memoryview(bytes(row_bytes)), row_bytes) * (64 * each)
        attachment = Attachment(row_bytes, tuple(PinnedBlock(n, each) for n in range(64)), checksums)
        for _ in range(tries):
            began = time.thread_time()
            staged = StagedRows(row_bytes, 0, 64 * each)
            assert copy_attached(pool, geometry, attachment, staged.load_rows) == 64 * each
            rates.setdefault(row_bytes, []).append(64 * each * row_bytes / (time.thread_time() - began) / 1e9)
            staged.close()
    return Row(
        measure="paged",
        case="stage rows of 128 KiB: copy out of the pool, verify",
        unit="GB/s",
        values=tuple(rates[_LAYOUT.row_bytes]),
        also={"rows of 22.5 KiB": float(np.median(rates[23_040]))},
    )


if __name__ == "__main__":
    show(measure_paged())
