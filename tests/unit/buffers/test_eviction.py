"""Eviction: idle sessions, least recently used first, between two marks, and never what somebody needs."""

from __future__ import annotations

import pytest

from kvlog.buffers.blocks import BlockTable, Key
from kvlog.buffers.eviction import EvictionMarks, plan_eviction
from kvlog.buffers.geometry import PoolGeometry
from kvlog.ids import Position, SessionId, Shard

MARKS = EvictionMarks()


def filled(used: int, *, blocks: int = 100) -> BlockTable:
    """A table of one-row blocks in which session n was touched at n, one block each."""
    table = BlockTable(PoolGeometry(block_bytes=10, blocks=blocks, device="cpu"), pinned_share=50)
    for n in range(used):
        session = SessionId(f"s{n}")
        table.settle(table.place(Key(session, Shard(0)), Position(0), 1, 10), [n])
        table.touch(session, n)
    return table


def plan(table: BlockTable, **options) -> list[int]:
    """The numbers of the sessions to evict."""
    found = plan_eviction(table, options.pop("marks", MARKS), now_ns=1000, **{"held": set(), **options})
    return [int(session[1:]) for session in found]


def test_eviction_below_the_high_mark_names_nobody():
    """85 % is still fine."""
    assert plan(filled(85)) == []


def test_eviction_above_the_high_mark_goes_down_to_the_low_one():
    """The least recently used, and no more than needed."""
    table = filled(86)
    assert plan(table) == list(range(16))
    for n in range(16):
        table.drop(SessionId(f"s{n}"))
    assert table.ledger.counts.used == 70
    assert plan(table) == []


def test_eviction_counts_what_is_about_to_be_placed():
    """A large restore makes room before it begins."""
    assert plan(filled(80), blocks_wanted=10) == list(range(20))


def test_eviction_spares_held_and_pinned_sessions():
    """A take-over in flight keeps its rows, and pinned blocks would not become free."""
    table = filled(86)
    table.pin(Key(SessionId("s1"), Shard(0)), Position(1))
    assert plan(table, held={SessionId("s0"), SessionId("s3")}) == [2, *range(4, 19)]


def test_eviction_with_everybody_held_names_nobody():
    """Then the pool stays full, and rows become absent."""
    assert plan(filled(100), held={SessionId(f"s{n}") for n in range(100)}) == []


def test_eviction_of_expired_sessions_does_not_wait_for_a_mark():
    """Idle for longer than the time to live."""
    assert plan(filled(10), marks=EvictionMarks(ttl_ns=994)) == list(range(6))
    assert plan(filled(10), marks=EvictionMarks(ttl_ns=994), held={SessionId("s2")}) == [0, 1, 3, 4, 5]


@pytest.mark.parametrize(("low", "high"), [(-1, 5), (80, 70), (70, 101)])
def test_eviction_marks_out_of_order_are_refused(low: int, high: int):
    """A low mark above the high one would evict for ever."""
    with pytest.raises(AssertionError):
        EvictionMarks(low_percent=low, high_percent=high)
