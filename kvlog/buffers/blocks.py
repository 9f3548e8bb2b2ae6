"""Which rows of which session lie in which blocks: the pool's bookkeeping, without the bytes.

A session's shard (a Key) has rows of one size, position by position in blocks of its own. Only a prefix without a hole
is of use to an engine, so only that is kept: a key holds rows [0, present) and nothing else. Rows behind a hole (not
logged, or no block was free) are not held, and the next `place` at or below `present` closes the gap.

Placing is two steps, because decoding may happen between them, in another thread: `place` says where rows go and keeps
those blocks from everybody else; `settle` makes them present, or not. Cut, drop or place in between make the placement
void: its blocks stay untouchable until it is settled, and then nothing becomes present.

Rows that an attach has pinned never change (INV-PINNED, kvlog.buffers.ledger): a `place` into a pinned block goes to
another one, into which the rows before are to be copied first (`Piece.copy_from`).

Not thread-safe: one thread, or one event loop, calls it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, NamedTuple, NewType

from kvlog.buffers.geometry import PinnedBlock
from kvlog.buffers.ledger import BlockLedger
from kvlog.errors import LayoutMismatch, RowTooLarge
from kvlog.ids import Position, SessionId, Shard

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvlog.buffers.geometry import PoolGeometry

__all__ = ["BlockTable", "Key", "LeaseId", "Piece", "PinnedBlocks", "Placement", "SessionUse", "Span"]

LeaseId = NewType("LeaseId", int)
"""One attach's hold on its blocks; never used twice."""


class Key(NamedTuple):
    """One shard of one session."""

    session: SessionId
    shard: Shard


class Span(NamedTuple):
    """`rows` rows of `row_bytes` in a block from its slot `slot`."""

    block: int
    slot: int
    rows: int
    row_bytes: int


class Piece(NamedTuple):
    """Where some of a placement's rows go; first copy slots [0, slot) from `copy_from`, if it names a block."""

    block: int
    slot: int
    rows: int
    copy_from: int | None


class Placement(NamedTuple):
    """Room for rows [start, start + n) of a key, kept until it is settled.

    `is_held`: its blocks are kept from everybody else meanwhile.
    """

    key: Key
    start: Position
    n: int
    row_bytes: int
    pieces: Sequence[Piece]
    is_held: bool


@dataclass(frozen=True, slots=True)
class PinnedBlocks:
    """An attach's blocks: rows from position 0, in order, unchanged until the lease is released."""

    lease: LeaseId
    row_bytes: int
    blocks: tuple[PinnedBlock, ...]
    row_checksums: array[int]


@dataclass(frozen=True, slots=True)
class SessionUse:
    """What a session takes, for who decides what to evict."""

    session: SessionId
    blocks: int
    pinned: bool
    touched_ns: int


@dataclass(slots=True)
class _Lane:
    """One key's rows: [0, present), where present is the number of checksums."""

    row_bytes: int
    rows_a_block: int
    blocks: list[int] = field(default_factory=list)
    checksums: array[int] = field(default_factory=lambda: array("Q"))
    open: Placement | None = None

    def blocks_for(self, rows: int) -> int:
        return -(-rows // self.rows_a_block)


@dataclass(slots=True)
class _Session:
    touched_ns: int
    lanes: dict[Shard, _Lane] = field(default_factory=dict)


class BlockTable:
    """The blocks of one pool, by session and shard.

    Args:
        geometry: of the pool's own blocks.
        pinned_share: the most of them that attaches may pin, in percent.
    """

    def __init__(self, geometry: PoolGeometry, *, pinned_share: int) -> None:
        self._geometry = geometry
        self._sessions: OrderedDict[SessionId, _Session] = OrderedDict()  # least recently touched first
        self._leases: dict[LeaseId, tuple[int, ...]] = {}
        self._lease_numbers = count(1)
        self._now_ns = 0
        self.ledger = BlockLedger(blocks=geometry.blocks, pinned_share=pinned_share)

    def place(self, key: Key, start: Position, n: int, row_bytes: int, *, held: bool = True) -> Placement:
        """Make room for rows [start, start + n); rows from start on are gone from now on, whatever comes of it.

        Args:
            start: 0 ≤ start ≤ present_prefix(key). At 0 the row size may differ from before.
            n: ≥ 1.
            held: False: it is settled before anything else is called here, so nothing has to be kept from anybody.

        Raises:
            PoolFull: not enough free blocks; rows below start are still there. Evict, or go on without these rows.
            RowTooLarge: one row is larger than a block.
            LayoutMismatch: another row size than that of the rows before start.
        """
        lane = self._lane_for(key, start, row_bytes)
        pieces = self._room(lane, start, n)
        lane.open = placement = Placement(key, start, n, row_bytes, pieces, held)
        if held:
            self.ledger.pin_for_write({piece.block for piece in pieces})
        return placement

    def settle(self, placement: Placement, row_checksums: Sequence[int]) -> bool:
        """End a placement: its first len(row_checksums) rows have been written; fewer, or none, if writing failed.

        Returns:
            Whether they are present now; not if the placement has become void meanwhile.
        """
        assert len(row_checksums) <= placement.n, "more rows than were placed"
        lane = self._lane(placement.key)
        valid = lane is not None and lane.open is placement
        if placement.is_held:
            self.ledger.unpin_written({piece.block for piece in placement.pieces})
        if valid and lane is not None:
            lane.checksums.extend(row_checksums)
            lane.open = None
            if len(row_checksums) < placement.n:
                self._cut_lane(lane, len(lane.checksums))
        return valid

    def present_prefix(self, key: Key) -> Position:
        """The number of rows from position 0 that are held."""
        lane = self._lane(key)
        return Position(0 if lane is None else len(lane.checksums))

    def mark_absent(self, key: Key, start: Position) -> None:
        """Rows from start on are known but not held."""
        lane = self._lane(key)
        if lane is not None and start <= len(lane.checksums):
            self._cut_lane(lane, start)

    def cut(self, session: SessionId, length: Position) -> None:
        """Cut every shard to at most `length` rows; an open placement that goes beyond it becomes void."""
        found = self._sessions.get(session)
        for lane in found.lanes.values() if found is not None else ():
            if length < len(lane.checksums) or (
                lane.open is not None and length < lane.open.start + lane.open.n
            ):
                self._cut_lane(lane, min(length, len(lane.checksums)))

    def drop(self, session: SessionId) -> None:
        """Forget a session's rows; from then on it is as if it had never had any."""
        found = self._sessions.pop(session, None)
        for lane in found.lanes.values() if found is not None else ():
            self._cut_lane(lane, 0)

    def pin(self, key: Key, length: Position) -> PinnedBlocks:
        """Keep rows [0, length) as they are until `release`.

        Args:
            length: ≤ present_prefix(key).

        Raises:
            PoolFull: attaches hold their share of the pool already; try again when one was released.
        """
        lane = self._lane(key)
        assert length <= self.present_prefix(key), "only what is present can be pinned"
        if lane is None:
            return self._leased((), PinnedBlocks(LeaseId(0), 1, (), array("Q")))
        indexes = tuple(lane.blocks[: lane.blocks_for(length)])
        self.ledger.pin_for_attach(indexes)
        most = lane.rows_a_block
        blocks = tuple(PinnedBlock(block, min(most, length - i * most)) for i, block in enumerate(indexes))
        return self._leased(
            indexes, PinnedBlocks(LeaseId(0), lane.row_bytes, blocks, lane.checksums[:length])
        )

    def release(self, lease: LeaseId) -> None:
        """End an attach; blocks that nobody owns any more become free."""
        self.ledger.unpin_attached(self._leases.pop(lease))

    def locate(self, key: Key, start: Position, n: int) -> Iterator[Span]:
        """Where present rows [start, start + n) lie, in order."""
        lane = self._lane(key)
        assert start >= 0, "positions begin at 0"
        assert start + n <= self.present_prefix(key), "only what is present can be read"
        if lane is not None:
            for piece in _pieces(lane, start, n, None):
                yield Span(piece.block, piece.slot, piece.rows, lane.row_bytes)

    def touch(self, session: SessionId, now_ns: int) -> None:
        """The session is in use now; the least recently touched is evicted first."""
        self._now_ns = max(self._now_ns, now_ns)
        found = self._sessions.get(session)
        if found is not None:
            found.touched_ns = self._now_ns
            self._sessions.move_to_end(session)

    def uses(self) -> Iterator[SessionUse]:
        """Every session that was placed and not dropped, least recently touched first."""
        for session, found in self._sessions.items():
            blocks = [block for lane in found.lanes.values() for block in lane.blocks]
            pinned = any(self.ledger.is_pinned(block) for block in blocks)
            yield SessionUse(session, len(blocks), pinned, found.touched_ns)

    def check(self) -> None:
        """Assert what must hold between any two calls.

        Cost: all blocks; for tests.
        """
        lanes = [lane for found in self._sessions.values() for lane in found.lanes.values()]
        self.ledger.check(block for lane in lanes for block in lane.blocks)
        for lane in lanes:
            rows = len(lane.checksums) if lane.open is None else lane.open.start + lane.open.n
            assert len(lane.blocks) == lane.blocks_for(rows), (
                "a key has the blocks of its rows, and no others"
            )
            assert lane.open is None or lane.open.start == len(lane.checksums), (
                "an open placement continues the rows"
            )

    def _lane(self, key: Key) -> _Lane | None:
        found = self._sessions.get(key.session)
        return None if found is None else found.lanes.get(key.shard)

    def _lane_for(self, key: Key, start: Position, row_bytes: int) -> _Lane:
        """The key's lane for rows of this size; a new one where there is none, or where all its rows are replaced."""
        lane = self._lane(key)
        if lane is not None and lane.row_bytes == row_bytes:
            return lane
        if lane is not None and start > 0:
            raise LayoutMismatch(field="row_bytes", expected=lane.row_bytes, actual=row_bytes)
        rows_a_block = self._geometry.rows_a_block(row_bytes)
        if rows_a_block < 1:
            raise RowTooLarge(row_bytes=row_bytes, record_bytes_max=self._geometry.block_bytes)
        if lane is not None:
            self._cut_lane(lane, 0)
        found = self._sessions.setdefault(key.session, _Session(self._now_ns))
        made = found.lanes[key.shard] = _Lane(row_bytes, rows_a_block)
        return made

    def _room(self, lane: _Lane, start: Position, n: int) -> Sequence[Piece]:
        """The lane's blocks for rows [start, start + n); those from start on are gone."""
        assert 0 <= start <= len(lane.checksums), "a placement behind a hole"
        assert n >= 1, "a placement of no rows"
        self._cut_lane(lane, start)
        index, slot = divmod(start, lane.rows_a_block)
        copy_from = lane.blocks[-1] if slot and self.ledger.is_pinned(lane.blocks[-1]) else None
        wanted = lane.blocks_for(start + n) - len(lane.blocks) + (copy_from is not None)
        if wanted:
            new = self.ledger.take(wanted)
            if copy_from is not None:
                lane.blocks.pop()
                self.ledger.give_back([copy_from])
            lane.blocks += new
        if slot + n <= lane.rows_a_block:  # as nearly always: a row or a few
            return (Piece(lane.blocks[index], slot, n, copy_from),)
        return tuple(_pieces(lane, start, n, copy_from))

    def _cut_lane(self, lane: _Lane, rows: int) -> None:
        """Keep the first `rows` present rows and the blocks that hold them; an open placement becomes void."""
        lane.open = None
        if rows < len(lane.checksums):
            del lane.checksums[rows:]
        keep = lane.blocks_for(rows)
        if keep < len(lane.blocks):
            surplus = lane.blocks[keep:]
            del lane.blocks[keep:]
            self.ledger.give_back(surplus)

    def _leased(self, indexes: tuple[int, ...], pinned: PinnedBlocks) -> PinnedBlocks:
        lease = LeaseId(next(self._lease_numbers))
        self._leases[lease] = indexes
        return PinnedBlocks(lease, pinned.row_bytes, pinned.blocks, pinned.row_checksums)


def _pieces(lane: _Lane, start: int, n: int, copy_from: int | None) -> Iterator[Piece]:
    """The blocks and slots of rows [start, start + n), in order; the first may begin in the middle of a block."""
    at, end = start, start + n
    while at < end:
        index, slot = divmod(at, lane.rows_a_block)
        rows = min(lane.rows_a_block - slot, end - at)
        yield Piece(lane.blocks[index], slot, rows, copy_from if at == start else None)
        at += rows
