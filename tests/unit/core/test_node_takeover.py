"""NodeCore: who becomes the owner, when several want to, when answers are late, and when nobody waits any more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import (
    ReadWatermark,
    TurnAcknowledged,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import (
    Follow,
    HoleRead,
    LogReplacedRead,
    UnreadableRead,
    WatermarkFailed,
    WithdrawRequest,
)
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
