"""Which sessions to drop from a pool: idle ones, the least recently used first. Safe, because the log has them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Container

    from kvlog.buffers.blocks import BlockTable
    from kvlog.ids import SessionId

__all__ = ["EvictionMarks", "plan_eviction"]

_ALL_PERCENT = 100


@dataclass(frozen=True, slots=True)
class EvictionMarks:
    """When to evict, and how far.

    Args:
        high_percent: used blocks above this start an eviction; 85: room for a burst while it runs.
        low_percent: it goes on down to this; 70: far enough below that it does not start again at once.
        ttl_ns: sessions idle for longer go in any case; None: never for that reason.
    """

    high_percent: int = 85
    low_percent: int = 70
    ttl_ns: int | None = None

    def __post_init__(self) -> None:
        assert 0 <= self.low_percent <= self.high_percent <= _ALL_PERCENT, (
            "marks are percents, the low one below the high one"
        )


def plan_eviction(
    table: BlockTable,
    marks: EvictionMarks,
    *,
    now_ns: int,
    held: Container[SessionId],
    blocks_wanted: int = 0,
) -> tuple[SessionId, ...]:
    """The sessions to drop now, in order; dropping any first part of them is safe too.

    Args:
        held: sessions with an open turn or a take-over in flight; they are never named. Nor are pinned ones: their
            blocks would not become free.
        blocks_wanted: what is about to be placed; counts as used.
    """
    counts = table.ledger.counts
    used = counts.used + blocks_wanted
    full = used * _ALL_PERCENT > marks.high_percent * counts.total
    target = marks.low_percent * counts.total // _ALL_PERCENT
    plan = []
    for use in table.uses():
        expired = marks.ttl_ns is not None and now_ns - use.touched_ns > marks.ttl_ns
        if not expired and not (full and used > target):
            break  # the later ones were touched later
        if use.pinned or use.session in held:
            continue
        plan.append(use.session)
        used -= use.blocks
    return tuple(plan)
