"""An answer that comes between two looks at a turn's phase."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.engines.turn_state import TurnRequest, TurnState
from kvlog.engines.turns import LoadCounts, TurnHandle
from kvlog.ids import Epoch, Position, SessionId, Turn
from kvlog.link.messages import RequestNumber, TurnOpened

if TYPE_CHECKING:
    from kvlog.engines.turn_state import Phase


class Racing(TurnState):
    """Opened by the link's reader right after the phase was read so many times."""

    reads_left = 0

    @property
    def phase(self) -> Phase:
        """As it was before the answer."""
        now = self._phase
        if self.reads_left:
            self.reads_left -= 1
            if not self.reads_left:
                opened = TurnOpened(
                    RequestNumber(1), Turn(1), Epoch(5), Position(0), Position(0), 4, (), b"x" * 16
                )
                self.answered(1, None, opened, 0.0)  # type: ignore[arg-type]  # no link is needed
        return now

    @phase.setter
    def phase(self, phase: Phase) -> None:
        self._phase = phase


class Rows:
    """Ten computed rows."""

    length = 10


def test_turn_that_opens_while_it_is_looked_at_may_still_write() -> None:
    """Or its blocks would be given back with all its rows unlogged."""
    turn = Racing(TurnRequest(session=SessionId("s")), list(range(20)))
    turn.begin(0.0, 9.0)
    handle = TurnHandle(turn, 4, LoadCounts())
    turn.reads_left = 1
    assert handle.may_write_more(Rows())  # type: ignore[arg-type]  # only its length is read
    assert handle.logged
    assert handle.may_write_more(Rows())  # type: ignore[arg-type]
