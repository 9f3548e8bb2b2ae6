"""The arithmetic of lag: records at once, bytes and tokens as far as they were read, seconds without silence."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from kvlog.core.lag import (
    MARKS_MAX,
    NO_LAG,
    PACE_SAMPLES_MAX,
    Backlog,
    Lag,
    LagMeter,
    LagSample,
    Needed,
    PartitionLag,
    Waiting,
    needed_of,
    total,
)
from kvlog.ids import Offset, SessionId, Shard
from tests.unit.core.logbook import delta, truncate
from tests.unit.core.standings import whole

NOW = 100_000
A, B = SessionId("a"), SessionId("b")

WAITING = [
    Waiting(Offset(10), A, 100, 2, NOW - 5000),
    Waiting(Offset(11), B, 200, 0, NOW - 4000),
    Waiting(Offset(12), A, 300, 3, NOW - 3000),
    Waiting(Offset(13), None, 50, 0, NOW - 2000),
]


def sample(
    second: float, *, end: int | None, applied: int | None, start: int | None = 0, needed: int | None = None
) -> LagSample:
    """A sample without a backlog."""
    return LagSample(
        int(second * 1000),
        None if start is None else Offset(start),
        None if end is None else Offset(end),
        None if applied is None else Offset(applied),
        None if needed is None else Offset(needed),
    )


def observed(*samples: LagSample) -> PartitionLag:
    """What a meter says at the last of the samples."""
    meter = LagMeter()
    return [meter.observe(each) for each in samples][-1]


@pytest.mark.parametrize(
    ("applied", "expected"),
    [
        (14, NO_LAG),
        (15, NO_LAG),
        (13, Lag(1, 50, 0, 2.0)),
        (11, Lag(3, 550, 3, 4.0)),
        (10, Lag(4, 650, 5, 5.0)),
        (8, Lag(6, 650, 5, 5.0, is_exact=False)),
    ],
)
def test_backlog_counts_what_is_not_applied(applied: int, expected: Lag) -> None:
    """Records from the offsets, the rest from what was read; a backlog read in part gives lower bounds."""
    assert expected == Backlog(WAITING, Offset(14), NOW).after(Offset(applied))


def test_backlog_of_which_nothing_was_read_knows_records_only() -> None:
    """Unknown is None, never 0."""
    assert Lag(4, None, None, None, is_exact=False) == Backlog([], Offset(14), NOW).after(Offset(10))
    assert Lag(2, None, None, None, is_exact=False) == Backlog(WAITING[:2], Offset(14), NOW).after(Offset(12))


def test_backlog_is_told_by_session() -> None:
    """A session's lag is that of its own records; those in doubt are nobody's."""
    assert {A: Lag(2, 400, 5, 5.0), B: Lag(1, 200, 0, 4.0)} == Backlog(
        WAITING, Offset(14), NOW
    ).sessions_after(Offset(10))
    assert {A: Lag(1, 300, 3, 3.0, is_exact=False)} == Backlog(WAITING, Offset(20), NOW).sessions_after(
        Offset(12)
    )


def test_record_that_the_log_dated_later_than_now_is_no_younger_than_zero() -> None:
    """Clocks differ; an age does not go below 0."""
    assert Backlog(WAITING, Offset(14), NOW - 60_000).after(Offset(13)).seconds == 0.0


def test_tokens_are_those_of_one_shard() -> None:
    """Each position is in one delta of every shard, and counts once."""
    state = whole()
    first = delta(state, (1, 2, 3))
    counted = [
        Waiting.tokens_of(r) for r in (first, first._replace(shard=Shard(1)), truncate(state, 0), None)
    ]
    assert [3, 0, 0, 0] == counted


def test_total_adds_counts_and_takes_the_oldest() -> None:
    """One unknown makes a sum a lower bound, which it says; nothing known stays unknown."""
    exact, unknown = Lag(2, 100, 3, 4.0), Lag(5, None, None, None, is_exact=False)
    assert Lag(4, 200, 6, 4.0) == total([exact, replace(exact, seconds=1.0)])
    assert Lag(7, 100, 3, 4.0, is_exact=False) == total([exact, unknown])
    assert Lag(10, None, None, None, is_exact=False) == total([unknown, unknown])
    assert NO_LAG == total([])


def test_lag_has_figures() -> None:
    """The units are in the names."""
    assert {"records": 2, "bytes": 100, "tokens": 3, "seconds": None, "exact": False} == Lag(
        2, 100, 3, None, is_exact=False
    ).figures()


# The meter


def test_meter_knows_records_at_the_first_sample() -> None:
    """A pace needs two."""
    assert PartitionLag(Lag(4, None, None, None, is_exact=False), None, None, None, 10, None) == observed(
        sample(0, end=14, applied=10)
    )


@pytest.mark.parametrize(
    "unknown",
    [sample(0, end=None, applied=10), sample(0, end=14, applied=None), sample(0, end=None, applied=None)],
)
def test_meter_without_a_watermark_or_an_applied_offset_knows_no_lag(unknown: LagSample) -> None:
    """Not known is None."""
    lag = observed(unknown, replace(unknown, at_ms=2000))
    assert (None, None) == (lag.lag, lag.seconds_to_close)


@pytest.mark.parametrize("missing", ["start", "applied"])
def test_meter_without_both_ends_knows_no_distance_to_loss(missing: str) -> None:
    """Not known is None."""
    known: dict[str, int | None] = {"start": 0, "applied": 5, missing: None}
    seen = observed(*(sample(s, end=9, **known) for s in (0, 1)))
    assert (None, None) == (seen.records_to_loss, seen.seconds_to_loss)


def test_meter_of_a_reader_without_lag_says_zero_seconds_for_ever() -> None:
    """An idle producer costs no seconds: nothing waits."""
    seen = observed(*(sample(minute * 60, end=14, applied=14) for minute in range(60)))
    assert PartitionLag(NO_LAG, 0.0, 0.0, 0.0, 14, math.inf) == seen


def test_silence_before_a_record_does_not_make_it_old() -> None:
    """An hour of silence, then one record: it is as old as itself."""
    hour = [sample(minute * 60, end=14, applied=14) for minute in range(61)]
    seen = observed(*hour, sample(3602, end=15, applied=14), sample(3605, end=15, applied=14))
    assert seen.lag is not None
    assert seen.lag.seconds == 5.0


def test_silence_after_a_record_makes_it_older() -> None:
    """A reader that is stuck on one record falls behind by a second each second."""
    seen = [
        observed(
            sample(0, end=10, applied=10), sample(1, end=11, applied=10), sample(s, end=11, applied=10)
        ).lag
        for s in (2, 30)
    ]
    assert [2.0, 30.0] == [lag and lag.seconds for lag in seen]


def test_records_between_two_samples_are_taken_to_have_come_evenly() -> None:
    """The first unapplied one of a hundred that came within ten seconds."""
    seen = observed(sample(0, end=0, applied=0), sample(10, end=100, applied=50))
    assert seen.lag is not None
    assert seen.lag.seconds == 5.0


def test_record_older_than_the_first_sample_has_no_known_age() -> None:
    """It was there before we looked."""
    seen = observed(sample(0, end=10, applied=5), sample(1, end=11, applied=5))
    assert seen.lag == Lag(6, None, None, None, is_exact=False)


def test_backlog_that_was_read_gives_the_age_and_the_sizes() -> None:
    """What a record says of itself is better than what was seen from outside."""
    read = LagSample(NOW, Offset(0), Offset(14), Offset(12), backlog=Backlog(WAITING, Offset(14), NOW))
    assert Lag(2, 350, 3, 3.0) == observed(read).lag


def test_backlog_that_was_not_read_far_enough_takes_its_age_from_the_watermarks() -> None:
    """Each figure from whoever knows it."""
    read = LagSample(10_000, Offset(0), Offset(14), Offset(12), backlog=Backlog(WAITING[:1], Offset(14), NOW))
    seen = observed(sample(0, end=12, applied=12), read)
    assert Lag(2, None, None, 10.0, is_exact=False) == seen.lag


def test_lag_closes_at_the_difference_of_two_paces() -> None:
    """Ten a second come, thirty a second are applied: a lag of forty is gone in two seconds."""
    seen = observed(sample(0, end=1000, applied=940), sample(1, end=1010, applied=970))
    assert (10.0, 30.0, 2.0) == (seen.appended_per_second, seen.applied_per_second, seen.seconds_to_close)


@pytest.mark.parametrize("applied", [1000, 1010])
def test_lag_that_grows_or_stays_never_closes(applied: int) -> None:
    """Infinite, which is something else than unknown."""
    seen = observed(sample(0, end=1020, applied=1000), sample(1, end=1030, applied=applied))
    assert seen.seconds_to_close == math.inf


def test_distance_to_loss_counts_what_retention_may_still_take() -> None:
    """The log start gains 20 records a second on what is needed: 30 records are lost in 1.5 seconds."""
    seen = observed(sample(0, end=100, applied=50, start=0), sample(1, end=100, applied=60, start=30))
    assert (30, 1.5) == (seen.records_to_loss, seen.seconds_to_loss)


def test_distance_to_loss_is_measured_from_what_is_needed() -> None:
    """A session's root may lie far below the applied offset."""
    seen = observed(
        sample(0, end=100, applied=90, start=0, needed=40),
        sample(1, end=100, applied=95, start=10, needed=40),
    )
    assert (30, 3.0) == (seen.records_to_loss, seen.seconds_to_loss)


@pytest.mark.parametrize(
    ("first", "applied", "expected"),
    [
        ([], 90, Needed(Offset(90), 0)),
        ([40, 70], 90, Needed(Offset(40), 0)),
        ([95], 90, Needed(Offset(90), 0)),
        ([10, 40, 29], 90, Needed(Offset(40), 2)),
        ([10], 20, Needed(Offset(20), 1)),
    ],
)
def test_needed_is_the_lowest_offset_that_can_still_be_lost(
    first: list[int], applied: int, expected: Needed
) -> None:
    """Sessions of which records are gone are counted; from then on others decide how near retention is."""
    offsets = [Offset(each) for each in first]
    assert expected == needed_of(offsets, applied=Offset(applied), log_start=Offset(30))


@pytest.mark.parametrize(
    ("start", "applied", "expected"),
    [(60, 50, (-10, 0.0)), (50, 50, (0, math.inf)), (100, 100, (0, math.inf)), (0, 50, (50, math.inf))],
)
def test_distance_to_loss_when_the_log_start_stands(
    start: int, applied: int, expected: tuple[int, float]
) -> None:
    """What is lost is lost now; where the log start does not move, or nothing is needed, nothing is lost."""
    seen = observed(*(sample(s, end=100, applied=applied, start=start) for s in (0, 1)))
    assert expected == (seen.records_to_loss, seen.seconds_to_loss)


@pytest.mark.parametrize("second", [sample(5, end=3, applied=3), sample(5, end=300, applied=200, start=90)])
def test_meter_forgets_everything_when_the_log_goes_back(second: LagSample) -> None:
    """A watermark or log start below the last one is another log's."""
    meter = LagMeter()
    meter.observe(sample(0, end=200, applied=100, start=100))
    assert observed(second) == meter.observe(second)


def test_meter_goes_on_after_samples_without_a_watermark() -> None:
    """An outage leaves a gap in what is known, not in the meter."""
    seen = observed(
        sample(0, end=10, applied=10), sample(5, end=None, applied=10), sample(10, end=30, applied=10)
    )
    assert (2.0, 0.0) == (seen.appended_per_second, seen.applied_per_second)
    assert seen.lag is not None
    assert seen.lag.seconds == 10.0


def test_two_samples_of_one_moment_give_no_pace() -> None:
    """Nothing is divided by zero."""
    seen = observed(sample(1, end=10, applied=5), sample(1, end=20, applied=6))
    assert (None, None, None) == (seen.appended_per_second, seen.applied_per_second, seen.seconds_to_close)


def test_meter_remembers_a_bounded_number_of_watermarks_and_grows_coarser() -> None:
    """After a day of falling behind, the age of the oldest record is still right to a few percent."""
    meter = LagMeter()
    for second in range(0, 86_400, 10):
        seen = meter.observe(sample(second, end=10 * second + 1, applied=1))
        assert len(meter._marks) <= MARKS_MAX
    assert len(meter._recent) == PACE_SAMPLES_MAX
    assert seen.lag is not None
    assert seen.lag.seconds == pytest.approx(86_390, rel=0.05)
