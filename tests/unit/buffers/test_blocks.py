"""The pool's bookkeeping, rule by rule."""

from __future__ import annotations

import pytest

from kvlog.buffers.blocks import BlockTable, Key, Placement
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.errors import LayoutMismatch, PoolFull, RowTooLarge
from kvlog.ids import Position, SessionId, Shard

A, B = SessionId("a"), SessionId("b")
KEY, OTHER = Key(A, Shard(0)), Key(B, Shard(0))
ROW = 10


def make(blocks: int = 8, *, pinned_share: int = 50) -> BlockTable:
    """A table of blocks of 4 rows each."""
    return BlockTable(PoolGeometry(block_bytes=45, blocks=blocks, device="cpu"), pinned_share=pinned_share)


def write(table: BlockTable, key: Key, start: int, n: int, row_bytes: int = ROW) -> Placement:
    """Place rows and make them present; each row's checksum is its position."""
    placement = table.place(key, Position(start), n, row_bytes)
    assert table.settle(placement, list(range(start, start + n)))
    table.check()
    return placement


def test_place_over_several_blocks_fills_them_in_order():
    """Positions follow each other within a block and from block to block."""
    table = make()
    placement = write(table, KEY, 0, 6)
    assert [(p.block, p.slot, p.rows, p.copy_from) for p in placement.pieces] == [
        (0, 0, 4, None),
        (1, 0, 2, None),
    ]
    placement = write(table, KEY, 6, 3)
    assert [(p.block, p.slot, p.rows, p.copy_from) for p in placement.pieces] == [
        (1, 2, 2, None),
        (2, 0, 1, None),
    ]
    assert table.present_prefix(KEY) == 9
    assert [tuple(span) for span in table.locate(KEY, Position(3), 4)] == [(0, 3, 1, ROW), (1, 0, 3, ROW)]


def test_place_before_the_end_replaces_what_follows():
    """Rows from start on are gone at once; the blocks that are not needed any more are free."""
    table = make()
    write(table, KEY, 0, 12)
    placement = table.place(KEY, Position(5), 1, ROW)
    assert table.present_prefix(KEY) == 5
    assert table.ledger.counts.free == 6
    assert table.settle(placement, [99])
    assert table.present_prefix(KEY) == 6
    assert table.pin(KEY, Position(6)).row_checksums.tolist() == [0, 1, 2, 3, 4, 99]


def test_place_that_is_settled_at_once_pins_nothing():
    """Where nobody can come in between, nobody has to be kept out."""
    table = make()
    placement = table.place(KEY, Position(0), 5, ROW, held=False)
    assert not any(table.ledger.is_pinned(piece.block) for piece in placement.pieces)
    assert table.settle(placement, range(5))
    table.check()
    assert table.present_prefix(KEY) == 5


def test_place_that_was_not_written_leaves_the_rows_before_it():
    """A failed decode costs its own rows only, and no block."""
    table = make()
    write(table, KEY, 0, 5)
    placement = table.place(KEY, Position(5), 8, ROW)
    assert table.settle(placement, [])
    table.check()
    assert (table.present_prefix(KEY), table.ledger.counts.free) == (5, 6)


def test_place_that_was_written_in_part_is_present_in_part():
    """What came before the failure is good."""
    table = make()
    placement = table.place(KEY, Position(0), 8, ROW)
    assert table.settle(placement, [7, 8])
    table.check()
    assert (table.present_prefix(KEY), table.ledger.counts.free) == (2, 7)


def test_place_into_a_full_pool_says_so_and_keeps_the_rows_before_start():
    """PoolFull has both numbers; nothing was taken."""
    table = make(2)
    write(table, KEY, 0, 5)
    with pytest.raises(PoolFull) as caught:
        table.place(KEY, Position(5), 4, ROW)
    assert caught.value.fields == {"blocks_wanted": 1, "blocks_free": 0}
    table.check()
    assert table.present_prefix(KEY) == 5


def test_place_behind_a_hole_is_a_fault_of_the_caller():
    """Rows behind a hole are of no use to anybody, so they are not held."""
    with pytest.raises(AssertionError):
        make().place(KEY, Position(1), 1, ROW)


def test_place_of_another_row_size_is_taken_at_position_0_only():
    """Another layout begins anew; in the middle it is a mismatch."""
    table = make()
    write(table, KEY, 0, 5)
    with pytest.raises(LayoutMismatch) as caught:
        table.place(KEY, Position(5), 1, 20)
    assert caught.value.fields == {"field": "row_bytes", "expected": 10, "actual": 20}
    placement = write(table, KEY, 0, 3, 20)
    assert [piece.rows for piece in placement.pieces] == [2, 1]
    assert (table.present_prefix(KEY), table.ledger.counts.free) == (3, 6)


def test_place_of_a_row_larger_than_a_block_is_refused():
    """It fits nowhere."""
    with pytest.raises(RowTooLarge):
        make().place(KEY, Position(0), 1, 46)


def test_place_into_a_pinned_block_goes_to_another_one():
    """What an attach holds never changes; the rows before are to be copied."""
    table = make()
    write(table, KEY, 0, 6)
    pinned = table.pin(KEY, Position(6))
    placement = write(table, KEY, 6, 1)
    assert [(p.slot, p.copy_from) for p in placement.pieces] == [(2, 1)]
    assert placement.pieces[0].block not in {block.index for block in pinned.blocks}
    assert table.ledger.counts.loose == 1
    placement = write(table, KEY, 7, 1)
    assert [piece.copy_from for piece in placement.pieces] == [None]
    table.release(pinned.lease)
    table.check()
    assert table.ledger.counts.loose == table.ledger.counts.pinned == 0


def test_place_at_a_pinned_blocks_beginning_copies_nothing():
    """All of its rows are replaced, so none is needed."""
    table = make()
    write(table, KEY, 0, 6)
    table.pin(KEY, Position(6))
    placement = write(table, KEY, 4, 2)
    assert [(p.slot, p.copy_from) for p in placement.pieces] == [(0, None)]
    assert table.ledger.counts.loose == 1


def test_pin_names_blocks_rows_and_checksums():
    """All that the engine's side needs to copy and verify."""
    table = make()
    write(table, KEY, 0, 6)
    pinned = table.pin(KEY, Position(5))
    assert pinned.blocks == (PinnedBlock(0, 4), PinnedBlock(1, 1))
    assert pinned.row_checksums.tolist() == [0, 1, 2, 3, 4]
    assert pinned.row_bytes == ROW


def test_pin_of_nothing_is_a_lease_like_any_other():
    """A session without rows can be attached, at length 0."""
    table = make()
    pinned = table.pin(KEY, Position(0))
    assert pinned.blocks == ()
    table.release(pinned.lease)


def test_pin_beyond_the_share_is_refused_until_a_release():
    """Attaches cannot take the whole pool from those who write."""
    table = make(8)
    write(table, KEY, 0, 16)
    write(table, OTHER, 0, 4)
    first = table.pin(KEY, Position(16))
    second = table.pin(KEY, Position(8))  # the same blocks cost nothing
    with pytest.raises(PoolFull) as caught:
        table.pin(OTHER, Position(1))
    assert caught.value.fields == {"blocks_wanted": 1, "blocks_free": 0}
    table.release(first.lease)
    table.pin(OTHER, Position(1))
    table.release(second.lease)
    table.check()


def test_pin_of_rows_that_are_not_present_is_a_fault_of_the_caller():
    """Only what is committed is exposed."""
    table = make()
    table.place(KEY, Position(0), 4, ROW)
    with pytest.raises(AssertionError):
        table.pin(KEY, Position(1))


def test_release_of_a_lease_twice_is_a_fault_of_the_caller():
    """A second release could free what another attach holds."""
    table = make()
    lease = table.pin(KEY, Position(0)).lease
    table.release(lease)
    with pytest.raises(KeyError):
        table.release(lease)


def test_drop_of_a_pinned_session_frees_its_blocks_on_release_only():
    """Freed while pinned is not free."""
    table = make(4)
    write(table, KEY, 0, 8)
    pinned = table.pin(KEY, Position(8))
    table.drop(A)
    table.check()
    assert (table.present_prefix(KEY), table.ledger.counts.free, table.ledger.counts.loose) == (0, 2, 2)
    write(table, OTHER, 0, 8)
    with pytest.raises(PoolFull):
        table.place(OTHER, Position(8), 1, ROW)
    table.release(pinned.lease)
    table.check()
    assert table.ledger.counts.free == 2


def test_cut_shortens_every_shard_of_the_session_only():
    """A Truncate is for all shards."""
    table = make()
    second = Key(A, Shard(1))
    write(table, KEY, 0, 6)
    write(table, second, 0, 3)
    write(table, OTHER, 0, 6)
    table.cut(A, Position(4))
    table.cut(SessionId("nobody"), Position(0))
    table.check()
    assert [table.present_prefix(key) for key in (KEY, second, OTHER)] == [4, 3, 6]
    assert table.ledger.counts.free == 4


def test_mark_absent_shortens_one_shard():
    """Rows that are known but not held end the prefix."""
    table = make()
    write(table, KEY, 0, 6)
    table.mark_absent(KEY, Position(9))
    assert table.present_prefix(KEY) == 6
    table.mark_absent(KEY, Position(2))
    table.mark_absent(OTHER, Position(0))
    table.check()
    assert table.present_prefix(KEY) == 2


@pytest.mark.parametrize("what", ["cut", "drop", "place", "absent"])
def test_placement_overtaken_before_it_is_settled_makes_nothing_present(what: str):
    """A writer in another thread may be late: its blocks are nobody else's until it is done."""
    table = make(4)
    write(table, KEY, 0, 2)
    late = table.place(KEY, Position(2), 4, ROW)
    newer = None
    if what == "cut":
        table.cut(A, Position(3))
    elif what == "drop":
        table.drop(A)
    elif what == "absent":
        table.mark_absent(KEY, Position(1))
    else:
        newer = table.place(KEY, Position(1), 1, ROW)
        assert not {p.block for p in newer.pieces} & {p.block for p in late.pieces}
        assert newer.pieces[0].copy_from == late.pieces[0].block
    table.check()
    before = table.present_prefix(KEY)
    free = table.ledger.counts.free
    assert not table.settle(late, [1, 2, 3, 4])
    table.check()
    assert table.present_prefix(KEY) == before
    assert table.ledger.counts.free > free
    if newer is not None:
        assert table.settle(newer, [5])
        assert table.present_prefix(KEY) == 2


def test_cut_behind_an_open_placement_leaves_it_valid():
    """It takes nothing away."""
    table = make()
    placement = table.place(KEY, Position(0), 4, ROW)
    table.cut(A, Position(4))
    assert table.settle(placement, [0, 1, 2, 3])


def test_uses_are_in_the_order_of_the_last_touch():
    """Least recently used first, with what each takes."""
    table = make()
    table.touch(A, 5)
    write(table, KEY, 0, 5)
    write(table, OTHER, 0, 1)
    table.touch(A, 10)
    table.touch(B, 3)
    table.pin(KEY, Position(1))
    assert [(u.session, u.blocks, u.pinned, u.touched_ns) for u in table.uses()] == [
        ("a", 2, True, 10),
        ("b", 1, False, 10),
    ]
    table.touch(A, 11)
    assert [use.session for use in table.uses()] == ["b", "a"]
