"""Several requests at once on one model: one thread computes, a few others open and close turns.

A round gives each active request one step (a piece of its prefill, or one token), then the replicator one `after_step`
for all of them, and only then are the new tokens told: who was fenced in the meantime says nothing more. A finished
request gives its place back at once, whatever the daemon does; what the ring did not take of it is written by one of a
few closers, and where none is free its log ends at the cursor. A finished `acked` request keeps its cache, not its
place, until the log has its rows or they are late. Memory is bounded by twice `active_max` caches and one a closer;
further requests wait in a queue of `queued_max`, and then are refused.

What goes wrong for one request fails that request. What goes wrong with the loop itself fails them all, and `failure`
says so from then on: nothing is taken any more that nobody would answer.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.engines.generation import NewToken
from kvlog.engines.jobs import FENCED, AnswerEvent, Failed, Finished, Job, RunningJob
from kvlog.engines.kv_digests import digests_at
from kvlog.engines.turn_state import TurnRequest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlog.engines.base import StepModel
    from kvlog.engines.generation import FinishReason
    from kvlog.engines.replicator import Replicator

__all__ = ["StepLoop", "StepLoopOptions"]

_STOPPING = Failed("stopping", "This engine is stopping.")
_CLOSERS = 8
"""Threads that write what finished requests left behind; each holds a cache, for `close_seconds` at most."""

_ACKED_POLL_SECONDS = 0.005
"""With nothing to compute, finished `acked` requests are looked after so often; an acknowledgement takes longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoopOptions:
    """How much at once, and how fast.

    Args:
        active_max: requests that are computed at once, each with a cache.
        queued_max: requests that wait for a place.
        steps_per_second: rounds are not started faster; 0: as fast as possible.
        wait_seconds: how long the daemon may try to become primary before a request starts without it.
    """

    active_max: int = 32
    queued_max: int = 64
    steps_per_second: float = 0.0
    wait_seconds: float = 1.0


class StepLoop:
    """Runs jobs; `submit` and `cancel` may be called from any thread."""

    def __init__(self, model: StepModel, replicator: Replicator, options: StepLoopOptions) -> None:
        self._model = model
        self._replicator = replicator
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[Job] = deque()
        self._ready: list[RunningJob] = []
        self._places = 0
        self._ending: Failed | None = None
        self._openers = ThreadPoolExecutor(options.active_max, "kvlog-open-turn")
        self._closers = ThreadPoolExecutor(_CLOSERS, "kvlog-close-turn")
        self._free_closers = threading.Semaphore(_CLOSERS)
        self._held: list[RunningJob] = []
        self._thread = threading.Thread(target=self._run, name="kvlog-step-loop", daemon=True)

    @property
    def active(self) -> int:
        """Requests that have a place, from before their turn is opened until their answer is over."""
        return self._places

    @property
    def queued(self) -> int:
        """Requests that wait for a place."""
        return len(self._queue)

    @property
    def failure(self) -> str | None:
        """Why nothing is computed any more; None: all is well, or it was told to stop."""
        ending = self._ending
        return None if ending is None or ending is _STOPPING else ending.message

    def start(self) -> None:
        """Start to compute."""
        self._thread.start()

    def close(self) -> None:
        """Stop: running requests fail as `stopping`, and their turns end with the link."""
        self._end_all(_STOPPING)
        if self._thread.is_alive():
            self._thread.join()
        self._openers.shutdown()  # what waits for a thread is run, and told that it is over
        self._closers.shutdown()

    def submit(self, job: Job) -> bool:
        """Take a job. Returns: False if everything is full, stopping or failed; try again later, or elsewhere."""
        with self._changed:
            if self._ending is not None or len(self._queue) >= self._options.queued_max:
                return False
            if self._places < self._options.active_max:
                self._places += 1
                self._openers.submit(self._open, job)
            else:
                self._queue.append(job)
        return True

    def cancel(self, job: Job) -> None:
        """Nobody wants the answer any more; nothing is told after this returns but what is under way."""
        job.cancelled = True
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)

    def _open(self, job: Job) -> None:
        """Open the turn and attach; on a thread of `_openers`."""
        ending = self._ending
        if ending is not None or job.cancelled:
            if ending is not None:
                _say(job, ending)
            self._leave()
            return
        try:
            running = self._opened(job)
        except Exception as error:  # noqa: BLE001  # a task's top: the request fails, the engine goes on
            _say(job, _internal(error))
            self._leave()
            return
        if job.generation.finished is not None:
            _say(job, Finished(job.generation.finished, running.details()))
        elif not job.cancelled:
            with self._changed:
                ending = self._ending
                if ending is None:
                    self._ready.append(running)
                    self._changed.notify_all()
                    return
            _say(job, ending)
        self._end(running)

    def _opened(self, job: Job) -> RunningJob:
        generation, session = job.generation, job.session
        cache = self._model.new_cache()
        began = time.monotonic()
        request = TurnRequest(
            session=session.session,
            mode=session.mode,
            wait_seconds=self._options.wait_seconds,
            take_over=session.take_over,
        )
        job.handle = handle = self._replicator.open_turn(request, generation.tokens)
        opened = time.monotonic()
        try:
            attached = handle.load_into(cache)
        except BaseException:  # no memory for it: the turn must not stay open for a request that has failed
            forget = not session.named
            self._replicator.close_turn(handle, cache, generation.tokens, until=opened, forget=forget)
            raise
        return RunningJob(
            job,
            handle,
            cache,
            open_turn_ms=1000 * (opened - began),
            attach_ms=1000 * (time.monotonic() - opened),
            attached=attached,
            known=len(generation.tokens),
            log_from=handle.log_from,
        )

    def _end(self, running: RunningJob) -> None:
        """Give the place to the next, and close the turn."""
        self._leave()
        self._end_turn(running)

    def _end_turn(self, running: RunningJob) -> None:
        """Close the turn: now, or where rows are behind and a closer is free, soon."""
        now = time.monotonic()
        if running.job.acked is not None:
            running.job.acked.give_up("ended")
        behind = running.handle.may_write_more(running.cache)
        if behind and self._free_closers.acquire(blocking=False):
            self._closers.submit(self._catch_up, running, now + self._replicator.close_seconds)
        else:
            self._close(running, until=now)

    def _catch_up(self, running: RunningJob, until: float) -> None:
        """Write what is behind, then close the turn; on a thread of `_closers`."""
        try:
            self._close(running, until)
        finally:
            self._free_closers.release()

    def _close(self, running: RunningJob, until: float) -> None:
        tokens, forget = running.job.generation.tokens, not running.job.session.named
        self._replicator.close_turn(running.handle, running.cache, tokens, until=until, forget=forget)

    def _leave(self) -> None:
        """Give a place back."""
        with self._changed:
            if self._queue and self._ending is None:
                self._openers.submit(self._open, self._queue.popleft())
            else:
                self._places -= 1

    def _end_all(self, ending: Failed) -> None:
        """Take nothing more, and tell those who wait for a place; the first ending stays."""
        with self._changed:
            self._ending = ending = self._ending or ending
            waiting = [*self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for job in waiting:
            _say(job, ending)

    # The computing thread.

    def _run(self) -> None:
        active: list[RunningJob] = []
        try:
            while self._take_ready(active):
                self._round(active)
        except Exception as error:  # noqa: BLE001  # the thread's top: nobody is left to compute
            self._end_all(_internal(error))
        with self._changed:
            ending = self._ending or _STOPPING
            active += self._ready
            self._ready.clear()
        for running in active:
            _say(running.job, ending)
        for running in self._held:
            assert running.job.acked is not None, "it is held"
            running.job.acked.give_up(ending.kind)  # and woken when the link ends
        if ending is not _STOPPING:
            self._replicator.close()  # its turns would stay open as long as this process stands there

    def _round(self, active: list[RunningJob]) -> None:
        """Compute, replicate, tell; who is over leaves the list."""
        began = time.monotonic()
        results = [(running, self._step(running)) for running in active]
        self._replicator.after_step(
            [(each.handle, each.cache, each.job.generation.tokens) for each in (*active, *self._held)]
        )
        for running, result in results:
            if self._tell(running, result):
                active.remove(running)
        for running in [each for each in self._held if not self._is_held(each)]:
            self._held.remove(running)
            self._end_turn(running)
        self._keep_pace(began)

    def _take_ready(self, active: list[RunningJob]) -> bool:
        """Wait until there is something to compute. Returns: False at the end."""
        with self._changed:
            timeout = _ACKED_POLL_SECONDS if self._held else None
            self._changed.wait_for(lambda: active or self._ready or self._ending, timeout)
            active += self._ready
            self._ready.clear()
            return self._ending is None

    def _step(self, running: RunningJob) -> NewToken | Failed | None:
        """Compute one piece. Returns: None while tokens that are known are still to be computed."""
        generation, cache = running.job.generation, running.cache
        if running.job.cancelled:
            return None
        try:
            logits = self._model.forward(cache, generation.next_piece(cache.length))
            return generation.draw(logits) if cache.length == len(generation.tokens) else None
        except Exception as error:  # noqa: BLE001  # a task's top: the request fails, the engine goes on
            return _internal(error)

    def _tell(self, running: RunningJob, result: NewToken | Failed | None) -> bool:
        """Tell what is new. Returns: whether the request is over."""
        job = running.job
        if running.handle.fenced.is_set() and not isinstance(result, Failed):
            result = FENCED
        if isinstance(result, NewToken) and running.first_token_ms is None:
            running.first_token_ms = 1000 * (time.monotonic() - job.arrived)
        if result is not None and not job.cancelled:
            _say(job, result)
        finish = result.finish if isinstance(result, NewToken) else None
        if finish is not None:
            _say(job, self._finished(running, finish))
        over = finish is not None or isinstance(result, Failed) or job.cancelled
        if over and finish is not None and self._hold(running):
            self._leave()
        elif over:
            self._end(running)
        return over

    def _hold(self, running: RunningJob) -> bool:
        """Keep the turn of a finished `acked` request open until the log has it. Returns: whether it needs that."""
        gate = running.job.acked
        running.finished_at = time.monotonic()
        if gate is None or not self._is_held(running):
            return False
        if len(self._held) >= self._options.active_max:
            gate.give_up("overloaded")
            return False
        self._held.append(running)
        return True

    def _is_held(self, running: RunningJob) -> bool:
        """Somebody waits for the log, and it may still come."""
        job, handle = running.job, running.handle
        if job.acked is None or job.cancelled or job.acked.late is not None or handle.fenced.is_set():
            return False
        if handle.acked_length >= running.cache.length:
            return False
        late = job.acked.hopeless(handle, running.finished_at, time.monotonic())
        if late is not None:
            job.acked.give_up(late)
        return late is None

    def _finished(self, running: RunningJob, finish: FinishReason) -> Finished | Failed:
        try:
            return Finished(finish, running.details(), self._digests(running))
        except Exception as error:  # noqa: BLE001  # a task's top: the request fails, the engine goes on
            return _internal(error)

    def _digests(self, running: RunningJob) -> Mapping[int, list[str]] | None:
        """Of a finished answer's cache, where its sender asked: what was attached, all of it, and what it named."""
        cache, asked = running.cache, running.job.kv_digests
        if asked is None:
            return None
        return digests_at(cache, self._model.identity.layout, (running.attached, cache.length, *asked))

    def _keep_pace(self, began: float) -> None:
        if self._options.steps_per_second > 0:
            left = began + 1 / self._options.steps_per_second - time.monotonic()
            if left > 0:
                time.sleep(left)


def _say(job: Job, told: AnswerEvent) -> None:
    """Tell whoever sent the job; one who cannot be told has left."""
    try:
        job.sink(told)
    except Exception:  # noqa: BLE001  # its sender's fault, and nobody else's
        job.cancelled = True


def _internal(error: Exception) -> Failed:
    return Failed("internal", f"{type(error).__name__}: {error}")
