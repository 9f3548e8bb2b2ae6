"""Puts a session that `kvlog replay` rebuilt from the log into an engine's cache, without a daemon or a log.

The file is verified as an attach is: its checksum before any row is used, and the identity of the rows against the
model's. Its format is kvlog.wire.replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from kvlog.checksums import checksum
from kvlog.errors import DecodeError, LayoutMismatch
from kvlog.ids import Shard
from kvlog.wire.replayed import HEAD_BYTES_MAX, PREFIX_BYTES, read_head

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import numpy.typing as npt

    from kvlog.engines.base import RowCache, StepModel
    from kvlog.wire.replayed import Replayed

__all__ = ["load_replayed"]

_CHUNK_BYTES = 8 << 20
"""Rows put together at a time."""


def load_replayed(file: Path, model: StepModel) -> tuple[list[int], RowCache]:
    """A replayed session's token ids, and a cache of the model that holds its rows.

    Returns: all token ids, and the cache; where the cache is shorter, the rest is computed from the token ids. Where it
        is not, the caller cuts the last row and computes it again: a next token needs logits, and those are not logged.

    Raises:
        DecodeError: not a replay file, or damaged.
        LayoutMismatch: the rows are another model's (fields: field, expected, actual).
    """
    if file.stat().st_size <= PREFIX_BYTES:
        raise DecodeError(problem=f"{file.name} is no replay file")
    whole = np.memmap(file, np.uint8, mode="r")
    size = int.from_bytes(bytes(whole[:PREFIX_BYTES]), "little")
    if size > HEAD_BYTES_MAX:
        raise DecodeError(problem=f"{file.name} is no replay file")
    replayed = read_head(bytes(whole[: PREFIX_BYTES + size]))
    data = whole[PREFIX_BYTES + size :]
    if len(data) != replayed.data_bytes or checksum(data.data) != replayed.checksum:
        raise DecodeError(problem=f"{file.name} is cut or damaged: replay the session again")
    difference = model.identity.difference(replayed.identity)
    if difference is not None:
        field, expected, actual = difference
        raise LayoutMismatch(field=field, expected=expected, actual=actual)
    if replayed.identity.shards != 1:
        raise LayoutMismatch(field="shards", expected=1, actual=replayed.identity.shards)
    tokens: list[int] = data[: replayed.tokens_bytes].view(np.int64).tolist()
    cache = model.new_cache()
    for rows in _rows(data, replayed):
        cache.load_rows(rows)
    return tokens, cache


def _rows(data: npt.NDArray[np.uint8], replayed: Replayed) -> Iterator[memoryview]:
    """Token-major rows of the one shard, a chunk at a time."""
    layout = replayed.identity.layout
    starts = [replayed.layer_at(Shard(0), layer) for layer in range(layout.layers)]
    part = layout.row_bytes // layout.layers
    layers = [data[at : at + replayed.layer_bytes].reshape(-1, part) for at in starts]
    step = max(1, _CHUNK_BYTES // layout.row_bytes)
    for at in range(0, replayed.positions, step):
        yield np.stack([layer[at : at + step] for layer in layers], axis=1).reshape(-1).data
