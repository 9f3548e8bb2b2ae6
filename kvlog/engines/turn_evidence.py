"""What one turn of a paged engine came to, for whoever has to prove it: rows in blocks, rows loaded, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.engines.row_store import StepRows
    from kvlog.engines.turns import TurnHandle
    from kvlog.ids import SessionId
    from kvlog.layout import Layout

__all__ = ["TurnEvidence", "TurnTimes"]


@dataclass(slots=True)
class TurnTimes:
    """When a turn came so far, in monotonic seconds; 0: it did not.

    `asked`: the daemon for it. `answered`: by the daemon, seen by the engine. `loaded`: what could be attached was
    copied, verified, and put into blocks.
    """

    asked: float = 0.0
    answered: float = 0.0
    loaded: float = 0.0

    @property
    def open_ms(self) -> float:
        """What the daemon took."""
        return 1000 * max(0.0, self.answered - self.asked)

    @property
    def attach_ms(self) -> float:
        """What copying, verifying and loading took; 0: nothing was loaded."""
        return 1000 * (self.loaded - self.answered) if self.loaded else 0.0


@dataclass(frozen=True, slots=True)
class TurnEvidence:
    """A turn as its worker has it; to be looked at while its blocks are still its own.

    Args:
        session: whose.
        tokens: ids that have rows, or will have: longer than `rows` by the newest.
        rows: in the engine's blocks.
        layout: of a row.
        known: tokens that the request had when the turn was asked for.
        loaded: rows that were verified and put into blocks instead of being computed.
        handle: its log; None: the daemon was never asked, or has not answered.
        times: see there.
    """

    session: SessionId
    tokens: list[int]
    rows: StepRows
    layout: Layout
    known: int
    loaded: int
    handle: TurnHandle | None
    times: TurnTimes
