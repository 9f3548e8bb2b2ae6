"""The turns in progress of this daemon's engines: what their rows need to be logged."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.buffers.ring import session_hash
from kvlog.ids import FIRST_POSITION, Shard

if TYPE_CHECKING:
    from kvlog.buffers.ring import TableRow
    from kvlog.ids import Epoch, Position, SessionId, Turn
    from kvlog.layout import Layout
    from kvlog.link.messages import FromDaemon
    from kvlog.link.server import Peer
    from kvlog.modes import SyncMode

__all__ = ["FIRST_SHARD", "Batch", "OpenTurnEntry", "Rank", "TurnRegistry"]

FIRST_SHARD = Shard(0)
"""The only one of an engine of one process."""

_USED_MAX = 10_000
"""More than a node owns at one time (Limits.primaries)."""


@dataclass(slots=True)
class Batch:
    """Rows of one shard that wait to become one delta; contiguous from `start`."""

    start: Position
    since: float
    tokens: list[int] = field(default_factory=list)
    rows: bytearray = field(default_factory=bytearray)


@dataclass(slots=True, eq=False)
class Rank:
    """One engine process's part of a turn: the rows of one shard, which come out of its ring.

    Args:
        peer: its link.
        shard: rows of another one are dropped.
        only_reads: another rank logs that shard: rows of it are dropped, and the turn goes on without it.
        closing_at: closed by the engine: it lasts until so many bytes of its ring were taken; None: it goes on.
        done: nothing more comes of it.
        batch: rows of it that are held back.
    """

    peer: Peer
    shard: Shard = FIRST_SHARD
    only_reads: bool = False
    closing_at: int | None = None
    done: bool = False
    batch: Batch | None = None


@dataclass(slots=True, eq=False)
class OpenTurnEntry:
    """One turn in progress.

    Args:
        ranks: the engine's processes whose request it is; one of each shard writes.
        session: of the turn.
        turn: its number.
        epoch: rows of another one are dropped.
        mode: how closely it is logged.
        layout: what a row is.
        group: by which its ranks found each other; empty for an engine of one process.
        log_from: the first row that it logs.
        ended: set once it is over.
    """

    ranks: tuple[Rank, ...]
    session: SessionId
    turn: Turn
    epoch: Epoch
    mode: SyncMode
    layout: Layout
    session_hash: int
    group: bytes = b""
    log_from: Position = FIRST_POSITION
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_closing(self) -> bool:
        """Its engine, or one of its ranks, has closed it."""
        return any(rank.closing_at is not None for rank in self.ranks)

    @property
    def is_ending(self) -> bool:
        """A rank that writes has closed it, so that the session will not have more than is written by then."""
        return any(rank.closing_at is not None for rank in self.ranks if not rank.only_reads)

    @property
    def is_done(self) -> bool:
        """Nothing more comes of any rank."""
        return all(rank.done for rank in self.ranks)

    def rank_of(self, peer: Peer) -> Rank | None:
        """The part of one engine process, if it has one."""
        return next((rank for rank in self.ranks if rank.peer is peer), None)

    def take_in_again(self, peer: Peer) -> bool:
        """A rank that only reads has lost the turn, and comes back to it, maybe over another link.

        It wrote nothing, so that nothing of the turn is lost with it. Who comes back to a turn that ends waits for the
        next one with all others.

        Returns: False: it is not such a rank of this turn.
        """
        if self.is_ending:
            return False
        for index, rank in enumerate(self.ranks):
            old, new = rank.peer.hello, peer.hello
            if rank.only_reads and (old.rank, old.identity) == (new.rank, new.identity):
                back = Rank(peer, rank.shard, only_reads=True)
                self.ranks = (*self.ranks[:index], back, *self.ranks[index + 1 :])
                return True
        return False

    def tell(self, message: FromDaemon) -> None:
        """Say it to every rank."""
        for rank in self.ranks:
            rank.peer.send(message)


class TurnRegistry:
    """Turns by number; a turn is in here from TurnOpened until it has ended and its rows are out of the rings."""

    def __init__(self) -> None:
        self._turns: dict[Turn, OpenTurnEntry] = {}
        self._used: OrderedDict[SessionId, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._turns)

    def add(self, entry: OpenTurnEntry) -> None:
        """A turn was opened."""
        self._turns[entry.turn] = entry
        self._use(entry.session)

    def get(self, turn: Turn) -> OpenTurnEntry | None:
        """The turn of this number, if it is in progress."""
        return self._turns.get(turn)

    def pop(self, turn: Turn) -> OpenTurnEntry | None:
        """The turn has ended."""
        entry = self._turns.pop(turn, None)
        if entry is not None:
            entry.ended.set()
            self._use(entry.session)
        return entry

    def used_at(self, session: SessionId) -> float:
        """When a turn of the session last began or ended, in monotonic seconds; minus infinity: long ago, or never."""
        return self._used.get(session, float("-inf"))

    def _use(self, session: SessionId) -> None:
        self._used[session] = time.monotonic()
        self._used.move_to_end(session)
        if len(self._used) > _USED_MAX:
            self._used.popitem(last=False)

    def of_row(self, row: TableRow, peer: Peer) -> tuple[OpenTurnEntry, Rank] | None:
        """The turn of a row in this engine's ring, if it may write it and epoch, session and shard fit.

        RULE ring; INV-JOINT: one rank writes a shard.
        """
        entry = self._turns.get(row.turn)
        rank = entry.rank_of(peer) if entry is not None else None
        if entry is None or rank is None or rank.done or rank.only_reads:
            return None
        said = (row.epoch, row.session_hash, row.shard)
        return (entry, rank) if said == (entry.epoch, entry.session_hash, rank.shard) else None

    def of_peer(self, peer: Peer) -> list[tuple[OpenTurnEntry, Rank]]:
        """Every turn that one engine process has a part in, and that part."""
        found = ((entry, entry.rank_of(peer)) for entry in self._turns.values())
        return [(entry, rank) for entry, rank in found if rank is not None]

    def sessions(self) -> frozenset[SessionId]:
        """Sessions with a turn in progress."""
        return frozenset(entry.session for entry in self._turns.values())

    def busy_hashes(self, at_most: int) -> tuple[int, ...]:
        """xxh3_64 of sessions with a turn in progress."""
        return tuple(entry.session_hash for entry in list(self._turns.values())[:at_most])

    def of_session(self, session: SessionId) -> OpenTurnEntry | None:
        """The turn in progress of a session."""
        wanted = session_hash(session)
        return next(
            (e for e in self._turns.values() if e.session_hash == wanted and e.session == session), None
        )
