"""The take-overs that a node has in flight, and who waits for each of them. Pure bookkeeping.

What waits for a claim (a request, the wish to end the session, the watermark it must catch up with) is kept with its
take-over in one entry, so nothing can be left behind when the take-over is won, fenced or given up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.core.inputs import LogReplacedRead, UnreadableRead
from kvlog.core.takeover import Phase

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlog.core.inputs import HoleRead, OpenTurn, WatermarkRead
    from kvlog.core.takeover import TakeOver
    from kvlog.ids import Partition, SessionId
    from kvlog.records import EndReason

__all__ = ["ClaimInFlight", "ClaimsInFlight"]


@dataclass(slots=True)
class ClaimInFlight:
    """One take-over and what waits for it.

    Args:
        takeover: the attempt itself.
        asked: the request that opens a turn when it is won; None once it was answered or withdrawn.
        ending: why the session is ended when it is won.
        watermark: what the claim waits with until everything below it was folded.
    """

    takeover: TakeOver
    asked: OpenTurn | None = None
    ending: EndReason | None = None
    watermark: WatermarkRead | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody still waits for it."""
        return self.asked is not None or self.ending is not None


class ClaimsInFlight:
    """Take-overs by session."""

    __slots__ = ("_by_session",)

    def __init__(self) -> None:
        """Nothing is in flight yet."""
        self._by_session: dict[SessionId, ClaimInFlight] = {}

    def __len__(self) -> int:
        return len(self._by_session)

    def __contains__(self, session: SessionId) -> bool:
        return session in self._by_session

    def __iter__(self) -> Iterator[tuple[SessionId, ClaimInFlight]]:
        """Every one of them with its session; a copy, so that they may be removed meanwhile."""
        return iter(tuple(self._by_session.items()))

    @property
    def rewrites(self) -> int:
        """So many of them only serve a rewrite."""
        return sum(c.asked is not None and c.asked.rewrites for c in self._by_session.values())

    def get(self, session: SessionId) -> ClaimInFlight | None:
        """The take-over of a session, and who waits for it."""
        return self._by_session.get(session)

    def start(self, session: SessionId, takeover: TakeOver) -> ClaimInFlight:
        """Begin one. Whoever waits for an older take-over of the session waits for this one from here on.

        The watermark that the older one waits with is dropped: it says nothing of what was claimed since.
        """
        older = self._by_session.get(session)
        claim = ClaimInFlight(takeover, older.asked if older else None, older.ending if older else None)
        self._by_session[session] = claim
        return claim

    def unseen(
        self,
        happened: UnreadableRead | HoleRead | LogReplacedRead,
        partition_of: Callable[[SessionId], Partition],
    ) -> Iterator[tuple[SessionId, ClaimInFlight]]:
        """Those that may have stood where nothing could be read; a watermark of a log that is void is dropped."""
        key = happened.key if isinstance(happened, UnreadableRead) else None
        for session, claim in self:
            if key not in (None, session) or partition_of(session) != happened.partition:
                continue
            is_void = isinstance(happened, LogReplacedRead) and claim.watermark is not None
            if is_void:
                claim.watermark = None
            if is_void or claim.takeover.phase is Phase.CLAIMED:
                yield session, claim

    def pop(self, session: SessionId) -> ClaimInFlight:
        """It is over."""
        return self._by_session.pop(session)
