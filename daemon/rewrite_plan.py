"""Which sessions of ours are due to be logged again, and what of them can be.

Due: its first needed record has less than a set share of its life in the log left, by age or by bytes. Not logged
again: who has not been used for as long as the pool keeps idle sessions (else no session would ever leave the log), and
what would make the log take itself away (RewriteRule).
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.buffers.blocks import Key
from kvlog.core.rewriting import is_rewritable
from kvlog.ids import Position, Shard

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon.eviction import Evictor
    from daemon.node import NodeShell
    from daemon.retention import Arrivals, RetentionRule
    from daemon.turns import TurnRegistry
    from kvlog.buffers.pool import BlockPool
    from kvlog.core.session import SessionState
    from kvlog.ids import Offset, Partition, SessionId
    from kvlog.layout import Layout

__all__ = ["Plan", "PlannerParts", "RewritePlanner", "RewriteRule", "SkipReason"]


_QUIET_SECONDS = 5.0
"""A session that was used a moment ago will likely be used again, and a rewrite that gives way leaves a shorter prefix.
So it is left alone until half of its time to be rewritten is gone."""


class SkipReason(StrEnum):
    """Why a session that is due is not logged again."""

    ABSENT = "absent"
    """Rows of it are not in this node's pool any more."""
    NO_ROOM = "no_room"
    """The pool has no room for the old rows and the new ones at one time."""
    ROTTEN = "rotten"
    """A row in the pool is not what was stored."""
    LOG_TOO_SMALL = "log_too_small"
    """log.retention_bytes is so small that rewriting would fill it."""
    UNUSED = "unused"
    """Nobody has used it for pool.idle_seconds; it may go."""

    @property
    def is_alarming(self) -> bool:
        """Whether an operator should hear of it."""
        return self is not SkipReason.UNUSED


@dataclass(frozen=True, slots=True)
class RewriteRule:
    """When to log again.

    Args:
        retention: what the log keeps.
        when_left: the share of its life that a first record has left when its session is due; 0: never.
        idle_seconds: a session that was not used for so long is let go.
        pinned_share: the most of the pool that may be pinned, in percent.
    """

    retention: RetentionRule
    when_left: float
    idle_seconds: float
    pinned_share: int

    @property
    def bytes_a_life(self) -> float | None:
        """Of what a partition takes between two rewrites of a session, rewriting may be half: so many bytes."""
        size = self.retention.size_bytes
        return None if size is None else size * (1 - self.when_left) / 2


@dataclass(frozen=True, slots=True)
class Plan:
    """What is logged of each shard: the rows of [0, rows_to), and the token ids alone of [rows_to, length)."""

    length: Position
    rows_to: Position
    rows_a_block: int
    layout: Layout


@dataclass(frozen=True, slots=True)
class PlannerParts:
    """What is looked at; nothing of it is changed.

    Args:
        shell: holds the core.
        pool: this node's.
        evictor: knows how much room there is.
        turns: say when a session was last used.
        arrivals: when the log's records came.
        ids_from: from which position on a session is logged by token ids alone; None: nowhere.
        partition_of: a session's partition.
    """

    shell: NodeShell
    pool: BlockPool
    evictor: Evictor
    turns: TurnRegistry
    arrivals: Arrivals
    ids_from: Callable[[SessionId], Position | None]
    partition_of: Callable[[SessionId], Partition]


class RewritePlanner:
    """Says what is due and what can be done, by one rule."""

    def __init__(self, parts: PlannerParts, rule: RewriteRule) -> None:
        self._parts = parts
        self._rule = rule
        self._spent: dict[Partition, deque[tuple[int, int]]] = {}

    def due(self) -> list[SessionId]:
        """Sessions of ours whose first record is near its end, the nearest first."""
        rule = self._rule
        primaries = self._parts.shell.core.primaries() if rule.when_left else iter(())
        lefts = [(self._left(primary.session), primary.session) for primary in primaries]
        return [session for left, session in sorted(lefts) if left < rule.when_left]

    def rest_seconds(self, session: SessionId) -> float:
        """How long a session that was just logged again is left alone.

        Due already, it has a log whose clock is far from ours: by the log's own, its records are young for so long.
        """
        rule = self._rule
        is_due = self._left(session) < rule.when_left
        return (1 - rule.when_left) * rule.retention.seconds / 2 if is_due else 0.0

    def first_needed(self, session: SessionId) -> Offset | None:
        """From where a reader must begin to know the session; None: not known."""
        state = self._parts.shell.core.state(session)
        return state.first_needed_offset if state is not None else None

    def plan(self, session: SessionId) -> Plan | SkipReason | None:
        """What can be logged again of a session that is due; None: nothing now, it is in use."""
        core = self._parts.shell.core
        primary, state = core.primary(session), core.state(session)
        if primary is None or state is None or not is_rewritable(primary, state):
            return None
        idle_seconds = time.monotonic() - self._parts.turns.used_at(session)
        if idle_seconds < _QUIET_SECONDS and self._left(session) > self._rule.when_left / 2:
            return None
        if idle_seconds > self._rule.idle_seconds:
            return SkipReason.UNUSED
        plan = self.plan_of(state, state.length)
        if isinstance(plan, Plan):
            size = plan.rows_to * plan.layout.row_bytes * len(state.shards)
            if not self._is_affordable(session, size):
                return SkipReason.LOG_TOO_SMALL
        return plan

    def plan_of(self, state: SessionState, length: Position) -> Plan | SkipReason:
        """The same of a session's first positions, as the pool is now."""
        parts, layout, session = self._parts, state.claim.identity.layout, state.session
        ids_from = parts.ids_from(session)
        rows_to = length if ids_from is None else min(length, ids_from)
        keys = [Key(session, Shard(shard)) for shard in range(len(state.shards))]
        if any(parts.pool.present_prefix(key) < rows_to for key in keys):
            return SkipReason.ABSENT
        rows_a_block = max(1, parts.pool.geometry.rows_a_block(layout.row_bytes))
        blocks = len(keys) * -(-rows_to // rows_a_block)
        counts = parts.pool.blocks.ledger.counts
        pinnable = counts.total * self._rule.pinned_share // 100 - counts.pinned
        if blocks > min(parts.evictor.room, pinnable):
            return SkipReason.NO_ROOM
        return Plan(length, rows_to, rows_a_block, layout)

    def spend(self, session: SessionId, size: int) -> None:
        """So many bytes of a session were logged again."""
        partition = self._parts.partition_of(session)
        at = self._parts.arrivals.bytes_read(partition)
        self._spent.setdefault(partition, deque()).append((at, size))

    def _left(self, session: SessionId) -> float:
        """The share of its life that the session's first record still has; 1: it has none yet."""
        first, now_ms = self.first_needed(session), time.time_ns() // 1_000_000
        if first is None:
            return 1.0
        passed = self._parts.arrivals.since(self._parts.partition_of(session), first, now_ms)
        return self._rule.retention.left(*passed)

    def _is_affordable(self, session: SessionId, size: int) -> bool:
        """Where bytes end a record's life, a rewrite shortens that of others: it must not feed itself."""
        most = self._rule.bytes_a_life
        if most is None:
            return True
        partition = self._parts.partition_of(session)
        spent = self._spent.setdefault(partition, deque())
        now = self._parts.arrivals.bytes_read(partition)
        if spent and spent[-1][0] > now:
            spent.clear()  # of a log that was replaced since
        while spent and spent[0][0] < now - 2 * most:
            spent.popleft()
        return size + sum(one for _, one in spent) <= most
