"""A pool's shared memory as a torch tensor, without a copy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from kvlog.buffers.geometry import PoolGeometry
    from kvlog.buffers.memory import SealedMemory

__all__ = ["view_blocks"]


def view_blocks(memory: SealedMemory, geometry: PoolGeometry) -> torch.Tensor:
    """The blocks of memory that is mapped writable.

    Shape: [blocks, block_bytes], uint8, C-contiguous; shares its bytes with `memory` and keeps the mapping alive.
    """
    assert not memory.view.readonly, "torch has no read-only tensors"
    return torch.frombuffer(memory.view[: geometry.size_bytes], dtype=torch.uint8).view(
        geometry.blocks, geometry.block_bytes
    )
