"""Asks an attention kernel where in a page it puts K and V, by letting it write numbers that say where they came from.

vLLM's documented shape of a CPU cache, [blocks, heads, block_size, 2 · head_dim], is only the space: on the `vec`
kernels K is column-major and V row-major, on AMX both are tiles. So the first process to see a cache writes a scratch
block through the kernel's own function, one digit of each element's number at a time (digits below 128, exact in every
dtype), and inverts what it finds. What is not a permutation, or differs between heads, is refused. A latent cache (MLA)
has one plane instead of two, and is asked the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvlog.engines.paged_rows import PageMap
from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

__all__ = ["probe_page_map"]

_DIGITS: Final = 127
"""Digits are written as 1 to 127, so that an element that was not written, 0, shows; bfloat16 is exact to 256."""

_K_AND_V: Final = 2


def probe_page_map(write: Callable[..., None], page: torch.Tensor, planes: int = _K_AND_V) -> PageMap:
    """Find the order of a page.

    Args:
        write: (keys, values, scratch, slots), or (latents, scratch, slots) → writes rows into slots, the kernel's own
            function. Shape: each plane [n, heads, head_dim]; slots [n], int64.
        page: one block to write into, zeroed, with a cache's strides. Shape: [1, heads, block_size, planes · head_dim].
        planes: 2: K and V; 1: one latent vector.

    Raises:
        ConfigError: the kernel keeps something else than rows as they were given (a packed or quantised cache).
    """
    _, heads, positions, width = page.shape
    dims = width // planes
    shape = (positions, heads, planes, dims)
    numbers = torch.arange(positions * heads * planes * dims).reshape(shape)
    slots = torch.arange(positions, dtype=torch.int64, device=page.device)
    found = torch.zeros(page.shape, dtype=torch.int64)
    weight = 1
    while weight <= numbers.numel():
        digits = (numbers // weight % _DIGITS + 1).to(page.dtype).to(page.device)
        page.zero_()
        write(*(digits[:, :, plane].contiguous() for plane in range(planes)), page, slots)
        read = page.cpu().double()
        if not bool(((read >= 1) & (read <= _DIGITS)).all()):
            raise _refused("it does not keep every element of a row in its page as it was given")
        found += (read.long() - 1) * weight
        weight *= _DIGITS
    return _inverted(found.reshape(heads, -1).numpy(), shape)


def _inverted(found: npt.NDArray[np.int64], shape: tuple[int, int, int, int]) -> PageMap:
    """From the number at each place of a page to the place of each number; the same for all heads."""
    positions, heads, planes, dims = shape
    if not np.array_equal(np.sort(found, axis=None), np.arange(found.size)):
        raise _refused("it writes several elements to one place")
    where = np.empty(found.size, np.int64)
    where[found.ravel()] = np.arange(found.size)
    by_head = where.reshape(shape).transpose(1, 0, 2, 3)
    size = positions * planes * dims
    tables = by_head - (np.arange(heads) * size)[:, None, None, None]
    if not (tables == tables[0]).all():
        raise _refused("it orders the pages of its heads differently, or mixes them")
    return PageMap(tables[0])


def _refused(problem: str) -> ConfigError:
    fix = "serve without kvlog, and report the attention backend's name"
    return ConfigError(setting="attention backend", problem=problem, fix=fix)
