"""What engines ask of the daemon: the LinkHandler. Welcomes them, closes their turns, passes on what becomes of those.

Hello ─▶ ring and intake        OpenTurn ─▶ daemon.opening        Release ─▶ unpin
CloseTurn of all ranks ─▶ rings drained ─▶ core      link closed ─▶ ring drained, turns closed for all ranks, unpinned
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from daemon.intake import RowIntake
from daemon.leases import AttachLeases
from daemon.opening import TurnOpener, turn_opened
from daemon.telemetry import Event
from kvlog.buffers.ring import create_ring
from kvlog.core import effects as fx
from kvlog.core import inputs
from kvlog.core.takeover import Claimant
from kvlog.errors import ConfigError, KvlogError, LocalProtocolError, RowTooLarge
from kvlog.link import messages as link
from kvlog.link.server import Accepted
from kvlog.records import EndReason
from kvlog.wire.cut import check_row
from kvlog.wire.message import check_identity

if TYPE_CHECKING:
    from daemon.intake import IntakeParts
    from daemon.neighbours import Neighbours
    from daemon.turns import OpenTurnEntry
    from kvlog.buffers.pool import BlockPool
    from kvlog.ids import NodeId
    from kvlog.link.server import Peer
    from kvlog.modes import SyncMode

__all__ = ["ControlOptions", "EngineControl"]

_CLOSED_DRAIN_SECONDS = 60.0
"""How long a dead engine's ring may take to be emptied before its turns are closed regardless."""
_RANKS_CLOSE_SECONDS = 60.0
"""After a rank that writes has closed a turn: others hold a finished request's blocks for seconds, and close it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """What engines are told and allowed.

    Args:
        node: our name.
        incarnation: 16 random bytes of this process.
        ring_bytes: of each engine's ring.
        claim_wait_ms_max: the longest that a request may wait for its turn.
        mode: where a turn names none.
    """

    node: NodeId
    incarnation: bytes
    ring_bytes: int
    claim_wait_ms_max: int
    mode: SyncMode


@dataclass(slots=True, eq=False)
class _Engine:
    """One connected engine."""

    intake: RowIntake
    task: asyncio.Task[None]


class EngineControl:
    """Implements kvlog.link.server.LinkHandler; lives on the daemon's event loop."""

    def __init__(
        self,
        parts: IntakeParts,
        pool: BlockPool,
        neighbours: Neighbours,
        options: ControlOptions,
    ) -> None:
        self._parts = parts
        self._pool = pool
        self._options = options
        self._leases = AttachLeases(pool, parts.limits)
        self._opener = TurnOpener(parts, self._leases, neighbours, options)
        self._engines: dict[Peer, _Engine] = {}
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._pool_fd = pool.memory.reader_fd()
        shell = parts.shell
        shell.handle(fx.TurnAcknowledged, self._acknowledged)
        shell.handle(fx.TurnFenced, self._fenced)
        shell.handle(fx.TurnEnded, self._ended)

    @property
    def engines(self) -> int:
        """Engines connected now."""
        return len(self._engines)

    async def run(self) -> None:
        """Hold the engines' tasks until cancelled."""
        try:
            async with asyncio.TaskGroup() as tasks:
                self._tasks = tasks
                try:
                    await asyncio.Event().wait()
                finally:
                    self._tasks = None
        finally:
            os.close(self._pool_fd)

    def _running(self) -> asyncio.TaskGroup | None:
        return self._tasks

    def stop(self) -> None:
        """Take no more engines."""
        self._stopping = True

    async def drain(self, seconds_max: float) -> None:
        """Publish what is in the rings now, for at most so long."""
        for engine in self._engines.values():
            engine.intake.stop_holding_back()
        try:
            async with asyncio.timeout(seconds_max):
                for engine in list(self._engines.values()):
                    await engine.intake.drained()
        except TimeoutError:
            pass

    # LinkHandler

    async def hello(self, peer: Peer, message: link.Hello) -> Accepted | link.Rejected:
        """Give the engine a ring of its own."""
        assert self._tasks is not None, "run first"
        refusal = self._refusal(message)
        if refusal is not None:
            self._parts.telemetry.say(
                Event.ENGINE_REJECTED, engine=message.engine, reason=refusal.reason.value, hint=refusal.hint
            )
            return refusal
        try:  # in a thread: the kernel takes its time to find so many pages
            ring = await asyncio.to_thread(create_ring, self._options.ring_bytes)
        except ConfigError as error:
            return link.Rejected(link.RejectReason.OVERLOADED, str(error))
        tasks = self._running()
        if tasks is None:
            ring.close()
            return link.Rejected(link.RejectReason.STOPPING, "The daemon stops; connect again later.")
        intake = RowIntake(self._parts, ring)
        task = tasks.create_task(intake.run(peer, lambda error: self._corrupt(peer, error)))
        self._engines[peer] = _Engine(intake, task)
        self._parts.telemetry.metrics.engines.set(len(self._engines))
        self._parts.telemetry.say(Event.ENGINE_CONNECTED, engine=message.engine, pid=peer.credentials.pid)
        ring_fd, doorbell_fd = intake.fds
        geometry = self._pool.geometry
        welcome = link.Welcome(
            protocol=link.PROTOCOL,
            incarnation=self._options.incarnation,
            node=self._options.node,
            ring_bytes=intake.ring_bytes,
            pool_bytes=geometry.size_bytes,
            block_bytes=geometry.block_bytes,
            blocks=geometry.blocks,
            device=geometry.device,
        )
        return Accepted(welcome, (ring_fd, self._pool_fd, doorbell_fd))

    async def open_turn(
        self, peer: Peer, message: link.OpenTurn
    ) -> link.TurnOpened | link.TurnUnlogged | None:
        """Answer within the request's time, whatever the log does."""
        if self._stopping:
            return link.TurnUnlogged(message.request, link.UnloggedReason.STOPPING, "the daemon stops")
        entry = self._parts.turns.of_session(message.session)
        if entry is not None and message.group and entry.group == message.group:
            if entry.take_in_again(peer):
                # Nothing to attach: it has been computed meanwhile.
                return turn_opened(message.request, entry, entry.layout.row_bytes, None)
            self._lose(entry)  # whoever asks for a turn that is open has lost it
        return await self._opener.open_turn(peer, message)

    def close_turn(self, peer: Peer, message: link.CloseTurn) -> None:
        """Close the turn once its rows are out of the ring, and those of its other ranks out of theirs."""
        entry, engine = self._parts.turns.get(message.turn), self._engines.get(peer)
        rank = entry.rank_of(peer) if entry is not None else None
        if entry is None or rank is None or engine is None:
            return
        if len(entry.ranks) > 1 and not rank.only_reads and not entry.is_ending:
            asyncio.get_running_loop().call_later(_RANKS_CLOSE_SECONDS, self._lose, entry)
        engine.intake.close_turn(rank)

    def release(self, peer: Peer, message: link.Release) -> None:
        """The attach is done."""
        self._leases.release(peer, message.turn)

    def forget(self, peer: Peer, message: link.Forget) -> None:
        """End the session, claiming it first if it is not ours."""
        claimant = Claimant(self._options.node, self._parts.writer, peer.hello.identity, link.DIGEST_NONE)
        self._parts.shell.step(inputs.EndSession(message.session, EndReason.FORGET, claimant))

    def closed(self, peer: Peer, cause: Exception | None) -> None:
        """The engine is gone: what it left in its ring is still logged, then its turns are closed."""
        engine = self._engines.get(peer)
        if engine is None:
            return
        self._leases.release_all(peer)
        self._parts.telemetry.metrics.engines.set(len(self._engines) - 1)
        self._parts.telemetry.say(
            Event.ENGINE_GONE, engine=peer.hello.engine, pid=peer.credentials.pid, cause=str(cause or "")
        )
        for entry, rank in self._parts.turns.of_peer(peer):
            if not rank.only_reads:  # what such a one has, another one logs: that goes on
                self._lose(entry)  # now: the next request of the session waits for it, or is refused as busy
        del self._engines[peer]
        if self._tasks is not None:
            self._tasks.create_task(self._bury(peer, engine))

    def _lose(self, entry: OpenTurnEntry) -> None:
        """End a turn for all of its ranks, since one has left it: what is in their rings is still logged."""
        if self._parts.turns.get(entry.turn) is not entry:
            return
        left = [rank for rank in entry.ranks if rank.closing_at is None and rank.peer in self._engines]
        for rank in left:
            self._engines[rank.peer].intake.close_turn(rank)
            rank.peer.send(link.TurnEnded(entry.turn, link.EndedReason.RANK_LOST))
        if left and len(entry.ranks) > 1:
            reason = link.EndedReason.RANK_LOST.value
            self._parts.telemetry.metrics.turns_ended.labels(reason).inc()
            self._parts.telemetry.say(Event.TURN_ENDED, session=entry.session, reason=reason)

    async def _bury(self, peer: Peer, engine: _Engine) -> None:
        turns = self._parts.turns
        if not engine.task.done():
            engine.intake.stop_holding_back()
            try:
                async with asyncio.timeout(_CLOSED_DRAIN_SECONDS):
                    await engine.intake.drained()
            except TimeoutError:
                pass
            engine.task.cancel()
            await asyncio.wait([engine.task])
        for entry, rank in turns.of_peer(peer):
            rank.done = True
            if entry.is_done:
                turns.pop(entry.turn)
                self._parts.shell.step(inputs.CloseTurn(entry.turn))
        engine.intake.close()

    def _refusal(self, message: link.Hello) -> link.Rejected | None:
        if self._stopping:
            return link.Rejected(link.RejectReason.STOPPING, "The daemon stops; connect again later.")
        ranks, ranks_max = message.rank.ranks, self._parts.limits.shards
        if ranks > ranks_max:
            hint = f"An engine of {ranks} ranks; at most {ranks_max} can share a session."
            return link.Rejected(link.RejectReason.IDENTITY, hint)
        row_bytes = message.identity.layout.row_bytes
        try:
            check_row(row_bytes, self._parts.limits)
        except RowTooLarge as error:
            return link.Rejected(link.RejectReason.ROW_TOO_LARGE, str(error))
        block_bytes = self._pool.geometry.block_bytes
        if row_bytes > block_bytes:
            return link.Rejected(
                link.RejectReason.ROW_TOO_LARGE,
                f"A row has {row_bytes} bytes and pool.block_bytes is {block_bytes}: raise it above the row.",
            )
        try:
            check_identity(message.identity, self._parts.limits)
        except LocalProtocolError as error:
            return link.Rejected(link.RejectReason.IDENTITY, f"No claim can carry it: {error}")
        return None

    def _corrupt(self, peer: Peer, error: KvlogError) -> None:
        self._parts.telemetry.say(Event.RING_CORRUPTED, engine=peer.hello.engine, problem=str(error))
        for entry, _ in self._parts.turns.of_peer(peer):
            peer.send(link.TurnEnded(entry.turn, link.EndedReason.RING_CORRUPT))
        peer.close("its ring holds what no right writer leaves there")

    # Effects

    def _acknowledged(self, effect: fx.TurnAcknowledged) -> None:
        entry = self._parts.turns.get(effect.turn)
        if entry is not None:
            entry.tell(link.Acked(effect.turn, effect.length))

    def _fenced(self, effect: fx.TurnFenced) -> None:
        self._parts.telemetry.metrics.fenced.inc()
        self._parts.telemetry.say(
            Event.NODE_FENCED, session=effect.session, epoch=effect.epoch, newer_epoch=effect.newer_epoch
        )
        entry = self._parts.turns.pop(effect.turn)
        if entry is not None:
            entry.tell(link.TurnFenced(effect.session, effect.turn, effect.epoch, effect.newer_epoch))

    def _ended(self, effect: fx.TurnEnded) -> None:
        self._parts.telemetry.metrics.turns_ended.labels(effect.reason.value).inc()
        self._parts.telemetry.say(Event.TURN_ENDED, session=effect.session, reason=effect.reason.value)
        entry = self._parts.turns.pop(effect.turn)
        if entry is not None:
            entry.tell(link.TurnEnded(effect.turn, _ended_reason(effect.reason)))


def _ended_reason(reason: fx.TurnEndReason) -> link.EndedReason:
    match reason:
        case fx.TurnEndReason.OUTCOME_UNKNOWN | fx.TurnEndReason.DROPPED | fx.TurnEndReason.STOPPING:
            return link.EndedReason.OUTCOME_UNKNOWN
        case fx.TurnEndReason.GAVE_WAY:
            raise AssertionError("a rewrite is no engine's turn")
        case fx.TurnEndReason.REFUSED:
            return link.EndedReason.BROKEN
        case fx.TurnEndReason.ROWS_OUT_OF_ORDER | fx.TurnEndReason.TOO_LONG:
            return link.EndedReason.ROWS_REFUSED
        case fx.TurnEndReason.SESSION_ENDED:
            return link.EndedReason.HANDED_OVER
        case _:
            assert_never(reason)
