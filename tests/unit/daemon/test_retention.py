"""How near retention is to an offset, by marks that are coarser the further back they lie."""

from __future__ import annotations

import pytest

from daemon.retention import MARKS_MAX, Arrivals, RetentionRule
from kvlog.ids import Offset, Partition

P = Partition(3)


def since(arrivals: Arrivals, offset: int, now_ms: int) -> tuple[float, int]:
    """Age and bytes of an offset."""
    return arrivals.since(P, Offset(offset), now_ms)


def arrived(*records: tuple[int, int, int]) -> Arrivals:
    """Records by offset, time and size."""
    arrivals = Arrivals()
    for offset, at_ms, size in records:
        arrivals.note(P, Offset(offset), at_ms, size)
    return arrivals


def test_age_and_bytes_are_those_of_the_record_and_what_follows() -> None:
    """Bytes count the record itself: it is lost with them."""
    arrivals = arrived((5, 10_000, 100), (6, 12_000, 200), (9, 20_000, 300))
    assert [(20.0, 600), (18.0, 500), (10.0, 300)] == [since(arrivals, at, 30_000) for at in (5, 6, 9)]
    assert 600 == arrivals.bytes_read(P)


def test_offset_between_two_marks_counts_as_the_earlier_one() -> None:
    """It is never taken to be younger than it is."""
    arrivals = arrived((0, 10_000, 100), (1, 10_400, 100), (2, 11_000, 100))
    assert [(1.0, 300), (1.0, 300), (0.0, 100)] == [since(arrivals, at, 11_000) for at in (0, 1, 2)]


def test_offset_before_the_first_mark_counts_as_that() -> None:
    """Nothing older was read."""
    assert (1.0, 10) == since(arrived((7, 1000, 10)), 3, 2000)


@pytest.mark.parametrize("offset", [8, 9])
def test_offset_that_was_not_read_has_no_age(offset: int) -> None:
    """What comes will be young."""
    assert (0.0, 0) == since(arrived((7, 1000, 10)), offset, 2000)
    assert (0.0, 0) == since(Arrivals(), offset, 2000)


def test_record_that_is_read_again_counts_once() -> None:
    """A reader goes back to read a doubtful record again."""
    assert (3.0, 30) == since(arrived((7, 1000, 10), (8, 2000, 20), (7, 1000, 10), (8, 2000, 20)), 7, 4000)


def test_clock_that_goes_back_gives_no_negative_age() -> None:
    """The log's clock and ours may differ."""
    assert (0.0, 10) == since(arrived((7, 5000, 10)), 7, 2000)


def test_partition_that_is_another_one_begins_anew() -> None:
    """Its offsets say other things now."""
    arrivals = arrived((7, 1000, 10))
    arrivals.forget(P)
    arrivals.forget(P)
    assert ((0.0, 0), 0) == (since(arrivals, 7, 9000), arrivals.bytes_read(P))


def test_marks_are_bounded_and_err_on_the_old_side() -> None:
    """However long the log: an age is at least the true one, and exact at the recent end."""
    arrivals, count = Arrivals(), 3 * MARKS_MAX
    for offset in range(count):
        arrivals.note(P, Offset(offset), offset * 1000, 1)
    marks = arrivals._partitions[P].offsets
    assert len(marks) <= MARKS_MAX
    assert sorted(set(marks)) == marks
    for offset in (0, 1, 100, count // 2, count - 2, count - 1):
        age, size = since(arrivals, offset, count * 1000)
        assert age >= count - offset
        assert size >= count - offset
    assert (2.0, 2) == since(arrivals, count - 2, count * 1000)


@pytest.mark.parametrize(
    ("size_bytes", "age", "size", "left"),
    [(None, 25, 10**9, 0.75), (1000, 25, 900, 0.1), (1000, 95, 100, 0.05), (1000, 200, 0, -1.0)],
)
def test_what_is_left_is_the_lesser_of_time_and_bytes(
    size_bytes: int | None, age: float, size: int, left: float
) -> None:
    """Whichever ends first; negative once it may be gone."""
    assert left == pytest.approx(RetentionRule(100, size_bytes).left(age, size))
