"""Rewriting: a session of ours is logged again from position 0, so that a reader that begins later knows it. Pure.

A reader knows a session from its root on. Retention takes old records, so the root of a session that lives long comes
near the log start. Its owner then claims it anew and, under the new epoch, writes Truncate(0) and every row again:
seq 0 of an epoch with length 0 restarts the chain, so it roots who has no history (docs/fencing.md). In the middle of
an epoch it would root nobody, hence the claim.

INV-REWRITE: a rewrite begins only where the session is owned, idle, drained and whole, under an epoch claimed for it,
and not if another writer has claimed meanwhile (INV-NO-CLAIM-BACK); and it never stands in a request's way: it gives
way at once, and what it has logged so far stands.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core.effects import TurnEnded, TurnEndReason, TurnUnlogged, UnloggedReason
from kvlog.core.inputs import OpenTurn
from kvlog.core.primary import Tenure
from kvlog.core.session import Standing
from kvlog.core.takeover import Phase

if TYPE_CHECKING:
    from kvlog.core.claims import ClaimsInFlight
    from kvlog.core.effects import Effect
    from kvlog.core.inputs import RewriteSession
    from kvlog.core.owned import OwnedSessions
    from kvlog.core.primary import PrimaryCore
    from kvlog.core.session import SessionState
    from kvlog.ids import SessionId

__all__ = ["give_way", "is_rewritable", "turn_of"]


def is_rewritable(primary: PrimaryCore, state: SessionState | None) -> bool:
    """Whether the owner could log the session again as it is: nothing is on its way, nobody writes, all of it is known.

    All rows must be of one identity and context, those of the claim: a record says whose bytes it holds by its claim.
    """
    if (
        state is None
        or state.length == 0
        or state.standing is not Standing.WHOLE
        or primary.tenure is not Tenure.OWNED
        or primary.turn is not None
        or not primary.is_drained(state)
    ):
        return False
    context = state.shards[0].runs[0].context
    return state.usable(state.tokens, context, primary.claim.identity) == state.length


def turn_of(
    happened: RewriteSession, primary: PrimaryCore | None, state: SessionState | None
) -> OpenTurn | None:
    """The turn that logs the session again; None where that cannot be now."""
    if primary is None or state is None or not is_rewritable(primary, state):
        return None
    return OpenTurn(
        request=happened.request,
        session=happened.session,
        tokens=state.tokens,
        context=state.shards[0].runs[0].context,
        identity=primary.claim.identity,
        continues=primary.claim.epoch,
        deadline_ns=happened.deadline_ns,
        rewrites=True,
    )


def give_way(session: SessionId, claims: ClaimsInFlight, owned: OwnedSessions) -> tuple[Effect, ...]:
    """A request for the session came: its rewrite is over, if there is one, wherever it stands.

    A claim that was not sent yet is not sent, so that the request goes on under the epoch that it would have had.
    """
    out: list[Effect] = []
    claim, primary = claims.get(session), owned.get(session)
    if claim is not None and claim.asked is not None and claim.asked.rewrites:
        out.append(TurnUnlogged(claim.asked.request, session, UnloggedReason.BUSY))
        claim.asked = None
        if claim.takeover.phase is Phase.ASKING and not claim.is_wanted:
            claims.pop(session)
    if primary is not None and primary.is_rewriting and primary.turn is not None:
        out.append(TurnEnded(primary.turn, session, TurnEndReason.GAVE_WAY))
        owned.close(primary.turn)
    return tuple(out)
