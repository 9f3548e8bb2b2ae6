"""The one thread of a process that writes to a local log: group commits, in the order of submission.

    event loop                              scribe's thread
    submit(job) ──▶ queue (bounded) ──▶ take a group · lock · BEGIN IMMEDIATE · jobs · COMMIT · ring the bell
                 ◀── futures done ◀──── unlock · settle · [checkpoint] · [trim]

Appends, table rows and committed offsets all go this way, so a process never competes with itself, and one commit
serves whatever has queued up meanwhile. A job stays in the queue until its group is durable. When a group fails for a
reason that leaves nothing in the log (disk full, directory gone, a lock that is not given back), the same group is
tried again, and new submissions are refused with the reason. When it may have left something (an I/O error in COMMIT),
or the log was replaced, everything that is pending ends as OutcomeUnknown, in one step of the event loop, so that
nothing later can survive something earlier (INV-LOCAL-ORDER).
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from kvlog.errors import LogUnavailable, OutcomeUnknown
from kvlog.limits import DEFAULT
from kvlog.log.local_lock import give_way
from kvlog.log.local_pen import Pen

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.log.local_rows import Retention, Transaction
    from kvlog.log.local_store import Paths, Synchronous

__all__ = ["GROUP_BYTES_MAX", "PENDING_BYTES_MAX", "Scribe"]

PENDING_BYTES_MAX = DEFAULT.publish_queue_bytes
"""Submitted and not yet durable; past it, `submit` waits."""

GROUP_BYTES_MAX = 4 << 20
GROUP_JOBS_MAX = 1024
"""One commit. Larger groups write no faster, hold the lock longer, and make their first job wait for the last."""

TRIM_SECONDS = 1.0
TRIM_BYTES = 16 << 20
"""Retention is looked after when so much time has passed, or so much was written, since it was last."""

RETRY_SECONDS_MIN, RETRY_SECONDS_MAX = 0.05, 1.0
"""Pause before a failed group is tried again, doubled each time."""


@dataclass(frozen=True, slots=True)
class _Job:
    work: Callable[[Transaction], object]
    size: int
    partition: int | None
    future: asyncio.Future[Any]


class Scribe:
    """Runs jobs in write transactions, in order. Made and used in one event loop.

    Args:
        paths: the log; it is opened again when it was recreated.
        identity: of the log that its user knows; another one ends what is pending.
        retention: what to keep of each partition.
        synchronous: what a job survives once its future is done.
    """

    def __init__(
        self, paths: Paths, identity: str, *, retention: Retention, synchronous: Synchronous
    ) -> None:
        self._paths = paths
        self._retention = retention
        # Touched by the event loop only:
        self._loop = asyncio.get_running_loop()
        self._admission = asyncio.Lock()
        self._room = asyncio.Event()
        self._ended = asyncio.Event()
        self._pending_bytes = 0
        # Shared, under _changed:
        self._changed = threading.Condition()
        self._queue: deque[_Job] = deque()
        self._closing = False
        self._abandoned = False
        self._halted = False
        # Written by the thread, read by the loop:
        self._down: LogUnavailable | None = None
        # The thread's own:
        self._pen = Pen(paths, identity, synchronous)
        self._untrimmed_bytes = 0
        self._trim_at = time.monotonic()
        # A daemon thread: a disk that hangs must not keep the process from exiting.
        self._thread = threading.Thread(target=self._run, name="kvlog-scribe", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def down(self) -> LogUnavailable | None:
        """Why nothing can be written now; None: it can, as far as was seen."""
        return self._down

    async def submit(
        self, work: Callable[[Transaction], object], *, size: int, partition: int | None = None
    ) -> asyncio.Future[Any]:
        """Queue a job; wait while the queue is full. The future has the job's result once it is durable.

        Args:
            work: called in the thread, and again if its group is tried again: it changes nothing but the transaction.
            size: the bytes that it keeps in memory and writes.
            partition: of an append; OutcomeUnknown names it.

        Raises:
            LogUnavailable: the log cannot be written now, or is closed; the job was not queued.
        """
        async with self._admission:
            self._refuse_while_down()
            while self._pending_bytes and self._pending_bytes + size > PENDING_BYTES_MAX:
                self._room.clear()
                await self._room.wait()
                self._refuse_while_down()
            return self._enqueue(_Job(work, size, partition, self._loop.create_future()))

    async def flush(self) -> None:
        """Return when everything submitted so far is durable or has failed."""
        if not self._ended.is_set():
            with suppress(OutcomeUnknown):
                await self._enqueue(_Job(_nothing, 0, None, self._loop.create_future()))

    async def close(self, *, seconds: float) -> None:
        """Write what is queued, at most so long; what is left then ends as OutcomeUnknown."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._ended.wait()
        with self._changed:
            self._abandoned = True
            self._changed.notify()
        self._end_all("the log was closed before the append was durable")
        self._ended.set()

    # ------------------------------------------------------------------------------------------ in the event loop

    def _enqueue(self, job: _Job) -> asyncio.Future[Any]:
        self._pending_bytes += job.size
        with self._changed:
            self._queue.append(job)
            self._changed.notify()
        return job.future

    def _refuse_while_down(self) -> None:
        down = self._down
        if self._closing:
            raise self._unavailable("this log was closed")
        if down is not None:
            raise LogUnavailable(**down.fields)

    def _settle(self, group: Sequence[_Job], results: Sequence[object]) -> None:
        for job, result in zip(group, results, strict=True):
            self._pending_bytes -= job.size
            if not job.future.done():
                job.future.set_result(result)
        self._room.set()

    def _end_all(self, problem: str) -> None:
        with self._changed:
            jobs = list(self._queue)
            self._queue.clear()
            self._halted = False
            self._changed.notify()
        for job in jobs:
            self._pending_bytes -= job.size
            if not job.future.done():
                error = OutcomeUnknown(partition=job.partition, where=self._paths.url, problem=problem)
                job.future.set_exception(error)
        self._room.set()

    def _unavailable(self, problem: str) -> LogUnavailable:
        return LogUnavailable(where=self._paths.url, problem=problem)

    # ------------------------------------------------------------------------------------------ in the thread

    def _run(self) -> None:
        try:
            while (group := self._next_group()) is not None:
                try:
                    self._write(group)
                    self._tend()
                    if self._queue:
                        give_way()
                except OutcomeUnknown as error:
                    self._halt(str(error.fields["problem"]))
                except Exception as error:  # noqa: BLE001 - the thread's top: a fault of ours, and nobody may hang
                    self._halt(f"the writer failed: {error!r}")
        finally:
            self._pen.drop()
            self._tell(self._ended.set)

    def _next_group(self) -> list[_Job] | None:
        """Wait for jobs; empty when it is time to trim, None when it is time to end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._abandoned or (not self._halted and (self._queue or self._closing)),
                timeout=max(0.0, self._trim_at - time.monotonic()),
            )
            if self._abandoned or (self._closing and not self._queue):
                return None
            return [] if self._halted else _group(self._queue)

    def _write(self, group: list[_Job]) -> None:
        """Commit one group, however often that has to be tried, until it is done or nobody wants it any more."""
        pause = RETRY_SECONDS_MIN
        while group:
            try:
                self._commit(group)
            except LogUnavailable as error:
                self._pen.drop()
                self._down = error
                self._tell(self._room.set)  # who waits for room is told why there is none
                with self._changed:
                    if self._changed.wait_for(lambda: self._abandoned, timeout=pause):
                        return
                pause = min(2 * pause, RETRY_SECONDS_MAX)
            else:
                return

    def _commit(self, group: list[_Job]) -> None:
        size = sum(job.size for job in group)
        with self._pen.locked() as database:
            if self._abandoned:
                raise self._unavailable("this log was closed")
            results = self._pen.transact(
                database, lambda written: [job.work(written) for job in group], size=size
            )
        with self._changed:
            for _ in group:
                if self._queue:  # close() may have ended them meanwhile
                    self._queue.popleft()
        self._untrimmed_bytes += size
        self._down = None  # before anybody is told: who hears of a commit may append
        self._tell(self._settle, group, results)

    def _tend(self) -> None:
        """Checkpoint and trim, when it is time; both may fail without harm, and who appends is told of the reason."""
        more = False
        try:
            self._pen.checkpoint_if_due()
            if self._untrimmed_bytes < TRIM_BYTES and time.monotonic() < self._trim_at:
                return
            more = self._pen.trim(self._retention)
        except LogUnavailable:
            self._pen.drop()
        self._untrimmed_bytes = 0
        self._trim_at = time.monotonic() + (0.0 if more else TRIM_SECONDS)

    def _halt(self, problem: str) -> None:
        """End everything that is pending, from the event loop; take no group before that is done."""
        with self._changed:
            self._halted = True
        self._down = None
        self._pen.drop()
        self._tell(self._end_all, problem)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *arguments)
        except RuntimeError:  # the loop is closed: nobody is left to be told
            self._abandoned = True


def _group(queue: deque[_Job]) -> list[_Job]:
    size = 0
    group: list[_Job] = []
    for job in islice(queue, GROUP_JOBS_MAX):
        size += job.size
        if group and size > GROUP_BYTES_MAX:
            break
        group.append(job)
    return group


def _nothing(_: Transaction) -> None:
    """A job that only marks a place in the queue."""
