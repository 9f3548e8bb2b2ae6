"""The sessions that a node owns, least recently used first, and the turns in progress on them. Pure bookkeeping.

INV-BOUND-OWNED: beyond limits.primaries the least recently used session that is idle and drained is let go. That is
safe: the session stays claimed by us in the log, nobody writes it, and its next turn claims it again, here or
elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

from kvlog.ids import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlog.core.inputs import OpenTurn
    from kvlog.core.primary import PrimaryCore, Tenure
    from kvlog.core.session import SessionState
    from kvlog.ids import Position, SessionId
    from kvlog.limits import Limits

__all__ = ["OwnedSessions"]

_LOOKED_AT_MAX = 8
"""Sessions in use stand at the end of the order, so the first few are idle, or soon will be."""


class OwnedSessions:
    """PrimaryCores by session, and whose turn is in progress."""

    __slots__ = ("_limits", "_next_turn", "_primaries", "_turns")

    def __init__(self, limits: Limits, *, first_turn: int = 1) -> None:
        """Nothing is owned yet."""
        self._limits = limits
        self._next_turn = first_turn
        self._primaries: OrderedDict[SessionId, PrimaryCore] = OrderedDict()
        self._turns: dict[Turn, SessionId] = {}

    def __contains__(self, session: SessionId) -> bool:
        return session in self._primaries

    def __iter__(self) -> Iterator[PrimaryCore]:
        """Every one of them, least recently used first; a copy, so that they may be removed meanwhile."""
        return iter(tuple(self._primaries.values()))

    def get(self, session: SessionId) -> PrimaryCore | None:
        """The writing side of a session that is owned."""
        return self._primaries.get(session)

    def add(self, primary: PrimaryCore) -> None:
        """A session was taken over."""
        assert primary.session not in self._primaries, "what was owned before is removed first"
        self._primaries[primary.session] = primary

    def remove(self, primary: PrimaryCore, tenure: Tenure) -> Turn | None:
        """It is not owned any more. Gives the turn that was in progress."""
        turn = primary.lose(tenure)
        del self._primaries[primary.session]
        if turn is not None:
            self._turns.pop(turn, None)
        return turn

    def session_of(self, turn: Turn) -> SessionId | None:
        """The session of a turn in progress."""
        return self._turns.get(turn)

    def of_turn(self, turn: Turn) -> PrimaryCore | None:
        """The primary whose turn in progress this is."""
        session = self._turns.get(turn)
        primary = self._primaries.get(session) if session is not None else None
        return primary if primary is not None and primary.turn == turn else None

    def begin(self, primary: PrimaryCore, asked: OpenTurn) -> tuple[Turn, Position]:
        """Begin a turn under the next number, which no other turn of this process has had."""
        turn = Turn(self._next_turn)
        self._next_turn += 1
        log_from = primary.begin(turn, asked.tokens, asked.context, rewrites=asked.rewrites)
        self._turns[turn] = primary.session
        self._primaries.move_to_end(primary.session)
        return turn, log_from

    def close(self, turn: Turn) -> None:
        """End a turn; one that is not in progress is ignored."""
        session = self._turns.pop(turn, None)
        if session is not None and (primary := self._primaries.get(session)) is not None:
            primary.close(turn)

    def surplus(self, state_of: Callable[[SessionId], SessionState | None]) -> PrimaryCore | None:
        """The session to let go of now, if there are too many; None: none, or none of the oldest few is idle."""
        if len(self._primaries) <= self._limits.primaries:
            return None
        for _, session in zip(range(_LOOKED_AT_MAX), self._primaries, strict=False):
            primary = self._primaries[session]
            if primary.turn is None and primary.is_drained(state_of(session)):
                return primary
        return None
