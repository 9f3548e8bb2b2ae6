"""What engines ask of the daemon: the LinkHandler. Opens and closes turns, pins blocks for attaches, passes answers on.

Hello ─▶ ring and intake        OpenTurn ─▶ core ─▶ TurnOpened: pin, answer │ TurnUnlogged: answer
CloseTurn ─▶ ring drained ─▶ core      Release ─▶ unpin      link closed ─▶ ring drained, turns closed, blocks unpinned
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, assert_never

from daemon.intake import RowIntake
from daemon.telemetry import Event
from daemon.turns import OpenTurnEntry
from kvlog.buffers.blocks import Key
from kvlog.buffers.ring import create_ring, session_hash
from kvlog.core import effects as fx
from kvlog.core import inputs
from kvlog.core.takeover import Claimant
from kvlog.errors import ConfigError, KvlogError, LocalProtocolError, RowTooLarge
from kvlog.ids import Position, SessionId, Turn
from kvlog.link import messages as link
from kvlog.link.server import Accepted
from kvlog.records import EndReason
from kvlog.wire.cut import check_row
from kvlog.wire.message import check_identity

if TYPE_CHECKING:
    from daemon.intake import IntakeParts
    from daemon.neighbours import Neighbours
    from kvlog.buffers.blocks import LeaseId, PinnedBlocks
    from kvlog.buffers.pool import BlockPool
    from kvlog.ids import Epoch, NodeId
    from kvlog.link.server import Peer
    from kvlog.modes import SyncMode

__all__ = ["ControlOptions", "EngineControl"]

_WILLING_PAUSE_SECONDS = 0.05
_CLOSED_DRAIN_SECONDS = 60.0
"""How long a dead engine's ring may take to be emptied before its turns are closed regardless."""


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
    leases: dict[Turn, LeaseId] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Asked:
    """An OpenTurn that waits for the core's answer."""

    peer: Peer
    message: link.OpenTurn
    answer: asyncio.Future[link.TurnOpened | link.TurnUnlogged]
    began: float


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
        self._neighbours = neighbours
        self._options = options
        self._engines: dict[Peer, _Engine] = {}
        self._asked: dict[int, _Asked] = {}
        self._numbers = itertools.count(1)
        self._tasks: asyncio.TaskGroup | None = None
        self._stopping = False
        self._pool_fd = pool.memory.reader_fd()
        shell = parts.shell
        shell.handle(fx.TurnOpened, self._opened)
        shell.handle(fx.TurnUnlogged, self._unlogged)
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

    async def open_turn(self, peer: Peer, message: link.OpenTurn) -> link.TurnOpened | link.TurnUnlogged:
        """Answer within the request's time, whatever the log does."""
        wait_ms = min(message.wait_ms, self._options.claim_wait_ms_max)
        deadline = time.monotonic() + wait_ms / 1000
        if self._stopping:
            return link.TurnUnlogged(message.request, link.UnloggedReason.STOPPING, "the daemon stops")
        if not await self._closing_done(message.session, deadline):
            detail = "its last turn is over, and rows of it are still on their way"
            return link.TurnUnlogged(message.request, link.UnloggedReason.CLAIM_TIMEOUT, detail)
        if not message.take_over and not await self._owner_is_willing(message.session, wait_ms / 2000):
            reason, detail = self._say_unlogged(message.session, fx.UnloggedReason.OWNER_BUSY, None)
            return link.TurnUnlogged(message.request, reason, detail)
        number = next(self._numbers)
        answer: asyncio.Future[link.TurnOpened | link.TurnUnlogged] = (
            asyncio.get_running_loop().create_future()
        )
        self._asked[number] = _Asked(peer, message, answer, time.monotonic())
        try:
            self._parts.shell.step(
                inputs.OpenTurn(
                    request=number,
                    session=message.session,
                    tokens=link.unpack_tokens(message.tokens),
                    context=message.context,
                    identity=peer.hello.identity,
                    continues=message.continues,
                    deadline_ns=int(deadline * 1e9),
                )
            )
            return await answer
        finally:
            if self._asked.pop(number, None) is not None and not answer.done():
                self._parts.shell.step(inputs.WithdrawRequest(message.session, number))

    def close_turn(self, peer: Peer, message: link.CloseTurn) -> None:
        """Close the turn once its rows are out of the ring."""
        entry = self._parts.turns.get(message.turn)
        engine = self._engines.get(peer)
        if entry is None or entry.peer is not peer or engine is None:
            return
        engine.intake.close_turn(entry)

    def release(self, peer: Peer, message: link.Release) -> None:
        """The attach is done."""
        engine = self._engines.get(peer)
        lease = engine.leases.pop(message.turn, None) if engine else None
        if lease is not None:
            self._pool.release(lease)

    def forget(self, peer: Peer, message: link.Forget) -> None:
        """End the session, claiming it first if it is not ours."""
        claimant = Claimant(self._options.node, self._parts.writer, peer.hello.identity, link.DIGEST_NONE)
        self._parts.shell.step(inputs.EndSession(message.session, EndReason.FORGET, claimant))

    def closed(self, peer: Peer, cause: Exception | None) -> None:
        """The engine is gone: what it left in its ring is still logged, then its turns are closed."""
        engine = self._engines.pop(peer, None)
        if engine is None:
            return
        for lease in engine.leases.values():
            self._pool.release(lease)
        self._parts.telemetry.metrics.engines.set(len(self._engines))
        self._parts.telemetry.say(
            Event.ENGINE_GONE, engine=peer.hello.engine, pid=peer.credentials.pid, cause=str(cause or "")
        )
        for entry in self._parts.turns.of_peer(peer):
            engine.intake.close_turn(
                entry
            )  # now: the next request of the session waits for it, or is refused as busy
        if self._tasks is not None:
            self._tasks.create_task(self._bury(peer, engine))

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
        for entry in turns.of_peer(peer):
            turns.pop(entry.turn)
            self._parts.shell.step(inputs.CloseTurn(entry.turn))
        engine.intake.close()

    async def _closing_done(self, session: SessionId, deadline: float) -> bool:
        """A turn that is being closed is not in the way of the next one for longer than its rows need.

        Returns: False if they need longer than the request may wait: not busy, and worth asking again.
        """
        entry = self._parts.turns.of_session(session)
        if entry is None or entry.closing_at is None:
            return True
        try:
            async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
                await entry.ended.wait()
        except TimeoutError:
            return False
        return True

    async def _owner_is_willing(self, session: SessionId, seconds_max: float) -> bool:
        """Whether the session may be claimed without ending somebody's turn (DESIGN 5.1), as far as heartbeats say.

        A hint for politeness: a request that takes over on purpose is not asked, and the log decides in any case.
        """
        state = self._parts.shell.core.state(session)
        if state is None or state.claim.node == self._options.node:
            return True
        number = session_hash(session)
        until = time.monotonic() + seconds_max
        while self._neighbours.is_busy(state.claim.node, number, now := time.monotonic()):
            if now >= until:
                return False
            await asyncio.sleep(_WILLING_PAUSE_SECONDS)
        return True

    def _refusal(self, message: link.Hello) -> link.Rejected | None:
        if self._stopping:
            return link.Rejected(link.RejectReason.STOPPING, "The daemon stops; connect again later.")
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
        for entry in self._parts.turns.of_peer(peer):
            peer.send(link.TurnEnded(entry.turn, link.EndedReason.RING_CORRUPT))
        peer.close("its ring holds what no right writer leaves there")

    # Effects

    def _opened(self, effect: fx.TurnOpened) -> None:
        asked = self._asked.get(effect.request)
        if asked is None or asked.answer.done() or asked.peer not in self._engines:
            self._parts.shell.step(inputs.CloseTurn(effect.turn))
            return
        peer, layout = asked.peer, asked.peer.hello.identity.layout
        self._parts.turns.add(
            OpenTurnEntry(
                peer=peer,
                session=effect.session,
                turn=effect.turn,
                epoch=effect.epoch,
                mode=asked.message.mode or self._options.mode,
                layout=layout,
                session_hash=session_hash(effect.session),
            )
        )
        self._say_difference(peer, effect)
        pinned = self._pin(peer, effect)
        seconds = time.monotonic() - asked.began
        metrics = self._parts.telemetry.metrics
        metrics.turns_opened.inc()
        metrics.takeover_seconds.observe(seconds)
        self._parts.telemetry.say(
            Event.TURN_OPENED,
            session=effect.session,
            turn=effect.turn,
            epoch=effect.epoch,
            usable=effect.usable,
            attach=sum(block.rows for block in pinned.blocks) if pinned else 0,
            log_from=effect.log_from,
            milliseconds=round(1000 * seconds, 2),
        )
        asked.answer.set_result(_turn_opened(asked.message.request, effect, layout.row_bytes, pinned))

    def _say_difference(self, peer: Peer, effect: fx.TurnOpened) -> None:
        """An engine of another model, dtype or weights cannot use what the session holds: say which it is."""
        state = self._parts.shell.core.state(effect.session)
        differs = state.differs(peer.hello.identity) if state else None
        if differs is not None:
            name, theirs, ours = differs
            self._parts.telemetry.say(
                Event.IDENTITY_DIFFERED,
                session=effect.session,
                field=name,
                session_has=_said(theirs),
                engine_has=_said(ours),
            )

    def _pin(self, peer: Peer, effect: fx.TurnOpened) -> PinnedBlocks | None:
        """Hold the blocks that the engine may copy: what the fold allows, as far as bytes are here."""
        key = Key(effect.session, peer.hello.shard)
        self._pool.blocks.touch(effect.session, time.monotonic_ns())
        length = min(effect.usable, self._pool.present_prefix(key), link.attach_rows_max(self._parts.limits))
        if length == 0:
            return None
        try:
            pinned = self._pool.pin(key, Position(length))
        except KvlogError:
            return None  # attaches hold as much of the pool as they may: recompute
        self._engines[peer].leases[effect.turn] = pinned.lease
        return pinned

    def _unlogged(self, effect: fx.TurnUnlogged) -> None:
        reason, detail = self._say_unlogged(effect.session, effect.reason, effect.newer_epoch)
        asked = self._asked.get(effect.request)
        if asked is None or asked.answer.done():
            return
        asked.answer.set_result(link.TurnUnlogged(asked.message.request, reason, detail))

    def _say_unlogged(
        self, session: SessionId, reason: fx.UnloggedReason, newer_epoch: Epoch | None
    ) -> tuple[link.UnloggedReason, str]:
        self._parts.telemetry.metrics.turns_unlogged.labels(reason.value).inc()
        self._parts.telemetry.say(
            Event.TURN_UNLOGGED, session=session, reason=reason.value, newer_epoch=newer_epoch
        )
        return _UNLOGGED[reason]

    def _acknowledged(self, effect: fx.TurnAcknowledged) -> None:
        entry = self._parts.turns.get(effect.turn)
        if entry is not None:
            entry.peer.send(link.Acked(effect.turn, effect.length))

    def _fenced(self, effect: fx.TurnFenced) -> None:
        self._parts.telemetry.metrics.fenced.inc()
        self._parts.telemetry.say(
            Event.NODE_FENCED, session=effect.session, epoch=effect.epoch, newer_epoch=effect.newer_epoch
        )
        entry = self._parts.turns.pop(effect.turn)
        if entry is not None:
            entry.peer.send(link.TurnFenced(effect.session, effect.turn, effect.epoch, effect.newer_epoch))

    def _ended(self, effect: fx.TurnEnded) -> None:
        self._parts.telemetry.metrics.turns_ended.labels(effect.reason.value).inc()
        self._parts.telemetry.say(Event.TURN_ENDED, session=effect.session, reason=effect.reason.value)
        entry = self._parts.turns.pop(effect.turn)
        if entry is not None:
            entry.peer.send(link.TurnEnded(effect.turn, _ended_reason(effect.reason)))


def _said(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def _turn_opened(
    request: link.RequestNumber, effect: fx.TurnOpened, row_bytes: int, pinned: PinnedBlocks | None
) -> link.TurnOpened:
    blocks = tuple(link.AttachBlock(block.index, block.rows) for block in pinned.blocks) if pinned else ()
    return link.TurnOpened(
        request=request,
        turn=effect.turn,
        epoch=effect.epoch,
        log_from=effect.log_from,
        attach_length=Position(sum(block.rows for block in blocks)),
        row_bytes=row_bytes,
        blocks=blocks,
        row_checksums=pinned.row_checksums.tobytes() if pinned else b"",
    )


_UNLOGGED: dict[fx.UnloggedReason, tuple[link.UnloggedReason, str]] = {
    fx.UnloggedReason.BUSY: (link.UnloggedReason.BUSY, "another turn of this session is in progress here"),
    fx.UnloggedReason.OWNER_BUSY: (
        link.UnloggedReason.OWNER_BUSY,
        "its owner has a turn in progress",
    ),
    fx.UnloggedReason.CLAIM_TIMEOUT: (
        link.UnloggedReason.CLAIM_TIMEOUT,
        "the claim was not read back in time",
    ),
    fx.UnloggedReason.FENCED: (link.UnloggedReason.FENCED, "another node owns the session"),
    fx.UnloggedReason.LOG_UNAVAILABLE: (link.UnloggedReason.LOG_UNAVAILABLE, "the log does not answer"),
    fx.UnloggedReason.TOO_LONG: (link.UnloggedReason.NOT_SUPPORTED, "more positions than a session may have"),
    fx.UnloggedReason.OVERLOADED: (link.UnloggedReason.CLAIM_TIMEOUT, "too many claims are on their way"),
    fx.UnloggedReason.STOPPING: (link.UnloggedReason.STOPPING, "the daemon stops"),
    fx.UnloggedReason.SESSION_ENDED: (link.UnloggedReason.NOT_SUPPORTED, "the session ended meanwhile"),
}


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
