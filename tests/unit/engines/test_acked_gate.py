"""The gate of `acked` mode, from data only: when a token is shown, held, dropped or late."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest

from kvlog.engines.acked_gate import AckedGate, AckedOptions, Late, Passage
from kvlog.link.messages import EndedReason, UnloggedReason


@dataclass
class Handle:
    """What the gate looks at."""

    acked_length: int = 0
    reason: UnloggedReason | EndedReason | None = None
    was_logged: bool = True
    fenced: threading.Event = field(default_factory=threading.Event)


def gate(late: Late = Late.DEGRADE) -> AckedGate:
    """Of an answer whose first token is at position 10; a token is held for 2 s."""
    return AckedGate(AckedOptions(seconds=2.0, late=late), 10)


def judge(of: AckedGate, handle: Any, now: float = 0.0) -> Passage:
    """Of a token that was drawn at 0."""
    return of.judge(handle, 0.0, now)


def test_gate_shows_the_token_at_n_once_n_rows_are_acknowledged():
    """Each token needs one row more than the one before it."""
    one, handle = gate(), Handle(acked_length=9)
    assert Passage.HOLD is judge(one, handle)
    handle.acked_length = 11
    assert [Passage.SHOW, Passage.SHOW, Passage.HOLD] == [judge(one, handle) for _ in range(3)]
    assert one.late is None


def test_gate_degrades_at_the_deadline_and_holds_nothing_from_then_on():
    """What was late once is not acked, whatever comes later."""
    one, handle = gate(), Handle()
    assert Passage.HOLD is judge(one, handle, 1.9)
    assert [Passage.SHOW] * 2 == [judge(one, handle, 2.0), judge(one, handle, 0.0)]
    assert "deadline" == one.late


def test_gate_that_is_to_fail_fails_at_the_deadline():
    """The other setting."""
    one = gate(Late.FAIL)
    assert [Passage.HOLD, Passage.LATE] == [judge(one, Handle(), now) for now in (1.9, 2.0)]


@pytest.mark.parametrize("reason", [*UnloggedReason, *EndedReason])
def test_gate_waits_for_a_turn_that_was_logged_and_may_be_again(reason):
    """A lost link may come back within the deadline; a session that was given away does not."""
    one, handle = gate(), Handle(reason=reason)
    assert (Passage.HOLD if reason.passes else Passage.SHOW) is judge(one, handle, 1.0)
    assert Passage.SHOW is judge(one, handle, 2.0)
    assert str(reason) == one.late


@pytest.mark.parametrize("reason", UnloggedReason)
def test_gate_does_not_wait_for_a_turn_that_never_was_logged(reason):
    """An answer that begins unlogged is told so at once."""
    one = gate()
    assert Passage.SHOW is judge(one, Handle(reason=reason, was_logged=False))
    assert str(reason) == one.late


def test_gate_shows_nothing_more_of_a_fenced_turn():
    """Acknowledged or not: another node has the session."""
    one, handle = gate(), Handle(acked_length=20)
    handle.fenced.set()
    assert Passage.FENCED is judge(one, handle)


def test_gate_of_an_answer_that_has_failed_drops_what_is_not_acknowledged():
    """An error event has no place to say that tokens before it had degraded."""
    one, handle = gate(), Handle(acked_length=10)
    one.fail()
    assert [Passage.SHOW, Passage.DROP, Passage.DROP] == [judge(one, handle, 9.0) for _ in range(3)]
    assert one.late is None


def test_gate_of_an_answer_that_had_degraded_before_it_failed_shows_the_rest():
    """It went on as any other answer does."""
    one = gate()
    assert Passage.SHOW is judge(one, Handle(), 2.0)
    one.fail()
    assert Passage.SHOW is judge(one, Handle(), 2.0)


def test_gate_that_is_given_up_is_late_for_what_is_not_acknowledged_yet():
    """Tokens that the log has are shown as held; the others degrade, for the first reason that was given."""
    one, handle = gate(), Handle(acked_length=10)
    one.give_up("overloaded")
    one.give_up("deadline")
    assert [Passage.SHOW] * 2 == [judge(one, handle) for _ in range(2)]
    assert "overloaded" == one.late
