"""An engine with a paged cache and no model: a scheduler, workers, and rows that are a function of the tokens.

Steps as vLLM makes them: admit or ask again, give blocks, plan, load, compute, save, draw. A row depends on all tokens
up to its position and on the rank that keeps it, so a row of another session, position, prefix or shard is a wrong one.

With several ranks a step's rows come of what all of them have: where one computes on a block that was not filled, the
rows of all of them are wrong.
"""

from __future__ import annotations

import math
import os
import pickle
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from kvlog.checksums import checksum, digest
from kvlog.engines.paged_rows import PagedStore, PageMap
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.step_plan import StepReport
from kvlog.engines.step_planner import FinishedRequest, NewRequest, PlannerOptions, Scheduled, StepPlanner
from kvlog.engines.step_worker import StepWorker, WorkerOptions
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId
from kvlog.layout import DType, Identity, Layout
from kvlog.link.client import ClientOptions
from kvlog.link.messages import EngineRank
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    import numpy.typing as npt

    from kvlog.engines.row_store import RowStore
    from kvlog.engines.step_plan import StepPlan

    Memory = npt.NDArray[np.uint16]

__all__ = ["LATENT", "LAYOUT", "SIZE", "PagedEngine", "PagedOptions", "paged", "row_of", "with_daemon"]

LAYOUT = Layout(3, 2, 2, 16, DType.BFLOAT16)
LATENT = Layout(3, 1, 1, 64, DType.BFLOAT16)
"""Rows of as many bytes, which all ranks have alike."""
SIZE = 16
_MODEL = digest(b"paged")
_SECONDS = 20.0


def row_of(tokens: list[int], position: int, shard: int = 0) -> bytes:
    """What every paged engine computes there."""
    seed = checksum(repr((tokens[: position + 1], shard) if shard else tokens[: position + 1]).encode())
    return np.random.default_rng(seed).bytes(LAYOUT.row_bytes)


@dataclass
class Request:
    """One request, waiting, running or over."""

    name: str
    tokens: list[int]
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    running: bool = False
    fresh: bool = False
    loading: bool = False
    over: FinishedRequest | None = None


class PagedEngine:
    """Used by the test's thread, step by step."""

    def __init__(
        self,
        start_replicator: Callable[[int, bytes], Replicator],
        planner: PlannerOptions,
        worker: WorkerOptions,
        wanted: PagedOptions,
    ) -> None:
        layout = wanted.layout
        page = (SIZE, layout.planes, layout.head_dim)
        order = np.arange(math.prod(page)).reshape(page)
        shape = (layout.layers, wanted.blocks, layout.kv_heads, order.size)
        memories = [np.zeros(shape, np.uint16) for _ in range(planner.ranks)]
        self.stores = [PagedStore(list(memory), PageMap(order), layout) for memory in memories]
        self.planner = StepPlanner(planner)
        self.workers = [
            StepWorker(partial(start_replicator, rank), store, rank, worker)
            for rank, store in enumerate(map(wanted.over, memories) if wanted.over else self.stores)
        ]
        self.requests: dict[str, Request] = {}
        self.free = list(range(wanted.blocks))
        self.chunk = 64
        self.wait_seconds = planner.wait_seconds
        self.plans: list[StepPlan] = []
        self._preempted: list[str] = []
        self._counted: Counter[tuple[str, str]] = Counter()

    @property
    def worker(self) -> StepWorker:
        """The first one."""
        return self.workers[0]

    @property
    def store(self) -> PagedStore:
        """The first one's."""
        return self.stores[0]

    @property
    def replicator(self) -> Replicator:
        """The first worker's."""
        return self.worker.replicator

    def add(
        self,
        name: str,
        tokens: list[int],
        session: str | None = None,
        *,
        named: bool = True,
        take_over: bool = False,
    ) -> Request:
        """A new request."""
        request = self.requests[name] = Request(name, list(tokens))
        turn = TurnRequest(
            session=SessionId(session or name), wait_seconds=self.wait_seconds / 2, take_over=take_over
        )
        self.planner.add(NewRequest(name, turn, request.tokens, named=named))
        return request

    def finish(self, name: str) -> FinishedRequest:
        """A request is over; its blocks are free at once unless they are held."""
        request = self.requests[name]
        request.running = False
        request.over = self.planner.finished(name, len(request.blocks), request.computed)
        if not request.over.hold and not request.loading:
            self._give_back(request)
        return request.over

    def preempt(self, name: str) -> None:
        """Its blocks are taken from it; it waits again."""
        request = self.requests[name]
        request.running, request.computed = False, 0
        self._give_back(request)
        self._preempted.append(name)

    def step(self, count: int = 1) -> None:
        """Whole steps."""
        for _ in range(count):
            self._step()

    def step_until(self, condition: Callable[[], object]) -> None:
        """Steps until something is so."""
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline, "it never came"
            self._step()
            time.sleep(0.001)

    def run_until(self, name: str, length: int) -> None:
        """Steps until a request has so many tokens."""
        deadline = time.monotonic() + _SECONDS
        while len(self.requests[name].tokens) < length:
            assert time.monotonic() < deadline, f"{name} stands at {len(self.requests[name].tokens)}"
            self._step()
            if not self.requests[name].running:
                time.sleep(0.001)

    def shard(self, rank: int) -> int:
        """Whose rows a rank has."""
        return 0 if self.store.is_replicated else rank

    def rows(self, name: str, rank: int = 0) -> list[bytes]:
        """What a request's blocks hold."""
        request = self.requests[name]
        out = bytearray(request.computed * LAYOUT.row_bytes)
        self.stores[rank].gather(request.blocks, 0, memoryview(out))
        return [bytes(out[at : at + LAYOUT.row_bytes]) for at in range(0, len(out), LAYOUT.row_bytes)]

    def _step(self) -> None:
        for request in self.requests.values():
            if not request.running and not request.loading and request.over is None:
                self._admit(request)
        running = [request for request in self.requests.values() if request.running]
        counts = {one.name: min(self.chunk, len(one.tokens) - one.computed) for one in running}
        plan = self.planner.plan([self._scheduled(one, counts[one.name]) for one in running], self._preempted)
        self._preempted = []
        plan = pickle.loads(pickle.dumps(plan))
        self.plans.append(plan)
        for worker in self.workers:
            worker.before_step(plan)
            worker.load(plan)
        unfilled = {block for worker in self.workers for block in worker._failed_blocks}
        for request in running:
            self._compute(request, counts[request.name], spoilt=not unfilled.isdisjoint(request.blocks))
        for worker in self.workers:
            worker.after_step(plan)
        released, received = self._of_all("take_released"), self._of_all("take_received")
        failed = {block for worker in self.workers for block in worker.take_failed_blocks()}
        report = self._report()
        for request in running:
            self._draw(request, failed)
        for name in received:
            self._received(self.requests[name], failed)
        self.planner.take(report)
        self.planner.released(released)
        for name in released:
            self._give_back(self.requests[name])

    def _received(self, request: Request, failed: set[int]) -> None:
        """A load beside the steps is over: the request goes on, or, if it has left, its blocks are free only now."""
        request.loading = False
        if request.over is not None:
            self._give_back(request)
            return
        bad = [index for index, block in enumerate(request.blocks) if block in failed]
        request.computed = bad[0] * SIZE if bad else request.computed
        request.running = request.computed > 0
        if not request.running:  # as vLLM does: it waits again, and asks again what can be loaded
            self._give_back(request)

    def _admit(self, request: Request) -> None:
        external = self.planner.matched(request.name, 0, time.monotonic())
        wanted = -(-len(request.tokens) // SIZE)
        if external is None or wanted > len(self.free):
            return
        request.blocks = [self.free.pop() for _ in range(wanted)]
        request.computed, request.fresh = external, True
        request.loading = self.planner.is_beside(external)
        request.running = not request.loading
        self.planner.allocated(request.name, request.blocks, external)

    def _scheduled(self, request: Request, count: int) -> Scheduled:
        fresh, request.fresh = request.fresh, False
        new = list(request.blocks) if fresh else []
        while len(request.blocks) * SIZE < request.computed + count:
            request.blocks.append(self.free.pop())
            new.append(request.blocks[-1])
        return Scheduled(request.name, request.computed, count, new, anew=fresh)

    def _report(self) -> StepReport:
        """What the workers say together, as vLLM puts it together."""
        reports = [worker.report() for worker in self.workers]
        said = [report for report in reports if not report.is_empty]
        whole = reduce(StepReport.aggregate, said, StepReport())
        return cast("StepReport", pickle.loads(pickle.dumps(whole)))

    def _of_all(self, call: str) -> set[str]:
        """Requests of which every worker has said so."""
        for worker in self.workers:
            self._counted.update((call, name) for name in getattr(worker, call)())
        done = {key for key, count in self._counted.items() if key[0] == call and count == len(self.workers)}
        for key in done:
            del self._counted[key]
        return {name for _, name in done}

    def _compute(self, request: Request, count: int, *, spoilt: bool) -> None:
        at = range(request.computed, request.computed + count)
        for rank, store in enumerate(self.stores):
            rows = b"".join(row_of(request.tokens, position, self.shard(rank)) for position in at)
            if spoilt and len(self.stores) > 1:
                rows = bytes([0xDD]) * len(rows)
            store.scatter(request.blocks, request.computed, memoryview(rows))
        request.computed += count

    def _draw(self, request: Request, failed: set[int]) -> None:
        bad = [index for index, block in enumerate(request.blocks) if block in failed]
        if bad:
            request.computed = bad[0] * SIZE
        elif request.computed == len(request.tokens):
            request.tokens.append(checksum(repr(request.tokens).encode()) % 1000)

    def _give_back(self, request: Request) -> None:
        """Free blocks are overwritten by whoever comes next: here at once."""
        for block in request.blocks:
            nonsense = memoryview(bytes([0xEE]) * (SIZE * LAYOUT.row_bytes))
            for store in self.stores if request.name not in self._preempted else ():
                store.scatter([block], 0, nonsense)
        self.free += request.blocks
        request.blocks = []


@dataclass(frozen=True, kw_only=True)
class PagedOptions:
    """What a test may want of its engine.

    Args:
        layout: of a row: a part of it for each rank, or LATENT.
        ranks: each has a link of its own. Several need a real daemon, a process that a busy machine may keep silent for
            longer than a fake one.
        blocks: of the cache.
        wait: seconds that a request waits for its rows.
        at_once: rows that are loaded in a step; more are loaded beside the steps.
        few: who has no more tokens than so many to compute does not wait.
        over: makes of the cache what the workers read and write it through.
    """

    layout: Layout = LAYOUT
    ranks: int = 1
    blocks: int = 64
    wait: float = 2.0
    at_once: int = 1000
    few: int = 0
    over: Callable[[Memory], RowStore] | None = None


@contextmanager
def paged(path: Path, wanted: PagedOptions | None = None, **worker: Any) -> Iterator[PagedEngine]:
    """An engine that looks for a daemon; `worker`: WorkerOptions."""
    wanted = wanted or PagedOptions()
    dead_seconds = 0.3 if wanted.ranks == 1 else 10.0
    client = ClientOptions(connect_seconds=0.5, ping_seconds=0.05, dead_seconds=dead_seconds)
    options = ReplicatorOptions(
        socket=path,
        backoff_seconds_min=0.01,
        backoff_seconds_max=0.05,
        step_bytes=20 * LAYOUT.row_bytes,
        client=client,
    )

    def start_replicator(rank: int, renewal: bytes) -> Replicator:
        """Weights by another name are another model."""
        shards = 1 if wanted.layout is LATENT else wanted.ranks
        weights = digest(b"weights", renewal)
        identity = Identity(_MODEL, weights, wanted.layout, shards)
        replicator = Replicator(options, identity, EngineRank(rank, wanted.ranks))
        replicator.start()
        return replicator

    planner = PlannerOptions(
        wait_seconds=wanted.wait,
        ranks=wanted.ranks,
        held_blocks_max=wanted.blocks,
        rows_at_once_max=wanted.at_once,
        compute_tokens=wanted.few,
        instance=os.urandom(16),
    )
    workers = WorkerOptions(ranks=wanted.ranks, **worker)
    engine = PagedEngine(start_replicator, planner, workers, wanted)
    try:
        yield engine
    finally:
        for each in engine.workers:
            each.close()


@contextmanager
def with_daemon(
    path: Path, knobs: Knobs | None = None, wanted: PagedOptions | None = None, **worker: Any
) -> Iterator[tuple[FakeDaemon, PagedEngine]]:
    """An engine that has found its daemon."""
    with FakeDaemon.running(path, knobs) as running, paged(path, wanted, **worker) as engine:
        assert engine.replicator.wait_connected(_SECONDS)
        yield running.daemon, engine


def answered(engine: PagedEngine, prompt: list[int], length: int) -> Request:
    """Session "s" was answered up to so many tokens by request "a", which is over; its last rows had three steps."""
    request = engine.add("a", prompt, "s")
    engine.run_until("a", length)
    engine.finish("a")
    engine.step(3)
    return request
