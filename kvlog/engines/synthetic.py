"""A model without a model: every byte of its cache matters to the next token, and a row costs microseconds.

    base[i] = blake2b(base[i - 1] ‖ token ‖ position), 64 bytes: a function of the position and all tokens so far
    row[i]  = 64-byte blocks, block b is base[i] as 8 u64, each plus b · K (so block 0 is base[i] itself)

base[i - 1] is read back from row i - 1 in the cache, and the logits are a function of bytes read back too:

    whole[i] = xxh3_64(whole[i - 1] ‖ xxh3_64(row i as it stands in the cache))
    logits   = mixed from xxh3_64(whole[n - 1] ‖ xxh3_64 of 4 earlier rows that whole[n - 1] chooses)

After `load_rows` or `cut`, `whole` is computed anew over the whole cache at the next forward: one wrong byte in an
attached row changes all logits from then on (one token in 256 is the same by chance). The four rows a step find what is
overwritten later. Nothing depends on when rows were hashed, so a resumed request gives the same tokens.

Vocabulary: 0-255 are bytes (prompts), 256-511 are syllables (answers); it never ends an answer by itself.
Cost of a step on one busy core: 0.1 ms at 4 KiB a row, 0.4 ms at 128 KiB.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlog.checksums import checksum, digest
from kvlog.errors import ConfigError
from kvlog.layout import DType, Identity, Layout

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy.typing as npt

    from kvlog.engines.base import RowCache

__all__ = ["VOCABULARY", "SyntheticCache", "SyntheticModel", "SyntheticOptions"]

VOCABULARY = 512
_BYTES = 256
_BASE_BYTES = 64
_LANES = _BASE_BYTES // 8
_ROWS_READ_AGAIN = 4
_CHUNK_BYTES = 1 << 20
"""A cache grows by about so much, without copying what it has."""

_ODD = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
"""Source: S. Vigna, splitmix64, https://prng.di.unimi.it/splitmix64.c (public domain)."""

_U64 = struct.Struct("<Q")
_STEP = struct.Struct("<II")
_LOGIT_SPAN = np.float32(12.0)
"""Logits lie in [0, 12): greedy is decided, and sampling at temperature 1 has some choice."""

_SYLLABLES = tuple(
    first + last + " "
    for first in "bdfghjklmnprstvz"
    for last in ("a", "e", "i", "o", "u", "an", "en", "in", "on", "un", "ar", "er", "ir", "or", "ur", "ay")
)


@dataclass(frozen=True, slots=True)
class SyntheticOptions:
    """What kind of cache it has.

    Args:
        row_bytes: of one position, a multiple of 64, at least 64; 131072 is an 8B model in bf16.
        weights: another value, another model: all rows and tokens differ.
        positions_max: longest sequence.
    """

    row_bytes: int = 4096
    weights: int = 0
    positions_max: int = 1 << 20


class SyntheticCache:
    """Rows in chunks of about 1 MiB; implements RowCache."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._chunk_rows = max(1, _CHUNK_BYTES // row_bytes)
        self._chunks: list[npt.NDArray[np.uint8]] = []
        self._length = 0
        self._hashed = 0
        self._whole = 0

    @property
    def length(self) -> int:
        """Positions whose rows it holds."""
        return self._length

    def copy_rows(self, start: int, out: memoryview) -> None:
        """RowCache: copy rows from `start` on."""
        at = 0
        for piece in self._pieces(start, len(out) // self._row_bytes):
            out[at : at + len(piece)] = piece
            at += len(piece)

    def load_rows(self, rows: memoryview) -> None:
        """RowCache: append whole rows; everything is hashed anew at the next forward."""
        count = len(rows) // self._row_bytes
        start = self._grow(count)
        at = 0
        for piece in self._pieces(start, count):
            piece[:] = rows[at : at + len(piece)]
            at += len(piece)
        self._hashed = self._whole = 0

    def cut(self, length: int) -> None:
        """RowCache: forget positions from `length` on."""
        assert 0 <= length <= self._length, "a cut does not grow"
        self._length = length
        del self._chunks[-(-length // self._chunk_rows) :]
        self._hashed = self._whole = 0

    def view_row(self, position: int) -> npt.NDArray[np.uint8]:
        """One row as it stands in the cache, writable. Shape: [row_bytes]."""
        chunk, row = divmod(position, self._chunk_rows)
        view: npt.NDArray[np.uint8] = self._chunks[chunk][row]
        return view

    def append_row(self) -> npt.NDArray[np.uint8]:
        """A new row to be filled. Shape: [row_bytes]."""
        return self.view_row(self._grow(1))

    def read_back(self) -> int:
        """A hash of every byte it holds; costs what is new since the last call."""
        for position in range(self._hashed, self._length):
            row = checksum(self.view_row(position).data)
            self._whole = checksum(_U64.pack(self._whole) + _U64.pack(row))
        self._hashed = self._length
        return self._whole

    def _grow(self, rows: int) -> int:
        start = self._length
        self._length += rows
        while len(self._chunks) * self._chunk_rows < self._length:
            self._chunks.append(np.empty((self._chunk_rows, self._row_bytes), np.uint8))
        return start

    def _pieces(self, start: int, count: int) -> Iterator[memoryview]:
        """Views of rows [start, start + count), at most one a chunk. Format B."""
        assert start + count <= self._length, "rows that the cache does not have"
        end = start + count
        while start < end:
            chunk, row = divmod(start, self._chunk_rows)
            rows = min(self._chunk_rows - row, end - start)
            yield self._chunks[chunk][row : row + rows].reshape(-1).data
            start += rows


class SyntheticModel:
    """Implements StepModel.

    Raises:
        ConfigError: row_bytes is not a multiple of 64; choose another.
    """

    def __init__(self, options: SyntheticOptions) -> None:
        row_bytes = options.row_bytes
        if row_bytes < _BASE_BYTES or row_bytes % _BASE_BYTES:
            raise ConfigError(
                setting="--row-bytes",
                problem=f"{row_bytes} is not a multiple of {_BASE_BYTES}, and at least that",
                fix="choose for example 4096, or 131072 for the size of an 8B model's rows",
            )
        self._options = options
        layout = Layout(layers=1, planes=2, kv_heads=1, head_dim=row_bytes // 4, dtype=DType.BFLOAT16)
        name = digest(b"kvlog synthetic 1", _U64.pack(row_bytes))
        self._identity = Identity(name, digest(name, _U64.pack(options.weights)), layout, shards=1)
        self._first_base = hashlib.blake2b(self._identity.weights, digest_size=_BASE_BYTES).digest()
        self._offsets = np.arange(row_bytes // _BASE_BYTES, dtype=np.uint64)[:, None] * _ODD
        self._ids = np.arange(1, VOCABULARY - _BYTES + 1, dtype=np.uint64) * _ODD

    @property
    def identity(self) -> Identity:
        """StepModel: a digest of the row size and of `weights`."""
        return self._identity

    @property
    def name(self) -> str:
        """StepModel: its name."""
        return "synthetic"

    @property
    def stop_tokens(self) -> frozenset[int]:
        """StepModel: none; answers have the length that was asked for."""
        return frozenset()

    @property
    def vocabulary(self) -> int:
        """StepModel: 256 bytes and 256 syllables."""
        return VOCABULARY

    @property
    def positions_max(self) -> int:
        """StepModel: from the options."""
        return self._options.positions_max

    def new_cache(self) -> SyntheticCache:
        """StepModel: an empty cache."""
        return SyntheticCache(self._options.row_bytes)

    def forward(self, cache: RowCache, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """StepModel: append the tokens' rows, read the cache back. Shape: [512], float32."""
        assert isinstance(cache, SyntheticCache), "one of new_cache"
        assert tokens, "logits are those after a token"
        for token in tokens:
            self._append(cache, token)
        return self._logits(self._read_back(cache))

    def encode(self, text: str) -> list[int]:
        """StepModel: UTF-8 bytes."""
        return list(text.encode(errors="replace"))

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """StepModel: `role: content` lines."""
        lines = [f"{role}: {content}\n" for role, content in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, tokens: Sequence[int]) -> str:
        """StepModel: bytes and syllables."""
        parts = [
            bytes([token]) if token < _BYTES else _SYLLABLES[token - _BYTES].encode() for token in tokens
        ]
        return b"".join(parts).decode(errors="replace")

    def _append(self, cache: SyntheticCache, token: int) -> None:
        position = cache.length
        before = cache.view_row(position - 1)[:_BASE_BYTES].tobytes() if position else self._first_base
        base = hashlib.blake2b(before + _STEP.pack(token, position), digest_size=_BASE_BYTES).digest()
        row = cache.append_row().view(np.uint64).reshape(-1, _LANES)
        np.add(self._offsets, np.frombuffer(base, np.uint64), out=row)

    def _read_back(self, cache: SyntheticCache) -> int:
        whole = cache.read_back()
        parts = [_U64.pack(whole)]
        for draw in range(_ROWS_READ_AGAIN):
            position = checksum(_U64.pack(whole) + _U64.pack(draw)) % cache.length
            parts.append(_U64.pack(checksum(cache.view_row(position).data)))
        return checksum(b"".join(parts))

    def _logits(self, state: int) -> npt.NDArray[np.float32]:
        mixed = self._ids + np.uint64(state)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * _MIX[0]
        mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]
        mixed ^= mixed >> np.uint64(31)
        logits = np.full(VOCABULARY, -np.inf, np.float32)
        logits[_BYTES:] = (mixed >> np.uint64(40)).astype(np.float32) * (_LOGIT_SPAN / np.float32(1 << 24))
        return logits
