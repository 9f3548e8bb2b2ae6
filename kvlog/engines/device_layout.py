"""Where the rows of a CUDA cache lie, by vLLM's documented shape, and the index of a run of rows.

vLLM views every layer as [blocks, heads, positions, content] whatever the order in memory (NHD, HND and their forms
with all layers of a block together are strides), and FlashAttention and FlashInfer keep [..., :dim] as K and
[..., dim:] as V. All layers are one allocation, equally far apart. So all of a step's rows, of all layers and requests,
are one indexed read of one strided view:

    view[layer, plane, block, head, position, dim]      blocks and positions are indexed by one vector each
    rows[n, layer, plane, head, dim]                    contiguous: what the log has

A backend may cut the scheduler's blocks into smaller ones of its kernel; they are numbered through, so a position's
slot (block · block_size + offset) says both.

Source: vllm/v1/kv_cache_layout.py, vllm/v1/kv_cache_interface.py (create_kv_cache_views), and the first lines of
do_kv_cache_update in vllm/v1/attention/backends/flash_attn.py and flashinfer.py; vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    import torch

    from kvlog.engines.paged_rows import PageMap

__all__ = ["SERVED_BACKENDS", "documented_order", "refuse_other_order", "slots_of", "stack_layers"]

SERVED_BACKENDS: Final = frozenset({"FLASH_ATTN", "FLASHINFER"})
"""vLLM's names of the backends whose layout was read."""

_LAYER_AXES: Final = 4


def stack_layers(layers: Sequence[torch.Tensor], planes: int) -> torch.Tensor:
    """View all layers as one tensor; nothing is copied.

    Args:
        layers: in the order of the model. Shape: each [blocks, heads, positions, planes · dim], of equal strides.
        planes: of a row.

    Returns: Shape: [layers, planes, blocks, heads, positions, dim].

    Raises:
        ConfigError: they do not lie equally far apart in one allocation.
    """
    first = layers[0]
    assert first.dim() == _LAYER_AXES, "[blocks, heads, positions, content]"
    starts = [layer.storage_offset() for layer in layers]
    step = starts[1] - starts[0] if len(layers) > 1 else 0
    alike = all(
        layer.shape == first.shape
        and layer.stride() == first.stride()
        and layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        for layer in layers
    )
    if not alike or starts != [starts[0] + index * step for index in range(len(layers))]:
        raise _refused("its layers do not lie equally far apart in one allocation")
    blocks, heads, positions, width = first.shape
    a_block, a_head, a_position, an_element = first.stride()
    dims = width // planes
    shape = (len(layers), planes, blocks, heads, positions, dims)
    strides = (step, dims * an_element, a_block, a_head, a_position, an_element)
    return first.as_strided(shape, strides, starts[0])


def slots_of(blocks: npt.NDArray[np.int64], block_size: int, start: int, count: int) -> npt.NDArray[np.int64]:
    """The slots of rows [start, start + count) of a block table.

    Args:
        blocks: the request's block table, from position 0, in the scheduler's blocks.
        block_size: positions of one of those.
        start: first position.
        count: how many.
    """
    positions = np.arange(start, start + count)
    slots: npt.NDArray[np.int64] = blocks[positions // block_size] * block_size + positions % block_size
    return slots


def documented_order(positions: int, planes: int, dims: int) -> npt.NDArray[np.int64]:
    """A page's order as documented, in the terms of PageMap. Shape: [positions, planes, dims]."""
    return np.arange(positions * planes * dims).reshape(positions, planes, dims)


def refuse_other_order(found: PageMap, backend: str) -> None:
    """Compare what the kernel does on this device with what its documented shape says.

    Raises:
        ConfigError: it writes elsewhere.
    """
    if not np.array_equal(found.table, documented_order(*found.table.shape)):
        raise _refused(f"{backend} does not write K and V where vLLM's documented shape has them")


def _refused(problem: str) -> ConfigError:
    fix = "serve without kvlog, and report the attention backend's name"
    return ConfigError(setting="attention backend", problem=problem, fix=fix)
