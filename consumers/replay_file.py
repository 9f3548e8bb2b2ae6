"""Builds a replay file: rows are spooled token-major as the log brings them, and put in layer order at the end.

The spool is a file without a name beside the result, as large as the rows: it is gone when the process is, however it
ends. The result gets its name once it is whole. Memory stays at a few chunks.
"""

from __future__ import annotations

import os
import tempfile
from array import array
from contextlib import suppress
from dataclasses import replace
from typing import IO, TYPE_CHECKING

import numpy as np

from kvlog.checksums import checksum
from kvlog.ids import Position, Shard
from kvlog.wire.replayed import write_head

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt

    from kvlog.layout import Layout
    from kvlog.wire.replayed import Replayed

__all__ = ["RowSpool", "write_replay_file"]

_CHUNK_BYTES = 8 << 20


class RowSpool:
    """The rows of one session as the fold has them by now.

    Args:
        folder: where the result will be; the spool needs as much room there as the rows.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Shard, IO[bytes]] = {}
        self._present: dict[Shard, Position] = {}

    def present(self, shard: Shard) -> Position:
        """Rows that are there, from 0 without a hole."""
        return self._present.get(shard, Position(0))

    def store(self, shard: Shard, start: Position, rows: memoryview, row_bytes: int) -> None:
        """Keep whole rows; behind a hole they are of no use and are left out."""
        if start > self.present(shard):
            return
        if shard not in self._files:
            self._files[shard] = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115  # closed by `close`
        file, at = self._files[shard].fileno(), start * row_bytes
        left = rows
        while left:
            written = os.pwrite(file, left, at)
            left, at = left[written:], at + written
        self._present[shard] = Position(start + len(rows) // row_bytes)

    def absent(self, shard: Shard, start: Position) -> None:
        """Rows from here on are not to be had."""
        self._present[shard] = min(self.present(shard), start)

    def cut(self, length: Position) -> None:
        """Forget every shard's rows from `length` on."""
        for shard in self._present:
            self.absent(shard, length)

    def read(self, shard: Shard, start: int, count: int, row_bytes: int) -> bytes:
        """Whole rows that are present."""
        data = os.pread(self._files[shard].fileno(), count * row_bytes, start * row_bytes)
        assert len(data) == count * row_bytes, "rows that are present were written"
        return data

    def close(self) -> None:
        """Give the room back."""
        for file in self._files.values():
            file.close()


def write_replay_file(
    file: Path, replayed: Replayed, tokens: Sequence[int], spool: RowSpool, advance: Callable[[int], None]
) -> None:
    """Write the file whole, under another name first.

    Args:
        file: replaced if it is there; only its owner can read it, for it holds a conversation.
        replayed: what it will hold; its checksum is found on the way.
        tokens: `replayed.length` token ids.
        spool: has `replayed.positions` rows of each shard.
        advance: told how many bytes were written.
    """
    unfinished = file.with_name(file.name + ".part")
    head = write_head(replayed)
    try:
        with open(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600), "r+b") as out:  # noqa: PTH123
            # Takes the room now: a full disk would else end the process when the mapping is written.
            os.posix_fallocate(out.fileno(), 0, len(head) + replayed.data_bytes)
            whole = np.memmap(out, np.uint8, mode="r+")
            data = whole[len(head) :]
            data[: replayed.tokens_bytes] = np.frombuffer(array("q", tokens), np.uint8)
            for shard in range(replayed.identity.shards):
                _write_layers(data, replayed, Shard(shard), spool, advance)
            whole[: len(head)] = np.frombuffer(
                write_head(replace(replayed, checksum=checksum(data.data))), np.uint8
            )
            whole.flush()
            os.fsync(out.fileno())
        unfinished.replace(file)
    except BaseException:
        with suppress(FileNotFoundError):
            unfinished.unlink()
        raise


def _write_layers(
    data: npt.NDArray[np.uint8],
    replayed: Replayed,
    shard: Shard,
    spool: RowSpool,
    advance: Callable[[int], None],
) -> None:
    layout: Layout = replayed.identity.layout
    part = layout.row_bytes // layout.layers
    starts = [replayed.layer_at(shard, layer) for layer in range(layout.layers)]
    layers = [data[at : at + replayed.layer_bytes].reshape(-1, part) for at in starts]
    step = max(1, _CHUNK_BYTES // layout.row_bytes)
    for at in range(0, replayed.positions, step):
        count = min(step, replayed.positions - at)
        rows = np.frombuffer(spool.read(shard, at, count, layout.row_bytes), np.uint8)
        by_layer = rows.reshape(count, layout.layers, part)
        for number, layer in enumerate(layers):
            layer[at : at + count] = by_layer[:, number]
        advance(shard * replayed.positions * layout.row_bytes + (at + count) * layout.row_bytes)
