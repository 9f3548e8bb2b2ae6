"""Rows out of and into a paged cache on a GPU. EXPERIMENTAL: never run on a device.

After each step one indexed read takes the new rows of all requests and layers out of the cache, on the engine's own
stream, into pinned memory (no Python per layer, nothing within a captured graph); a mark says when they have landed.
The next step's hook finds them there and writes them to the ring: the log is one step behind the cache, and no step
waits for a copy.

    settle ─▶ wanted ── gather_step ─▶ under way ── mark passed ─▶ landed ── copy_rows ─▶ in the ring, slot free

Pinned memory is a few slots, one a step. Without a free one a step gathers nothing: rows stay in their blocks and are
gathered later, as long as the request holds them. Only rows from the log's cursor on are kept; a turn that is opened
anew further down in the instant between a gather and the write ends its link, and the next gather begins there.

Loads are one indexed write for each piece of pinned memory: on the engine's stream before the step that needs them, or
beside it.
"""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np
import torch

from kvlog.engines.device_layout import slots_of
from kvlog.engines.stepwrite import share_rows
from kvlog.layout import DTYPE_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from kvlog.engines.device_queue import DeviceQueue, Mark
    from kvlog.engines.row_store import StepRows
    from kvlog.layout import Layout

__all__ = ["DeviceOptions", "DeviceRows", "DeviceStore"]

_LOAD_PIECE_BYTES: Final = 8 << 20
"""Pinned memory that a load takes at a time; torch keeps what was freed for the next one until the copy is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOptions:
    """What gathering may take.

    Args:
        step_bytes: rows that one step gathers at most, beside one row of each request; ≥ 1.
        slot_bytes: pinned memory of one step: bounds the requests that are gathered at once; ≥ one row.
        slots: steps whose rows may be under way or waiting for the ring; ≥ 2.
    """

    step_bytes: int = 2 << 20
    slot_bytes: int = 32 << 20
    slots: int = 4


@dataclass(slots=True, eq=False)
class _Slot:
    """One step's rows in pinned memory. `uses`: pieces that nobody has read yet."""

    host: torch.Tensor
    data: memoryview
    mark: Mark | None = None
    uses: int = 0

    @property
    def has_landed(self) -> bool:
        return self.mark is not None and self.mark.query()


@dataclass(slots=True, eq=False)
class _Piece:
    """Rows [start, end) of one request in a slot, from its row `at` on."""

    slot: _Slot
    start: int
    end: int
    at: int


@dataclass(slots=True)
class _Window:
    """What is gathered of one request: pieces that follow each other, from `start` on."""

    start: int = 0
    pieces: deque[_Piece] = field(default_factory=deque)

    @property
    def end(self) -> int:
        return self.pieces[-1].end if self.pieces else self.start

    def landed(self) -> int:
        """The end of what can be read."""
        end = self.start
        for piece in self.pieces:
            if not piece.slot.has_landed:
                break
            end = piece.end
        return end

    def follow(self, cursor: int) -> None:
        """Give up what lies below the cursor; begin anew if it has left what is here."""
        if not self.start <= cursor <= self.end:
            self.drop(cursor)
            return
        while self.pieces and self.pieces[0].end <= cursor:
            self.pieces.popleft().slot.uses -= 1
        self.start = cursor

    def drop(self, start: int) -> None:
        """Forget all."""
        for piece in self.pieces:
            piece.slot.uses -= 1
        self.pieces.clear()
        self.start = start


class DeviceRows:
    """One request's rows in a cache on a device: a RowCache of what has landed on the host.

    `length` is what has landed, not what is computed; `is_pending` says that more is under way.
    """

    def __init__(self, row_bytes: int, positions_a_block: int) -> None:
        self._row_bytes = row_bytes
        self._block_size = positions_a_block
        self._blocks: list[int] = []
        self._wanted = 0
        self._window = _Window()

    @property
    def length(self) -> int:
        """Positions that can be read, from the log's cursor on without a hole."""
        return self._window.landed()

    @property
    def blocks(self) -> Sequence[int]:
        """The block table."""
        return self._blocks

    @property
    def is_pending(self) -> bool:
        """Computed rows are under way, or wait for a slot."""
        return self._window.landed() < max(self._window.end, self._wanted)

    def take_blocks(self, blocks: Sequence[int], *, anew: bool) -> None:
        """The request holds more blocks, or, `anew`, other ones."""
        if anew:
            self._blocks = []
            self._wanted = 0
            self._window.drop(0)
        self._blocks += blocks

    def settle(self, length: int) -> None:
        """Positions below `length` are computed, as far as there are blocks; may be less than before."""
        self._wanted = min(length, len(self._blocks) * self._block_size)
        if self._wanted < self._window.end:
            self._window.drop(min(self._wanted, self._window.start))

    def give_up_blocks(self) -> None:
        """The blocks are somebody else's from now on: only what is under way still comes."""
        self._wanted = min(self._wanted, self._window.end)
        self._blocks = []

    def close(self) -> None:
        """Nobody reads it any more: its slots are free."""
        self._wanted, self._blocks = 0, []
        self._window.drop(0)

    def behind(self, cursor: int) -> int:
        """Follow the log's cursor. Returns: rows that are computed, not under way, and wanted by it."""
        self._window.follow(cursor)
        if not self._blocks:  # they were given up: what is not under way will never come
            self._wanted = min(self._wanted, self._window.end)
        return max(0, self._wanted - self._window.end)

    def take_piece(self, slot: _Slot, count: int, at: int) -> npt.NDArray[np.int64]:
        """The next rows are under way into a slot. Returns: where they lie in the cache."""
        start = self._window.end
        self._window.pieces.append(_Piece(slot, start, start + count, at))
        slot.uses += 1
        first = start // self._block_size
        held = self._blocks[first : -(-(start + count) // self._block_size)]
        return slots_of(np.array(held, np.int64), self._block_size, start - first * self._block_size, count)

    def copy_rows(self, start: int, out: memoryview) -> None:
        """Copy rows that have landed; `start` is not below the log's cursor."""
        end = start + len(out) // self._row_bytes
        assert self._window.start <= start <= end <= self.length, "rows that have landed"
        for piece in self._window.pieces:
            first, last = max(start, piece.start), min(end, piece.end)
            if first < last:
                into = slice((first - start) * self._row_bytes, (last - start) * self._row_bytes)
                at = (piece.at + first - piece.start) * self._row_bytes
                out[into] = piece.slot.data[at : at + (last - first) * self._row_bytes]

    def load_rows(self, rows: memoryview) -> None:  # noqa: ARG002
        """Not here: loads go through the store, in the blocks that the scheduler has given."""
        raise AssertionError("rows are loaded by the store")

    def cut(self, length: int) -> None:
        """Forget all positions from `length` on."""
        self.settle(min(length, self._wanted))


class DeviceStore:
    """All layers of an engine's paged cache on a device.

    Args:
        view: as `stack_layers` makes it; the engine must keep the cache as long as this lives.
        block_size: positions of one of the scheduler's blocks; a whole number of the view's.
        layout: of a row.
        queue: of the device.
        options: bounds.
    """

    def __init__(
        self,
        view: torch.Tensor,
        block_size: int,
        layout: Layout,
        queue: DeviceQueue,
        options: DeviceOptions,
    ) -> None:
        layers, planes, blocks, heads, positions, dims = view.shape
        assert (layers, planes, heads, dims) == (
            layout.layers, layout.planes, layout.kv_heads, layout.head_dim
        ), "a view of the layout"  # fmt: skip
        assert view.element_size() == DTYPE_BYTES[layout.dtype], "elements of the layout's dtype"
        assert block_size % positions == 0, "blocks of whole kernel blocks"
        self._view = view
        self._positions = positions
        self._layout = layout
        self._queue = queue
        self._options = options
        self._first = 0
        self.block_size = block_size
        self.blocks = blocks * positions // block_size
        self._slots = [self._new_slot() for _ in range(options.slots)]

    @property
    def layout(self) -> Layout:
        """Of a row."""
        return self._layout

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._layout.row_bytes

    @property
    def is_replicated(self) -> bool:
        """Every rank computes the same rows."""
        return self._layout.planes == 1

    def open_rows(self) -> DeviceRows:
        """One request's rows."""
        return DeviceRows(self.row_bytes, self.block_size)

    def gather_step(self, sources: Sequence[tuple[StepRows, int]]) -> None:
        """Queue one read of all new rows, behind the step that was queued last.

        Args:
            sources: each request's rows, and the log's cursor in them.
        """
        late = [(rows, behind) for rows, cursor in sources if (behind := _ours(rows).behind(cursor))]
        slot = next((slot for slot in self._slots if slot.uses == 0 and self._is_idle(slot)), None)
        if not late or slot is None:
            return
        rows_max = min(len(slot.host), max(len(late), self._options.step_bytes // self.row_bytes))
        shares = share_rows([behind for _, behind in late], rows_max, self._first)
        self._first += 1
        places, at = [], 0
        for (rows, _), count in zip(late, shares, strict=True):
            if count:
                places.append(_ours(rows).take_piece(slot, count, at))
                at += count
        with torch.inference_mode():
            slot.host[:at].copy_(self._view[self._index(np.concatenate(places))], non_blocking=True)
        slot.mark = self._queue.mark()

    def drain(self) -> None:
        """No step is being computed: wait for what was begun, which is a matter of a copy."""
        for slot in self._slots:
            if slot.uses and slot.mark is not None:
                slot.mark.synchronize()

    def fence(self) -> Mark:
        """The place in the engine's stream after all that may still write to blocks that were given away by now."""
        return self._queue.mark()

    def scatter(self, blocks: Sequence[int], start: int, rows: memoryview, after: Mark | None = None) -> None:
        """Put whole token-major rows at positions from `start` on; `rows` is read before this returns and not kept.

        Args:
            blocks: the request's block table, from position 0.
            start: first position.
            rows: contiguous, format B.
            after: None: they are there for whatever the engine queues next. A fence: they are written beside the
                engine's steps, after it, and are there when this returns.
        """
        with nullcontext() if after is None else self._queue.beside(after), torch.inference_mode():
            self._scatter(blocks, start, rows)

    def _scatter(self, blocks: Sequence[int], start: int, rows: memoryview) -> None:
        table = np.asarray(blocks, np.int64)
        piece = max(1, _LOAD_PIECE_BYTES // self.row_bytes)
        count = len(rows) // self.row_bytes
        for begin in range(0, count, piece):
            many = min(piece, count - begin)
            host = self._pinned(many)
            _bytes_of(host)[:] = rows[begin * self.row_bytes : (begin + many) * self.row_bytes]
            index = self._index(slots_of(table, self.block_size, start + begin, many))
            self._view[index] = host.to(self._view.device, non_blocking=True)

    def _index(self, slots: npt.NDArray[np.int64]) -> tuple[slice | torch.Tensor, ...]:
        """Of `view`. The vectors are not adjacent, so what they pick comes first: [n, layers, planes, heads, dim]."""
        both = np.stack((slots // self._positions, slots % self._positions))
        vectors = torch.from_numpy(both)
        if self._view.is_cuda:
            vectors = vectors.pin_memory()
        placed = vectors.to(self._view.device, non_blocking=True)
        return (slice(None), slice(None), placed[0], slice(None), placed[1])

    def _new_slot(self) -> _Slot:
        host = self._pinned(max(1, self._options.slot_bytes // self.row_bytes))
        return _Slot(host, _bytes_of(host))

    @staticmethod
    def _is_idle(slot: _Slot) -> bool:
        """Nothing is being copied into it, even if nobody waits for that any more."""
        return slot.mark is None or slot.has_landed

    def _pinned(self, count: int) -> torch.Tensor:
        layout = self._layout
        shape = (count, layout.layers, layout.planes, layout.kv_heads, layout.head_dim)
        return torch.empty(shape, dtype=self._view.dtype, pin_memory=self._view.is_cuda)


def _ours(rows: StepRows) -> DeviceRows:
    assert isinstance(rows, DeviceRows), "rows that this store has opened"
    return rows


def _bytes_of(host: torch.Tensor) -> memoryview:
    """A contiguous host tensor's bytes, writable."""
    flat: npt.NDArray[np.uint8] = host.view(torch.uint8).numpy().reshape(-1)
    return flat.data
