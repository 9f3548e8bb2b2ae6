"""Sessions of ours whose first records retention will soon take are logged again, from this node's own pool.

    due ─▶ RewriteSession ─▶ claim read back ─▶ TurnOpened: blocks pinned ─▶ copied, verified, published piece by piece
        ─▶ acknowledged to the end ─▶ CloseTurn, and a session row with the new first needed offset

One at a time, and behind what engines log: it waits while much is on its way. The core decides what is right
(INV-REWRITE, kvlog.core.rewriting): a request for the session ends the turn, a newer claim fences it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from daemon.outgoing import OutgoingRows, publish_rows
from daemon.rewrite_plan import RewritePlanner, SkipReason
from daemon.telemetry import Event
from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.blocks import Key
from kvlog.core.effects import TurnAcknowledged, TurnEnded, TurnFenced, TurnOpened, TurnUnlogged
from kvlog.core.inputs import CloseTurn, RewriteSession
from kvlog.errors import PoolFull
from kvlog.ids import FIRST_POSITION, Position, Shard

if TYPE_CHECKING:
    from daemon.index import NodeIndex
    from daemon.intake import IntakeParts
    from daemon.rewrite_plan import Plan, PlannerParts, RewriteRule
    from kvlog.buffers.blocks import PinnedBlocks
    from kvlog.ids import Offset, SessionId

__all__ = ["Rewriter"]

_LOOK_SECONDS = 1.0
_CLAIM_SECONDS = 10.0
"""A rewrite whose claim takes longer is not worth waiting for: it comes again."""
_CALM_SECONDS = 0.5
"""How long a rewrite that is over may keep its pins while the log is away."""
_AGAIN_SECONDS = 5.0
"""Between two tries of one session."""


@dataclass(slots=True, eq=False)
class _Work:
    """A rewrite that has its turn. `over`: how it ended, once it has, but for us."""

    opened: TurnOpened
    plan: Plan
    tokens: list[tuple[int, ...]]
    pinned: list[PinnedBlocks]
    acknowledged: Position = FIRST_POSITION
    over: str | None = None
    moved: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def is_complete(self) -> bool:
        return self.acknowledged >= self.plan.length


class Rewriter:
    """Looks for sessions that are due, and logs them again one by one."""

    def __init__(
        self, parts: IntakeParts, looked_at: PlannerParts, rule: RewriteRule, index: NodeIndex
    ) -> None:
        self._parts = parts
        self._pool = looked_at.pool
        self._evictor = looked_at.evictor
        self._index = index
        self._planner = RewritePlanner(looked_at, rule)
        self._numbers = 0
        self._asked: asyncio.Future[_Work | SkipReason | str] | None = None
        self._work: _Work | None = None
        self._not_before: dict[SessionId, float] = {}
        self._said: dict[SessionId, tuple[SkipReason, Offset | None]] = {}
        self._rotten: dict[SessionId, Offset | None] = {}
        shell = parts.shell
        shell.divert(TurnOpened, self._opened)
        shell.divert(TurnUnlogged, self._unlogged)
        shell.divert(TurnAcknowledged, self._acknowledged)
        shell.divert(TurnEnded, lambda effect: self._over(effect, effect.reason.value))
        shell.divert(TurnFenced, lambda effect: self._over(effect, "fenced"))

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            await self.look()

    async def look(self) -> None:
        """Rewrite what is due now, the most urgent first."""
        due = self._planner.due()
        owned = set(due)
        self._not_before = {s: at for s, at in self._not_before.items() if s in owned}
        self._said = {s: said for s, said in self._said.items() if s in owned}
        self._rotten = {s: offset for s, offset in self._rotten.items() if s in owned}
        for session in due:
            now = time.monotonic()
            if self._not_before.get(session, now) <= now:
                self._not_before[session] = now + _AGAIN_SECONDS
                await self._rewrite(session)

    async def _rewrite(self, session: SessionId) -> None:
        if session in self._rotten and self._rotten[session] == self._last_offset(session):
            return  # nothing was written since: another claim would find the same rows
        plan = self._planner.plan(session)
        if plan is None:
            return  # it is in use
        work = plan if isinstance(plan, SkipReason) else await self._claimed(session)
        if isinstance(work, SkipReason):
            self._skip(session, work)
        elif isinstance(work, str):
            self._parts.telemetry.metrics.rewrites.labels(work).inc()
        else:
            await self._carried_out(session, work)

    async def _claimed(self, session: SessionId) -> _Work | SkipReason | str:
        """The core answers within the deadline, whatever the log does."""
        self._numbers -= 1  # engines' requests count upwards
        self._asked = asyncio.get_running_loop().create_future()
        deadline_ns = time.monotonic_ns() + int(_CLAIM_SECONDS * 1e9)
        self._parts.shell.step(RewriteSession(self._numbers, session, deadline_ns))
        return await self._asked

    async def _carried_out(self, session: SessionId, work: _Work) -> None:
        began, size = time.monotonic(), 0
        self._evictor.rewritten = session
        try:
            size = await self._log_again(work)
            while not work.is_complete and work.over is None:
                work.moved.clear()
                await work.moved.wait()
        finally:
            self._release(work)
            self._work = self._evictor.rewritten = None
            self._parts.shell.step(CloseTurn(work.opened.turn))
        if work.over == SkipReason.ROTTEN.value:
            self._rotten[session] = self._last_offset(session)
            self._skip(session, SkipReason.ROTTEN)
            return
        metrics = self._parts.telemetry.metrics
        metrics.rewrites.labels("done" if work.is_complete else work.over).inc()
        metrics.rewrite_bytes.inc(size)
        self._planner.spend(session, size)
        if work.is_complete:
            self._not_before[session] = time.monotonic() + self._planner.rest_seconds(session)
        self._say_outcome(session, work, size=size, seconds=time.monotonic() - began)
        primary = self._parts.shell.core.primary(session)
        if primary is not None:
            self._index.note(primary.claim)

    def _say_outcome(self, session: SessionId, work: _Work, *, size: int, seconds: float) -> None:
        self._parts.telemetry.say(
            Event.SESSION_REWRITTEN if work.is_complete else Event.REWRITE_INTERRUPTED,
            session=session,
            epoch=work.opened.epoch,
            positions=work.acknowledged,
            of=work.plan.length,
            rows=work.plan.rows_to,
            payload_bytes=size,
            reason=work.over,
            seconds=round(seconds, 3),
        )

    async def _log_again(self, work: _Work) -> int:
        """Publish all of it, shard by shard of each piece, so that the whole prefix grows evenly; gives the bytes."""
        size, plan = 0, work.plan
        await self._verify(work)
        for start in range(0, plan.rows_to, plan.rows_a_block):
            positions = range(start, min(plan.rows_to, start + plan.rows_a_block))
            for shard in range(len(work.pinned)):
                rows = await self._rows(work, shard, positions)
                size += await self._publish(work, Shard(shard), positions, rows)
        for start in range(plan.rows_to, plan.length, self._parts.limits.delta_tokens):
            positions = range(start, min(plan.length, start + self._parts.limits.delta_tokens))
            for shard in range(len(work.tokens)):
                await self._publish(work, Shard(shard), positions, memoryview(b""))
        return size

    async def _verify(self, work: _Work) -> None:
        """Before the first row goes out: from then on a reader holds what was logged again, and no more."""
        plan = work.plan
        for start in range(0, plan.rows_to, plan.rows_a_block):
            positions = range(start, min(plan.rows_to, start + plan.rows_a_block))
            for shard in range(len(work.pinned)):
                await self._rows(work, shard, positions)

    async def _rows(self, work: _Work, shard: int, positions: range) -> memoryview:
        """The rows of one block, whole and verified; none if they are not, or not wanted any more."""
        if work.over is not None:
            return memoryview(b"")
        block = positions.start // work.plan.rows_a_block
        rows = await asyncio.to_thread(self._copied, work.pinned[shard], block)
        is_whole = len(rows) == len(positions) * work.plan.layout.row_bytes
        if not is_whole:
            work.over = SkipReason.ROTTEN.value
        return rows if is_whole else memoryview(b"")

    async def _publish(self, work: _Work, shard: Shard, positions: range, rows: memoryview) -> int:
        while work.over is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_CALM_SECONDS):
                    await self._parts.publisher.calm()
                    break
        if work.over is not None:
            return 0
        outgoing = OutgoingRows(
            turn=work.opened.turn,
            epoch=work.opened.epoch,
            shard=shard,
            start=Position(positions.start),
            tokens=work.tokens[shard][positions.start : positions.stop],
            rows=rows,
            layout=work.plan.layout,
        )
        return await publish_rows(self._parts, outgoing)

    def _copied(self, pinned: PinnedBlocks, block: int) -> memoryview:
        """A private copy of one block's rows, as far as each is what it was when it was stored."""
        first = sum(one.rows for one in pinned.blocks[:block])
        named = pinned.blocks[block]
        checksums = pinned.row_checksums[first : first + named.rows]
        attached, rows = Attachment(pinned.row_bytes, (named,), checksums), bytearray()
        copy_attached(self._pool.memory.view, self._pool.geometry, attached, rows.extend)
        return memoryview(rows)

    def _last_offset(self, session: SessionId) -> Offset | None:
        state = self._parts.shell.core.state(session)
        return state.last_offset if state is not None else None

    def _release(self, work: _Work) -> None:
        for pinned in work.pinned:
            self._pool.release(pinned.lease)
        work.pinned.clear()

    def _skip(self, session: SessionId, reason: SkipReason) -> None:
        """Counted and said once, until its first record is another one."""
        root = self._planner.first_needed(session)
        if self._said.get(session) == (reason, root):
            return
        self._said[session] = (reason, root)
        self._parts.telemetry.metrics.rewrites_skipped.labels(reason.value).inc()
        if reason.is_alarming:
            self._parts.telemetry.say(Event.REWRITE_SKIPPED, session=session, reason=reason.value)

    # What the core answers

    def _opened(self, effect: TurnOpened) -> bool:
        """The rows are pinned here and now, before the fold comes to the Truncate: that goes out with the first row."""
        if effect.request >= 0:
            return False
        asked = self._awaiting(effect.request)
        work = self._pinned(effect) if asked is not None else None
        self._work = work if isinstance(work, _Work) else None
        if self._work is None:
            self._parts.shell.step(CloseTurn(effect.turn))
        if asked is not None and work is not None:
            asked.set_result(work)
        return True

    def _unlogged(self, effect: TurnUnlogged) -> bool:
        if effect.request >= 0:
            return False
        asked = self._awaiting(effect.request)
        if asked is not None:
            asked.set_result(effect.reason.value)
        return True

    def _awaiting(self, request: int) -> asyncio.Future[_Work | SkipReason | str] | None:
        is_ours = self._asked is not None and not self._asked.done() and request == self._numbers
        return self._asked if is_ours else None

    def _pinned(self, effect: TurnOpened) -> _Work | SkipReason:
        state = self._parts.shell.core.state(effect.session)
        assert state is not None, "a claim that was read back has a state"
        plan = self._planner.plan_of(state, effect.usable)
        if isinstance(plan, SkipReason):
            return plan
        if plan.length == 0:
            return SkipReason.ABSENT
        work = _Work(effect, plan, [tuple(shard.tokens[: plan.length]) for shard in state.shards], [])
        try:
            for shard in range(len(state.shards)):
                work.pinned.append(self._pool.pin(Key(effect.session, Shard(shard)), plan.rows_to))
        except PoolFull:
            self._release(work)
            return SkipReason.NO_ROOM
        return work

    def _acknowledged(self, effect: TurnAcknowledged) -> bool:
        work = self._work
        if work is None or effect.turn != work.opened.turn:
            return False
        work.acknowledged = effect.length
        work.moved.set()
        return True

    def _over(self, effect: TurnEnded | TurnFenced, how: str) -> bool:
        work = self._work
        if work is None or effect.turn != work.opened.turn:
            return False
        work.over = how
        work.moved.set()
        return True
