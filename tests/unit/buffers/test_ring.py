"""The ring's two ends: whole entries or nothing, full at once, and no harm from a garbled writer."""

from __future__ import annotations

import struct
from array import array

import numpy as np
import pytest

from kvlog.buffers.doorbell import Doorbell, create_doorbell
from kvlog.buffers.ring import RingReader, RingWriter, TableRow, create_ring
from kvlog.buffers.ring_layout import ENTRY_MAGIC, NO_SIZES, PAD_MAGIC, EntryHeader, EntrySizes, RingArea
from kvlog.errors import DecodeError, RingFull, RowTooLarge
from kvlog.ids import Epoch, Position, Shard, Turn


def row(n: int = 1, *, turn: int = 1, start: int = 0) -> TableRow:
    """A table row in which only what matters differs."""
    return TableRow(Turn(turn), Epoch(9), 77, Shard(0), Position(start), n)


@pytest.fixture
def memory():
    """A small ring."""
    with create_ring(4096) as made:
        yield made


def put(writer: RingWriter, table: list[TableRow], tokens: list[int], rows: bytes) -> None:
    """Write one entry."""
    reservation = writer.reserve(table, tokens, len(rows) // len(tokens))
    reservation.rows[:] = rows
    writer.commit(reservation)


def test_ring_entry_committed_is_read_whole(memory):
    """Table, token ids and rows come out as they went in, turn by turn."""
    writer, reader = RingWriter(memory), RingReader(memory)
    table = [row(2, turn=1), row(1, turn=2, start=5)]
    put(writer, table, [1, 2, 3], b"aaabbbccc")
    entry = reader.peek()
    assert entry is not None
    assert entry.table == tuple(table)
    assert entry.tokens.tolist() == [1, 2, 3]
    assert bytes(entry.rows) == b"aaabbbccc"
    assert entry.rows.readonly
    parts = list(entry.parts())
    assert [(p.row.turn, p.tokens, bytes(p.rows)) for p in parts] == [
        (1, (1, 2), b"aaabbb"),
        (2, (3,), b"ccc"),
    ]
    assert reader.peek() is entry
    reader.release()
    assert reader.peek() is None
    assert (reader.counts.entries, reader.counts.rows) == (1, 3)


def test_ring_entry_of_token_ids_only_has_no_rows(memory):
    """The mode `ids` writes no rows."""
    writer, reader = RingWriter(memory), RingReader(memory)
    writer.commit(writer.reserve([row(3)], array("I", [7, 8, 9]), 0))
    entry = reader.peek()
    assert entry is not None
    assert (entry.tokens.tolist(), len(entry.rows), entry.row_bytes) == ([7, 8, 9], 0, 0)


def test_ring_entry_reserved_or_abandoned_is_not_visible(memory):
    """Nothing is there before commit, nothing ever after abandon; the room is free again."""
    writer, reader = RingWriter(memory), RingReader(memory)
    reservation = writer.reserve([row()], [1], 100)
    assert reader.peek() is None
    writer.abandon(reservation)
    assert reader.peek() is None
    assert writer.bytes_free == 4096
    put(writer, [row()], [2], b"x")
    entry = reader.peek()
    assert entry is not None
    assert entry.tokens.tolist() == [2]


def test_ring_rows_after_commit_can_no_longer_be_written(memory):
    """A late write would be seen as corruption, so the view is taken away."""
    writer = RingWriter(memory)
    reservation = writer.reserve([row()], [1], 4)
    writer.commit(reservation)
    with pytest.raises(ValueError, match="released"):
        reservation.rows[0] = 1


def test_ring_rows_held_by_an_array_do_not_stop_commit(memory):
    """An adapter that gathers with numpy may still have its array."""
    writer, reader = RingWriter(memory), RingReader(memory)
    reservation = writer.reserve([row()], [1], 4)
    held = np.frombuffer(reservation.rows, np.uint8)
    writer.commit(reservation)
    entry = reader.peek()
    assert entry is not None
    also_held = np.frombuffer(entry.rows, np.uint8)
    reader.release()
    assert len(held) == len(also_held) == 4


def test_ring_full_says_so_at_once_and_takes_more_after_release(memory):
    """RingFull has both numbers; the reader's release makes room."""
    writer, reader = RingWriter(memory), RingReader(memory)
    for n in range(4):
        put(writer, [row()], [n], bytes(900 - 17))
    with pytest.raises(RingFull) as caught:
        writer.reserve([row()], [9], 900)
    assert caught.value.fields == {"entry_bytes": 1088, "free_bytes": 0}
    assert writer.counts.full == 1
    assert reader.peek()
    reader.release()
    assert writer.bytes_free == 1024
    put(writer, [row()], [9], bytes(880))


def test_ring_room_for_the_entry_but_not_for_its_pad_is_full(memory):
    """An entry that goes to the beginning needs the rest of the ring too, or it would cover what is unread."""
    writer, reader = RingWriter(memory), RingReader(memory)
    put(writer, [row()], [1], bytes(1400))
    put(writer, [row()], [2], bytes(1400))
    assert reader.peek()
    reader.release()
    assert writer.bytes_free == 4096 - 1536
    with pytest.raises(RingFull):
        writer.reserve([row()], [3], 1500)
    entry = reader.peek()
    assert entry is not None
    assert entry.tokens.tolist() == [2]


def test_ring_head_is_stored_after_everything_below_it(memory, monkeypatch):
    """Whoever sees the new head sees a whole entry, pad included; there is no other store of it."""
    writer, reader = RingWriter(memory), RingReader(memory)
    real, seen = RingArea.store_head, []

    def store_then_read(self: RingArea, head: int) -> None:
        real(self, head)
        entry = reader.peek()
        assert entry is not None
        seen.append(entry.tokens.tolist())
        reader.release()

    monkeypatch.setattr(RingArea, "store_head", store_then_read)
    for n in range(6):
        put(writer, [row()], [n], bytes(1500))
    assert seen == [[n] for n in range(6)]
    assert reader.counts.rereads == 0


def test_ring_entry_larger_than_an_empty_ring_takes_names_the_most(memory):
    """Waiting would not help, so the field says how large an entry may be."""
    writer = RingWriter(memory)
    with pytest.raises(RingFull) as caught:
        writer.reserve([row(5)], [0] * 5, 500)
    assert caught.value.fields["entry_bytes_max"] == writer.entry_bytes_max == 2048


def test_ring_row_that_never_fits_is_too_large(memory):
    """One row is the least that an entry has."""
    with pytest.raises(RowTooLarge) as caught:
        RingWriter(memory).reserve([row()], [0], 2000)
    assert caught.value.fields == {"row_bytes": 2000, "record_bytes_max": 2048}


@pytest.mark.parametrize("row_bytes", [0, 1, 63, 64, 500])
@pytest.mark.parametrize("turns", [1, 3])
def test_ring_rows_max_always_fits(row_bytes: int, turns: int):
    """So many rows go into an empty ring wherever its head stands."""
    with create_ring(4096) as memory:
        writer, reader = RingWriter(memory), RingReader(memory)
        most = writer.rows_max(turns, row_bytes)
        assert most >= turns
        table = [row()] * (turns - 1) + [row(most - turns + 1)]
        for _ in range(50):
            writer.commit(writer.reserve([row()], [0], 30))
            writer.commit(writer.reserve([row()], [0], 0)) if writer.bytes_free >= 3000 else None
            while reader.peek():
                reader.release()
            writer.commit(writer.reserve(table, [0] * most, row_bytes))
            assert reader.peek()
            reader.release()


def test_ring_rows_max_of_a_row_that_never_fits_is_zero(memory):
    """The adapter can ask before it tries."""
    assert RingWriter(memory).rows_max(1, 4000) == 0


def test_ring_writer_made_anew_goes_on_where_the_old_one_was(memory):
    """Positions are in the ring, not in the writer; an open reservation of the old one is gone."""
    writer, reader = RingWriter(memory), RingReader(memory)
    put(writer, [row()], [1], b"a")
    writer.reserve([row()], [2], 1)
    put(RingWriter(memory), [row()], [3], b"c")
    seen = []
    while (entry := reader.peek()) is not None:
        seen.append(entry.tokens.tolist())
        reader.release()
    assert seen == [[1], [3]]


def test_ring_close_with_open_ends_gives_the_memory_back():
    """Neither end keeps a view of memory that is to be unmapped."""
    memory = create_ring(4096)
    writer, reader = RingWriter(memory), RingReader(memory)
    put(writer, [row()], [1], b"a")
    assert reader.peek()
    writer.reserve([row()], [2], 1)
    writer.close()
    reader.close()
    mapping = memory._mapping
    memory.close()
    assert mapping.closed


def _corrupt_each_byte(memory, size: int):
    good = bytes(memory.view[4096 : 4096 + size])
    for at in range(size):
        memory.view[4096 + at] ^= 0x10
        yield at
        memory.view[4096 : 4096 + size] = good


def test_ring_entry_with_any_byte_flipped_is_refused_for_good(memory):
    """Header, table, token ids and rows are all under the checksum; only the pads between entries are not."""
    writer = RingWriter(memory)
    put(writer, [row(2)], [1, 2], bytes(range(128)))
    sizes = EntrySizes.of(1, 2, 64)
    unsummed = set(range(4, 8))  # zero, and never read
    for at in _corrupt_each_byte(memory, sizes.used_bytes):
        if at in unsummed:
            continue
        reader = RingReader(memory)
        with pytest.raises(DecodeError):
            reader.peek()
        with pytest.raises(DecodeError):
            reader.peek()
        assert reader.counts.corrupt == 1
    assert RingReader(memory).peek() is not None


def test_ring_entry_of_an_earlier_lap_is_not_taken_for_a_new_one(memory):
    """Its checksum is right, its position is not: what is published and not yet visible looks like this."""
    writer, reader = RingWriter(memory), RingReader(memory)
    for _ in range(4):
        put(writer, [row()], [1], bytes(880))
        assert reader.peek()
        reader.release()
    RingArea(memory).store_head(4096 + 1024)
    with pytest.raises(DecodeError, match="position"):
        reader.peek()
    assert reader.counts.rereads > 0


def test_ring_entry_that_becomes_visible_late_is_read(memory, monkeypatch):
    """On a machine that reorders stores, the reader looks again a few times."""
    writer, reader = RingWriter(memory), RingReader(memory)
    put(writer, [row()], [1], b"abcd")
    good = bytes(memory.view[4096 : 4096 + 192])
    memory.view[4096 : 4096 + 192] = bytes(192)
    looks = iter(range(100))
    real = RingReader._header_at

    def late(self: RingReader, position: int) -> EntryHeader:
        if next(looks) == 5:
            memory.view[4096 : 4096 + 192] = good
        return real(self, position)

    monkeypatch.setattr(RingReader, "_header_at", late)
    entry = reader.peek()
    assert entry is not None
    assert bytes(entry.rows) == b"abcd"
    assert reader.counts.rereads == 5


@pytest.mark.parametrize("head", [1, 63, 4096 + 64, 1 << 63, (1 << 64) - 64, 4032])
def test_ring_head_that_is_nonsense_is_refused(memory, head: int):
    """Neither unaligned, nor further than the ring is long, nor over bytes that no one wrote."""
    reader = RingReader(memory)
    RingArea(memory).store_head(head)
    assert 0 <= reader.bytes_used <= 4096
    with pytest.raises(DecodeError):
        reader.peek()


@pytest.mark.parametrize("tail", [1, 63, 64, 1 << 63])
def test_ring_tail_that_is_nonsense_is_refused_by_the_writer(memory, tail: int):
    """A wild reader makes the writer stop, never overwrite what is unread."""
    writer = RingWriter(memory)
    RingArea(memory).store_tail(tail)
    with pytest.raises(DecodeError):
        writer.reserve([row()], [1], 4)


def test_ring_tail_that_falls_is_refused_by_the_writer(memory):
    """Room once given back cannot be taken away."""
    writer, reader = RingWriter(memory), RingReader(memory)
    put(writer, [row()], [1], b"a")
    assert reader.peek()
    reader.release()
    assert writer.bytes_free == 4096
    RingArea(memory).store_tail(0)
    with pytest.raises(DecodeError):
        _ = writer.bytes_free


@pytest.mark.parametrize("unaligned", [1, 65])
def test_ring_tail_that_is_unaligned_is_refused_by_a_new_reader(memory, unaligned: int):
    """A reader starts only where an entry can begin."""
    RingArea(memory).store_tail(unaligned)
    with pytest.raises(DecodeError):
        RingReader(memory)


@pytest.mark.parametrize(
    "header",
    [
        EntryHeader(PAD_MAGIC, 0, 0, 64, EntrySizes.of(0, 0, 0)),
        EntryHeader(PAD_MAGIC, 0, 0, 4096, EntrySizes.of(0, 0, 0)),
        EntryHeader(12345, 0, 0, 128, EntrySizes.of(1, 0, 0)),
        EntryHeader(ENTRY_MAGIC, 0, 0, 128, EntrySizes.of(1, 1, 0)),
        EntryHeader(ENTRY_MAGIC, 0, 0, 128, EntrySizes.of(0, 1, 0)),
        EntryHeader(ENTRY_MAGIC, 0, 0, 64, EntrySizes.of(2**32 - 1, 2**32 - 1, 2**32 - 1)),
    ],
)
def test_ring_entry_with_a_right_checksum_and_impossible_sizes_is_refused(memory, header: EntryHeader):
    """A writer that is wrong, not only unlucky, cannot lead the reader out of the ring or around for ever."""
    area = RingArea(memory)
    if header.summed_bytes <= 4096:
        area.write_header(header)
    else:
        fields = struct.pack("=IIQQQIII", header.magic, 0, 0, 0, 64, *[2**32 - 1] * 3)
        memory.view[4096 : 4096 + len(fields)] = fields
    area.store_head(4096 if header.entry_bytes == 4096 else 128)
    with pytest.raises(DecodeError):
        RingReader(memory).peek()


def test_ring_entry_that_reaches_beyond_the_head_is_refused(memory):
    """Behind the head is what the writer is about to write, whatever the entry says of its size."""
    put(RingWriter(memory), [row()], [1], bytes(200))
    area = RingArea(memory)
    area.store_head(area.load_head() - 64)
    with pytest.raises(DecodeError, match="does not fit the ring"):
        RingReader(memory).peek()


def test_ring_entry_larger_than_its_parts_is_refused(memory):
    """Its checksum is right, but the rest of it would be under no checksum."""
    area = RingArea(memory)
    area.write_header(EntryHeader(ENTRY_MAGIC, 0, 0, 192, NO_SIZES))
    area.store_head(192)
    with pytest.raises(DecodeError, match="add up"):
        RingReader(memory).peek()


def test_ring_pad_behind_a_pad_is_refused(memory):
    """No writer needs two, and a chain of them would be a loop."""
    area = RingArea(memory)
    area.store_tail(4032)
    reader = RingReader(memory)
    area.write_header(EntryHeader(PAD_MAGIC, 0, 4032, 64, EntrySizes.of(0, 0, 0)))
    area.write_header(EntryHeader(PAD_MAGIC, 0, 4096, 4032, EntrySizes.of(0, 0, 0)))
    area.store_head(4032 + 4096)
    with pytest.raises(DecodeError, match="a pad does not end where the ring does"):
        reader.peek()


def test_doorbell_rung_by_commit_is_cleared_once(memory):
    """One or many rings are one wake-up, and neither side ever waits."""
    bell = create_doorbell()
    writer = RingWriter(memory, bell)
    assert not bell.clear()
    for n in range(3):
        put(writer, [row()], [n], b"a")
    assert bell.fileno() >= 0
    assert bell.clear()
    assert not bell.clear()
    bell.close()
    bell.close()


def test_doorbell_that_nobody_answers_never_waits():
    """A full counter is not an error: the reader has been called often enough."""
    import os

    bell = create_doorbell()
    os.eventfd_write(bell.fileno(), (1 << 64) - 2)
    Doorbell.ring(bell)
    bell.close()
