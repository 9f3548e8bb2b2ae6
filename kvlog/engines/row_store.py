"""What a worker of a paged engine needs of the engine's cache, wherever that is: on the host or on a device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from kvlog.engines.base import RowCache

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.engines.device_queue import Mark
    from kvlog.layout import Layout

__all__ = ["RowStore", "StepRows"]


class StepRows(RowCache, Protocol):
    """One request's rows over its block table, as far as the watermark."""

    @property
    def is_pending(self) -> bool:
        """Computed rows cannot be read yet, but will be."""
        ...

    def take_blocks(self, blocks: Sequence[int], *, anew: bool) -> None:
        """The request holds more blocks, or, `anew`, other ones."""
        ...

    def settle(self, length: int) -> None:
        """Positions below `length` are computed, as far as there are blocks; may be less than before."""
        ...

    def give_up_blocks(self) -> None:
        """The blocks are somebody else's from now on: only what is under way still comes."""
        ...

    def close(self) -> None:
        """Nobody reads it any more."""
        ...


class RowStore(Protocol):
    """All layers of an engine's paged cache."""

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        ...

    @property
    def layout(self) -> Layout:
        """Of a row."""
        ...

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        ...

    @property
    def is_replicated(self) -> bool:
        """Every rank has the same rows, so that one of them logs for all; else each has its part of every row."""
        ...

    def open_rows(self) -> StepRows:
        """One request's rows."""
        ...

    def gather_step(self, sources: Sequence[tuple[StepRows, int]]) -> None:
        """A step is computed, or queued: begin to read its new rows, if that takes time.

        Args:
            sources: rows that `open_rows` has made, and the log's cursor in each.
        """
        ...

    def drain(self) -> None:
        """No step is being computed: wait for what was begun, which is a matter of a copy."""
        ...

    def fence(self) -> Mark | None:
        """Where a scatter beside the steps may begin."""
        ...

    def scatter(self, blocks: Sequence[int], start: int, rows: memoryview, after: Mark | None = None) -> None:
        """Put whole token-major rows at positions from `start` on; `rows` is read before this returns and not kept.

        Args:
            blocks: the request's block table, from position 0.
            start: first position.
            rows: contiguous, format B.
            after: a fence: called beside the steps, and complete when it returns. None: complete for the next step.
        """
        ...
