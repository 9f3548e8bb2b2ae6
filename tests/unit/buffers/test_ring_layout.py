"""The bytes of a ring are where its module's drawing says."""

from __future__ import annotations

import struct

import pytest
import xxhash

from kvlog.buffers.memory import attach, create
from kvlog.buffers.ring import RingReader, RingWriter, TableRow, create_ring, session_hash
from kvlog.buffers.ring_layout import Fence, RingArea
from kvlog.errors import DecodeError
from kvlog.ids import Epoch, Position, Shard, Turn


def test_ring_control_page_is_laid_out_as_drawn():
    """Magic, version and size at the beginning, head at 128, tail at 256, data from 4096."""
    with create_ring(1 << 16) as memory:
        assert memory.size_bytes == 4096 + (1 << 16)
        assert bytes(memory.view[:8]) == b"KVLGRING"
        assert struct.unpack_from("=I4xQ", memory.view, 8) == (1, 1 << 16)
        area = RingArea(memory)
        area.store_head(0x1122334455667788)
        area.store_tail(0x99)
        assert struct.unpack_from("=Q", memory.view, 128) == (0x1122334455667788,)
        assert struct.unpack_from("=Q", memory.view, 256) == (0x99,)
        assert (area.load_head(), area.load_tail()) == (0x1122334455667788, 0x99)


def test_ring_entry_is_laid_out_as_drawn():
    """Every field of header, table, token ids and rows, byte by byte."""
    table = [
        TableRow(Turn(3), Epoch(5), session_hash("a"), Shard(1), Position(7), 2),
        TableRow(Turn(4), Epoch(6), session_hash("b"), Shard(0), Position(0), 1),
    ]
    with create_ring(4096) as memory:
        writer = RingWriter(memory)
        reservation = writer.reserve(table, [10, 11, 12], 50)
        reservation.rows[:] = bytes(range(150))
        writer.commit(reservation)
        entry = bytes(memory.view[4096:])
        magic, zero, summed, position, size, turns, tokens, row_bytes = struct.unpack_from(
            "=4sIQQQIII", entry
        )
        assert (magic, zero, position, turns, tokens, row_bytes) == (b"KVRE", 0, 0, 2, 3, 50)
        assert entry[44:64] == bytes(20)
        first = struct.unpack_from("=QQQHHIII", entry, 64)
        assert first == (3, 5, xxhash.xxh3_64_intdigest(b"a"), 1, 0, 7, 2, 0)
        assert struct.unpack_from("=QQQHHIII", entry, 104)[:2] == (4, 6)
        assert struct.unpack_from("=3I", entry, 144) == (10, 11, 12)
        assert entry[192:342] == bytes(range(150))
        assert size == 384
        assert summed == xxhash.xxh3_64_intdigest(entry[16:342])
        assert struct.unpack_from("=Q", memory.view, 128) == (384,)


def test_ring_pad_is_laid_out_as_drawn():
    """What does not fit before the end goes to the beginning, behind a pad that fills the rest."""
    row = TableRow(Turn(1), Epoch(1), 1, Shard(0), Position(0), 1)
    with create_ring(1024) as memory:
        writer, reader = RingWriter(memory), RingReader(memory)
        for _ in range(2):
            writer.commit(writer.reserve([row], [1], 256))
            assert reader.peek()
            reader.release()
        writer.commit(writer.reserve([row], [1], 256))
        pad = bytes(memory.view[4096 + 768 : 4096 + 832])
        assert struct.unpack("=4sIQQQ", pad[:32])[::3] == (b"KVRP", 768)
        assert struct.unpack_from("=Q", pad, 24) == (256,)
        assert struct.unpack_from("=Q", pad, 8) == (xxhash.xxh3_64_intdigest(pad[16:]),)
        assert struct.unpack_from("=Q", memory.view, 128) == (1024 + 384,)


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, b"X"), (8, b"\2"), (16, struct.pack("=Q", 1 << 60)), (16, struct.pack("=Q", 100)), (16, bytes(8))],
)
def test_ring_area_over_a_damaged_control_page_is_refused(at: int, value: bytes):
    """Another magic, version or an impossible size is not a ring."""
    with create_ring(4096) as memory:
        memory.view[at : at + len(value)] = value
        with pytest.raises(DecodeError):
            RingArea(memory)


def test_ring_area_over_too_little_memory_is_refused():
    """Shorter than its control page."""
    with create("kvlog-test", 100, setting="x") as memory, pytest.raises(DecodeError):
        RingArea(memory)


def test_ring_area_over_memory_attached_by_descriptor_is_the_same_ring():
    """The engine's end opens what it got over the socket."""
    with create_ring(4096) as memory, attach(memory.fd, writable=True) as theirs:
        writer, reader = RingWriter(theirs), RingReader(memory)
        row = TableRow(Turn(1), Epoch(1), 1, Shard(0), Position(0), 1)
        writer.commit(writer.reserve([row], [5], 0))
        entry = reader.peek()
        assert entry is not None
        assert entry.table == (row,)


def test_fence_crossed_often_never_waits():
    """Its lock is private, so it is always free."""
    fence = Fence()
    for _ in range(1000):
        fence.cross()
