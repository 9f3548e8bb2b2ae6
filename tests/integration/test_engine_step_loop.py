"""The step loop over a real link: what a stopped daemon, a failing hook and an end in mid-answer cost its requests."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from kvlog.engines.generation import Generation, GenerationRequest
from kvlog.engines.jobs import AnswerEvent, Failed, Finished, Job, JobSession
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.sampler import Sampler
from kvlog.engines.step_loop import StepLoop, StepLoopOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.ids import SessionId, Shard
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

SECONDS = 10.0
MODEL = SyntheticModel(SyntheticOptions(row_bytes=4096))


@dataclass
class Asked:
    """A job and what it was told."""

    job: Job
    told: list[AnswerEvent] = field(default_factory=list)

    @property
    def end(self) -> AnswerEvent | None:
        """Finished or Failed; None while it goes on."""
        return self.told[-1] if self.told and isinstance(self.told[-1], Finished | Failed) else None

    @property
    def kind(self) -> str | None:
        """How it failed."""
        return self.end.kind if isinstance(self.end, Failed) else None


def ask(name: str, tokens: int = 10, *, named: bool = True) -> Asked:
    """A job that is not submitted yet."""
    told: list[AnswerEvent] = []
    request = GenerationRequest(tuple(name.encode()), (), tokens, Sampler(), ())
    session = JobSession(SessionId(name), named, None)
    return Asked(Job(Generation(request, MODEL), session, told.append), told)


@dataclass
class Looping:
    """A started loop and its replicator."""

    loop: StepLoop
    replicator: Replicator

    def submit(self, *asked: Asked) -> None:
        """Submit jobs, each as soon as it is taken."""
        for one in asked:
            wait_for(partial(self.loop.submit, one.job))


@contextmanager
def looping(path: Path, *, replicator: dict[str, float] | None = None, **options) -> Iterator[Looping]:
    """A loop that has found its daemon, if there is one."""
    made = Replicator(ReplicatorOptions(socket=path, **(replicator or {})), MODEL.identity, Shard(0))  # type: ignore[arg-type]
    made.start()
    made.wait_connected(1.0)
    loop = StepLoop(MODEL, made, StepLoopOptions(**options))
    loop.start()
    try:
        yield Looping(loop, made)
    finally:
        loop.close()
        made.close()


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def test_loop_over_a_full_ring_answers_at_its_own_pace(tmp_path):
    """Never block the engine: a daemon that stands still costs finished requests rows in the log, and nobody time."""
    knobs = Knobs(ring_bytes=1 << 17, paused=True)
    with (
        FakeDaemon.running(tmp_path / "s", knobs) as running,
        looping(tmp_path / "s", active_max=4, replicator={"close_seconds": 2.0}) as engine,
    ):
        asked = [ask(f"session {k}") for k in range(60)]
        began = time.monotonic()
        engine.submit(*asked)
        wait_for(lambda: all(one.end is not None for one in asked))
        assert time.monotonic() - began < 2.0
        assert [None] * 60 == [one.kind for one in asked]
        wait_for(lambda: engine.loop.active == 0)
        turns = running.daemon.turns
        wait_for(lambda: sum(turn.closed_at is None for turn in turns.values()) <= 8)  # the closers' own
        assert engine.replicator.counts.turns_cut >= 60 - 8 - 4  # the ring has room for the first few


def test_loop_writes_what_a_finished_request_left_behind(tmp_path):
    """A prefill that is longer than a step may write is in the log a moment after its answer, whole."""
    with (
        FakeDaemon.running(tmp_path / "s") as running,
        looping(tmp_path / "s", replicator={"step_bytes": 4096}) as engine,
    ):
        one = ask("x" * 100, tokens=1)
        engine.submit(one)
        wait_for(lambda: one.end is not None)
        wait_for(lambda: [turn.closed_at for turn in running.daemon.turns.values()] == [100])
        assert 100 == len(running.daemon.sessions["x" * 100].tokens)
        assert 0 == engine.replicator.counts.turns_cut
