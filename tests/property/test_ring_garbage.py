"""Any bytes at all in a ring give a whole entry or a DecodeError, in bounded time, and no other exception."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvlog.buffers.ring import RingReader, RingWriter, TableRow, create_ring
from kvlog.buffers.ring_layout import ENTRY_HEADER, ENTRY_MAGIC, PAD_MAGIC, RingArea
from kvlog.checksums import checksum
from kvlog.errors import DecodeError
from kvlog.ids import Epoch, Position, Shard, Turn

_SMALL = st.integers(0, 70)
_U32 = st.one_of(_SMALL, st.integers(0, 2**32 - 1))
_U64 = st.one_of(st.integers(0, 80).map(lambda n: n * 64), st.integers(0, 2**64 - 1))
_HEADERS = st.tuples(
    st.sampled_from([ENTRY_MAGIC, PAD_MAGIC, 0]),
    _U64,
    _U64,
    _U64,
    _U32,
    _U32,
    _U32,
)


def _read_all(reader: RingReader) -> int:
    """Read until empty or refused; how many entries there were."""
    for count in range(100):
        try:
            entry = reader.peek()
        except DecodeError:
            return count
        if entry is None:
            return count
        assert sum(len(part.tokens) for part in entry.parts()) == len(entry.tokens)
        assert len(entry.rows) == len(entry.tokens) * entry.row_bytes
        reader.release()
    raise AssertionError("it reads for ever")


@settings(deadline=None, max_examples=150)
@given(
    data=st.binary(max_size=600),
    head=_U64,
    tail=_U64,
    headers=st.lists(st.tuples(st.integers(0, 63), _HEADERS)),
)
def test_ring_reader_over_any_bytes_stays_inside(data: bytes, head: int, tail: int, headers: list):
    """A hostile writer gets nothing but its link closed."""
    with create_ring(4096) as memory:
        area = RingArea(memory)
        memory.view[4096 : 4096 + len(data)] = data
        for at, fields in headers:
            ENTRY_HEADER.pack_into(area.data, at * 64, *fields)
        area.store_head(head)
        area.store_tail(tail)
        try:
            reader = RingReader(memory)
        except DecodeError:
            return
        _read_all(reader)


@settings(deadline=None, max_examples=150)
@given(
    sizes=st.tuples(_U32, _U32, _U32, _U64),
    magic=st.sampled_from([ENTRY_MAGIC, PAD_MAGIC]),
    table=st.binary(max_size=200),
)
def test_ring_reader_over_a_header_with_a_right_checksum_stays_inside(sizes: tuple, magic: int, table: bytes):
    """Even a checksum that fits does not make sizes true."""
    turns, tokens, row_bytes, entry_bytes = sizes
    with create_ring(4096) as memory:
        area = RingArea(memory)
        memory.view[4160 : 4160 + len(table)] = table
        ENTRY_HEADER.pack_into(area.data, 0, magic, 0, 0, entry_bytes, turns, tokens, row_bytes)
        rows_at = -(-(64 + 40 * turns + 4 * tokens) // 64) * 64
        used = 64 if magic == PAD_MAGIC else min(4096, rows_at + tokens * row_bytes)
        summed = checksum(area.data[16:used])
        ENTRY_HEADER.pack_into(area.data, 0, magic, summed, 0, entry_bytes, turns, tokens, row_bytes)
        area.store_head(4096)
        _read_all(RingReader(memory))


@settings(deadline=None, max_examples=100)
@given(flips=st.lists(st.tuples(st.integers(0, 4095), st.integers(1, 255)), min_size=1, max_size=4))
def test_ring_entries_with_flipped_bytes_are_never_read_wrong(flips: list[tuple[int, int]]):
    """What comes out is what went in, up to the first damage."""
    with create_ring(4096) as memory:
        writer, reader = RingWriter(memory), RingReader(memory)
        put: list[tuple[list[int], bytes]] = []
        for n in range(8):
            row = TableRow(Turn(1), Epoch(1), 5, Shard(0), Position(n), 2)
            reservation = writer.reserve([row], [n, n + 1], 150)
            reservation.rows[:] = bytes([n + 1]) * 300
            writer.commit(reservation)
            put.append(([n, n + 1], bytes([n + 1]) * 300))
        for at, bits in flips:
            memory.view[4096 + at] ^= bits
        for tokens, rows in put:
            try:
                entry = reader.peek()
            except DecodeError:
                return
            assert entry is not None
            assert (entry.tokens.tolist(), bytes(entry.rows)) == (tokens, rows)
            reader.release()
