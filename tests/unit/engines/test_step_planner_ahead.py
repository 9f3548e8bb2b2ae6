"""The planner under a scheduler one step ahead, as vLLM's is on GPUs: it plans before it knows the last token.

The model of it: steps are planned into a queue and carried out in order, one behind. The device knows the tokens that
it has drawn; the scheduler hears of them a step late. Its count of computed positions has the steps in flight in it,
drafts as if they were all accepted, and is put right when a step's result comes.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from kvlog.engines.step_plan import Ready, StepPlan, StepReport, TurnKey
from kvlog.engines.step_planner import NewRequest, PlannerOptions, Scheduled, StepPlanner
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId
from kvlog.link.messages import unpack_tokens

TURN = TurnRequest(session=SessionId("s"))
STALE = -1


@dataclass
class Worker:
    """What carries the plans out: cells hold the token whose KV is there; rows are read when a step is done."""

    tokens: dict[int, list[int]] = field(default_factory=dict)
    cells: dict[int, int] = field(default_factory=dict)
    logged: dict[int, list[int]] = field(default_factory=dict)

    def before(self, plan: StepPlan) -> None:
        """Turns begin with the tokens that were known."""
        for ask in plan.opens:
            self.tokens[ask.key] = list(unpack_tokens(ask.tokens))
            self.logged[ask.key] = []

    def after(self, plan: StepPlan) -> None:
        """Each new row below the watermark is that of the token that goes into the log with it."""
        for rows in plan.rows:
            known, log = self.tokens[rows.key], self.logged[rows.key]
            known += rows.tokens
            for position in range(len(log), rows.length):
                assert self.cells.get(position) == known[position], f"row {position} is another token's"
                log.append(known[position])


class Ahead:
    """One request under a scheduler that is one step ahead."""

    def __init__(self, prompt: int, *, drafts: int = 0, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.drafts = drafts
        self.planner = StepPlanner(PlannerOptions(held_blocks_max=100))
        self.worker = Worker()
        self.known = [self.random.randrange(1000) for _ in range(prompt)]
        self.truth = list(self.known)
        self.computed = 0
        self.flight: deque[tuple[StepPlan, int]] = deque()
        self.results: deque[tuple[list[int], int]] = deque()
        self.planner.add(NewRequest("r", TURN, self.known, named=True))
        self.key = TurnKey(0)

    def admit(self) -> None:
        """Ask, be answered, get blocks."""
        assert self.planner.matched("r", 0, 0.0) is None
        plan = self.planner.plan((), ())
        self.worker.before(plan)
        self.key = plan.opens[0].key
        self.planner.take(StepReport(ready=(Ready(self.key, 0, 0, 0, logged=True),)))
        assert 0 == self.planner.matched("r", 0, 0.0)
        self.planner.allocated("r", [0], 0)
        self.fresh = True

    def schedule(self, chunk: int = 1000) -> None:
        """Plan one more step; the token of the one in flight is not known."""
        prefill = len(self.known) - self.computed
        count = min(chunk, prefill) if prefill > 0 else 1 + self.drafts
        step = [Scheduled("r", self.computed, count, range(100) if self.fresh else (), anew=self.fresh)]
        self.fresh = False
        self.flight.append((self.planner.plan(step, ()), count))
        self.computed += count

    def carry_out(self) -> None:
        """The oldest step in flight, on the device: it knows what it has drawn itself."""
        plan, count = self.flight.popleft()
        self.worker.before(plan)
        start = self.done
        if start + count < len(self.truth):  # a chunk of the prompt draws nothing
            self._write(start, self.truth[start : start + count])
            self.done, drawn, refused = start + count, [], 0
        else:
            sure = self.truth[start:]
            accepted = self.random.randint(0, count - len(sure)) if self.drafts else 0
            drawn = [self.random.randrange(1000) for _ in range(accepted + 1)]
            refused = count - len(sure) - accepted
            self._write(start, [*sure, *drawn[:accepted], *[STALE] * refused])
            self.done = start + len(sure) + accepted
            self.truth += drawn
        self.worker.after(plan)
        self.results.append((drawn, refused))

    def hear(self) -> None:
        """The scheduler takes the oldest result."""
        drawn, refused = self.results.popleft()
        self.computed -= refused
        self.known += drawn

    def finish(self) -> None:
        """The request is over; its blocks are held; what is in flight is carried out, then the last plan."""
        assert self.planner.finished("r", 10, self.computed).hold
        last = self.planner.plan((), ())
        while self.flight:
            self.carry_out()
        self.worker.after(last)

    done = 0
    fresh = True

    def _write(self, start: int, tokens: list[int]) -> None:
        self.worker.cells.update(enumerate(tokens, start))


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("seed", range(20))
def test_rows_of_a_step_ahead_are_never_logged_before_their_token_is_known(seed: int, drafts: int) -> None:
    """Whatever is in flight: each logged row was computed of its own token, and the log misses few."""
    one = Ahead(prompt=30, drafts=drafts, seed=seed)
    one.admit()
    one.schedule(chunk=16)
    for _ in range(40):
        one.schedule(chunk=16)
        one.carry_out()
        one.hear()
    log = one.worker.logged[one.key]
    assert one.truth[: len(log)] == log
    assert len(one.truth) - len(log) <= 2 * (1 + drafts)


def test_log_of_a_step_ahead_is_one_row_later_than_of_a_step_in_time() -> None:
    """The price: one more row is recomputed after a failure."""
    one = Ahead(prompt=10)
    one.admit()
    behind = []
    one.schedule()
    for _ in range(5):
        one.schedule()
        one.carry_out()
        behind.append(one.done - len(one.worker.logged[one.key]))
        one.hear()
    assert [0, 1, 1, 1, 1] == behind


@pytest.mark.parametrize("drafts", [0, 4])
@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("seed", range(10))
def test_last_rows_of_a_request_are_sent_with_its_held_blocks(seed: int, ahead: int, drafts: int) -> None:
    """Whether a step is in flight when it ends or not: all rows of known tokens are logged, and no others."""
    one = Ahead(prompt=10, drafts=drafts, seed=seed)
    one.admit()
    one.schedule()
    for _ in range(6):
        one.schedule()
        one.carry_out()
        one.hear()
    if not ahead:
        one.carry_out()
        one.hear()
    one.finish()
    log = one.worker.logged[one.key]
    assert one.known[: len(log)] == log
    assert len(one.known) - (1 - ahead) == len(log)


def test_token_of_a_step_in_flight_at_a_preemption_is_in_the_next_turn() -> None:
    """The step is carried out, its token counts; the blocks are gone, and the new turn begins with all known tokens."""
    one = Ahead(prompt=10)
    one.admit()
    one.schedule()
    for _ in range(3):
        one.schedule()
        one.carry_out()
        one.hear()
    plan = one.planner.plan((), ["r"])  # preempted with a step in flight
    assert [one.key] == [close.key for close in plan.closes]
    one.carry_out()
    one.hear()
    one.computed = one.done = 0
    before = list(one.worker.logged[one.key])
    one.admit()
    assert one.known == one.worker.tokens[one.key]
    assert one.known[: len(before)] == before
    one.worker.cells.clear()
    one.schedule()
    one.carry_out()
    assert one.known == one.worker.logged[one.key]
