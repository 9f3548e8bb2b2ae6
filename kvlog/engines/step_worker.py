"""The worker's side of a paged engine: carries out the planner's steps on the cache, through a Replicator.

    before_step   closes (a last write while the blocks are still theirs), opens
    load          verified rows into blocks, before the computation
    after_step    new rows of all turns into the ring; turns that end with held blocks catch up
    report        which turns were answered, and with how many verified rows

What can be attached is copied and verified on a thread of its own before the scheduler hears of it: rows that do not
verify shorten the answer and never come near a block, and a load cannot fail for want of bytes. None of these methods
waits or raises: whatever goes wrong with one turn ends that turn.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from kvlog.engines.staged_rows import StagedRows, give_back, stage_rows
from kvlog.engines.step_plan import Dropped, Ready, StepReport
from kvlog.engines.turn_evidence import TurnEvidence, TurnTimes
from kvlog.ids import NO_EPOCH
from kvlog.link.messages import UnloggedReason, unpack_tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from concurrent.futures import Future

    from kvlog.engines.device_queue import Mark
    from kvlog.engines.replicator import Replicator
    from kvlog.engines.row_store import RowStore, StepRows
    from kvlog.engines.step_plan import CloseAsk, LoadAsk, OpenAsk, RowsAt, StepPlan, TurnKey
    from kvlog.engines.turns import PendingTurn, TurnHandle
    from kvlog.ids import Epoch, SessionId

__all__ = ["StepWorker", "WorkerCounts", "WorkerOptions"]

_STAGERS: Final = 2
"""Threads that copy and verify: one is as fast as memory, the second keeps a short attach from waiting long."""

_OWN_SECONDS: Final = 5.0
_OWN_RETRY_SECONDS: Final = 0.1
"""A session whose turn has ended here less than so long ago is busy with ourselves: the daemon may still be working at
that turn's claim or rows. It is asked again soon, not taken for another request."""

_LEFT_MAX: Final = 1024
"""Ended turns that are remembered, by key and by session; a forgotten one lets its request claim its session back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What one worker may spend.

    Args:
        hold_seconds: how long a finished request's blocks are held to write what is behind.
        staging_bytes_max: verified rows that wait to be loaded, of all turns together; more are computed instead.
        ranks: workers that compute each row together.
    """

    hold_seconds: float = 2.0
    staging_bytes_max: int = 2 << 30
    ranks: int = 1


@dataclass(slots=True)
class WorkerCounts:
    """What a worker has done since its start.

    `rows_loaded`: verified, in `stage_seconds`, and put into blocks, in `load_seconds`. `load_failures`: loads whose
    blocks were given back to be computed. `staging_refused`: attaches that the staging bound left out. `faults`:
    errors that nobody foresaw.
    """

    rows_loaded: int = 0
    stage_seconds: float = 0.0
    load_seconds: float = 0.0
    load_failures: int = 0
    staging_refused: int = 0
    turns_unlogged: int = 0
    faults: int = 0
    call_seconds_max: float = 0.0


@dataclass(slots=True, eq=False)
class _Entry:
    """One turn on this worker."""

    ask: OpenAsk
    tokens: list[int]
    rows: StepRows
    pending: PendingTurn | None = None
    handle: TurnHandle | None = None
    staging: Future[StagedRows] | None = None
    staged_bytes: int = 0
    reported: bool = False
    spoilt: bool = False
    dropped: bool = False
    closing: CloseAsk | None = None
    until: float = 0.0
    retry_at: float = 0.0
    known: int = 0
    loaded: int = 0
    times: TurnTimes = field(default_factory=TurnTimes)


class StepWorker:
    """Carries out plans; used by the engine's computing thread.

    Args:
        start_replicator: gives a started replicator for weights by the plan's word; empty: those of the engine's start.
        store: the cache.
        rank: which of its engine's workers this is.
        options: bounds.
    """

    def __init__(
        self,
        start_replicator: Callable[[bytes], Replicator],
        store: RowStore,
        rank: int,
        options: WorkerOptions,
    ) -> None:
        self._start_replicator = start_replicator
        self._replicator = start_replicator(b"")
        self._store = store
        self._rank = rank
        self._options = options
        self._entries: dict[TurnKey, _Entry] = {}
        self._waiting: list[_Entry] = []
        self._left: OrderedDict[TurnKey, Epoch] = OrderedDict()
        self._ended: OrderedDict[SessionId, float] = OrderedDict()
        self._stagers = ThreadPoolExecutor(_STAGERS, "kvlog-stage")
        self._staged_bytes = 0
        self._released: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed: list[TurnKey] = []
        self._loading: dict[str, tuple[LoadAsk, Future[bool]]] = {}
        self._received: set[str] = set()
        self._dropped: list[Dropped] = []
        self.counts = WorkerCounts()

    def before_step(self, plan: StepPlan) -> None:
        """End and begin turns, before anything is written to blocks."""
        now = time.monotonic()
        self._write_last(plan)
        for close in plan.closes:
            self._close(close, now)
        if plan.renew:
            self._renew(plan.renew, now)
        for ask in plan.opens:
            tokens = list(unpack_tokens(ask.tokens))
            rows = self._store.open_rows()
            entry = self._entries[ask.key] = _Entry(ask, tokens, rows, known=len(tokens))
            self._waiting.append(entry)
        self._begin_waiting()

    def load(self, plan: StepPlan) -> None:
        """Put verified rows into blocks."""
        for ask in plan.loads:
            staged = self._take_staged(ask)
            if ask.beside and staged is not None:
                filling = self._stagers.submit(self._fill, ask, staged, self._store.fence())
                self._loading[ask.beside] = (ask, filling)
                continue
            self._loaded(ask, well=staged is not None and self._fill(ask, staged))
            if ask.beside:
                self._received.add(ask.beside)

    def after_step(self, plan: StepPlan) -> None:
        """Write the new rows of all turns into the ring."""
        started = time.perf_counter()
        unsure = self._options.ranks > 1 or any(ask.key in self._failed for ask in plan.loads)
        loaded = {ask.key: ask.length for ask in plan.loads if unsure and not ask.beside}
        for rows in plan.rows:
            self._follow(rows, loaded)
        self._gather(idle=all(self._is_closing(rows.key) for rows in plan.rows))
        self._write([entry for entry in self._entries.values() if entry.handle is not None])
        now = time.monotonic()
        for entry in [entry for entry in self._entries.values() if entry.closing is not None]:
            if not self._may_write_more(entry) or now > entry.until:
                self._end(entry, now)
        self._begin_waiting()
        self.counts.call_seconds_max = max(self.counts.call_seconds_max, time.perf_counter() - started)

    def report(self) -> StepReport:
        """What the planner has to know."""
        now = time.monotonic()
        ready = [said for entry in tuple(self._entries.values()) if (said := self._ready(entry, now))]
        self._drop_unlogged()
        dropped, self._dropped = tuple(self._dropped), []
        failed, self._failed = tuple(self._failed), []
        return StepReport(tuple(ready), dropped, failed)

    def take_released(self) -> set[str]:
        """Finished requests whose blocks are not needed any more."""
        released, self._released = self._released, set()
        return released

    @property
    def is_loading(self) -> bool:
        """Blocks are being filled beside the steps."""
        return bool(self._loading)

    def take_received(self) -> set[str]:
        """Requests whose load beside the steps is over, well or not; ask for failed blocks afterwards."""
        for name, (ask, filling) in tuple(self._loading.items()):
            if filling.done():
                del self._loading[name]
                self._received.add(name)
                failed = filling.cancelled() or filling.exception() is not None
                self._loaded(ask, well=not failed and filling.result())
        received, self._received = self._received, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not: they have to be computed."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def close(self) -> None:
        """Leave the daemon; turns that are still open end there with the link."""
        self._stagers.shutdown(wait=False, cancel_futures=True)
        self._replicator.close()

    @property
    def replicator(self) -> Replicator:
        """The one of the present weights."""
        return self._replicator

    def evidence(self, key: TurnKey) -> TurnEvidence | None:
        """What a turn has come to; None: there is none of that key, or none any more."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        session, layout = entry.ask.request.session, self._store.layout
        told = entry.known, entry.loaded, entry.handle, entry.times
        return TurnEvidence(session, entry.tokens, entry.rows, layout, *told)

    # Turns

    def _renew(self, weights: bytes, now: float) -> None:
        """End everything, and introduce ourselves to the daemon as another model."""
        for entry in tuple(self._entries.values()):
            self._end(entry, now)
        self._waiting = []
        # Not here: a connect in progress may take seconds to notice.
        threading.Thread(target=self._replicator.close, name="kvlog-close", daemon=True).start()
        self._replicator = self._start_replicator(weights)

    def _begin_waiting(self) -> None:
        """Begin turns whose session is not just being closed here: the daemon would answer that it is busy."""
        closing = {entry.ask.request.session for entry in self._entries.values() if entry.closing is not None}
        waiting, self._waiting = self._waiting, []
        now = time.monotonic()
        for entry in waiting:
            if entry.ask.request.session in closing or now < entry.retry_at:
                self._waiting.append(entry)
                continue
            continues = self._left.get(entry.ask.previous, NO_EPOCH)
            entry.times.asked = entry.times.asked or now
            entry.pending = self._replicator.begin_turn(entry.ask.request, entry.tokens, continues=continues)

    def _ready(self, entry: _Entry, now: float) -> Ready | None:
        """Say once that a turn was answered, and how many rows were verified; copying them may take several steps."""
        if entry.reported or entry.pending is None or entry.closing is not None:
            return None
        if entry.handle is None:
            if not entry.pending.is_answered(now):
                return None
            entry.handle = entry.pending.settle()
            if self._is_busy_with_ourselves(entry, now):
                self._ask_later(entry, now)
                return None
            entry.times.answered = now
            self._stage(entry)
        if entry.staging is not None and not entry.staging.done():
            return None
        entry.reported = True
        length = 0 if entry.staging is None else self._staged_length(entry)
        return Ready(entry.ask.key, self._rank, entry.ask.local, length, entry.handle.logged)

    def _is_busy_with_ourselves(self, entry: _Entry, now: float) -> bool:
        """The turn in the way is one that has ended here, not another request's."""
        session = entry.ask.request.session
        if entry.handle is None or entry.handle.reason is not UnloggedReason.BUSY:
            return False
        others = (
            other for other in self._entries.values() if other is not entry and other.handle is not None
        )
        if any(other.ask.request.session == session for other in others):
            return False
        return now - self._ended.get(session, -_OWN_SECONDS) < _OWN_SECONDS

    def _ask_later(self, entry: _Entry, now: float) -> None:
        assert entry.handle is not None, "it was answered"
        self._replicator.close_turn(entry.handle, entry.rows, entry.tokens, until=now)
        entry.handle = entry.pending = None
        entry.retry_at = now + _OWN_RETRY_SECONDS
        self._waiting.append(entry)

    def _stage(self, entry: _Entry) -> None:
        """Begin to copy and verify what lies beyond the engine's own prefix."""
        assert entry.handle is not None, "answered"
        row_bytes, local, length = self._store.row_bytes, entry.ask.local, entry.handle.attach_length
        wanted = (length - local) * row_bytes
        if wanted <= 0:
            entry.handle.release()
            return
        if self._staged_bytes + wanted > self._options.staging_bytes_max:
            self.counts.staging_refused += 1
            entry.handle.release()
            return
        entry.staged_bytes = wanted
        self._staged_bytes += wanted
        entry.staging = self._stagers.submit(stage_rows, entry.handle, row_bytes, local, length)

    def _staged_length(self, entry: _Entry) -> int:
        assert entry.staging is not None, "it was staged"
        if entry.staging.exception() is not None:
            self.counts.faults += 1
            return 0
        staged = entry.staging.result()
        self.counts.stage_seconds += staged.seconds
        return staged.length

    def _unstage(self, entry: _Entry, *, taken: bool = False) -> None:
        """Forget what was staged, and, unless somebody has `taken` it, give its memory back."""
        staging = entry.staging
        self._staged_bytes -= entry.staged_bytes
        entry.staging, entry.staged_bytes = None, 0
        if staging is not None and not taken:
            self._beside(give_back, staging)

    def _beside(self, do: Callable[..., object], *given: object) -> None:
        """Not in a step; after `close` not at all: the process ends."""
        with contextlib.suppress(RuntimeError):
            self._stagers.submit(do, *given)

    def _close(self, close: CloseAsk, now: float) -> None:
        entry = self._entries.get(close.key)
        if entry is None:
            if close.held:
                self._released.add(close.held)
            return
        entry.closing = close
        if entry in self._waiting:
            self._waiting.remove(entry)
        if close.held and entry.pending is not None:
            entry.handle = entry.handle or entry.pending.settle()
            entry.until = now + self._options.hold_seconds
            return
        if self._is_under_way(entry):  # its rows come without the blocks, once they are under way
            self._gather(idle=False)
            entry.rows.give_up_blocks()
            entry.until = now + self._options.hold_seconds
            return
        self._end(entry, now)

    def _end(self, entry: _Entry, now: float) -> None:
        """End a turn at its cursor, and give its blocks up."""
        close = entry.closing
        self._entries.pop(entry.ask.key, None)
        self._unstage(entry)
        if entry.pending is not None:
            handle = entry.handle or entry.pending.settle()
            forget = close is not None and close.forget
            self._replicator.close_turn(handle, entry.rows, entry.tokens, until=now, forget=forget)
            self._remember(entry, handle.epoch, now)
        entry.rows.close()
        if close is not None and close.held:
            self._released.add(close.held)

    def _remember(self, entry: _Entry, epoch: Epoch, now: float) -> None:
        self._left[entry.ask.key] = epoch
        self._ended[entry.ask.request.session] = now
        for remembered in (self._left, self._ended):
            if len(remembered) > _LEFT_MAX:
                remembered.popitem(last=False)

    def _drop_unlogged(self) -> None:
        """Say of turns that no asking will ever log that they are over, and stop following them."""
        for entry in tuple(self._entries.values()):
            handle = entry.handle
            if handle is None or entry.closing is not None or entry.dropped:
                continue
            reason, now = handle.reason, time.monotonic()
            if self._is_busy_with_ourselves(entry, now):
                self._ask_later(entry, now)
            elif reason is not None and (handle.fenced.is_set() or not reason.passes):
                entry.dropped = True
                self._dropped.append(Dropped(entry.ask.key, str(reason)))
                self.counts.turns_unlogged += 1
                if entry.staging is None:
                    self._end(entry, now)

    # Rows

    def _take_staged(self, ask: LoadAsk) -> StagedRows | None:
        """The verified rows of a load; None: they are not all there."""
        entry = self._entries.get(ask.key)
        if entry is None or entry.staging is None or not entry.staging.done():
            return None
        if entry.staging.exception() is not None or entry.staging.result().length < ask.length:
            self._unstage(entry)
            return None
        staged = entry.staging.result()
        self._unstage(entry, taken=True)
        return staged

    def _fill(self, ask: LoadAsk, staged: StagedRows, after: Mark | None = None) -> bool:
        """Put rows into blocks. Returns: False if that failed: the blocks are computed instead."""
        began = time.perf_counter()
        try:
            self._store.scatter(ask.blocks, ask.start, staged.rows(ask.start, ask.length), after)
        except Exception:  # noqa: BLE001  # the adapter's top: generation never fails by it
            self.counts.faults += 1
            return False
        finally:
            self._beside(staged.close)
        self.counts.load_seconds += time.perf_counter() - began
        return True

    def _loaded(self, ask: LoadAsk, *, well: bool) -> None:
        entry = self._entries.get(ask.key)
        if well:
            self.counts.rows_loaded += ask.length - ask.start
            if entry is not None:
                entry.loaded, entry.times.loaded = ask.length - ask.start, time.monotonic()
            return
        self.counts.load_failures += 1
        self._failed.append(ask.key)
        size = self._store.block_size
        self._failed_blocks |= set(ask.blocks[ask.start // size : -(-ask.length // size)])
        if entry is not None:
            entry.spoilt = True

    def _follow(self, rows: RowsAt, loaded: Mapping[TurnKey, int]) -> None:
        """The request has been computed up to the watermark.

        Whether a load of this step went well on the other workers is known after it. What was computed on top of it, by
        whoever shares its blocks, is not written before the next step says how far it counts.

        Args:
            rows: of the plan.
            loaded: where the loads of this step end, if one of them has failed, or there are other workers.
        """
        entry = self._entries.get(rows.key)
        if entry is None:
            return
        entry.rows.take_blocks(rows.blocks, anew=rows.anew)
        sure = max(entry.rows.length, loaded.get(rows.key, 0)) if loaded else rows.length
        entry.tokens += rows.tokens
        entry.rows.settle(0 if entry.spoilt else min(rows.length, sure))
        entry.spoilt = False
        if entry.handle is None and entry.pending is not None:
            entry.handle = entry.pending.settle()  # it began without waiting for the answer
        if entry.staging is not None:  # and without what was staged
            self._unstage(entry)
        elif entry.handle is not None:
            entry.handle.release()

    def _write_last(self, plan: StepPlan) -> None:
        """Rows of turns whose blocks are given up now, all in one budget: many may end at once."""
        ending = {close.key: self._entries.get(close.key) for close in plan.closes if not close.held}
        self._write([entry for entry in ending.values() if entry is not None])

    def _gather(self, *, idle: bool) -> None:
        """Begin to read the step's new rows, where that takes time."""
        cursors = (
            (entry.rows, handle.cursor)
            for entry in self._entries.values()
            if (handle := entry.handle) is not None
        )
        self._store.gather_step([(rows, cursor) for rows, cursor in cursors if cursor is not None])
        if idle:
            self._store.drain()

    def _write(self, entries: list[_Entry]) -> None:
        active = [(entry.handle, entry.rows, entry.tokens) for entry in entries if entry.handle is not None]
        if active:
            self._replicator.after_step(active)

    def _may_write_more(self, entry: _Entry) -> bool:
        return entry.handle is not None and (
            entry.handle.may_write_more(entry.rows) or self._is_under_way(entry)
        )

    def _is_closing(self, key: TurnKey) -> bool:
        entry = self._entries.get(key)
        return entry is None or entry.closing is not None

    @staticmethod
    def _is_under_way(entry: _Entry) -> bool:
        return entry.handle is not None and entry.handle.logged and entry.rows.is_pending
