"""One step's rows into the ring: shares, budgets, a full ring, cursors."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlog.buffers.ring import RingReader, RingWriter, create_ring
from kvlog.engines.stepwrite import (
    LogCursor,
    StepBudget,
    Written,
    rows_behind,
    share_rows,
    write_step,
)
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.errors import RowTooLarge
from kvlog.ids import Epoch, Shard, Turn

if TYPE_CHECKING:
    from kvlog.engines.base import RowCache
    from kvlog.engines.stepwrite import RowSource

ROW_BYTES = 64
MODEL = SyntheticModel(SyntheticOptions(row_bytes=ROW_BYTES))
BUDGET = StepBudget(step_bytes=1 << 20, first=0)


def source(turn: int, rows: int, at: int = 0) -> RowSource:
    """A turn with so many rows in its cache."""
    cache = MODEL.new_cache()
    tokens = [turn * 1000 + position for position in range(rows)]
    if rows:
        MODEL.forward(cache, tokens)
    return LogCursor(Turn(turn), Epoch(turn + 5), 77, at), cache, [*tokens, 9]


def rows_of(one: RowSource, start: int, end: int) -> bytes:
    """Rows as the cache has them."""
    out = bytearray((end - start) * ROW_BYTES)
    _, cache, _ = one
    cache.copy_rows(start, memoryview(out))
    return bytes(out)


@pytest.fixture
def ring():
    """A writer and a reader on 8 KiB."""
    memory = create_ring(8192)
    writer, reader = RingWriter(memory), RingReader(memory)
    yield writer, reader
    writer.close()
    reader.close()
    memory.close()


def write(writer, sources, budget=BUDGET):
    """One step of an engine."""
    return write_step(writer, sources, ROW_BYTES, Shard(3), budget)


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(0, 300), st.integers(0, 1000))
def test_share_rows_budget_is_used_up_and_nobody_gets_more_than_he_has(behind, rows_max, first):
    """The sum is the budget or all there is; one row for each comes before a second for any."""
    shares = share_rows(behind, rows_max, first)
    assert min(rows_max, sum(behind)) == sum(shares)
    assert all(0 <= share <= has for share, has in zip(shares, behind, strict=True))
    if any(share > 1 for share in shares):
        assert all(share >= 1 for share in shares)


def test_share_rows_a_rising_first_is_fair():
    """Where the budget is too small for all, everyone has his turn."""
    given = [share_rows([5, 5, 5], 1, first) for first in range(3)]
    assert [[1, 0, 0], [0, 1, 0], [0, 0, 1]] == given


def test_write_step_all_turns_of_a_step_are_one_entry(ring):
    """One step of the engine is one ring entry, with ids, start and the cache's own bytes."""
    writer, reader = ring
    sources = [source(1, 4), source(2, 3, at=1), source(3, 2, at=2)]
    assert Written(6, full=False) == write(writer, sources)
    entry = reader.peek()
    assert entry is not None
    parts = list(entry.parts())
    assert [(1, 6, 77, 0, 4, 3), (2, 7, 77, 1, 2, 3)] == [
        (p.row.turn, p.row.epoch, p.row.session_hash, p.row.start, p.row.n, p.row.shard) for p in parts
    ]
    assert [(1000, 1001, 1002, 1003), (2001, 2002)] == [part.tokens for part in parts]
    assert [rows_of(sources[0], 0, 4), rows_of(sources[1], 1, 3)] == [bytes(part.rows) for part in parts]
    assert [4, 3, 2] == [cursor.position for cursor, _, _ in sources]
    del parts, entry
    reader.release()
    assert reader.peek() is None


def test_write_step_nothing_new_writes_nothing(ring):
    """A step of an engine whose rows are all in the ring costs no entry."""
    writer, reader = ring
    assert Written(0, full=False) == write(writer, [source(1, 3, at=3)])
    assert reader.peek() is None


def test_write_step_rows_without_a_known_token_wait(ring):
    """A row is logged with its token id or not yet."""
    writer, _ = ring
    cursor, cache, tokens = source(1, 4)
    assert Written(2, full=False) == write(writer, [(cursor, cache, tokens[:2])])


def test_write_step_far_behind_catches_up_in_pieces_of_the_budget(ring):
    """A long prefill does not make one step long; every turn gets at least a row."""
    writer, reader = ring
    sources = [source(1, 30), source(2, 5, at=4), source(3, 5, at=4)]
    counted = []
    for step in range(5):
        counted.append(write(writer, sources, StepBudget(8 * ROW_BYTES, step)).rows)
        if reader.peek() is not None:
            reader.release()
    assert [8, 8, 8, 8, 0] == counted


def test_write_step_budget_below_a_row_still_moves_every_turn(ring):
    """However large its rows are, a batch keeps up."""
    writer, _ = ring
    sources = [source(1, 3), source(2, 3)]
    assert Written(2, full=False) == write(writer, sources, StepBudget(1, 0))
    assert [1, 1] == [cursor.position for cursor, _, _ in sources]


def test_write_step_full_ring_leaves_cursors_where_they_are(ring):
    """Nothing waits for a reader: rows stay in the cache, and go when there is room."""
    writer, reader = ring
    one = (cursor, _, known) = source(1, 400)
    while write(writer, [one]).rows:
        pass
    at = cursor.position
    assert 0 < at < 400
    assert Written(0, full=True) == write(writer, [one])
    assert at == cursor.position
    tokens = []
    while (entry := reader.peek()) is not None:
        tokens += entry.tokens.tolist()
        del entry
        reader.release()
        write(writer, [one])
    assert known[:400] == tokens


def test_write_step_row_that_never_fits_is_an_error():
    """A ring that is too small for one row is a setting, not a full ring."""
    memory = create_ring(128)
    writer = RingWriter(memory)
    with pytest.raises(RowTooLarge):
        write(writer, [source(1, 1)])
    writer.close()
    memory.close()


def test_write_step_cache_that_fails_leaves_no_entry(ring):
    """An entry is whole or not there."""
    writer, reader = ring
    one = (cursor, _, tokens) = source(1, 2)

    class Broken:
        length = 2

        def copy_rows(self, start, out):
            raise MemoryError

    with pytest.raises(MemoryError):
        write(writer, [(cursor, cast("RowCache", Broken()), tokens)])
    assert reader.peek() is None
    assert Written(2, full=False) == write(writer, [one])


def test_write_step_rank_that_only_reads_writes_nothing_and_is_never_behind(ring):
    """Another one writes the same rows; in one step with others it takes nothing of the budget either."""
    writer, reader = ring
    one, other = source(1, 5), source(2, 5)
    one[0].only_reads = True
    assert [0, 5] == [rows_behind(one), rows_behind(other)]
    assert Written(0, full=False) == write(writer, [one])
    assert Written(5, full=False) == write(writer, [one, other])
    assert [0, 5] == [cursor.position for cursor, _, _ in (one, other)]
    entry = reader.peek()
    assert entry is not None
    assert [2] == [part.row.turn for part in entry.parts()]
