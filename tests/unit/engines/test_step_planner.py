"""The scheduler's side: watermarks, turns, loads and ends, from data only."""

from __future__ import annotations

import pickle
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines import step_planner
from kvlog.engines.step_plan import (
    CloseAsk,
    Dropped,
    LoadAsk,
    Ready,
    RowsAt,
    StepPlan,
    StepReport,
    TurnKey,
    UnloggedCause,
)
from kvlog.engines.step_planner import NewRequest, PlannerOptions, Scheduled, StepPlanner, watermark
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId
from kvlog.link.messages import unpack_tokens

TURN = TurnRequest(session=SessionId("s"))
FIRST = TurnKey(1)


def planner(**options: Any) -> StepPlanner:
    """With room for everything."""
    return StepPlanner(PlannerOptions(**{"held_blocks_max": 100, **options}))


def ready(length: int, key: int = 1, rank: int = 0, start: int = 0) -> StepReport:
    """A worker's answer."""
    return StepReport(ready=(Ready(TurnKey(key), rank, start, length, logged=True),))


def asked(tokens: list[int], **options: Any) -> StepPlanner:
    """One request that has asked for its turn."""
    one = planner(**options)
    one.add(NewRequest("r", TURN, tokens, named=True))
    assert one.matched("r", 0, 0.0) is None
    assert tokens == list(unpack_tokens(one.plan((), ()).opens[0].tokens))
    return one


def running(tokens: list[int]) -> StepPlanner:
    """One request that computes, with nothing loaded."""
    one = asked(tokens)
    one.take(ready(0))
    assert 0 == one.matched("r", 0, 0.0)
    one.allocated("r", [7], 0)
    return one


def test_watermark_of_a_prefill_chunk_is_what_is_computed():
    """Chunked prefill: rows up to the chunk's end."""
    assert [64, 128, 200] == [watermark(done, 64, 200) for done in (0, 64, 136)]


def test_watermark_of_a_decode_step_is_the_known_tokens():
    """The row of the newest known token; the token that the step draws has none yet."""
    assert 201 == watermark(200, 1, 201)


def test_watermark_leaves_out_drafts():
    """Four drafts behind one known token: only the known one is sure."""
    assert 201 == watermark(200, 5, 201)


def test_watermark_after_preemption_begins_anew():
    """Computed restarts at 0, so nothing that is not in blocks is read."""
    assert 64 == watermark(0, 64, 300)


@given(st.integers(0, 500), st.integers(1, 300), st.integers(1, 600))
def test_watermark_never_passes_computed_rows_or_known_tokens(computed, scheduled, known):
    """Both bounds, and one of them is reached."""
    found = watermark(computed, scheduled, known)
    assert found in {computed + scheduled, known}
    assert found <= min(computed + scheduled, known)


def test_request_waits_for_its_turn_and_loads_what_was_verified():
    """The last token is left to compute, and the local prefix is not loaded again."""
    tokens = list(range(50))
    one = asked(tokens)
    assert one.matched("r", 0, 0.1) is None
    one.take(ready(50))
    assert (49, 17) == (one.matched("r", 0, 0.2), one.matched("r", 32, 0.2))
    one.allocated("r", [4, 5], 17)
    plan = one.plan([Scheduled("r", 49, 1, [4, 5], anew=True)], ())
    assert (LoadAsk(FIRST, 32, 49, (4, 5)),) == plan.loads
    assert (RowsAt(FIRST, (4, 5), True, (), 50),) == plan.rows
    assert StepPlan() == one.plan((), ())


def test_request_asks_once_however_often_it_is_looked_at():
    """The scheduler asks at every step."""
    one = asked([1, 2])
    for _ in range(5):
        assert one.matched("r", 0, 0.1) is None
    assert StepPlan() == one.plan((), ())


def test_request_that_waited_too_long_is_computed_and_still_followed():
    """Recompute, and the turn may open later."""
    one = asked([1, 2, 3], wait_seconds=2.0)
    assert [None, 0, 0] == [one.matched("r", 0, at) for at in (2.0, 2.1, 2.2)]
    one.take(ready(3))
    assert 0 == one.matched("r", 0, 2.3)
    one.allocated("r", [0], 0)
    plan = one.plan([Scheduled("r", 0, 3, [0], anew=True)], ())
    assert ((), (RowsAt(FIRST, (0,), True, (), 3),)) == (plan.loads, plan.rows)


def test_request_with_little_to_compute_does_not_wait_and_is_followed():
    """To wait would cost a step. Its turn is asked for with the step that computes it; what it has is not loaded."""
    one = planner(compute_tokens=16)
    one.add(NewRequest("r", TURN, list(range(48)), named=True))
    assert 0 == one.matched("r", 32, 0.0)
    one.take(ready(40, start=32))
    assert 0 == one.matched("r", 32, 0.0), "nothing is loaded, whatever the daemon has"
    one.allocated("r", [4, 5, 6], 0)
    plan = one.plan([Scheduled("r", 32, 16, [4, 5, 6], anew=True)], ())
    assert [FIRST] == [ask.key for ask in plan.opens]
    assert ((), (RowsAt(FIRST, (4, 5, 6), True, (), 48),)) == (plan.loads, plan.rows)


@pytest.mark.parametrize("many", [17, 1000])
def test_request_with_more_to_compute_waits(many: int):
    """Beyond what the engine's own cache has."""
    one = planner(compute_tokens=16)
    one.add(NewRequest("r", TURN, list(range(32 + many)), named=True))
    assert one.matched("r", 32, 0.0) is None


def test_request_that_takes_over_waits_however_little_there_is():
    """What was shown already goes on from the same bytes."""
    one = planner(compute_tokens=16)
    one.add(NewRequest("r", replace(TURN, take_over=True), [1, 2, 3], named=True))
    assert one.matched("r", 0, 0.0) is None
    one.plan((), ())
    one.take(ready(3))
    assert 2 == one.matched("r", 0, 0.0)


def test_request_with_little_to_compute_waits_behind_another_one_of_its_session():
    """Whose turn may still be closing: its own one would open late, or be refused, when it is over already."""
    one = planner(compute_tokens=16)
    for name, wanted in (("a", 0), ("b", None)):
        one.add(NewRequest(name, TURN, [1, 2, 3], named=True))
        assert wanted == one.matched(name, 0, 0.0)
    one.finished("a", 0)
    one.add(NewRequest("c", TURN, [1, 2, 3], named=True))
    assert one.matched("c", 0, 0.0) is None


def test_request_that_names_no_session_is_not_held():
    """Its turn would open to be forgotten, and its blocks are kept from those whose rows are wanted."""
    for named in (True, False):
        one = planner(compute_tokens=16)
        one.add(NewRequest("r", TURN, [1, 2, 3], named=named))
        assert 0 == one.matched("r", 0, 0.0)
        one.allocated("r", [0], 0)
        one.plan([Scheduled("r", 0, 3, [0], anew=True)], ())
        assert named == one.finished("r", 1, 3).hold


def test_sessions_that_were_seen_are_remembered_up_to_a_bound(monkeypatch: pytest.MonkeyPatch):
    """The last ones; memory does not grow with every request that names none."""
    monkeypatch.setattr(step_planner, "_SEEN_MAX", 2)
    one = planner(compute_tokens=16)
    found = []
    for k, session in enumerate("abacb"):
        one.add(NewRequest(f"r{k}", replace(TURN, session=SessionId(session)), [1], named=True))
        found.append(one.matched(f"r{k}", 0, 0.0))
    assert [0, 0, None, 0, 0] == found


def test_request_that_names_no_session_waits_for_its_own_rows_only():
    """Nobody else can have logged any; once it was preempted, it has."""
    one = planner()
    one.add(NewRequest("r", TURN, list(range(100)), named=False))
    assert 0 == one.matched("r", 0, 0.0)
    one.allocated("r", [0], 0)
    one.plan([Scheduled("r", 0, 100, [0], anew=True)], ())
    one.plan((), ["r"])
    assert one.matched("r", 0, 0.0) is None


def test_request_whose_local_prefix_has_left_loads_nothing():
    """Verified rows begin where its blocks ended when it asked; less now would leave a hole."""
    one = planner()
    one.add(NewRequest("r", TURN, list(range(50)), named=True))
    assert one.matched("r", 32, 0.0) is None
    one.take(ready(40, start=32))
    assert [0, 8] == [one.matched("r", local, 0.0) for local in (16, 32)]


def test_request_of_several_ranks_takes_the_shortest():
    """A missing rank is waited for, a lagging one shortens the prefix."""
    one = asked(list(range(50)), ranks=2)
    one.take(ready(40, rank=0))
    assert one.matched("r", 0, 0.0) is None
    one.take(ready(30, rank=1))
    assert 30 == one.matched("r", 0, 0.0)


def test_request_of_several_ranks_waits_for_the_last():
    """A rank that has not said ready may have nothing."""
    one = asked([1] * 100, ranks=2)
    one.take(ready(80))
    assert one.matched("r", 0, 1.0) is None
    one.take(ready(80, rank=1))
    assert 80 == one.matched("r", 0, 1.0)


def test_turn_of_several_ranks_has_a_group_of_its_own():
    """The same on every rank, another for every turn and every engine; one process needs none."""

    def groups(**options: Any) -> list[bytes]:
        one = planner(**options)
        for name in "ab":
            one.add(NewRequest(name, TURN, [1, 2], named=True))
            one.matched(name, 0, 0.0)
        return [ask.request.group for ask in one.plan((), ()).opens]

    assert [b"", b""] == groups()
    names = [*groups(ranks=2, instance=b"x"), *groups(ranks=2, instance=b"y")]
    assert [16] * 4 == [len(name) for name in names]
    assert 4 == len(set(names))


def test_turn_that_one_rank_cannot_log_ends_on_all():
    """Once, whoever says so first; the request goes on unlogged."""
    one = asked([1, 2, 3], ranks=2)
    one.take(StepReport(dropped=(Dropped(FIRST, "busy"),)))
    one.take(StepReport(dropped=(Dropped(FIRST, "busy"),)))
    assert ((CloseAsk(FIRST),), {"busy": 1}) == (one.plan((), ()).closes, one.unlogged)
    assert 0 == one.matched("r", 0, 0.0)


def test_new_weights_have_a_word_that_nobody_has_used():
    """The same for all ranks, since it travels with the plan; another each time and in each engine."""
    words = []
    for instance in (b"x", b"y"):
        one = planner(instance=instance)
        for _ in range(2):
            one.renew()
            words.append(one.plan((), ()).renew)
        assert b"" == one.plan((), ()).renew
    assert 4 == len(set(words))


def test_rows_carry_only_what_is_new():
    """Tokens and blocks that the worker knows are not told again."""
    tokens = [1, 2, 3]
    one = running(tokens)
    assert ((), 3) == _told(one.plan([Scheduled("r", 0, 3, [7], anew=True)], ()))
    tokens.append(4)
    assert ((4,), 4) == _told(one.plan([Scheduled("r", 3, 1, [], anew=False)], ()))
    tokens.append(5)
    assert ((5,), 5) == _told(one.plan([Scheduled("r", 4, 1, [], anew=False)], ()))


def _told(plan: StepPlan) -> tuple[tuple[int, ...], int]:
    return plan.rows[0].tokens, plan.rows[0].length


def test_preempted_request_ends_its_log_and_comes_back_as_another_turn():
    """Its blocks are another's soon; the new turn says which one it continues."""
    tokens = [1, 2, 3, 4]
    one = running(tokens)
    one.plan([Scheduled("r", 0, 4, [7], anew=True)], ())
    assert (CloseAsk(FIRST),) == one.plan((), ["r"]).closes
    assert one.matched("r", 0, 5.0) is None
    again = one.plan((), ()).opens[0]
    assert (TurnKey(2), FIRST) == (again.key, again.previous)
    one.take(ready(4, key=1))  # what is said of the old turn is nobody's
    assert one.matched("r", 0, 5.0) is None
    one.take(ready(4, key=2))
    assert 3 == one.matched("r", 0, 5.0)


def test_preemption_that_is_seen_only_when_it_comes_back_is_the_same():
    """A cache reset preempts and resumes within one step."""
    one = running([1, 2, 3])
    one.plan([Scheduled("r", 0, 3, [7], anew=True)], ())
    assert one.matched("r", 0, 1.0) is None
    plan = one.plan((), ["r"])
    assert ((CloseAsk(FIRST),), [TurnKey(2)]) == (plan.closes, [ask.key for ask in plan.opens])


def test_finished_request_holds_its_blocks_until_they_are_read():
    """And within the share that may be held."""
    one = planner(held_blocks_max=3)
    for name in ("a", "b"):
        one.add(NewRequest(name, TURN, [1], named=True))
        one.matched(name, 0, 0.0)
        one.allocated(name, [1, 2], 0)
    assert [True, False] == [one.finished(name, 2).hold for name in ("a", "b")]
    assert (CloseAsk(FIRST, "a"), CloseAsk(TurnKey(2), "")) == one.plan((), ()).closes
    one.released({"a"})
    one.add(NewRequest("c", TURN, [1], named=False))
    one.matched("c", 0, 0.0)
    one.allocated("c", [1], 0)
    assert not one.finished("c", 1).hold, "its session ends with it: nobody would read what is written yet"
    assert (CloseAsk(TurnKey(3), "", forget=True),) == one.plan((), ()).closes


def test_held_blocks_are_given_up_though_no_step_can_be_planned_any_more():
    """What is sent when the scheduler's half has failed is what must not be lost: loads, and whose blocks are held."""
    one = running([1, 2])
    assert one.finished("r", 1).hold
    assert (CloseAsk(FIRST, "r"),) == one.plan_loads().closes
    assert () == one.plan_loads().closes


def test_request_aborted_before_it_ran_holds_nothing():
    """Its turn is closed; nobody waits for its blocks."""
    one = asked([1, 2])
    assert not one.finished("r", 0).hold
    assert (CloseAsk(FIRST),) == one.plan((), ()).closes
    assert not one.finished("r", 0).hold


@pytest.mark.parametrize(
    ("cause", "named", "forget"),
    [("fault", False, True), ("fault", True, False), ("fenced", False, False)],
)
def test_dropped_turn_of_one_rank_ends_a_session_that_nobody_can_ask_for(
    cause: str, *, named: bool, forget: bool
):
    """The other ranks forget it when they close: the request's own end finds their turns gone. Never another node's."""
    one = planner(ranks=2)
    one.add(NewRequest("r", TURN, [1, 2], named=named))
    one.matched("r", 0, 0.0)
    one.take(StepReport(dropped=(Dropped(FIRST, cause),)))
    assert (CloseAsk(FIRST, forget=forget),) == one.plan((), ()).closes


def test_dropped_turn_is_not_followed_and_says_why():
    """A request that is served unlogged costs nothing at each step."""
    one = running([1, 2])
    one.take(StepReport(dropped=(Dropped(FIRST, "fenced"),)))
    assert () == one.plan([Scheduled("r", 0, 2, [7], anew=True)], ()).rows
    over = one.finished("r", 1)
    assert (False, "fenced", {"fenced": 1}) == (over.hold, over.cause, one.unlogged)


@pytest.mark.parametrize("cause", [UnloggedCause.PARALLEL, UnloggedCause.BEAM_SEARCH])
def test_refused_request_never_asks(cause):
    """It is served, and counted with the reason."""
    one = planner()
    one.add(NewRequest("r", cause, [1, 2], named=True))
    assert 0 == one.matched("r", 0, 0.0)
    one.allocated("r", [1], 0)
    assert StepPlan() == one.plan([Scheduled("r", 0, 2, [1], anew=True)], ())
    assert ({cause.value: 1}, cause.value) == (one.unlogged, one.finished("r", 1).cause)


def test_plans_and_reports_survive_pickling_and_add_up():
    """They travel between processes at every step."""
    plan = StepPlan(
        (CloseAsk(FIRST, "r"),), (), (LoadAsk(FIRST, 0, 5, (1,)),), (RowsAt(FIRST, (), False, (9,), 6),)
    )
    assert plan == pickle.loads(pickle.dumps(plan))
    both = ready(1).aggregate(StepReport(dropped=(Dropped(FIRST, "busy"),), failed=(FIRST,)))
    assert both == pickle.loads(pickle.dumps(both))
    assert (1, 1, (FIRST,)) == (len(both.ready), len(both.dropped), both.failed)
    assert (False, False, True) == (
        both.is_empty,
        StepReport(failed=(FIRST,)).is_empty,
        StepReport().is_empty,
    )


def test_load_that_has_failed_counts_for_nothing_and_is_not_tried_again():
    """The request comes back to the scheduler: it is logged under a new turn, and its rows are computed."""
    one = asked([1, 2, 3, 4, 5])
    one.take(ready(4))
    assert 4 == one.matched("r", 0, 0.0)
    one.allocated("r", [7], 4)
    one.take(StepReport(failed=(FIRST, FIRST)))  # two ranks say so
    assert one.matched("r", 0, 0.0) is None
    (again,) = one.plan((), ()).opens
    assert (TurnKey(2), FIRST) == (again.key, again.previous)
    one.take(ready(4, key=2))
    assert 0 == one.matched("r", 0, 0.0)
    assert 0 == one.finished("r", 0).loaded


def test_failure_of_a_load_whose_request_has_gone_is_dropped():
    """Its workers could not know."""
    one = asked([1, 2, 3])
    one.finished("r", 0)
    one.take(StepReport(failed=(FIRST,)))
    assert {} == one.unlogged
