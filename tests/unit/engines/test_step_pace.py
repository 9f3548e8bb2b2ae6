"""How much a step may copy: learned from what copying cost."""

from __future__ import annotations

import pytest

from kvlog.engines.step_pace import StepPace

KIB = 1 << 10


def steps(pace: StepPace, cost_us_a_kib: float, wanted: int, count: int) -> list[float]:
    """Milliseconds of so many copies, each of what is wanted as far as it is allowed."""
    taken = []
    for _ in range(count):
        copied = min(wanted, pace.bytes_now)
        taken.append(cost_us_a_kib * copied / KIB / 1000)
        pace.took(copied, taken[-1] / 1000)
    return taken


@pytest.mark.parametrize("cost", [0.01, 0.6, 3.4, 20.0])
def test_pace_comes_to_the_time_that_a_step_may_take(cost: float) -> None:
    """Whatever a byte costs: within a few steps, and from the first one on not far beyond."""
    pace = StepPace(0.002, 8 << 20)
    taken = steps(pace, cost, 1 << 30, 20)
    assert max(taken[1:]) <= 2.01 or cost > 10
    assert max(taken[5:]) <= 2.01
    assert taken[-1] >= 1.0 or pace.bytes_now == 8 << 20


def test_pace_is_not_set_by_copies_that_were_smaller_than_allowed() -> None:
    """A row a step says nothing of what a run of rows would cost."""
    pace = StepPace(0.002, 8 << 20)
    steps(pace, 3.4, 128 * KIB, 100)
    assert 512 * KIB == pace.bytes_now


def test_pace_learns_nothing_of_a_step_that_copied_nothing() -> None:
    """It may have taken long for another reason, a garbage collection say."""
    pace = StepPace(0.002, 2 << 20)
    before = pace.bytes_now
    pace.took(0, 1.0)
    assert before == pace.bytes_now


def test_pace_recovers_from_a_copy_in_which_the_machine_stood_still() -> None:
    """It falls by a quarter at most, never below 64 KiB, and doubles with each step that uses it."""
    pace = StepPace(0.002, 2 << 20)
    steps(pace, 0.1, 1 << 30, 5)
    pace.took(pace.bytes_now, 1.0)
    assert 512 * KIB == pace.bytes_now
    for _ in range(5):
        pace.took(1, 1.0)
    assert 64 * KIB == pace.bytes_now
    steps(pace, 0.1, 1 << 30, 5)
    assert 2 << 20 == pace.bytes_now


def test_pace_never_allows_more_than_its_most() -> None:
    """Also where that is less than a start."""
    pace = StepPace(0.002, 1000)
    assert 1000 == pace.bytes_now
    pace.took(1000, 1.0)
    pace.took(1000, 0.0)
    assert 1000 == pace.bytes_now
