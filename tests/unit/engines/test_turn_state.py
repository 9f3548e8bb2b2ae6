"""A turn's phases, from data only: what each answer and event makes of each phase."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kvlog.engines.turn_state import (
    RETRY_SECONDS_MAX,
    Asking,
    Closed,
    Logged,
    TurnRequest,
    TurnState,
    Unlogged,
    may_write_later,
)
from kvlog.engines.turns import LoadCounts, TurnHandle
from kvlog.errors import LinkClosed
from kvlog.ids import Epoch, Position, SessionId, Turn
from kvlog.link.messages import (
    Acked,
    EndedReason,
    RequestNumber,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    unpack_tokens,
)

LINK: Any = object()
OTHER_LINK: Any = object()
NEVER = float("inf")
OPENED = TurnOpened(RequestNumber(1), Turn(8), Epoch(40), Position(5), Position(0), 64, (), b"")


def fresh() -> TurnState:
    """A turn that nobody has asked for."""
    return TurnState(TurnRequest(session=SessionId("s")), [1, 2, 3])


def asking(turn: TurnState, now: float = 0.0) -> int:
    """Ask for it."""
    attempt = turn.begin(now, give_up_at=now + 1)
    assert attempt is not None
    return attempt


def logged() -> TurnState:
    """A turn that is logged over LINK."""
    turn = fresh()
    turn.answered(asking(turn), LINK, OPENED, 0.0)
    return turn


def test_turn_fresh_is_unlogged_and_due():
    """Before there is a daemon there is no daemon."""
    turn = fresh()
    assert UnloggedReason.NO_LINK is turn.reason
    assert asking(turn) == 1
    assert UnloggedReason.NO_LINK is turn.reason


def test_turn_is_asked_for_once_at_a_time():
    """Two threads that look after a turn do not both ask."""
    turn = fresh()
    asking(turn)
    assert turn.begin(0.0, 1.0) is None


def test_turn_opened_is_logged_from_where_the_daemon_says():
    """The cursor begins at log_from, under the daemon's turn and epoch."""
    turn = logged()
    phase = turn.phase
    assert isinstance(phase, Logged)
    assert (8, 40, 5) == (phase.cursor.turn, phase.cursor.epoch, phase.cursor.position)
    assert turn.reason is None


@pytest.mark.parametrize("reason", UnloggedReason)
def test_turn_refused_is_asked_for_again_only_if_the_reason_may_pass(reason: UnloggedReason):
    """Busy stays busy; an unreachable log may come back."""
    turn = fresh()
    turn.answered(asking(turn), LINK, TurnUnlogged(RequestNumber(1), reason, ""), 10.0)
    assert reason is turn.reason
    phase = turn.phase
    assert isinstance(phase, Unlogged)
    assert (10.1 if reason.passes else NEVER) == phase.again_at
    assert turn.begin(10.05, 11) is None
    assert reason.passes == (turn.begin(10.2, 11) is not None)


def test_turn_refused_again_and_again_is_asked_for_later_each_time():
    """The pause doubles up to a bound."""
    turn, pauses = fresh(), []
    for _ in range(10):
        attempt = turn.begin(1e6, 1e6 + 1)
        assert attempt is not None
        turn.answered(attempt, LINK, TurnUnlogged(RequestNumber(1), UnloggedReason.CLAIM_TIMEOUT, ""), 0.0)
        assert isinstance(turn.phase, Unlogged)
        pauses.append(turn.phase.again_at)
    assert pytest.approx([0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 6.4, *[RETRY_SECONDS_MAX] * 3]) == pauses


def missed(turn: TurnState, now: float) -> float:
    """Ask, and be told that a rank is missing once the wait is over. Returns: the pause."""
    attempt = asking(turn, now)
    now += turn.message(RequestNumber(1)).wait_ms / 1000
    turn.answered(attempt, LINK, TurnUnlogged(RequestNumber(1), UnloggedReason.RANK_MISSING, ""), now)
    assert isinstance(turn.phase, Unlogged)
    return turn.phase.again_at - now


def test_turn_of_a_missing_rank_is_asked_for_again_before_the_daemon_would_give_the_others_up():
    """Each rank waits longer than it pauses: so they meet, however far apart they began."""
    turn, now = TurnState(TurnRequest(session=SessionId("s"), wait_seconds=1.0), [1, 2, 3]), 0.0
    for _ in range(10):
        wait = turn.wait_seconds
        pause = missed(turn, now)
        assert 0.09 < pause < 0.51
        assert pause < wait
        now += wait + pause


def test_turn_of_a_missing_rank_waits_longer_each_time_and_again_as_the_request_said_once_all_were_there():
    """A rank that stays away costs few questions with all their ids; another reason means that nobody is missing."""
    turn, now, waits = TurnState(TurnRequest(session=SessionId("s"), wait_seconds=1.0), [1, 2, 3]), 0.0, []
    for _ in range(6):
        waits.append(turn.wait_seconds)
        now += turn.wait_seconds + missed(turn, now)
    assert [1.0, 2.0, 4.0, 8.0, 10.0, 10.0] == waits
    attempt = asking(turn, now)
    turn.answered(attempt, LINK, TurnUnlogged(RequestNumber(1), UnloggedReason.CLAIM_TIMEOUT, ""), now)
    assert isinstance(turn.phase, Unlogged)
    assert 1.0 == turn.wait_seconds
    assert pytest.approx(now + 0.1) == turn.phase.again_at


@pytest.mark.parametrize("phase", [0.03, 0.08, 0.125, 0.2])
def test_ranks_that_ask_out_of_phase_with_short_waits_meet(phase: float):
    """A rank's thread looks four times a second: waits under that never met those of a rank that looks in between."""
    tick, ranks = (
        0.25,
        [TurnState(TurnRequest(session=SessionId("s"), wait_seconds=0.02), [1, 2, 3]) for _ in range(2)],
    )
    waiting: list[tuple[float, int] | None] = [None, None]
    for step in range(40):
        for rank, turn in enumerate(ranks):
            now = step * tick + rank * phase
            for each, held in enumerate(waiting):
                if held is not None and held[0] <= now:
                    refusal = TurnUnlogged(RequestNumber(1), UnloggedReason.RANK_MISSING, "")
                    ranks[each].answered(held[1], LINK, refusal, held[0])
                    waiting[each] = None
            if waiting[1 - rank] is not None:
                return
            attempt = turn.begin(now, now + turn.wait_seconds + 1)
            if attempt is not None:
                waiting[rank] = (now + turn.wait_seconds, attempt)
    raise AssertionError("they never met")


def test_turn_says_its_group():
    """By which the daemon finds its other ranks."""
    turn = TurnState(TurnRequest(session=SessionId("s"), group=b"group"), [1])
    assert b"group" == turn.message(RequestNumber(1)).group


def test_turn_without_an_answer_is_given_up_and_a_late_one_is_not_wanted():
    """Nobody waits for ever, and what comes later is undone by the link."""
    turn = fresh()
    attempt = asking(turn, now=0.0)
    turn.unanswered(0.9)
    assert isinstance(turn.phase, Asking)
    turn.unanswered(1.0)
    assert UnloggedReason.NO_ANSWER is turn.reason
    assert not turn.answered(attempt, LINK, OPENED, 1.1)
    assert asking(turn, now=2.0) == attempt + 1
    assert not turn.answered(attempt, LINK, OPENED, 2.1), "the answer to an older question"


def test_turn_whose_link_ends_is_due_at_once_on_the_next():
    """Generation went on; its rows are asked for as soon as there is someone to ask."""
    turn = logged()
    turn.link_lost(OTHER_LINK, 4.0)
    assert turn.reason is None
    turn.link_lost(LINK, 5.0)
    assert Unlogged(UnloggedReason.NO_LINK, 5.0) == turn.phase


def test_turn_asked_again_says_what_it_was_logged_under():
    """The daemon must be able to tell a continuation from a new request."""
    turn = logged()
    assert Epoch(40) == turn.message(RequestNumber(2)).continues
    assert Epoch(0) == fresh().message(RequestNumber(2)).continues


@pytest.mark.parametrize("take_over", [False, True])
def test_turn_takes_over_when_its_request_says_so_or_once_it_was_logged(take_over):
    """A new request waits for a busy owner; one that was begun before, here or elsewhere, does not."""
    turn = TurnState(TurnRequest(session=SessionId("s"), take_over=take_over), [1, 2, 3])
    assert take_over is turn.message(RequestNumber(1)).take_over
    turn.answered(asking(turn), LINK, OPENED, 0.0)
    assert turn.message(RequestNumber(2)).take_over


def test_turn_asked_again_sends_the_tokens_of_now():
    """What was generated without a daemon is part of the question."""
    turn = logged()
    turn.follow([1, 2, 3, 4, 5])
    assert (1, 2, 3, 4, 5) == unpack_tokens(turn.message(RequestNumber(2)).tokens)


def test_turn_question_without_a_link_is_due_again():
    """A link that ends under a question is no refusal."""
    turn = fresh()
    turn.answered(asking(turn), LINK, LinkClosed(problem="x"), 3.0)
    assert Unlogged(UnloggedReason.NO_LINK, 3.0) == turn.phase


def test_turn_fenced_is_told_and_never_asked_for_again():
    """INV-NO-CLAIM-BACK."""
    turn = logged()
    turn.link_event(LINK, TurnFenced(SessionId("s"), Turn(8), Epoch(40), Epoch(50)), 1.0)
    assert turn.fenced.is_set()
    assert Unlogged(UnloggedReason.FENCED, NEVER) == turn.phase
    turn.link_lost(LINK, 2.0)
    assert turn.begin(1e9, 2e9) is None


def test_turn_fenced_while_it_had_no_link_is_fenced_by_the_answer():
    """Another node took it meanwhile: the request ends, the session is not claimed back."""
    turn = logged()
    turn.link_lost(LINK, 1.0)
    turn.answered(
        asking(turn, 1.0), OTHER_LINK, TurnUnlogged(RequestNumber(2), UnloggedReason.FENCED, ""), 1.0
    )
    assert turn.fenced.is_set()
    assert turn.begin(1e9, 2e9) is None


def test_turn_that_never_was_logged_is_not_fenced_by_a_refusal():
    """Another node owns the session and does not give it: the request is served, unlogged."""
    turn = fresh()
    turn.answered(asking(turn), LINK, TurnUnlogged(RequestNumber(1), UnloggedReason.FENCED, ""), 1.0)
    assert not turn.fenced.is_set()
    assert UnloggedReason.FENCED is turn.reason


@pytest.mark.parametrize("reason", EndedReason)
def test_turn_given_up_by_the_daemon_is_opened_anew_only_if_that_helps(reason):
    """An unknown outcome is claimed anew; a session that was handed over is not."""
    turn = logged()
    turn.link_event(LINK, TurnEnded(Turn(8), reason), 4.0)
    assert Unlogged(reason, 4.0 if reason.passes else NEVER) == turn.phase


def test_turn_acknowledged_only_grows():
    """Acknowledgements may repeat after a turn was opened anew."""
    turn = logged()
    turn.link_event(LINK, Acked(Turn(8), Position(9)), 1.0)
    turn.link_event(LINK, Acked(Turn(8), Position(7)), 1.0)
    assert Position(9) == turn.acked_length


@pytest.mark.parametrize(
    ("log_from", "attach_length", "acked"),
    [(5, 0, 0), (5, 4, 4), (5, 5, 5), (3, 5, 3)],
)
def test_turn_opened_is_acknowledged_as_far_as_its_rows_are_in_the_log(log_from, attach_length, acked):
    """Rows below log_from may be on their way, and those above are written anew, whatever was acknowledged before."""
    turn = logged()
    turn.link_event(LINK, Acked(Turn(8), Position(9)), 1.0)
    turn.link_lost(LINK, 2.0)
    opened = replace(OPENED, log_from=Position(log_from), attach_length=Position(attach_length))
    turn.answered(asking(turn, 2.0), LINK, opened, 2.0)
    assert Position(acked) == turn.acked_length


def test_turn_watcher_is_called_at_every_change():
    """Whoever waits without a thread is woken by acknowledgements, ends and losses."""
    turn, calls = logged(), []
    turn.watcher = lambda: calls.append(turn.acked_length)
    turn.link_event(LINK, Acked(Turn(8), Position(9)), 1.0)
    turn.link_lost(LINK, 2.0)
    assert [9, 9] == calls


def test_turn_events_of_another_turn_or_link_are_dropped():
    """Turn numbers restart with the daemon."""
    turn = logged()
    fence = TurnFenced(SessionId("s"), Turn(8), Epoch(40), Epoch(50))
    turn.link_event(OTHER_LINK, fence, 1.0)
    turn.link_event(LINK, replace(fence, turn=Turn(7)), 1.0)
    assert not turn.fenced.is_set()


def test_turn_attach_is_what_was_opened_before_it_was_settled():
    """A turn that is opened later finds a cache with rows: nothing is attached then."""
    early, late = logged(), fresh()
    settled = early.settle()
    assert settled is not None
    assert OPENED is settled.opened
    assert late.settle() is None
    late.answered(asking(late), LINK, OPENED, 0.0)
    assert late.attach is None


def test_turn_closed_takes_nothing_any_more():
    """The end is the end, whatever is still under way."""
    turn = fresh()
    attempt = asking(turn)
    assert turn.close() is None
    assert not turn.answered(attempt, LINK, OPENED, 0.0)
    turn.refuse(UnloggedReason.NOT_SUPPORTED, 0.0)
    assert isinstance(turn.phase, Closed)
    assert turn.begin(1e9, 2e9) is None
    assert turn.reason is None


def test_turn_close_gives_what_the_daemon_must_be_told():
    """Who closes knows turn and length."""
    turn = logged()
    phase = turn.phase
    assert phase is turn.close()


@pytest.mark.parametrize("only_reads", [False, True])
def test_turn_of_a_rank_that_only_reads_never_has_rows_to_write(only_reads):
    """Neither now nor when its link is back: it has nothing to hold blocks for."""
    turn = TurnState(TurnRequest(session=SessionId("s")), [1, 2, 3], only_reads=only_reads)
    attempt = asking(turn)
    assert may_write_later(turn, turn.phase) is not only_reads
    turn.answered(attempt, LINK, OPENED, 0.0)
    phase = turn.phase
    assert isinstance(phase, Logged)
    assert not may_write_later(turn, phase)
    assert (only_reads, 5) == (phase.cursor.only_reads, phase.opened.log_from)
    cursor = TurnHandle(turn, 64, LoadCounts()).cursor
    assert cursor == (None if only_reads else 5)
    turn.link_lost(LINK, 1.0)
    assert may_write_later(turn, turn.phase) is not only_reads
