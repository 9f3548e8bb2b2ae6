"""From an engine's ring to the core: check whose rows they are, batch by mode, cut to records, encode.

One RowIntake an engine. A step that cannot be published now (the publisher is full) stays in the ring; the ring then
fills, the adapter keeps its cursor and catches up later. What waits for rows to be out of the ring waits for a number
of bytes, not for an empty ring: under load, or behind a bandwidth cap, a ring is never empty.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from daemon.outgoing import OutgoingRows, publish_rows
from daemon.turns import Batch
from kvlog.buffers.doorbell import create_doorbell
from kvlog.buffers.ring import RingReader
from kvlog.core.inputs import CloseTurn
from kvlog.errors import DecodeError, KvlogError
from kvlog.modes import SyncKind

if TYPE_CHECKING:
    from collections.abc import Callable

    from daemon.codec import CodecChooser
    from daemon.node import NodeShell
    from daemon.pace import Pacer
    from daemon.primary import Publisher
    from daemon.telemetry import Telemetry
    from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
    from kvlog.buffers.memory import SealedMemory
    from kvlog.buffers.ring import RingEntry, RingPart
    from kvlog.ids import Position, Shard, Writer
    from kvlog.limits import Limits
    from kvlog.link.server import Peer

__all__ = ["IntakeParts", "RowIntake"]

_IDLE_SECONDS = 0.5
"""A doorbell that was missed costs at most so long."""
_TAKE_SECONDS = 0.05
"""So long rows are taken before those that are due, and turns that are closed, get their turn."""

_EMPTY = memoryview(b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeParts:
    """What every engine's intake and the control share."""

    shell: NodeShell
    publisher: Publisher
    turns: TurnRegistry
    telemetry: Telemetry
    limits: Limits
    writer: Writer
    codec: CodecChooser
    pacer: Pacer


class RowIntake:
    """Reads one engine's ring until cancelled."""

    def __init__(self, parts: IntakeParts, ring: SealedMemory) -> None:
        """Take over the ring's memory, fresh from `create_ring`."""
        self._parts = parts
        self._memory = ring
        self._reader = RingReader(self._memory)
        self._doorbell = create_doorbell()
        self._rung = asyncio.Event()
        self._drained = asyncio.Event()
        self._drained.set()
        self._drain_to = 0
        self._holds_back = True

    @property
    def fds(self) -> tuple[int, int]:
        """Ring and doorbell, for the engine; they stay ours."""
        return self._memory.fd, self._doorbell.fileno()

    @property
    def ring_bytes(self) -> int:
        """Size of the ring's memory."""
        return self._memory.size_bytes

    def wake(self) -> None:
        """Look at the ring now, and say `drained` once what is in it now was taken."""
        self._drain_to = self._reader.counts.bytes + self._reader.bytes_used
        self._drained.clear()
        self._rung.set()

    def close_turn(self, rank: Rank) -> None:
        """End a turn of this engine, as far as this rank goes, once the rows that are in the ring now were taken."""
        self.wake()
        rank.closing_at = self._drain_to

    def stop_holding_back(self) -> None:
        """Flush what `every` holds back, now and from now on: the daemon is about to stop."""
        self._holds_back = False
        self.wake()

    async def drained(self) -> None:
        """Wait until what was in the ring at the last `wake` was taken and given to the log."""
        await self._drained.wait()

    async def run(self, peer: Peer, on_corrupt: Callable[[KvlogError], None]) -> None:
        """Take rows as they come.

        Args:
            peer: the engine.
            on_corrupt: called once if the ring holds what cannot be logged; the link must then be closed.
        """
        loop = asyncio.get_running_loop()
        loop.add_reader(self._doorbell.fileno(), self._heard)
        try:
            while True:
                await self._wait(peer)
                self._rung.clear()
                await self._take_some(peer)
                await self._flush_due(peer, time.monotonic())
                self._finish_closing(peer)
                if self._reader.counts.bytes >= self._drain_to:
                    self._drained.set()
        except KvlogError as error:
            on_corrupt(error)
        finally:
            self._drained.set()
            loop.remove_reader(self._doorbell.fileno())

    def close(self) -> None:
        """Give ring and doorbell back; after `run` has ended."""
        self._reader.close()
        self._memory.close()
        self._doorbell.close()

    def _heard(self) -> None:
        """Cleared here: the loop calls this as long as it is rung, and would look at the ring once more for nothing."""
        self._doorbell.clear()
        self._rung.set()

    async def _wait(self, peer: Peer) -> None:
        if self._reader.bytes_used:
            return
        seconds = _IDLE_SECONDS
        for entry, rank in self._parts.turns.of_peer(peer):
            if rank.batch is not None:
                due = rank.batch.since + entry.mode.milliseconds / 1000 - time.monotonic()
                seconds = max(0.0, min(seconds, due))
        try:
            async with asyncio.timeout(seconds):
                await self._rung.wait()
        except TimeoutError:
            pass

    async def _take_some(self, peer: Peer) -> None:
        """Until the ring is empty, or for a while."""
        until = time.monotonic() + _TAKE_SECONDS
        while (entry := self._reader.peek()) is not None:
            await self._parts.publisher.room()
            await self._take(entry, peer)
            self._reader.release()
            await asyncio.sleep(0)
            if time.monotonic() > until:
                return

    async def _take(self, entry: RingEntry, peer: Peer) -> None:
        metrics = self._parts.telemetry.metrics
        for part in entry.parts():
            found = self._parts.turns.of_row(part.row, peer)
            if found is None:
                metrics.rows_dropped.inc(part.row.n)
                continue
            turn, rank = found
            metrics.rows_taken.inc(part.row.n)
            if entry.row_bytes not in (0, turn.layout.row_bytes):
                problem = (
                    f"rows of {entry.row_bytes} bytes, and the engine's layout has {turn.layout.row_bytes}"
                )
                raise DecodeError(problem=problem)
            if turn.mode.kind is SyncKind.EVERY:
                await self._batch(turn, rank, part, entry.row_bytes)
            else:
                await self._publish(turn, part.row.shard, part.row.start, part.tokens, part.rows)

    async def _batch(self, turn: OpenTurnEntry, rank: Rank, part: RingPart, row_bytes: int) -> None:
        """Hold rows back until there are enough of them, or until they are due."""
        batch = rank.batch
        is_other = batch is not None and (
            batch.start + len(batch.tokens) != part.row.start or bool(batch.rows) != bool(part.rows)
        )
        if is_other:  # rows and token ids alone never share a delta: whose rows they are would be a guess
            await self._flush(turn, rank)
            batch = None
        if batch is None:
            batch = rank.batch = Batch(part.row.start, time.monotonic())
        batch.tokens.extend(part.tokens)
        batch.rows += part.rows
        held_max = max(1, (self._parts.limits.record_bytes // max(1, row_bytes)))
        if len(batch.tokens) >= min(turn.mode.tokens, held_max):
            await self._flush(turn, rank)

    async def _flush_due(self, peer: Peer, now: float) -> None:
        """Only what came out of this ring: two tasks that flush one shard could change the order of its rows."""
        for turn, rank in self._parts.turns.of_peer(peer):
            if rank.batch is not None:
                over = rank.closing_at is not None or not self._holds_back
                if over or rank.batch.since + turn.mode.milliseconds / 1000 <= now:
                    await self._flush(turn, rank)

    async def _flush(self, turn: OpenTurnEntry, rank: Rank) -> None:
        batch, rank.batch = rank.batch, None
        if batch is not None:
            await self._publish(turn, rank.shard, batch.start, tuple(batch.tokens), memoryview(batch.rows))

    def _finish_closing(self, peer: Peer) -> None:
        """Turns whose engine has closed them end once their rows are out of the ring, of the last rank's ring."""
        for turn, rank in self._parts.turns.of_peer(peer):
            if rank.closing_at is not None and self._reader.counts.bytes >= rank.closing_at:
                rank.done = rank.done or rank.batch is None
            if turn.is_done:
                self._parts.turns.pop(turn.turn)
                self._parts.shell.step(CloseTurn(turn.turn))

    async def _publish(
        self,
        turn: OpenTurnEntry,
        shard: Shard,
        start: Position,
        tokens: tuple[int, ...],
        rows: memoryview,
    ) -> None:
        await publish_rows(
            self._parts,
            OutgoingRows(
                turn=turn.turn,
                epoch=turn.epoch,
                shard=shard,
                start=start,
                tokens=tokens,
                rows=_EMPTY if turn.mode.kind is SyncKind.IDS else rows,
                layout=turn.layout,
            ),
        )
