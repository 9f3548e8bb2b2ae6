"""NodeCore: a request that was logged before claims only after it has seen every claim since (INV-NO-CLAIM-BACK)."""

from __future__ import annotations

import pytest

from kvlog.core.effects import (
    AppendRecord,
    ReadWatermark,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import (
    AppendFailed,
    CloseTurn,
    LogReplacedRead,
    Stop,
    WithdrawRequest,
)
from kvlog.core.session import Standing
from kvlog.ids import Epoch, Offset, Partition, Position, SessionId, Turn
from kvlog.limits import TINY
from tests.unit.core.cluster import Machine, claims_in, told

S = SessionId("s")
ASKS = ReadWatermark(S, Partition(0))


def outcome_unknown(a: Machine) -> None:
    """Its request was logged, and then an append of its own had an unknown outcome."""
    a.own(1, 2)
    a.write(1, 2)
    a.lose()
    a.disown()


def unlogged(reason: UnloggedReason, newer: int | None = None, *, request: int = 1) -> TurnUnlogged:
    """The request is served without being logged."""
    return TurnUnlogged(request, S, reason, None if newer is None else Epoch(newer))


def fenced_turn(a: Machine, b: Machine) -> None:
    """A had a turn under epoch 1; B has claimed epoch 5 meanwhile, and written."""
    a.own(1, 2)
    a.write(1, 2)
    b.read()
    b.open(1, 2)
    b.answer()
    b.land()
    b.read()
    b.write(3)


def test_request_that_was_fenced_does_not_claim_back(a: Machine, b: Machine) -> None:
    """INV-NO-CLAIM-BACK: A has read B's claim, so its request is over there and nothing is asked."""
    fenced_turn(a, b)
    a.read()
    assert [unlogged(UnloggedReason.FENCED, 5, request=2)] == a.open(1, 2, continues=1)


def test_request_that_goes_on_reads_up_to_the_watermark_before_it_claims(a: Machine, b: Machine) -> None:
    """INV-NO-CLAIM-BACK: A was cut off and has not read B's claim yet; it finds it before it claims."""
    fenced_turn(a, b)
    a.lose()
    a.core.primary(S).lose("lost")  # type: ignore[union-attr, arg-type]
    a.disown()
    assert [ASKS] == a.open(1, 2, continues=1)
    assert [] == a.answer()
    assert [] == told(a.read(until=4))
    assert [unlogged(UnloggedReason.FENCED, 5, request=2)] == told(a.read())
    assert (0, []) == (a.core.takeovers_in_flight, claims_in(a))


def test_request_that_goes_on_and_was_not_fenced_claims_when_it_has_caught_up(a: Machine, b: Machine) -> None:
    """An append was lost, and nobody else has claimed: the same request goes on under a new epoch."""
    a.own(1, 2)
    a.write(1, 2)
    a.cluster.book.claim("C", session="other")
    a.rows(3)
    a.lose()
    a.open(1, 2, 3, continues=1)
    assert [] == a.answer()
    effects = a.read()
    assert [Epoch(6)] == [e.record.epoch for e in effects if isinstance(e, AppendRecord)]
    a.land()
    assert [TurnOpened(2, S, Turn(2), Epoch(6), Position(2), Position(2))] == told(a.read())


def test_request_that_goes_on_claims_at_once_where_everything_was_read(a: Machine) -> None:
    """Nothing below the watermark is unknown."""
    a.own(1)
    a.rows(1)
    a.lose()
    a.open(1, continues=1)
    assert [AppendRecord] == [type(effect) for effect in a.answer()]


def test_request_that_goes_on_in_its_own_epoch_needs_no_claim(a: Machine) -> None:
    """The engine's link broke and came back: the session is still ours."""
    a.own(1)
    a.write(1)
    a.step(CloseTurn(Turn(1)))
    assert [TurnOpened(2, S, Turn(2), Epoch(1), Position(1), Position(1))] == a.open(1, continues=1)


def test_request_that_goes_on_after_it_has_taken_over_itself_is_not_fenced_by_the_owner_before(
    a: Machine, b: Machine
) -> None:
    """The rival's epoch is older than the request's own."""
    b.own(1)
    b.write(1)
    a.read()
    a.own(1, 2)
    a.write(2)
    a.step(CloseTurn(Turn(1)))
    assert [TurnOpened(2, S, Turn(2), Epoch(5), Position(2), Position(2))] == a.open(1, 2, continues=5)


def test_request_that_was_fenced_does_not_ride_on_a_claim_for_another(a: Machine, b: Machine) -> None:
    """INV-NO-CLAIM-BACK: A owns the session again, for a new request; the old one stays fenced."""
    fenced_turn(a, b)
    a.read()
    a.own(1, 2, 3)
    a.step(CloseTurn(Turn(2)))
    assert [unlogged(UnloggedReason.FENCED, 5, request=3)] == a.open(1, 2, continues=1)


def test_takeover_joined_by_a_fenced_request_ends_it_when_it_wins(a: Machine, b: Machine) -> None:
    """The claim was sent for a new request that has gone; the one that rides on it was fenced long before."""
    a.own(1, 2)
    a.write(1, 2)
    a.lose()
    b.read()
    b.open(1, 2)
    b.answer()
    b.land()
    a.read()
    a.open(1, 2, 3)
    a.answer()
    a.step(WithdrawRequest(S, 2))
    assert [unlogged(UnloggedReason.FENCED, 5, request=3)] == a.open(1, 2, continues=1)


def test_claim_that_waits_to_catch_up_is_given_up_when_its_request_goes(a: Machine, b: Machine) -> None:
    """Nobody needs it, and it might claim back."""
    fenced_turn(a, b)
    a.disown()
    a.open(1, 2, continues=1)
    a.answer()
    a.step(WithdrawRequest(S, 2))
    assert [] == told(a.read())
    assert (0, []) == (a.core.takeovers_in_flight, claims_in(a))


def test_claim_that_waits_to_catch_up_may_be_given_up_by_time(a: Machine, b: Machine) -> None:
    """Its deadline passes, then its own time; reading on finds nothing left of it."""
    fenced_turn(a, b)
    a.disown()
    a.open(1, 2, continues=1, deadline_ns=5)
    a.answer()
    for now in (0, 5, TINY.claim_ns):
        a.core.tick(now)
    assert a.core.takeovers_in_flight == 0
    assert [] == told(a.read())
    assert [] == claims_in(a)


def test_watermark_of_a_takeover_that_was_given_up_does_not_serve_the_next_request(
    a: Machine, b: Machine
) -> None:
    """INV-NO-CLAIM-BACK: it is older than the request, and says nothing of what was claimed since."""
    a.own(1, 2)
    a.write(1, 2)
    a.lose()
    a.disown()
    a.cluster.book.claim("C", session="other")
    a.open(1, 2, continues=1, deadline_ns=5)
    a.answer()
    for now in (0, 5, TINY.claim_ns):
        a.core.tick(now)
    b.read()
    b.open(1, 2)
    b.answer()
    b.land()
    a.open(1, 2, continues=1)
    a.read(until=5)
    assert [] == claims_in(a)
    a.answer()
    assert [unlogged(UnloggedReason.FENCED, 6, request=3)] == told(a.read())
    assert [] == claims_in(a)


def test_end_of_a_session_waits_for_no_request(a: Machine, b: Machine) -> None:
    """A fenced request is answered when the log was read; the claim to end the session goes on all the same."""
    fenced_turn(a, b)
    a.disown()
    a.open(1, 2, continues=1)
    a.answer()
    assert [] == a.end()
    effects = a.read()
    assert [unlogged(UnloggedReason.FENCED, 5, request=2)] == told(effects)
    assert 1 == len(claims_in(a))
    a.land()
    a.read()
    a.land()
    a.read()
    assert Standing.ENDED is a.state().standing  # type: ignore[union-attr]


def test_claim_that_lands_while_the_next_one_waits_to_catch_up_wins_and_is_waited_for_no_more(
    a: Machine, b: Machine
) -> None:
    """A claim of unknown outcome: what was asked for the next one goes with it."""
    outcome_unknown(a)
    a.open(1, 2, continues=1)
    a.read()
    a.answer()
    (claim,) = claims_in(a)
    a.step(AppendFailed(claim))
    b.open(1, session="other")
    b.answer()
    a.land()
    b.land()
    assert [] == a.answer()
    opened, *_ = told(a.read())
    assert isinstance(opened, TurnOpened)
    assert 0 == a.core.takeovers_in_flight


def test_node_that_stops_lets_a_claim_for_an_end_go_on(a: Machine) -> None:
    """No request waits for it, so nobody is answered."""
    a.own(1)
    a.write(1)
    a.disown()
    a.end()
    assert [] == told(a.step(Stop()))
    assert 1 == a.core.takeovers_in_flight


def test_log_that_lost_its_tail_is_asked_again_by_who_waits_to_catch_up(a: Machine) -> None:
    """It may never come to the watermark that the claim waits for."""
    outcome_unknown(a)
    a.cluster.book.claim("C", session="other")
    a.open(1, 2, continues=1)
    a.answer()
    assert ASKS in a.step(LogReplacedRead(Partition(0), Offset(1)))
    assert [] == claims_in(a)


@pytest.mark.parametrize("folded", [False, True])
def test_request_that_goes_on_does_not_bring_an_ended_session_back(a: Machine, folded: bool) -> None:
    """INV-STAYS-ENDED: it was forgotten under the request's own epoch; the End may still be on its way."""
    a.own(1, 2)
    a.write(1, 2)
    a.step(CloseTurn(Turn(1)))
    a.end()
    if folded:
        a.land()
        a.read()
    assert [unlogged(UnloggedReason.SESSION_ENDED, request=2)] == a.open(1, 2, continues=1)
    assert (0, []) == (a.core.takeovers_in_flight, a.asked)


def test_request_that_goes_on_finds_the_end_of_its_session_before_it_claims(a: Machine) -> None:
    """INV-STAYS-ENDED: an End that this process has not read yet, as after its restart."""
    a.own(1, 2)
    a.write(1, 2)
    a.end()
    a.land()
    a.disown()
    a.open(1, 2, continues=1)
    assert [] == a.answer()
    assert [unlogged(UnloggedReason.SESSION_ENDED, request=2)] == told(a.read())
    assert (0, []) == (a.core.takeovers_in_flight, claims_in(a))


def test_request_that_goes_on_does_not_ride_on_the_claim_for_its_sessions_end(a: Machine) -> None:
    """INV-STAYS-ENDED: the claim is there to end it."""
    outcome_unknown(a)
    a.open(1, 2, continues=1)
    a.answer()
    a.end()
    a.read()
    a.land()
    assert [unlogged(UnloggedReason.SESSION_ENDED, request=2)] == told(a.read())
    a.land()
    a.read()
    assert Standing.ENDED is a.state().standing  # type: ignore[union-attr]


def test_new_request_begins_an_ended_session_anew(a: Machine) -> None:
    """It was never logged before: it has nothing to bring back."""
    a.own(1, 2)
    a.write(1, 2)
    a.step(CloseTurn(Turn(1)))
    a.end()
    a.land()
    a.read()
    opened = told(a.own(1, 2))
    assert [TurnOpened(2, S, Turn(2), Epoch(6), Position(0), Position(0))] == opened
