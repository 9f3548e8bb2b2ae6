"""When a reader is stuck, and when it only has nothing to read."""

from __future__ import annotations

from kvlog.ids import Partition
from kvlog.log.kafka_progress import ProgressWatch

P0, P1 = Partition(0), Partition(1)


def test_partition_with_data_and_no_progress_is_stuck_after_its_time() -> None:
    """The same position with records before it, for so long, is being stuck; a moment less is not."""
    watch = ProgressWatch(10.0)
    watch.observe(P0, position=5, end=9, now=100.0)
    watch.observe(P0, position=5, end=12, now=109.9)
    assert frozenset() == watch.stuck(109.9)
    assert frozenset({P0}) == watch.stuck(110.0)


def test_partition_that_moves_is_never_stuck() -> None:
    """Any progress begins the time anew, however far the end runs ahead."""
    watch = ProgressWatch(10.0)
    for step in range(100):
        watch.observe(P0, position=step, end=step + 1000, now=9.0 * step)
        assert frozenset() == watch.stuck(9.0 * step)


def test_partition_at_the_end_is_never_stuck() -> None:
    """An idle partition may stand still for ever; when data comes, the time begins then."""
    watch = ProgressWatch(10.0)
    watch.observe(P0, position=5, end=5, now=0.0)
    assert frozenset() == watch.stuck(1e9)
    watch.observe(P0, position=5, end=6, now=1e9)
    assert frozenset() == watch.stuck(1e9 + 9)
    assert frozenset({P0}) == watch.stuck(1e9 + 10)


def test_partition_that_catches_up_is_no_longer_watched() -> None:
    """Having stood still before does not count once the end was reached."""
    watch = ProgressWatch(10.0)
    watch.observe(P0, position=5, end=9, now=0.0)
    watch.observe(P0, position=9, end=9, now=5.0)
    assert frozenset() == watch.stuck(100.0)


def test_partitions_are_watched_apart() -> None:
    """One that moves does not hide one that is stuck."""
    watch = ProgressWatch(10.0)
    for now in (0.0, 5.0, 10.0):
        watch.observe(P0, position=1, end=9, now=now)
        watch.observe(P1, position=int(now), end=99, now=now)
    assert frozenset({P0}) == watch.stuck(10.0)


def test_forgotten_partition_begins_anew() -> None:
    """After new connections, or a seek, it gets its whole time again."""
    watch = ProgressWatch(10.0)
    watch.observe(P0, position=5, end=9, now=0.0)
    watch.forget()
    assert frozenset() == watch.stuck(100.0)
    watch.observe(P0, position=5, end=9, now=100.0)
    assert frozenset() == watch.stuck(109.0)
