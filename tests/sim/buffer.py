"""The model buffer of a node: blocks of four positions, pins, a free list that can run empty.

What kvlog.buffers promises, in its simplest form: a pinned block is never written nor handed to anybody else; rows
that find no room become absent; only rows from 0 without a hole are offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.ids import SessionId

BLOCK = 4


@dataclass(slots=True, eq=False)
class Block:
    rows: list[bytes | None] = field(default_factory=lambda: [None] * BLOCK)
    pins: int = 0
    freed: bool = False


@dataclass(slots=True)
class Rows:
    """One shard of one session."""

    blocks: list[Block | None] = field(default_factory=list)
    present: list[bool] = field(default_factory=list)

    def prefix(self) -> int:
        """Positions present from 0 without a hole."""
        return self.present.index(False) if False in self.present else len(self.present)


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks given to one attach, with what they held when they were given."""

    session: SessionId
    length: int
    blocks: list[list[Block]]
    held: list[list[tuple[bytes | None, ...]]]


class Buffer:
    """A node's buffer."""

    def __init__(self, blocks: int) -> None:
        self._free = [Block() for _ in range(blocks)]
        self._rows: dict[tuple[SessionId, int], Rows] = {}
        self.pins: list[Pin] = []

    def shard(self, session: SessionId, shard: int) -> Rows | None:
        return self._rows.get((session, shard))

    def row(self, session: SessionId, shard: int, position: int) -> bytes | None:
        """The bytes of a position, None if absent."""
        rows = self._rows.get((session, shard))
        if rows is None or position >= len(rows.present) or not rows.present[position]:
            return None
        block = rows.blocks[position // BLOCK]
        assert block is not None, "a present row has a block"
        return block.rows[position % BLOCK]

    def store(self, key: tuple[SessionId, int], start: int, rows: Sequence[bytes | None]) -> bool:
        """Write rows; whether all found room. None: the row is known to be absent."""
        held = self._rows.setdefault(key, Rows())
        self._cut(held, start)
        held.present += [False] * (start - len(held.present))
        whole = True
        for position, row in enumerate(rows, start):
            block = None if row is None else self._writable(held, position // BLOCK)
            held.present.append(block is not None)
            if block is not None:
                block.rows[position % BLOCK] = row
            whole = whole and (block is not None or row is None)
        return whole

    def cut(self, session: SessionId, length: int) -> None:
        """Forget every position from `length` on."""
        for (owner, _), held in self._rows.items():
            if owner == session:
                self._cut(held, length)

    def drop(self, session: SessionId) -> None:
        """Forget the session's bytes."""
        self.cut(session, 0)
        for key in [key for key in self._rows if key[0] == session]:
            del self._rows[key]

    def evict(self, session: SessionId) -> None:
        """Make all its bytes absent, to make room; later rows still find their place."""
        for (owner, _), held in self._rows.items():
            if owner == session:
                positions = len(held.present)
                self._cut(held, 0)
                held.present = [False] * positions

    def present(self, session: SessionId, shards: int) -> int:
        """The prefix that every shard has."""
        held = [self._rows.get((session, shard)) for shard in range(shards)]
        return min((rows.prefix() if rows else 0) for rows in held)

    def pin(self, session: SessionId, length: int, shards: int) -> Pin:
        """Give the blocks of [0, length) to an attach."""
        blocks: list[list[Block]] = []
        for shard in range(shards):
            held = self._rows.get((session, shard))
            mine = held.blocks[: -(-length // BLOCK)] if held else []
            blocks.append([block for block in mine if block is not None])
        for block in (b for shard_blocks in blocks for b in shard_blocks):
            block.pins += 1
        pin = Pin(session, length, blocks, [[tuple(b.rows) for b in mine] for mine in blocks])
        self.pins.append(pin)
        return pin

    def release(self, pin: Pin) -> None:
        """The attach is over; blocks that were freed meanwhile can be used again."""
        if pin not in self.pins:
            return
        self.pins.remove(pin)
        for block in (b for mine in pin.blocks for b in mine):
            block.pins -= 1
            if block.freed and not block.pins:
                self._put_back(block)

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    @property
    def sessions(self) -> set[SessionId]:
        """Sessions with bytes or positions here."""
        return {session for session, _ in self._rows}

    def _cut(self, held: Rows, length: int) -> None:
        del held.present[length:]
        keep = -(-length // BLOCK)
        for block in held.blocks[keep:]:
            if block is not None:
                self._give_up(block)
        del held.blocks[keep:]

    def _give_up(self, block: Block) -> None:
        if block.pins:
            block.freed = True
        else:
            self._put_back(block)

    def _put_back(self, block: Block) -> None:
        block.freed = False
        self._free.append(block)

    def _writable(self, held: Rows, index: int) -> Block | None:
        held.blocks += [None] * (index + 1 - len(held.blocks))
        block = held.blocks[index]
        if block is not None and not self._is_frozen(block):
            return block
        if not self._free:
            return None
        fresh = self._free.pop()
        fresh.rows = list(block.rows) if block is not None else [None] * BLOCK
        held.blocks[index] = fresh
        if block is not None:
            self._give_up(block)
        return fresh

    def _is_frozen(self, block: Block) -> bool:
        return block.pins > 0
