"""What the adapter needs of an engine, and what an engine needs of the adapter.

An engine owns its caches and its loop. The adapter (kvlog.engines.replicator) copies new rows out of a cache after each
step and puts attached rows into a fresh one; it never computes, never blocks a step and never talks to the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np
    import numpy.typing as npt

    from kvlog.layout import Identity

__all__ = ["RowCache", "StepModel"]


class RowCache(Protocol):
    """One request's own KV cache. Used by one thread at a time."""

    @property
    def length(self) -> int:
        """Positions whose KV it holds, from 0 without a hole."""
        ...

    def copy_rows(self, start: int, out: memoryview) -> None:
        """Copy rows [start, start + len(out) / row_bytes) into `out`, token-major.

        Args:
            start: first position, start + n ≤ length.
            out: writable, C-contiguous, format B, whole rows; not kept.
        """
        ...

    def load_rows(self, rows: memoryview) -> None:
        """Append whole token-major rows at position `length`; `rows` is read before this returns and not kept."""
        ...

    def cut(self, length: int) -> None:
        """Forget all positions from `length` on."""
        ...


class StepModel(Protocol):
    """A model that computes one request's next logits, step by step."""

    @property
    def identity(self) -> Identity:
        """Model digest, weight version, layout of a row, number of shards."""
        ...

    @property
    def name(self) -> str:
        """The model's name in the HTTP API."""
        ...

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids: they are 0 to vocabulary − 1."""
        ...

    @property
    def positions_max(self) -> int:
        """The longest sequence it takes."""
        ...

    def new_cache(self) -> RowCache:
        """An empty cache."""
        ...

    def forward(self, cache: RowCache, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute the KV of `tokens` at the cache's end and return the logits after the last one.

        Shape: [vocabulary], float32.
        """
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt."""
        ...

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) messages under the model's chat template, ready for the answer."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        ...
