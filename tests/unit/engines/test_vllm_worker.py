"""The worker's half when something breaks that nobody foresaw, and what it has counted."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvlog.checksums import digest
from kvlog.engines import vllm_worker
from kvlog.engines.replicator import ReplicationCounts
from kvlog.engines.step_plan import CloseAsk, Dropped, LoadAsk, OpenAsk, StepPlan, StepReport, TurnKey
from kvlog.engines.step_worker import WorkerCounts
from kvlog.engines.turn_state import TurnRequest
from kvlog.engines.turns import LoadCounts
from kvlog.engines.vllm_settings import ConnectorSettings
from kvlog.engines.vllm_worker import WorkerHalf
from kvlog.ids import SessionId
from kvlog.layout import DType, Identity, Layout
from kvlog.link.messages import PROTOCOL, EngineRank, Hello

KEY = TurnKey(1)


class Broken:
    """A worker whose methods raise once they are told to."""

    def __init__(self) -> None:
        self.counts = WorkerCounts()
        self.replicator = SimpleNamespace(counts=ReplicationCounts(), loads=LoadCounts())
        self.closed = threading.Event()
        self.raises = False

    def _do(self, *_: object) -> None:
        if self.raises:
            raise ZeroDivisionError

    before_step = load = after_step = _do

    def report(self) -> StepReport:
        self._do()
        return StepReport()

    def take_released(self) -> set[str]:
        return set()

    is_loading = False

    def take_received(self) -> set[str]:
        return set()

    def take_failed_blocks(self) -> set[int]:
        return set()

    def close(self) -> None:
        self.closed.set()


def half() -> tuple[Any, WorkerHalf]:
    """A worker and its half."""
    worker: Any = Broken()
    return worker, WorkerHalf(worker)


def test_unforeseen_error_never_reaches_the_engine() -> None:
    """It ends replication on this worker, once, and counts."""
    worker, one = half()
    worker.raises = True
    for do in (one.before_step, one.load, one.after_step):
        do(StepPlan())
    assert StepReport() == one.report()
    assert 1 == worker.counts.faults
    assert worker.closed.wait(5), "beside the step: leaving may take seconds"


def test_broken_worker_gives_every_held_block_back() -> None:
    """Blocks held before, and those that it is asked to hold from then on."""
    worker, one = half()
    one.before_step(StepPlan(closes=(CloseAsk(KEY, "a"),)))
    assert set() == one.take_released()
    worker.raises = True
    one.before_step(StepPlan(closes=(CloseAsk(KEY, "b"),)))
    assert ({"a", "b"}, set()) == (one.take_released(), one.take_released())
    one.before_step(StepPlan(closes=(CloseAsk(KEY, "c"),)))
    assert {"c"} == one.take_released()


def test_broken_worker_does_not_believe_in_a_load() -> None:
    """Its blocks are computed."""
    worker, one = half()
    worker.raises = True
    one.load(StepPlan(loads=(LoadAsk(KEY, 0, 20, (4, 7)),)))
    assert ({4, 7}, set()) == (one.take_failed_blocks(), one.take_failed_blocks())
    assert (StepReport(failed=(KEY,)), StepReport()) == (one.report(), one.report())


def test_broken_worker_lets_nobody_wait_for_a_load() -> None:
    """A load beside the steps that will never be done is over, and its blocks are computed."""
    worker, one = half()
    worker.raises = True
    plan = StepPlan(loads=(LoadAsk(KEY, 0, 20, (4, 7), "a"),))
    one.before_step(plan)
    one.load(plan)
    assert ({"a"}, {4, 7}, set()) == (one.take_received(), one.take_failed_blocks(), one.take_received())


def test_broken_worker_refuses_turns_that_are_asked_for() -> None:
    """Nobody waits for what it will never say, and the other ranks do not wait for it either."""
    worker, one = half()
    worker.raises = True
    ask = OpenAsk(KEY, TurnRequest(session=SessionId("s")), b"", 0, TurnKey(0))
    one.before_step(StepPlan(opens=(ask,)))
    assert ((Dropped(KEY, "fault"),), ()) == (one.report().dropped, one.report().dropped)


def test_ranks_but_the_first_leave_out_what_all_count_alike() -> None:
    """VLLM adds ranks up: a token is saved once, though every rank saves its part of it."""
    worker: Any = Broken()
    one = WorkerHalf(worker, counts_for_all=False)
    worker.counts.rows_loaded = worker.counts.load_failures = 5
    worker.replicator.counts.rows = worker.replicator.counts.ring_full = 7
    assert {"load_failures_blocks": 5, "skipped_steps": 7} == one.take_increments()


def test_increments_are_what_happened_since() -> None:
    """And a new link begins at 0 without taking anything back."""
    worker, one = half()
    worker.counts.rows_loaded = 5
    worker.replicator.counts.rows = 7
    assert {"loaded_tokens": 5, "saved_tokens": 7} == one.take_increments()
    assert {} == one.take_increments()
    worker.replicator = SimpleNamespace(counts=ReplicationCounts(rows=2), loads=LoadCounts(failed=1))
    assert {"saved_tokens": 2, "load_failures_unverified": 1} == one.take_increments()


@pytest.mark.parametrize(
    ("replicated", "rank", "expected"),
    [
        (False, EngineRank(), (1, 0, False)),
        (False, EngineRank(1, 2), (2, 1, False)),
        (True, EngineRank(), (1, 0, False)),
        (True, EngineRank(0, 2), (1, 0, False)),
        (True, EngineRank(1, 2), (1, 0, True)),
    ],
)
def test_worker_introduces_itself_by_what_its_store_says_of_the_ranks(
    monkeypatch: pytest.MonkeyPatch, replicated: bool, rank: EngineRank, expected: tuple[int, int, bool]
) -> None:
    """A shard for each, or one that all have: then nothing that the daemon is told depends on their number but that."""
    made: list[Any] = []

    class Noted:
        counts, loads = ReplicationCounts(), LoadCounts()

        def __init__(self, options: object, identity: Identity, rank: EngineRank) -> None:
            made.append(Hello(PROTOCOL, "", 0, identity, rank))

        def start(self) -> None:
            """Nobody is there."""

    monkeypatch.setattr(vllm_worker, "Replicator", Noted)
    settings = ConnectorSettings.parse({"link": "/nowhere"})
    store: Any = SimpleNamespace(is_replicated=replicated)
    identity = Identity(digest(b"m"), digest(b"w"), Layout(1, 1, 1, 8, DType.FLOAT32), 1)
    one = WorkerHalf.start(settings, store, identity, engine="vllm", rank=rank)
    one.worker._start_replicator(b"renewed")
    hellos = [(hello.identity.shards, hello.shard, hello.only_reads) for hello in made]
    assert [expected, expected] == hellos
    assert (rank.ranks, rank.rank) == (one.worker._options.ranks, one.worker._rank)
