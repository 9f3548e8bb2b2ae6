"""The bookkeeping against a dict of bytes: what is present reads back, what is pinned never changes, nothing leaks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from kvlog.buffers.blocks import BlockTable, Key, LeaseId, PinnedBlocks, Placement
from kvlog.buffers.eviction import EvictionMarks, plan_eviction
from kvlog.buffers.geometry import PoolGeometry
from kvlog.checksums import checksum
from kvlog.errors import LayoutMismatch, PoolFull
from kvlog.ids import Position, SessionId, Shard

BLOCK_BYTES = 32
SESSIONS = st.sampled_from([SessionId(name) for name in "abc"])
KEYS = st.builds(Key, SESSIONS, st.sampled_from([Shard(0), Shard(1)]))
ROW_SIZES = st.sampled_from([8, 8, 8, 5, 32])
LENGTHS = st.integers(0, 14).map(Position)


class BlocksModel(RuleBasedStateMachine):
    """Random operations on a small pool; the model knows each key's rows and each lease's bytes."""

    writing = Bundle("writing")
    leases = Bundle("leases")

    @initialize(blocks=st.integers(1, 12))
    def make(self, blocks: int):
        self.table = BlockTable(PoolGeometry(BLOCK_BYTES, blocks, "cpu"), pinned_share=50)
        self.memory = bytearray(blocks * BLOCK_BYTES)
        self.rows: dict[Key, list[bytes]] = {}
        self.opened: dict[Key, Placement] = {}
        self.pinned: dict[LeaseId, tuple[PinnedBlocks, list[bytes]]] = {}
        self.number = 0

    def fresh_row(self, row_bytes: int) -> bytes:
        self.number += 1
        return self.number.to_bytes(5, "little").ljust(row_bytes, b"\xee")

    def put(self, block: int, slot: int, row: bytes) -> None:
        at = block * BLOCK_BYTES + slot * len(row)
        self.memory[at : at + len(row)] = row

    def get(self, block: int, slot: int, row_bytes: int) -> bytes:
        at = block * BLOCK_BYTES + slot * row_bytes
        return bytes(self.memory[at : at + row_bytes])

    @rule(target=writing, key=KEYS, back=st.integers(0, 5), n=st.integers(1, 6), row_bytes=ROW_SIZES)
    def place(self, key: Key, back: int, n: int, row_bytes: int):
        held = self.rows.get(key, [])
        start = Position(max(0, len(held) - back))
        try:
            placement = self.table.place(key, start, n, row_bytes)
        except LayoutMismatch:
            assert start > 0
            assert len(held[0]) != row_bytes
            return multiple()
        except PoolFull:
            assert self.table.ledger.counts.free * (BLOCK_BYTES // row_bytes) < n + BLOCK_BYTES // row_bytes
            del held[start:]
            self.opened.pop(key, None)
            return multiple()
        del held[start:]
        self.opened[key] = placement
        for piece in placement.pieces:
            if piece.copy_from is not None:
                for slot in range(piece.slot):
                    self.put(piece.block, slot, self.get(piece.copy_from, slot, row_bytes))
        rows = [self.fresh_row(row_bytes) for _ in range(n)]
        left = iter(rows)
        for piece in placement.pieces:
            for slot in range(piece.slot, piece.slot + piece.rows):
                self.put(piece.block, slot, next(left))
        return placement, rows

    @rule(placed=consumes(writing), written=st.integers(0, 6))
    def settle(self, placed: tuple[Placement, list[bytes]], written: int):
        """Rows are written when they are placed, never later: a void placement's blocks may be anybody's by now."""
        placement, rows = placed
        good = rows[:written]
        valid = self.table.settle(placement, [checksum(row) for row in good])
        assert valid == (self.opened.get(placement.key) is placement)
        if valid:
            del self.opened[placement.key]
            self.rows.setdefault(placement.key, []).extend(good)

    @rule(session=SESSIONS, length=LENGTHS)
    def cut(self, session: SessionId, length: Position):
        self.table.cut(session, length)
        for key in [key for key in {*self.rows, *self.opened} if key.session == session]:
            placement = self.opened.get(key)
            if length < len(self.rows.get(key, [])) or (placement and length < placement.start + placement.n):
                self.opened.pop(key, None)
            del self.rows.setdefault(key, [])[length:]

    @rule(key=KEYS, start=LENGTHS)
    def mark_absent(self, key: Key, start: Position):
        self.table.mark_absent(key, start)
        if start <= len(self.rows.get(key, [])):
            del self.rows.setdefault(key, [])[start:]
            self.opened.pop(key, None)

    @rule(session=SESSIONS)
    def drop(self, session: SessionId):
        self.table.drop(session)
        for key in [key for key in {*self.rows, *self.opened} if key.session == session]:
            self.rows.pop(key, None)
            self.opened.pop(key, None)

    @rule(held=st.sets(SESSIONS))
    def evict(self, held: set[SessionId]):
        for session in plan_eviction(self.table, EvictionMarks(), now_ns=self.number, held=held):
            assert session not in held
            self.drop(session)

    @rule(session=SESSIONS)
    def touch(self, session: SessionId):
        self.table.touch(session, self.number)

    @rule(target=leases, key=KEYS, share=st.floats(0, 1))
    def pin(self, key: Key, share: float):
        held = self.rows.get(key, [])
        length = Position(round(len(held) * share))
        try:
            pinned = self.table.pin(key, length)
        except PoolFull:
            return multiple()
        self.pinned[pinned.lease] = (pinned, held[:length])
        return pinned.lease

    @rule(lease=consumes(leases))
    def release(self, lease: LeaseId):
        self.table.release(lease)
        del self.pinned[lease]

    @invariant()
    def everything_is_where_it_should_be(self):
        if not hasattr(self, "table"):
            return
        self.table.check()
        for key, rows in self.rows.items():
            assert self.table.present_prefix(key) == len(rows)
            spans = self.table.locate(key, Position(0), len(rows))
            read = [
                self.get(s.block, slot, len(rows[0]))
                for s in spans
                for slot in range(s.slot, s.slot + s.rows)
            ]
            assert read == rows
        for pinned, rows in self.pinned.values():
            read = [
                self.get(b.index, slot, pinned.row_bytes) for b in pinned.blocks for slot in range(b.rows)
            ]
            assert read == rows
            assert pinned.row_checksums.tolist() == [checksum(row) for row in rows]
        counts = self.table.ledger.counts
        assert counts.pinned * 2 <= counts.total


TestBlocksModel = BlocksModel.TestCase
TestBlocksModel.settings = settings(max_examples=120, stateful_step_count=60, deadline=None)
