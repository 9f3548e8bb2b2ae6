"""NodeCore: who becomes the owner, when several want to, when answers are late, and when nobody waits any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import (
    AppendRecord,
    ReadWatermark,
    TurnAcknowledged,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import (
    CloseTurn,
    Follow,
    HoleRead,
    LogReplacedRead,
    UnreadableRead,
    WatermarkFailed,
    WithdrawRequest,
)
from kvlog.core.session import Standing
from kvlog.ids import Epoch, Offset, Partition, Position, SessionId, Turn
from kvlog.limits import TINY
from tests.unit.core.cluster import Cluster, Machine, claims_in, owners, told
from tests.unit.core.logbook import OTHER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.core.effects import Effect
    from kvlog.core.inputs import Input

S = SessionId("s")
ASKS = ReadWatermark(S, Partition(0))


def unlogged(reason: UnloggedReason, newer: int | None = None, *, request: int = 1) -> TurnUnlogged:
    """The request is served without being logged."""
    return TurnUnlogged(request, S, reason, None if newer is None else Epoch(newer))


def test_of_two_claims_of_one_watermark_the_first_in_the_log_wins(a: Machine, b: Machine) -> None:
    """RULE: the log decides; the other node asks again and, having waited, claims the session over."""
    for machine in (a, b):
        machine.open(1)
        machine.answer()
    b.land()
    a.land()
    assert [TurnOpened] == [type(effect) for effect in told(b.read())]
    assert ASKS in a.read()
    assert ["B"] == owners(a, b)


def test_claimer_that_loses_as_often_as_it_may_is_fenced(cluster: Cluster, a: Machine) -> None:
    """Bounded attempts; the answer names the epoch that won."""
    a.open(1)
    for _ in range(TINY.claim_attempts):
        a.answer()
        cluster.book.claim("B")
        a.land()
        effects = a.read()
    newest = cluster.book.state().epoch
    assert [unlogged(UnloggedReason.FENCED, newest)] == told(effects)
    assert (0, []) == (a.core.takeovers_in_flight, a.asked)


def test_log_that_does_not_answer_is_asked_a_bounded_number_of_times(a: Machine) -> None:
    """The request is served unlogged."""
    a.open(1)
    answers = [effect for _ in range(TINY.claim_attempts) for effect in a.no_answer()]
    assert [ASKS] * (TINY.claim_attempts - 1) + [unlogged(UnloggedReason.LOG_UNAVAILABLE)] == answers
    assert a.core.takeovers_in_flight == 0


def test_log_that_does_not_answer_about_a_partition_that_is_not_followed_is_given_up(
    cluster: Cluster,
) -> None:
    """There is nothing to keep or to let go of."""
    b = cluster.machine("B", first=None)
    b.open(1)
    effects = [effect for _ in range(TINY.claim_attempts) for effect in b.no_answer()]
    assert [unlogged(UnloggedReason.LOG_UNAVAILABLE)] == told(effects)
    assert {} == b.core.partitions


def test_claim_that_cannot_be_appended_is_tried_a_bounded_number_of_times(a: Machine) -> None:
    """A claim of unknown outcome is followed by another claim, never by anything under it."""
    a.open(1)
    answers = []
    for _ in range(TINY.claim_attempts):
        a.answer()
        answers += a.lose()
    assert [ASKS] * (TINY.claim_attempts - 1) + [unlogged(UnloggedReason.LOG_UNAVAILABLE)] == answers


def test_answers_that_nobody_asked_for_do_nothing(a: Machine) -> None:
    """A watermark, or its failure, for a session that is not being claimed."""
    assert [] == a.step(WatermarkFailed(S))
    assert [] == a.answer_with(S, 3)
    a.open(1)
    a.answer()
    assert [] == a.answer_with(S, 3)
    assert [1] == [claim.epoch for claim in claims_in(a)]


def test_take_over_continues_what_another_node_wrote(a: Machine, b: Machine) -> None:
    """The point of it all: B goes on where the log ends, and A is told."""
    a.own(1, 2)
    a.write(1, 2)
    b.read()
    b.open(1, 2, 3)
    b.answer()
    b.land()
    assert [TurnOpened(1, S, Turn(1), Epoch(5), Position(2), Position(2))] == told(b.read())
    assert [TurnAcknowledged(Turn(1), S, Position(3))] == told(b.write(3))
    assert [TurnFenced(Turn(1), S, Epoch(1), Epoch(5))] == told(a.read())
    assert ["B"] == owners(a, b)
    assert a.state() == b.state()


def test_takeovers_in_flight_are_bounded(a: Machine) -> None:
    """Past the bound a request is served unlogged; a session that is being claimed already does not count twice."""
    for number in range(TINY.takeovers_in_flight):
        a.open(1, session=f"s{number}")
    assert [unlogged(UnloggedReason.OVERLOADED, request=TINY.takeovers_in_flight + 1)] == a.open(1)
    a.step(WithdrawRequest(SessionId("s0"), 1))
    assert [] == a.open(1, session="s0")


# Deadlines


def test_request_does_not_wait_past_its_deadline(a: Machine) -> None:
    """Its engine recomputes; the claim goes on."""
    a.open(1, deadline_ns=1000)
    a.answer()
    assert [] == list(a.core.tick(999))
    assert [unlogged(UnloggedReason.CLAIM_TIMEOUT)] == list(a.core.tick(1000))
    assert [] == list(a.core.tick(1001))


def test_claim_that_lands_after_the_deadline_makes_an_idle_owner(a: Machine) -> None:
    """The next request finds the session ours, without another claim."""
    a.open(1, deadline_ns=1000)
    a.answer()
    a.core.tick(1000)
    a.land()
    assert [] == told(a.read())
    assert ["A"] == owners(a)
    assert [TurnOpened(2, S, Turn(1), Epoch(1), Position(0), Position(0))] == a.open(1)


def test_takeover_that_nobody_waits_for_is_given_up_in_time(a: Machine) -> None:
    """A claim may be lost without a word; what waits for it is not kept for ever."""
    a.open(1, deadline_ns=1000)
    a.answer()
    a.core.tick(0)
    a.core.tick(TINY.claim_ns - 1)
    assert a.core.takeovers_in_flight == 1
    a.core.tick(TINY.claim_ns)
    assert a.core.takeovers_in_flight == 0


def test_takeover_that_somebody_waits_for_is_not_given_up(a: Machine) -> None:
    """The request's own deadline decides."""
    a.open(1)
    a.core.tick(0)
    a.core.tick(10 * TINY.claim_ns)
    assert a.core.takeovers_in_flight == 1


def test_claim_that_lands_after_it_was_given_up_owns_nothing_until_it_is_claimed_again(a: Machine) -> None:
    """INV-READBACK: nothing is written under a claim that nobody was waiting to read back."""
    a.open(1, deadline_ns=0)
    a.answer()
    for now in (0, TINY.claim_ns):
        a.core.tick(now)
    a.land()
    a.read()
    assert [] == owners(a)
    assert [ASKS] == a.open(1)
    a.answer()
    a.land()
    assert [Epoch(2)] == [effect.epoch for effect in told(a.read()) if isinstance(effect, TurnOpened)]


# A request that was logged before (INV-NO-CLAIM-BACK)


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


# A claim that cannot be read back


@pytest.mark.parametrize(
    "disturb",
    [
        lambda: HoleRead(Partition(0), Offset(1)),
        lambda: LogReplacedRead(Partition(0), Offset(0)),
    ],
)
def test_claim_that_fell_into_a_hole_is_made_again(a: Machine, disturb: Callable[[], Input]) -> None:
    """It would be waited for in vain; a take-over that has not claimed yet waits for its watermark."""
    a.open(1)
    a.open(1, session="t")
    a.answer()
    effects = a.step(disturb())
    assert [ASKS] == [effect for effect in effects if isinstance(effect, ReadWatermark)]
    assert 2 == a.core.takeovers_in_flight


@pytest.mark.parametrize(("key", "asks"), [(S, 1), (None, 1), (SessionId("t"), 0)])
def test_claim_that_cannot_be_read_is_made_again(
    cluster: Cluster, a: Machine, key: SessionId | None, asks: int
) -> None:
    """The record that stays unreadable may be it, unless its key says otherwise."""
    a.open(1)
    a.answer()
    a.land()
    cluster.unreadable[Offset(0)] = key
    effects = a.read()
    assert asks == len([effect for effect in effects if isinstance(effect, ReadWatermark)])


def test_claim_whose_record_is_readable_at_the_second_time_wins(a: Machine) -> None:
    """A transient damage costs one more fetch, not a claim."""
    a.open(1)
    a.answer()
    a.land()
    a.step(UnreadableRead(Partition(0), Offset(0), S))
    assert [TurnOpened] == [type(effect) for effect in told(a.read())]


def test_holes_use_up_the_attempts(a: Machine) -> None:
    """Bounded, like any other failure."""
    a.open(1)
    effects: list[Effect] = []
    for _ in range(TINY.claim_attempts):
        a.answer()
        effects += a.step(HoleRead(Partition(0), Offset(0)))
    assert [unlogged(UnloggedReason.LOG_UNAVAILABLE)] == told(effects)


def test_disturbance_of_another_partition_leaves_a_claim_alone(cluster: Cluster) -> None:
    """Partitions have nothing to do with each other."""
    a = cluster.machine("A")
    a.step(Follow(Partition(1), Offset(0)))
    a.open(1)
    a.answer()
    assert [] == a.step(HoleRead(Partition(1), Offset(9)))


def test_own_claim_that_is_refused_by_the_window_is_made_again(cluster: Cluster, a: Machine) -> None:
    """A hole after the watermark was read: the claim's window is not whole, so nobody who read so may admit it."""
    a.open(1)
    a.answer()
    a.step(HoleRead(Partition(0), Offset(3)))
    for _ in range(3):
        cluster.book.claim("B", session="t")
    a.land()
    a.answer()
    assert [Epoch(1)] == [e.record.epoch for e in cluster.book.entries if e.record.session == S]
    effects = a.read()
    assert [] == told(effects)
    a.land()
    assert [TurnOpened] == [type(effect) for effect in told(a.read())]


def test_session_that_is_being_claimed_is_not_pushed_out(cluster: Cluster, a: Machine) -> None:
    """Its claim, read back, must find its state."""
    cluster.book.claim("B")
    a.read()
    a.open(1)
    a.answer()
    for number in range(2 * TINY.sessions_a_partition):
        cluster.book.claim("B", session=f"other {number}")
    a.read()
    assert a.state() is not None
    a.land()
    assert [TurnOpened] == [type(effect) for effect in told(a.read())]


def test_claim_of_other_weights_is_not_ridden_on(a: Machine) -> None:
    """A request with other weights opens a take-over of its own."""
    a.open(1)
    a.step(WithdrawRequest(S, 1))
    assert [ASKS] == a.open(1, identity=OTHER_WEIGHTS)
