"""Which blocks of a pool are free, and which must not be touched by anybody yet.

A block is in one of three states: free; owned by one session's shard; loose, that is owned by nobody any more but still
pinned. Pins come from attaches (an engine is copying it) and from open placements (somebody is still writing to it). A
pinned block is never handed out: a loose one becomes free with its last pin. (INV-PINNED)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import PoolFull

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

__all__ = ["BlockCounts", "BlockLedger"]


@dataclass(frozen=True, slots=True)
class BlockCounts:
    """Blocks by state; `pinned` are those of attaches, owned or loose."""

    total: int
    free: int
    loose: int
    pinned: int

    @property
    def used(self) -> int:
        """Blocks that cannot be handed out now."""
        return self.total - self.free


class BlockLedger:
    """The blocks of one pool by number; knows nothing of sessions or bytes.

    Args:
        blocks: how many there are, ≥ 1.
        pinned_share: the most of them that attaches may pin, in percent.
    """

    def __init__(self, *, blocks: int, pinned_share: int) -> None:
        self._blocks = blocks
        self._pinned_max = blocks * pinned_share // 100
        # Taken from the end: the block given back last is the one most likely still in a cache.
        self._free = list(range(blocks - 1, -1, -1))
        self._loose: set[int] = set()
        self._attached: Counter[int] = Counter()
        self._written: Counter[int] = Counter()

    @property
    def counts(self) -> BlockCounts:
        """How many blocks are in which state."""
        return BlockCounts(self._blocks, len(self._free), len(self._loose), len(self._attached))

    def is_pinned(self, block: int) -> bool:
        """An engine may be reading it, or somebody writing to it."""
        return block in self._attached or block in self._written

    def take(self, count: int) -> list[int]:
        """Take free blocks: all of them or none.

        Raises:
            PoolFull: there are not so many.
        """
        if count > len(self._free):
            raise PoolFull(blocks_wanted=count, blocks_free=len(self._free))
        return [self._free.pop() for _ in range(count)]

    def give_back(self, blocks: Iterable[int]) -> None:
        """Their owner has no more use for them."""
        for block in blocks:
            if self.is_pinned(block):
                self._loose.add(block)
            else:
                self._free.append(block)

    def pin_for_attach(self, blocks: Iterable[int]) -> None:
        """Keep blocks as they are until `unpin_attached`.

        Raises:
            PoolFull: attaches would pin more than their share; nothing was pinned.
        """
        wanted = set(blocks)
        pinned = len(self._attached.keys() | wanted)
        if pinned > self._pinned_max:
            new = pinned - len(self._attached)
            raise PoolFull(blocks_wanted=new, blocks_free=max(0, self._pinned_max - len(self._attached)))
        self._attached.update(wanted)

    def unpin_attached(self, blocks: Iterable[int]) -> None:
        """Undo one `pin_for_attach` of the same blocks."""
        self._unpin(self._attached, set(blocks))

    def pin_for_write(self, blocks: Collection[int]) -> None:
        """Keep blocks, each named once, from being handed to anybody else while they are written."""
        for block in blocks:
            self._written[block] += 1

    def unpin_written(self, blocks: Collection[int]) -> None:
        """Undo one `pin_for_write` of the same blocks."""
        self._unpin(self._written, blocks)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that each block is in exactly one state, given those that are owned.

        Cost: all blocks; for tests.
        """
        everywhere = Counter([*self._free, *self._loose, *owned])
        assert everywhere == Counter(range(self._blocks)), "INV-PINNED: a block is in two places, or in none"
        assert all(self.is_pinned(block) for block in self._loose), (
            "INV-PINNED: a loose block without a pin is lost"
        )
        assert not any(self.is_pinned(block) for block in self._free), "INV-PINNED: a pinned block is free"
        assert min([*self._attached.values(), *self._written.values(), 1]) >= 1, "a pin that is none"

    def _unpin(self, pins: Counter[int], blocks: Collection[int]) -> None:
        for block in blocks:
            assert pins[block] >= 1, "unpinned more often than pinned"
            pins[block] -= 1
            if not pins[block]:
                del pins[block]
            if block in self._loose and not self.is_pinned(block):
                self._loose.remove(block)
                self._free.append(block)
