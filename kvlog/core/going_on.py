"""Going on: whether a request that was logged before, and has lost its turn, may have another one. Pure.

INV-NO-CLAIM-BACK: not if another writer has claimed its session since.
INV-STAYS-ENDED: not if its session has ended since. The request has all rows at hand: it would bring back what somebody
has removed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core.effects import TurnUnlogged, UnloggedReason
from kvlog.core.session import Standing

if TYPE_CHECKING:
    from kvlog.core.inputs import OpenTurn
    from kvlog.core.primary import PrimaryCore
    from kvlog.core.session import SessionState
    from kvlog.ids import Writer

__all__ = ["refusal"]


def refusal(
    asked: OpenTurn, state: SessionState | None, primary: PrimaryCore | None, writer: Writer
) -> TurnUnlogged | None:
    """Why it may not, as far as was read; None: it may, or it was never logged before.

    Args:
        asked: the request.
        state: its session as folded.
        primary: its session as owned; an End that was sent counts before it is folded.
        writer: this node's.
    """
    if not asked.continues:
        return None
    if state is not None:
        rival = state.rival_epoch if state.writer == writer else state.epoch
        if rival > asked.continues:
            return TurnUnlogged(asked.request, asked.session, UnloggedReason.FENCED, rival)
    ended = [
        primary.claim.epoch if primary is not None and primary.ended else 0,
        state.epoch if state is not None and state.standing is Standing.ENDED else 0,
    ]
    if max(ended) >= asked.continues:
        return TurnUnlogged(asked.request, asked.session, UnloggedReason.SESSION_ENDED)
    return None
