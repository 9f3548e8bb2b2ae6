"""The comparison that the proof of a take-over rests on: it must see every byte."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest

from kvlog.layout import DTYPE_BYTES, DType, Layout
from tests.model.row_difference import kv_difference


def _layout(dtype: DType) -> Layout:
    return Layout(layers=3, planes=2, kv_heads=2, head_dim=4, dtype=dtype)


@pytest.mark.parametrize("dtype", list(DType))
def test_kv_difference_of_equal_rows_is_none(dtype: DType) -> None:
    """Equal bytes are equal in every dtype, NaN among them or not."""
    layout = _layout(dtype)
    rows = np.random.default_rng(1).bytes(5 * layout.row_bytes)
    found = kv_difference(rows, bytearray(rows), layout)
    assert (5, True, None, None) == (found.positions, found.equal, found.first_layer, found.first_position)
    assert (0.0, 0.0, 0.0) == found.difference_max


@pytest.mark.parametrize("dtype", list(DType))
def test_kv_difference_finds_any_single_byte(dtype: DType) -> None:
    """The layer and the position of a flipped bit are named, wherever it is."""
    layout = _layout(dtype)
    rows = bytes(4 * layout.row_bytes)
    for at in range(len(rows)):
        other = bytearray(rows)
        other[at] ^= 1
        found = kv_difference(rows, other, layout)
        position, within = divmod(at, layout.row_bytes)
        assert (position, within * 3 // layout.row_bytes) == (found.first_position, found.first_layer)
        assert 2 == sum(found.layers_equal)


@pytest.mark.parametrize(
    ("dtype", "one", "other"),
    [
        (DType.FLOAT32, struct.pack("<f", 1.5), struct.pack("<f", -2.0)),
        (DType.FLOAT16, struct.pack("<e", 1.5), struct.pack("<e", -2.0)),
        (DType.BFLOAT16, struct.pack("<f", 1.5)[2:], struct.pack("<f", -2.0)[2:]),
        (DType.UINT8, b"\x05", b"\x01"),
    ],
)
def test_kv_difference_measures_in_the_rows_own_dtype(dtype: DType, one: bytes, other: bytes) -> None:
    """The largest absolute difference is that of the elements, per layer."""
    layout = _layout(dtype)
    rows, others = bytearray(2 * layout.row_bytes), bytearray(2 * layout.row_bytes)
    at = layout.row_bytes + layout.row_bytes // 3
    rows[at : at + DTYPE_BYTES[dtype]], others[at : at + DTYPE_BYTES[dtype]] = one, other
    found = kv_difference(rows, others, layout)
    assert (0.0, 4.0 if dtype is DType.UINT8 else 3.5, 0.0) == found.difference_max


def test_kv_difference_with_nan_says_nan() -> None:
    """A NaN on one side is no small difference."""
    layout = _layout(DType.FLOAT32)
    other = bytearray(layout.row_bytes)
    other[:4] = struct.pack("<f", math.nan)
    found = kv_difference(bytes(layout.row_bytes), other, layout)
    assert math.isnan(found.difference_max[0])
    assert not found.equal
