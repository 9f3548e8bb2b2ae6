"""From an OpenTurn to its answer: ranks are joined, a busy owner is left alone, the core decides, blocks are pinned.

OpenTurn ─▶ joined with its other ranks ─▶ core ─▶ TurnOpened: pin, answer each │ TurnUnlogged: answer all
"""

from __future__ import annotations

import asyncio
import itertools
import time
from typing import TYPE_CHECKING

from daemon.joining import JointAsk, RankAsk, RankJoiner
from daemon.telemetry import Event
from daemon.turns import OpenTurnEntry, Rank
from kvlog.buffers.ring import session_hash
from kvlog.core import effects as fx
from kvlog.core import inputs
from kvlog.ids import Position
from kvlog.link import messages as link

if TYPE_CHECKING:
    from daemon.control import ControlOptions
    from daemon.intake import IntakeParts
    from daemon.leases import AttachLeases
    from daemon.neighbours import Neighbours
    from kvlog.buffers.blocks import PinnedBlocks
    from kvlog.ids import Epoch, SessionId
    from kvlog.link.server import Peer

__all__ = ["TurnOpener"]

_PAUSE_SECONDS = 0.05
"""Between two looks at what a request waits for: an owner that is busy, or a claim's place."""

_OF_RANKS = frozenset({link.UnloggedReason.RANK_MISSING, link.UnloggedReason.RANKS_DIFFER})
"""What the core does not know: refused before it was asked."""


class TurnOpener:
    """Answers OpenTurns within their time, whatever the log does.

    Args:
        parts: the core's shell, and the turns in progress.
        leases: of the pool.
        neighbours: what other nodes say of themselves.
        options: what engines are told and allowed.
    """

    def __init__(
        self,
        parts: IntakeParts,
        leases: AttachLeases,
        neighbours: Neighbours,
        options: ControlOptions,
    ) -> None:
        self._parts = parts
        self._leases = leases
        self._neighbours = neighbours
        self._options = options
        self._joiner = RankJoiner()
        self._asked: dict[int, JointAsk] = {}
        self._numbers = itertools.count(1)
        parts.shell.handle(fx.TurnOpened, self._opened)
        parts.shell.handle(fx.TurnUnlogged, self._unlogged)

    async def open_turn(self, peer: Peer, message: link.OpenTurn) -> link.TurnUnlogged | None:
        """Ask for one rank. Returns: a refusal to be sent; None: it was sent its TurnOpened."""
        now = time.monotonic()
        deadline = now + min(message.wait_ms, self._options.claim_wait_ms_max) / 1000
        ask = RankAsk(peer, message, now, deadline, asyncio.get_running_loop().create_future())
        joint = self._joiner.join(ask)
        if joint.over:
            self._withdraw(joint)
        try:
            if joint.missing:
                await self._gathered(joint)
            elif not joint.over:
                await self._carried(joint)
            refusal = await ask.answer
        finally:  # the link's end, most likely: a rank that leaves before the answer leaves for all of them
            self._refuse(joint, link.UnloggedReason.RANK_MISSING, "another rank has left")
        if refusal is not None and refusal.reason in _OF_RANKS and not joint.counted:
            joint.counted = True  # once for all of them: it is one turn that was not logged
            self._count(message.session, refusal.reason.value, None, detail=refusal.detail)
        return refusal

    async def _gathered(self, joint: JointAsk) -> None:
        try:
            async with asyncio.timeout(max(0.0, joint.deadline - time.monotonic())):
                await joint.whole.wait()
        except TimeoutError:
            missing = ", ".join(map(str, joint.missing))
            self._refuse(
                joint, link.UnloggedReason.RANK_MISSING, f"rank {missing} of the engine has not asked"
            )

    async def _carried(self, joint: JointAsk) -> None:
        """The last rank to ask carries the question of all."""
        if not await self._closing_done(joint.session, joint.deadline):
            detail = "its last turn is over, and rows of it are still on their way"
            self._refuse(joint, link.UnloggedReason.CLAIM_TIMEOUT, detail)
            return
        patience = min((joint.deadline - joint.first.began) / 2, joint.deadline - time.monotonic())
        if not joint.take_over and not await self._owner_is_willing(joint.session, patience):
            if joint.over:
                return
            self._refuse(joint, *self._say_unlogged(joint.session, fx.UnloggedReason.OWNER_BUSY, None))
            return
        self._ask(joint)

    def _ask(self, joint: JointAsk) -> None:
        if not joint.over:
            number = next(self._numbers)
            self._asked[number] = joint
            self._parts.shell.step(joint.question(number))

    def _refuse(self, joint: JointAsk, reason: link.UnloggedReason, detail: str) -> None:
        """Answer those who wait for it, and withdraw the question."""
        if not joint.over:
            self._joiner.refuse(joint, reason, detail)
            self._withdraw(joint)

    def _withdraw(self, joint: JointAsk) -> None:
        if self._asked.pop(joint.number, None) is not None:
            self._parts.shell.step(inputs.WithdrawRequest(joint.session, joint.number))

    async def _closing_done(self, session: SessionId, deadline: float) -> bool:
        """A turn that is being closed is not in the way of the next one for longer than its rows need.

        Returns: False if they need longer than the request may wait: not busy, and worth asking again.
        """
        entry = self._parts.turns.of_session(session)
        if entry is None or not entry.is_closing:
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
            await asyncio.sleep(_PAUSE_SECONDS)
        return True

    # Effects

    def _opened(self, effect: fx.TurnOpened) -> None:
        """Answered here, not by whoever waits: what is said of the turn next must not overtake its opening."""
        joint = self._asked.pop(effect.request, None)
        if joint is None:
            self._parts.shell.step(inputs.CloseTurn(effect.turn))
            return
        self._joiner.forget(joint)
        joint.over = True
        asks = tuple(joint.asks.values())
        first = joint.first
        layout = first.peer.hello.identity.layout
        self._parts.turns.add(
            OpenTurnEntry(
                ranks=tuple(Rank(ask.peer, ask.shard, only_reads=ask.peer.hello.only_reads) for ask in asks),
                session=effect.session,
                turn=effect.turn,
                epoch=effect.epoch,
                mode=first.message.mode or self._options.mode,
                layout=layout,
                session_hash=session_hash(effect.session),
                group=first.message.group,
                log_from=effect.log_from,
            )
        )
        self._say_difference(first.peer, effect)
        pinned = self._leases.pin(effect, asks)
        self._say_opened(effect, joint, pinned)
        for index, ask in enumerate(asks):
            blocks = pinned[index] if pinned else None
            ask.peer.send(turn_opened(ask.message.request, effect, layout.row_bytes, blocks))
            if not ask.answer.done():
                ask.answer.set_result(None)

    def _say_opened(self, effect: fx.TurnOpened, joint: JointAsk, pinned: list[PinnedBlocks] | None) -> None:
        seconds = time.monotonic() - joint.first.began
        metrics = self._parts.telemetry.metrics
        metrics.turns_opened.inc()
        metrics.takeover_seconds.observe(seconds)
        self._parts.telemetry.say(
            Event.TURN_OPENED,
            session=effect.session,
            turn=effect.turn,
            epoch=effect.epoch,
            ranks=len(joint.asks),
            usable=effect.usable,
            attach=sum(block.rows for block in pinned[0].blocks) if pinned else 0,
            log_from=effect.log_from,
            milliseconds=round(1000 * seconds, 2),
        )

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

    def _unlogged(self, effect: fx.TurnUnlogged) -> None:
        joint = self._asked.pop(effect.request, None)
        is_crowded = effect.reason is fx.UnloggedReason.OVERLOADED
        if is_crowded and joint is not None and time.monotonic() + _PAUSE_SECONDS < joint.deadline:
            # Who takes over a node's sessions is asked for all of them at once: a place comes free in milliseconds.
            asyncio.get_running_loop().call_later(_PAUSE_SECONDS, self._ask, joint)
            return
        refusal = self._say_unlogged(effect.session, effect.reason, effect.newer_epoch)
        if joint is not None:
            self._joiner.refuse(joint, *refusal)

    def _say_unlogged(
        self, session: SessionId, reason: fx.UnloggedReason, newer_epoch: Epoch | None
    ) -> tuple[link.UnloggedReason, str]:
        self._count(session, reason.value, newer_epoch)
        return _UNLOGGED[reason]

    def _count(self, session: SessionId, reason: str, newer_epoch: Epoch | None, **fields: str) -> None:
        self._parts.telemetry.metrics.turns_unlogged.labels(reason).inc()
        self._parts.telemetry.say(
            Event.TURN_UNLOGGED, session=session, reason=reason, newer_epoch=newer_epoch, **fields
        )


def _said(value: object) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)


def turn_opened(
    request: link.RequestNumber,
    turn: fx.TurnOpened | OpenTurnEntry,
    row_bytes: int,
    pinned: PinnedBlocks | None,
) -> link.TurnOpened:
    """One rank's answer; `pinned`: what it can attach."""
    blocks = tuple(link.AttachBlock(block.index, block.rows) for block in pinned.blocks) if pinned else ()
    return link.TurnOpened(
        request=request,
        turn=turn.turn,
        epoch=turn.epoch,
        log_from=turn.log_from,
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
