"""Whether a kernel's order of a page can be said by strides, so that rows are copied and not looked up one by one.

Kernels put an element of a plane at `starts[position] + offset of its dimension`, and the offsets count in digits:
plain rows and columns have one digit, tiles have several. Dimension d of 64 in pairs of two, as VNNI has them, is
(32, 2), with a stride for each. An order of another kind goes by its table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.lib.stride_tricks import as_strided

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PlaneOrder", "plane_orders", "view_plane"]

_DIGITS_MAX: Final = 4


@dataclass(frozen=True, slots=True)
class PlaneOrder:
    """Where the elements of one plane lie in a page.

    Args:
        starts: of each position, where its dimension 0 is.
        step: between the starts of two positions, > 0, if it is always the same; 0: it is not.
        sizes: of the digits of a dimension, the most significant first; their product is head_dim.
        strides: one a digit.
    """

    starts: tuple[int, ...]
    step: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


def plane_orders(table: npt.NDArray[np.int64]) -> tuple[PlaneOrder, ...] | None:
    """Each plane's order; None: one of them is of another kind.

    Args:
        table: offsets in a page. Shape: [block_size, planes, head_dim].
    """
    found = [_plane_order(table[:, plane]) for plane in range(table.shape[1])]
    known = tuple(order for order in found if order is not None)
    return known if len(known) == len(found) else None


def view_plane(part: npt.NDArray[np.generic], order: PlaneOrder) -> npt.NDArray[np.generic]:
    """One plane's elements over all places where a position could start.

    Args:
        part: pages. Shape: [layers, blocks, heads, page size].
        order: of the plane.

    Shape: [blocks, start, layers, heads, *sizes], a view.
    """
    digits = tuple(zip(order.sizes, order.strides, strict=True))
    reach = sum((size - 1) * stride for size, stride in digits)
    layers, blocks, heads, page = part.shape
    a_layer, a_block, a_head, element = part.strides
    shape = (blocks, page - reach, layers, heads, *order.sizes)
    outer = (a_block, element, a_layer, a_head)
    return as_strided(part, shape, (*outer, *(stride * element for stride in order.strides)))


def _plane_order(plane: npt.NDArray[np.int64]) -> PlaneOrder | None:
    starts, offsets = plane[:, 0], plane[0] - plane[0, 0]
    digits = _digits(offsets)
    if digits is None or not np.array_equal(plane, starts[:, None] + offsets):
        return None
    steps = set(np.diff(starts).tolist()) or {1}
    step = steps.pop() if len(steps) == 1 else 0
    sizes, strides = zip(*digits, strict=True)
    return PlaneOrder(tuple(starts.tolist()), max(0, step), sizes, strides)


def _digits(offsets: npt.NDArray[np.int64]) -> list[tuple[int, int]] | None:
    """(size, stride) of each digit, the most significant first, if counting in digits gives these offsets."""
    found: list[tuple[int, int]] = []
    rest = offsets
    while len(rest) > 1 or not found:
        stride = int(rest[1]) if len(rest) > 1 else 1
        same = rest == np.arange(len(rest)) * stride
        size = len(rest) if same.all() else int(np.argmin(same))
        leading = rest[::size]
        counted = (leading[:, None] + np.arange(size) * stride).ravel()
        if stride < 1 or len(found) == _DIGITS_MAX or not np.array_equal(counted[: len(rest)], rest):
            return None
        if len(counted) != len(rest):
            return None
        found.insert(0, (size, stride))
        rest = leading
    return found
