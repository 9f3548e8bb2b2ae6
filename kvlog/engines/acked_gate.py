"""`acked` mode: whether a token may leave the engine yet; no I/O, no clock.

The token at position n is drawn from the KV of positions 0 to n − 1. INV-ACKED: it is shown once the log holds all of
them, as the daemon's own fold says: what a user has seen can then be continued from the log, without computing anything
again. What is late is shown all the same and from then on nothing is held (`degrade`), or it fails the answer (`fail`).

    judge ──▶ SHOW   n rows are acknowledged, or the answer has degraded
              HOLD   ask again when the turn has changed, or at the deadline
              DROP   the answer has failed: this token is never shown, nor is one after it
              FENCED another node has the session: show nothing more
              LATE   the deadline has passed, or the turn is not logged, and the setting is `fail`
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlog.engines.turns import TurnHandle

__all__ = ["AckedGate", "AckedOptions", "Late", "Passage"]

_DEADLINE = "deadline"


class Late(StrEnum):
    """What becomes of an answer whose next token was not acknowledged in time."""

    DEGRADE = "degrade"
    FAIL = "fail"


class Passage(StrEnum):
    """What to do with the next token."""

    SHOW = "show"
    HOLD = "hold"
    DROP = "drop"
    FENCED = "fenced"
    LATE = "late"


@dataclass(frozen=True, slots=True, kw_only=True)
class AckedOptions:
    """How long a token is held, counted from when it was drawn, and what follows then."""

    seconds: float = 2.0
    late: Late = Late.DEGRADE


class AckedGate:
    """One answer's gate. `judge` belongs to the output; the rest may be called from any thread.

    Args:
        options: deadline, and what is late.
        position: of the next token.
    """

    def __init__(self, options: AckedOptions, position: int) -> None:
        self._options = options
        self._position = position
        self._given_up: str | None = None
        self._late: str | None = None
        self._failed = False

    @property
    def late(self) -> str | None:
        """Why the log was too late: `deadline`, what it was given up for, why it is not logged; None: never."""
        return self._late

    def judge(self, handle: TurnHandle, drawn: float, now: float) -> Passage:
        """Say what to do with the next token; after SHOW the next one is another.

        Args:
            handle: the answer's turn.
            drawn: when the token was drawn, monotonic seconds.
            now: likewise.
        """
        if self._late is None and handle.fenced.is_set():
            return Passage.FENCED
        if self._late is None and handle.acked_length < self._position:
            if self._failed:
                return Passage.DROP
            late = self.hopeless(handle, drawn, now)
            if late is None:
                return Passage.HOLD
            self._late = late
            if self._options.late is Late.FAIL:
                return Passage.LATE
        self._position += 1
        return Passage.SHOW

    def deadline(self, drawn: float) -> float:
        """Until when a token is held."""
        return drawn + self._options.seconds

    def hopeless(self, handle: TurnHandle, drawn: float, now: float) -> str | None:
        """Why a token that was drawn then need not be waited for any longer; None: it may still be acknowledged."""
        if self._given_up is not None:
            return self._given_up
        reason = handle.reason
        if reason is not None and not (handle.was_logged and reason.passes):
            return str(reason)
        return str(reason or _DEADLINE) if now >= self.deadline(drawn) else None

    def give_up(self, why: str) -> None:
        """The turn is about to be closed, and will say nothing any more; the first reason stays."""
        self._given_up = self._given_up or why

    def fail(self) -> None:
        """The answer ends with an error, which cannot say that anything degraded: nothing is shown unacknowledged."""
        self._failed = True
