"""NodeCore: the end of a session, and hand-overs that stop after any step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import (
    AppendRecord,
    ReadWatermark,
    SessionEnded,
    TurnEnded,
    TurnFenced,
    TurnOpened,
)
from kvlog.core.inputs import AppendFailed, CloseTurn
from kvlog.core.session import Standing
from kvlog.core.standby import StandbyCore
from kvlog.ids import Epoch, Offset, Partition, Position, SessionId, Shard, Turn
from kvlog.limits import TINY
from kvlog.records import End, EndReason
from tests.unit.core.cluster import Cluster, Machine, claims_in, owners, told
from tests.unit.core.logbook import read_to

if TYPE_CHECKING:
    from collections.abc import Callable

S = SessionId("s")
ASKS = ReadWatermark(S, Partition(0))


def test_owned_session_is_ended_at_once(a: Machine) -> None:
    """The turn in progress ends with it; once the End is folded there is nothing left to own."""
    a.own(1)
    a.write(1)
    first, second = a.end()
    assert isinstance(first, TurnEnded)
    assert isinstance(second, AppendRecord)
    assert End(S, Epoch(1), a.core.primary(S).claim.writer, 3, EndReason.FORGET) == second.record  # type: ignore[union-attr, arg-type]
    assert [] == a.end()
    a.land()
    a.read()
    assert [] == owners(a)
    assert [] == a.end()


def test_session_that_is_not_owned_is_claimed_to_end_it(a: Machine, b: Machine) -> None:
    """Anybody may forget a session: as its owner."""
    a.own(1)
    a.write(1)
    b.read()
    assert [ASKS] == b.end()
    assert [] == b.end()
    b.answer()
    b.land()
    b.read()
    b.land()
    b.read()
    assert Standing.ENDED is b.state().standing  # type: ignore[union-attr]
    assert [TurnFenced] == [type(effect) for effect in told(a.read())]


def test_end_joins_a_takeover_in_flight_and_the_request_claims_anew(a: Machine) -> None:
    """The session ends first; the request that waited begins it again from nothing."""
    a.open(1, 2)
    a.answer()
    assert [] == a.end()
    a.land()
    assert [ASKS] == [effect for effect in a.read() if isinstance(effect, ReadWatermark)]
    a.answer()
    a.land()
    assert [Epoch(2)] == [e.epoch for e in told(a.read()) if isinstance(e, TurnOpened)]
    a.write(1, 2)
    assert [1, 2] == list(a.state().tokens)  # type: ignore[union-attr]


def test_end_is_given_up_with_its_takeover(a: Machine) -> None:
    """A log that is away forgets nothing now; whoever wants it asks again."""
    a.end()
    for _ in range(TINY.claim_attempts):
        a.no_answer()
    assert (0, []) == (a.core.takeovers_in_flight, a.asked)
    assert [TurnOpened] == [type(effect) for effect in told(a.own(1))]
    assert (["A"], []) == (owners(a), a.sent)


def test_forgotten_session_is_ended_although_its_end_was_lost(a: Machine) -> None:
    """Who forgets a session says so once: it is claimed anew, and ended under that claim."""
    a.own(1)
    a.write(1)
    a.step(CloseTurn(Turn(1)))
    a.end()
    assert [ASKS] == a.lose()
    a.answer()
    a.land()
    a.read()
    a.land()
    assert any(isinstance(effect, SessionEnded) for effect in a.read())
    assert ([], 0) == (owners(a), a.core.takeovers_in_flight)


def test_forgotten_session_is_ended_although_a_claim_of_unknown_outcome_lands_before_the_end(
    a: Machine,
) -> None:
    """The End is stale behind the claim that a rewrite had sent, and given up before it was known to stand."""
    a.own(1)
    a.write(1)
    a.step(CloseTurn(Turn(1)))
    a.rewrite()
    a.answer()
    (claim,) = claims_in(a)
    a.land()
    a.step(AppendFailed(claim))
    a.end()
    a.land()
    a.read()
    a.answer()
    a.land()
    a.read()
    a.land()
    a.read()
    assert Standing.ENDED is a.state().standing  # type: ignore[union-attr]
    assert ([], 0) == (owners(a), a.core.takeovers_in_flight)


def test_session_whose_time_is_over_is_not_claimed_back_to_end_it(a: Machine) -> None:
    """Only its owner ends a session that nobody uses; retention ends it as well."""
    a.own(1)
    a.write(1)
    a.step(CloseTurn(Turn(1)))
    a.end(reason=EndReason.TTL)
    assert ([], []) == (a.lose(), owners(a))


def test_ended_session_is_claimed_like_a_new_one(a: Machine) -> None:
    """Only a claim follows an End."""
    a.own(1)
    a.write(1)
    a.end()
    assert [ASKS] == a.open(1)
    a.answer()
    a.land()
    assert [TurnOpened(2, S, Turn(2), Epoch(5), Position(0), Position(0))] == told(a.read())[-1:]
    a.write(1)
    assert (Standing.WHOLE, [1]) == (a.state().standing, list(a.state().tokens))  # type: ignore[union-attr]


# Interrupted after each step, then resumed


def hand_over(a: Machine, b: Machine) -> list[Callable[[], object]]:
    """A take-over of A's session by B, step by step."""
    return [
        b.read,
        lambda: b.open(1, 2, 3),
        b.answer,
        b.land,
        b.read,
        lambda: b.rows(3, shard=0),
        lambda: b.land(1),
        lambda: b.land(1),
        lambda: b.rows(3, shard=1),
        b.land,
        b.read,
        a.read,
    ]


@pytest.mark.parametrize("steps", range(13))
@pytest.mark.parametrize("heir", ["A", "C"])
def test_hand_over_that_stops_after_any_step_leaves_a_session_that_can_be_claimed(
    cluster: Cluster, a: Machine, steps: int, heir: str
) -> None:
    """Every step can be interrupted: B dies, and anybody goes on; B's late records then change nothing."""
    b = cluster.machine("B")
    a.own(1, 2)
    a.write(1, 2)
    for step in hand_over(a, b)[:steps]:
        step()
    next_owner = a if heir == "A" else cluster.machine("C")
    next_owner.read()
    if next_owner.core.primary(S) is None:
        next_owner.own(1, 2, 3)
    assert [heir] == owners(next_owner)
    primary = next_owner.core.primary(S)
    assert primary is not None
    rest = (1, 2, 3)[primary.expects(Shard(0)) or 0 :]
    if rest:
        next_owner.write(*rest)
    b.land()
    read_again = next_owner.read()
    assert [1, 2, 3] == list(next_owner.state().tokens)  # type: ignore[union-attr]
    assert [] == [effect for effect in told(read_again) if not isinstance(effect, TurnFenced)]
    a_reader_of_everything(cluster)


@pytest.mark.parametrize("steps", range(13))
def test_hand_over_that_stops_after_any_step_is_resumed_by_the_same_node(
    cluster: Cluster, a: Machine, b: Machine, steps: int
) -> None:
    """B goes on after a pause: it ends up as the owner of a session that is whole."""
    a.own(1, 2)
    a.write(1, 2)
    done = hand_over(a, b)
    for step in done[:steps]:
        step()
    cluster.book.append(cluster.book.entries[0])
    for step in done[steps:]:
        step()
    assert (["B"], [1, 2, 3]) == (owners(a, b), list(b.state().tokens))  # type: ignore[union-attr]
    a_reader_of_everything(cluster)


def a_reader_of_everything(cluster: Cluster) -> None:
    """Whoever reads the whole log finds the session whole."""
    reader = StandbyCore(Partition(0), Offset(0), TINY)
    read_to(reader, cluster.book)
    state = reader.session(S)
    assert state is not None
    assert (Standing.WHOLE, [1, 2, 3]) == (state.standing, list(state.tokens))
