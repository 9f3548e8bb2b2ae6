"""How long the parts of a claim took: for the one line that is written when a take-over is complete."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlog.ids import SessionId

__all__ = ["ClaimTimes"]

_SESSIONS_MAX = 1024
"""Claims that never come back leave an entry behind; the oldest goes."""


@dataclass(slots=True)
class _Marks:
    """Monotonic seconds. `durable`: of the newest claim of this take-over; None: not yet."""

    asked: float
    durable: float | None = None


class ClaimTimes:
    """Marks of the claims in flight, by session. Time is passed in."""

    def __init__(self) -> None:
        self._marks: OrderedDict[SessionId, _Marks] = OrderedDict()

    def asked(self, session: SessionId, now: float) -> None:
        """A claim begins, or begins again: the first beginning counts."""
        self._marks.setdefault(session, _Marks(now))
        if len(self._marks) > _SESSIONS_MAX:
            self._marks.popitem(last=False)

    def durable(self, session: SessionId, now: float) -> None:
        """The log holds the claim."""
        marks = self._marks.get(session)
        if marks is not None:
            marks.durable = now

    def read_back(self, session: SessionId, now: float) -> Mapping[str, float]:
        """The claim was folded.

        Returns: milliseconds until it was durable, and from there until now; empty: not known.
        """
        marks = self._marks.pop(session, None)
        if marks is None:
            return {}
        # The reader may see the claim before its writer is told.
        durable = now if marks.durable is None else marks.durable
        return {
            "claim_ms": round(1000 * (durable - marks.asked), 2),
            "read_back_ms": round(1000 * (now - durable), 2),
        }
