"""What one position's bytes look like, and which cache they belong to.

A row is one position of a session, all layers: [layers, planes, kv_heads, head_dim] in the cache's dtype, C-contiguous.
planes is 2 (K, V) for ordinary attention and 1 for MLA, whose row is one latent vector.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.ids import Digest

__all__ = ["DTYPE_BYTES", "DType", "Identity", "Layout"]


class DType(StrEnum):
    """The element type of a cache."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    UINT8 = "uint8"


DTYPE_BYTES = {DType.BFLOAT16: 2, DType.FLOAT16: 2, DType.FLOAT32: 4, DType.UINT8: 1}


@dataclass(frozen=True, slots=True)
class Layout:
    """The shape of one row of one shard.

    Shape: [layers, planes, kv_heads, head_dim], C-contiguous, in `dtype`; kv_heads are those of one shard.
    """

    layers: int
    planes: int
    kv_heads: int
    head_dim: int
    dtype: DType

    @property
    def row_bytes(self) -> int:
        """Bytes of one position in one shard."""
        return self.layers * self.planes * self.kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Identity:
    """What bytes must agree on to be usable by a request: all but the tokens and their context.

    Raised on a difference elsewhere: LayoutMismatch, naming the field.
    """

    model: Digest
    weights: Digest
    layout: Layout
    shards: int

    def difference(self, other: Identity) -> tuple[str, object, object] | None:
        """The first field in which `other` differs, with both values; None if they are equal."""
        for name in ("model", "weights", "layout", "shards"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                return name, mine, theirs
        return None
