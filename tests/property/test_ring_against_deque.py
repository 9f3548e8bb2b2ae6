"""The ring against collections.deque: first in, first out, whole, and full only when it must be."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvlog.buffers.ring import RingReader, RingWriter, TableRow, create_ring
from kvlog.errors import RingFull, RowTooLarge
from kvlog.ids import Epoch, Position, Shard, Turn


class RingModel(RuleBasedStateMachine):
    """Random steps of one writer and one reader over a small ring, so that it is full and wraps all the time."""

    @initialize(data_bytes=st.sampled_from([256, 576, 1024, 4096]))
    def make(self, data_bytes: int):
        self.memory = create_ring(data_bytes)
        self.writer = RingWriter(self.memory)
        self.reader = RingReader(self.memory)
        self.expected: deque[tuple[tuple[TableRow, ...], list[int], bytes]] = deque()
        self.number = 0

    @rule(
        counts=st.lists(st.integers(1, 4), min_size=1, max_size=3),
        row_bytes=st.integers(0, 300),
        keep=st.booleans(),
    )
    def write(self, counts: list[int], row_bytes: int, keep: bool):
        self.number += 1
        table = tuple(
            TableRow(Turn(i), Epoch(self.number), i * 7, Shard(i), Position(i), n)
            for i, n in enumerate(counts)
        )
        tokens = [self.number * 10 + i for i in range(sum(counts))]
        try:
            reservation = self.writer.reserve(table, tokens, row_bytes)
        except RingFull as full:
            entry = full.fields["entry_bytes"]
            assert isinstance(entry, int)
            # An empty ring takes all that it ever takes; a full one refuses only what pad and entry do not fit into.
            if not self.expected:
                assert entry > self.writer.entry_bytes_max
            assert entry > self.writer.entry_bytes_max or 2 * entry > self.writer.bytes_free
            return
        except RowTooLarge:
            assert self.writer.rows_max(1, row_bytes) == 0
            return
        data = bytes((self.number + i) % 251 for i in range(row_bytes * len(tokens)))
        reservation.rows[:] = data
        if keep:
            self.writer.commit(reservation)
            self.expected.append((table, tokens, data))
        else:
            self.writer.abandon(reservation)

    @rule(release=st.booleans())
    def read(self, release: bool):
        entry = self.reader.peek()
        if not self.expected:
            assert entry is None
            return
        assert entry is not None
        assert (entry.table, entry.tokens.tolist(), bytes(entry.rows)) == self.expected[0]
        if release:
            self.reader.release()
            self.expected.popleft()

    @rule()
    def writer_restarts(self):
        self.writer.close()
        self.writer = RingWriter(self.memory)

    @invariant()
    def the_room_adds_up(self):
        if hasattr(self, "writer"):
            size = self.memory.size_bytes - 4096
            assert self.writer.bytes_free + self.reader.bytes_used == size
            assert (self.reader.bytes_used == 0) == (not self.expected)
            assert self.reader.counts.rereads == 0

    def teardown(self):
        if hasattr(self, "writer"):
            self.writer.close()
            self.reader.close()
            self.memory.close()


TestRingModel = RingModel.TestCase
TestRingModel.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
