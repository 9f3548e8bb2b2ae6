"""An engine with a paged cache and no model: a scheduler, one worker, and rows that are a function of the tokens.

Steps as vLLM makes them: admit or ask again, give blocks, plan, load, compute, save, draw. A row depends on all tokens
up to its position, so a row of another session, position or prefix is a wrong one.
"""

from __future__ import annotations

import pickle
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from kvlog.checksums import checksum, digest
from kvlog.engines.paged_rows import PagedStore, PageMap
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.step_planner import FinishedRequest, NewRequest, PlannerOptions, Scheduled, StepPlanner
from kvlog.engines.step_worker import StepWorker, WorkerOptions
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId, Shard
from kvlog.layout import DType, Identity, Layout
from kvlog.link.client import ClientOptions
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvlog.engines.step_plan import StepPlan

__all__ = ["LAYOUT", "SIZE", "PagedEngine", "paged", "row_of", "with_daemon"]

LAYOUT = Layout(3, 2, 2, 16, DType.BFLOAT16)
SIZE = 16
_PAGE = SIZE * LAYOUT.planes * LAYOUT.head_dim
_IDENTITY = Identity(digest(b"paged"), digest(b"weights", b""), LAYOUT, 1)
_SECONDS = 5.0


def row_of(tokens: list[int], position: int) -> bytes:
    """What every paged engine computes there."""
    seed = checksum(repr(tokens[: position + 1]).encode())
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
        start_replicator: Callable[[int], Replicator],
        blocks: int,
        planner: PlannerOptions,
        worker: WorkerOptions,
    ) -> None:
        memory = np.zeros((LAYOUT.layers, blocks, LAYOUT.kv_heads, _PAGE), np.uint16)
        order = np.arange(_PAGE).reshape(SIZE, LAYOUT.planes, LAYOUT.head_dim)
        self.store = PagedStore(list(memory), PageMap(order), LAYOUT)
        self.planner = StepPlanner(planner)
        self.worker = StepWorker(start_replicator, self.store, Shard(0), worker)
        self.requests: dict[str, Request] = {}
        self.free = list(range(blocks))
        self.chunk = 64
        self.plans: list[StepPlan] = []
        self._preempted: list[str] = []

    @property
    def replicator(self) -> Replicator:
        """The worker's."""
        return self.worker.replicator

    def add(self, name: str, tokens: list[int], session: str | None = None, *, named: bool = True) -> Request:
        """A new request."""
        request = self.requests[name] = Request(name, list(tokens))
        turn = TurnRequest(session=SessionId(session or name))
        self.planner.add(NewRequest(name, turn, request.tokens, named=named))
        return request

    def finish(self, name: str) -> FinishedRequest:
        """A request is over; its blocks are free at once unless they are held."""
        request = self.requests[name]
        request.running = False
        request.over = self.planner.finished(name, len(request.blocks))
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

    def rows(self, name: str) -> list[bytes]:
        """What a request's blocks hold."""
        request = self.requests[name]
        out = bytearray(request.computed * LAYOUT.row_bytes)
        self.store.gather(request.blocks, 0, memoryview(out))
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
        self.worker.before_step(plan)
        self.worker.load(plan)
        for request in running:
            self._compute(request, counts[request.name])
        self.worker.after_step(plan)
        released, received = self.worker.take_released(), self.worker.take_received()
        failed = self.worker.take_failed_blocks()
        report = pickle.loads(pickle.dumps(self.worker.report()))
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

    def _compute(self, request: Request, count: int) -> None:
        at = range(request.computed, request.computed + count)
        rows = b"".join(row_of(request.tokens, position) for position in at)
        self.store.scatter(request.blocks, request.computed, memoryview(rows))
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
            if request.name not in self._preempted:
                self.store.scatter([block], 0, nonsense)
        self.free += request.blocks
        request.blocks = []


@contextmanager
def paged(
    path: Path, *, blocks: int = 64, wait: float = 2.0, at_once: int = 1000, **worker: float
) -> Iterator[PagedEngine]:
    """An engine that looks for a daemon."""
    client = ClientOptions(connect_seconds=0.5, ping_seconds=0.05, dead_seconds=0.3)
    options = ReplicatorOptions(
        socket=path,
        backoff_seconds_min=0.01,
        backoff_seconds_max=0.05,
        step_bytes=20 * LAYOUT.row_bytes,
        client=client,
    )

    def start_replicator(generation: int) -> Replicator:
        """Each generation of weights is another model."""
        identity = replace(_IDENTITY, weights=digest(b"weights", bytes(generation)))
        replicator = Replicator(options, identity, Shard(0))
        replicator.start()
        return replicator

    planner = PlannerOptions(wait_seconds=wait, held_blocks_max=blocks, rows_at_once_max=at_once)
    engine = PagedEngine(start_replicator, blocks, planner, WorkerOptions(**worker))  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        engine.worker.close()


@contextmanager
def with_daemon(
    path: Path, knobs: Knobs | None = None, **options: float
) -> Iterator[tuple[FakeDaemon, PagedEngine]]:
    """An engine that has found its daemon."""
    with FakeDaemon.running(path, knobs) as running, paged(path, **options) as engine:  # type: ignore[arg-type]
        assert engine.replicator.wait_connected(_SECONDS)
        yield running.daemon, engine
