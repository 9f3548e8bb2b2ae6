"""Compares two runs' rows layer by layer: the proof that a resumed cache is the uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlog.layout import DType

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvlog.layout import Layout

    Rows = bytes | bytearray | memoryview

__all__ = ["RowDifference", "kv_difference"]

_ELEMENTS = {DType.BFLOAT16: "<u2", DType.FLOAT16: "<f2", DType.FLOAT32: "<f4", DType.UINT8: "u1"}


@dataclass(frozen=True, slots=True)
class RowDifference:
    """How the rows of one sequence differ between two runs.

    Args:
        positions: rows compared.
        layers_equal: for each layer, whether all its bytes are equal.
        first_position: the first row that differs anywhere; None if none does.
        difference_max: for each layer the largest absolute difference of two elements; NaN where one of them is NaN.
    """

    positions: int
    layers_equal: tuple[bool, ...]
    first_position: int | None
    difference_max: tuple[float, ...]

    @property
    def equal(self) -> bool:
        """Every byte of every layer is equal."""
        return all(self.layers_equal)

    @property
    def first_layer(self) -> int | None:
        """The lowest layer that differs; None if none does."""
        return None if self.equal else self.layers_equal.index(False)


def kv_difference(mine: Rows, theirs: Rows, layout: Layout) -> RowDifference:
    """Compare rows [0, n) of two runs by bytes, and by value where bytes differ.

    Args:
        mine: n whole rows, token-major, C-contiguous.
        theirs: as many.
        layout: of both.
    """
    one, other = _by_layer(mine, layout), _by_layer(theirs, layout)
    assert one.shape == other.shape, "as many rows on both sides"
    differs = (one != other).any(axis=2)
    rows = np.flatnonzero(differs.any(axis=1))
    layers = range(layout.layers)
    return RowDifference(
        positions=len(one),
        layers_equal=tuple(not differs[:, layer].any() for layer in layers),
        first_position=int(rows[0]) if len(rows) else None,
        difference_max=tuple(
            _difference_max(one[:, layer], other[:, layer], layout.dtype) for layer in layers
        ),
    )


def _by_layer(rows: Rows, layout: Layout) -> npt.NDArray[np.uint8]:
    """Shape: [n, layers, bytes of a layer]."""
    return np.frombuffer(rows, np.uint8).reshape(-1, layout.layers, layout.row_bytes // layout.layers)


def _difference_max(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8], dtype: DType) -> float:
    if np.array_equal(one, other):
        return 0.0
    with np.errstate(invalid="ignore"):  # infinite elements of broken rows
        return float(np.abs(_values(one, dtype) - _values(other, dtype)).max())


def _values(data: npt.NDArray[np.uint8], dtype: DType) -> npt.NDArray[np.float64]:
    elements = np.ascontiguousarray(data).view(_ELEMENTS[dtype])
    if dtype is DType.BFLOAT16:  # the upper half of a float32
        elements = (elements.astype("<u4") << 16).view("<f4")
    return elements.astype(np.float64)
