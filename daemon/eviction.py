"""Makes room in the pool: idle sessions go, least recently used first. Safe, because the log has them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from kvlog.buffers.eviction import plan_eviction

if TYPE_CHECKING:
    from daemon.node import NodeShell
    from daemon.turns import TurnRegistry
    from kvlog.buffers.eviction import EvictionMarks
    from kvlog.buffers.pool import BlockPool
    from kvlog.ids import SessionId

__all__ = ["Evictor"]


class Evictor:
    """Drops sessions from the pool, never one with a turn in progress or a take-over in flight."""

    def __init__(self, shell: NodeShell, pool: BlockPool, turns: TurnRegistry, marks: EvictionMarks) -> None:
        self._shell = shell
        self._pool = pool
        self._turns = turns
        self._marks = marks
        self.rewritten: SessionId | None = None
        """The session that is being logged again; it is in use."""

    @property
    def room(self) -> int:
        """Blocks that can be placed before anything is evicted for them."""
        counts = self._pool.blocks.ledger.counts
        return self._marks.high_percent * counts.total // 100 - counts.used

    def evict(self, *, blocks_wanted: int = 0, keep: SessionId | None = None) -> int:
        """Drop what is due.

        Args:
            blocks_wanted: about to be placed; counted as used.
            keep: the session that they are for.

        Returns: how many sessions went.
        """
        in_use = {session for session in (keep, self.rewritten) if session is not None}
        held = self._turns.sessions() | self._shell.core.sessions_being_claimed | in_use
        plan = plan_eviction(
            self._pool.blocks, self._marks, now_ns=time.monotonic_ns(), held=held, blocks_wanted=blocks_wanted
        )
        for session in plan:
            self._pool.drop(session)
        return len(plan)
