"""How many sessions a node owns at a time, and which it lets go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import FollowPartition, TurnOpened
from kvlog.core.inputs import CloseTurn, Stop
from kvlog.ids import Offset, Partition
from kvlog.limits import TINY

if TYPE_CHECKING:
    from tests.unit.core.cluster import Cluster, Machine


@pytest.fixture
def small(cluster: Cluster) -> Machine:
    """A machine that may own two sessions."""
    return cluster.machine("A", limits=replace(TINY, primaries=2, sessions_a_partition=50))


def owned(machine: Machine) -> list[str]:
    """The sessions that it owns, least recently used first."""
    return [primary.session for primary in machine.core.primaries()]


def take(machine: Machine, session: str) -> None:
    """A whole turn of a session: claimed if need be, one row, closed."""
    opened = next(e for e in machine.own(1, 2, session=session) if isinstance(e, TurnOpened))
    if opened.log_from == 0:
        machine.write(1, session=session)
    machine.step(CloseTurn(opened.turn))


def test_owned_beyond_the_limit_lets_the_least_recently_used_go(small: Machine) -> None:
    """INV-BOUND-OWNED: the oldest idle session is let go."""
    for session in ("x", "y", "x", "z"):
        take(small, session)
    assert owned(small) == ["x", "z"]


def test_owned_session_that_was_let_go_is_claimed_again_with_what_it_holds(small: Machine) -> None:
    """Its next turn claims anew and goes on where it was."""
    for session in ("x", "y", "z"):
        take(small, session)
    opened = next(e for e in small.own(1, 2, session="x") if isinstance(e, TurnOpened))
    assert (opened.usable, opened.log_from) == (1, 1)


def test_owned_session_with_a_turn_in_progress_is_kept(small: Machine) -> None:
    """What is in use is not let go, however many there are."""
    for session in ("x", "y", "z"):
        small.own(1, 2, session=session)
    assert owned(small) == ["x", "y", "z"]


def test_state_that_is_held_is_passed_over_and_the_next_idle_one_goes(cluster: Cluster) -> None:
    """INV-BOUND-SESSIONS: an owned session's state stays although it is the oldest."""
    a = cluster.machine("A", limits=replace(TINY, primaries=1, sessions_a_partition=2))
    a.own(1, 2, session="x")
    for session in ("y", "z"):
        other = cluster.machine(f"other of {session}")
        other.read()
        other.own(1, 2, session=session)
    a.read()
    assert a.state("x") is not None
    assert a.state("y") is None
    assert a.state("z") is not None


def test_end_of_many_unknown_sessions_claims_no_more_than_the_bound(a: Machine) -> None:
    """Ending sessions obeys the bound on claims in flight: what does not fit is not ended."""
    for number in range(50):
        a.end(session=f"unknown {number}")
    assert a.core.takeovers_in_flight == TINY.takeovers_in_flight


def test_session_being_claimed_is_named_until_it_is_owned(a: Machine) -> None:
    """So that nobody takes its bytes away meanwhile."""
    a.open(1, 2)
    assert a.core.sessions_being_claimed == {"s"}
    a.answer()
    a.land()
    a.read()
    assert a.core.sessions_being_claimed == frozenset()


def test_end_of_a_session_while_stopping_claims_nothing(a: Machine) -> None:
    """A node that stops takes nothing over, not even to end it."""
    a.step(Stop())
    assert a.end(session="unknown") == []
    assert a.core.takeovers_in_flight == 0


def test_request_that_goes_on_in_a_partition_not_followed_is_read_from_its_claim_on(cluster: Cluster) -> None:
    """INV-NO-CLAIM-BACK: following from the watermark would miss a rival's claim, so it begins where it was logged."""
    rival = cluster.machine("B", first=None)
    rival.own(1, 2, session="far")
    rival.write(1, session="far")
    a = cluster.machine("A", first=None)
    a.open(1, 2, session="far", continues=1)
    assert [FollowPartition(Partition(1), Offset(0))] == a.answer()
    assert a.core.takeovers_in_flight == 1
    told = a.read(partition=1)
    assert a.core.takeovers_in_flight == 1 or told
