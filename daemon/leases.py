"""The pool's blocks that engines may copy from: pinned when a turn opens, until they release them or are gone."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvlog.buffers.blocks import Key
from kvlog.errors import KvlogError
from kvlog.ids import Position
from kvlog.link.messages import attach_rows_max

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daemon.joining import RankAsk
    from kvlog.buffers.blocks import LeaseId, PinnedBlocks
    from kvlog.buffers.pool import BlockPool
    from kvlog.core.effects import TurnOpened
    from kvlog.ids import Turn
    from kvlog.limits import Limits
    from kvlog.link.server import Peer

__all__ = ["AttachLeases"]


class AttachLeases:
    """Who holds which blocks."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self._pool = pool
        self._limits = limits
        self._held: dict[Peer, dict[Turn, LeaseId]] = {}

    def pin(self, opened: TurnOpened, asks: Sequence[RankAsk]) -> list[PinnedBlocks] | None:
        """Hold what each rank may copy of its own shard: what the fold allows, as far as bytes of every shard are here.

        Returns: the same length for all; None: nothing, or attaches hold as much of the pool as they may.
        """
        keys = [Key(opened.session, ask.shard) for ask in asks]
        self._pool.blocks.touch(opened.session, time.monotonic_ns())
        present = min(self._pool.present_prefix(key) for key in keys)
        length = min(opened.usable, present, attach_rows_max(self._limits))
        if length == 0:
            return None
        pinned: list[PinnedBlocks] = []
        try:
            pinned.extend(self._pool.pin(key, Position(length)) for key in keys)  # keeps what came before
        except KvlogError:
            for blocks in pinned:
                self._pool.release(blocks.lease)
            return None
        for ask, blocks in zip(asks, pinned, strict=True):
            self._held.setdefault(ask.peer, {})[opened.turn] = blocks.lease
        return pinned

    def release(self, peer: Peer, turn: Turn) -> None:
        """One rank has copied them."""
        lease = self._held.get(peer, {}).pop(turn, None)
        if lease is not None:
            self._pool.release(lease)

    def release_all(self, peer: Peer) -> None:
        """One rank is gone."""
        for lease in self._held.pop(peer, {}).values():
            self._pool.release(lease)
