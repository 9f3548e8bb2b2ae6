"""Digests of a cache's rows, layer by layer: what two engines compare to know that their caches are equal.

A digest tells nothing of the conversation, so it may leave the engine where rows may not.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from kvlog.checksums import DIGEST_BYTES

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvlog.engines.base import RowCache
    from kvlog.layout import Layout

__all__ = ["digests_at", "layer_digests"]

_CHUNK_BYTES = 4 << 20


def layer_digests(cache: RowCache, layout: Layout, positions: int, *, first: int = 0) -> list[str]:
    """Blake2b of each layer's bytes of rows [first, positions), in hex; costs a pass over them, 1 ms a MB.

    Args:
        cache: has that many rows.
        layout: of its rows.
        positions: how many, from 0.
        first: position of the first row that counts.
    """
    digests = [hashlib.blake2b(digest_size=DIGEST_BYTES) for _ in range(layout.layers)]
    step = max(1, _CHUNK_BYTES // layout.row_bytes)
    for start in range(first, positions, step):
        count = min(step, positions - start)
        rows = np.empty((count, layout.layers, layout.row_bytes // layout.layers), np.uint8)
        cache.copy_rows(start, rows.reshape(-1).data)
        for layer, digest in enumerate(digests):
            digest.update(rows[:, layer].tobytes())
    return [digest.hexdigest() for digest in digests]


def digests_at(cache: RowCache, layout: Layout, lengths: Iterable[int]) -> Mapping[int, list[str]]:
    """`layer_digests` of several lengths; one that the cache does not reach is cut to what it has, 0 is left out."""
    wanted = sorted({min(length, cache.length) for length in lengths} - {0})
    return {length: layer_digests(cache, layout, length) for length in wanted}
