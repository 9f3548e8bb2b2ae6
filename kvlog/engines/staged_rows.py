"""Verified rows in private memory, between the daemon's pool and the engine's blocks.

Memory of our own mapping: malloc would give up to gigabytes back, and a bytearray also clear them, with Python's lock
held, 1.5 ms a MiB for which the engine's steps stand still. `close` belongs on a thread beside them.
"""

from __future__ import annotations

import contextlib
import mmap
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from concurrent.futures import Future

    from kvlog.engines.turns import TurnHandle

__all__ = ["StagedRows", "give_back", "stage_rows"]


class StagedRows:
    """The RowCache that an attach is loaded into; rows below `skip` are counted and not kept.

    Args:
        row_bytes: size of a row.
        skip: rows that the engine has itself.
        length: rows that may come, the skipped ones too.

    `seconds`: what copying and verifying them took, for whoever counts.
    """

    def __init__(self, row_bytes: int, skip: int, length: int) -> None:
        self._row_bytes = row_bytes
        self._skip = skip * row_bytes
        self._mapping = mmap.mmap(-1, max(1, (length - skip) * row_bytes), mmap.MAP_PRIVATE)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, and as good
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._memory = memoryview(self._mapping)
        self._seen = 0
        self.seconds = 0.0

    @property
    def length(self) -> int:
        """Rows that have come, the skipped ones too."""
        return self._seen // self._row_bytes

    def load_rows(self, rows: memoryview) -> None:
        """Keep what lies beyond the skipped rows."""
        at, self._seen = self._seen - self._skip, self._seen + len(rows)
        if at + len(rows) > 0:
            begin = max(0, -at)
            into = np.frombuffer(self._memory[at + begin : at + len(rows)], np.uint8)
            into[:] = np.frombuffer(rows[begin:], np.uint8)

    def rows(self, start: int, end: int) -> memoryview:
        """Rows [start, end), start not among the skipped; a view, to be dropped before `close`."""
        return self._memory[start * self._row_bytes - self._skip : end * self._row_bytes - self._skip]

    def copy_rows(self, start: int, out: memoryview) -> None:
        """As RowCache has it."""
        out[:] = self.rows(start, start + len(out) // self._row_bytes)

    def cut(self, length: int) -> None:
        """As RowCache has it."""
        self._seen = min(self._seen, length * self._row_bytes)

    def close(self) -> None:
        """Give the memory back; takes milliseconds where it is large, without Python's lock."""
        self._memory.release()
        self._mapping.close()


def stage_rows(handle: TurnHandle, row_bytes: int, skip: int, length: int) -> StagedRows:
    """Copy and verify what a turn attaches beyond the engine's own `skip` rows; on a thread beside the steps."""
    began = time.perf_counter()
    staged = StagedRows(row_bytes, skip, length)
    handle.load_into(staged)
    staged.seconds = time.perf_counter() - began
    return staged


def give_back(staging: Future[StagedRows]) -> None:
    """Give up rows that nobody wants; on a thread beside the steps."""
    if staging.exception() is None:
        staging.result().close()
