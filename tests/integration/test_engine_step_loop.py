"""The step loop over a real link: what a stopped daemon, a failing hook and an end in mid-answer cost its requests."""

from __future__ import annotations

import threading
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
from kvlog.engines.synthetic import SyntheticCache, SyntheticModel, SyntheticOptions
from kvlog.ids import SessionId
from kvlog.link.messages import UnloggedReason
from tests.integration import one_request
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

SECONDS = 10.0
wait_for = partial(one_request.wait_for, seconds=SECONDS)
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

    def has_ended(self) -> bool:
        """Nothing more is told."""
        return self.end is not None

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
    made = Replicator(ReplicatorOptions(socket=path, **(replicator or {})), MODEL.identity)  # type: ignore[arg-type]
    made.start()
    made.wait_connected(1.0)
    loop = StepLoop(MODEL, made, StepLoopOptions(**options))
    loop.start()
    try:
        yield Looping(loop, made)
    finally:
        loop.close()
        made.close()


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


def test_loop_forgets_only_what_the_log_may_hold(tmp_path):
    """Under overload the daemon is not asked to claim sessions, one by one, only to end them."""
    knobs = Knobs(refuse=UnloggedReason.LOG_UNAVAILABLE)
    with FakeDaemon.running(tmp_path / "s", knobs) as running, looping(tmp_path / "s") as engine:
        for refuse in (UnloggedReason.LOG_UNAVAILABLE, None):
            knobs.refuse = refuse
            engine.submit(asked := ask(f"refused: {refuse}", named=False))
            wait_for(asked.has_ended)
        wait_for(lambda: running.daemon.forgotten)
        assert ["refused: None"] == running.daemon.forgotten


def test_loop_forgets_a_nameless_session_that_is_opened_after_its_answer(tmp_path):
    """The daemon's answer comes when nobody is left to close the turn by its request: the session ends with it."""
    knobs = Knobs(answer_after=0.5)
    with (
        FakeDaemon.running(tmp_path / "s", knobs) as running,
        looping(
            tmp_path / "s",
            wait_seconds=0.01,
            replicator={"close_seconds": 0.05, "answer_seconds": 0.01},
        ) as engine,
    ):
        engine.submit(asked := ask("late", tokens=2, named=False))
        wait_for(asked.has_ended)
        assert not running.daemon.turns
        wait_for(lambda: running.daemon.forgotten)
        assert (["late"], [0]) == (
            running.daemon.forgotten,
            [turn.closed_at for turn in running.daemon.turns.values()],
        )


def test_loop_whose_hook_fails_goes_on_without_the_log(tmp_path, monkeypatch):
    """What goes wrong while rows are copied costs the link, is counted, and costs no answer."""
    copy = SyntheticCache.copy_rows

    def failing(self, start, out):
        if start == 20:
            raise MemoryError("too much")
        copy(self, start, out)

    monkeypatch.setattr(SyntheticCache, "copy_rows", failing)
    with FakeDaemon.running(tmp_path / "s"), looping(tmp_path / "s") as engine:
        asked = [ask(f"session number {k}", tokens=30) for k in range(3)]
        engine.submit(*asked)
        wait_for(lambda: all(one.end is not None for one in asked))
        assert ([None] * 3, [31] * 3) == ([one.kind for one in asked], [len(one.told) for one in asked])
        assert engine.replicator.counts.failures > 0
        monkeypatch.undo()
        wait_for(lambda: engine.replicator.connected)
        engine.submit(after := ask("after", tokens=3))
        wait_for(lambda: after.end is not None)
        assert isinstance(after.end, Finished)
        assert after.end.details.logged


def test_loop_whose_digests_fail_fails_that_request(tmp_path, monkeypatch):
    """A digest that cannot be made ends its own answer with a reason."""

    def failing(*_):
        raise MemoryError("too much")

    monkeypatch.setattr("kvlog.engines.step_loop.digests_at", failing)
    with looping(tmp_path / "s") as engine:
        one, other = ask("one"), ask("other")
        one.job.kv_digests = ()
        engine.submit(one, other)
        wait_for(lambda: one.end is not None and other.end is not None)
        assert ("internal", None) == (one.kind, other.kind)
        wait_for(lambda: engine.loop.active == 0)
        assert engine.loop.failure is None


def test_loop_that_fails_tells_everyone_and_takes_nothing_more(tmp_path, monkeypatch):
    """The only computing thread does not end in silence: all jobs fail, further ones are refused, the turns end."""
    with FakeDaemon.running(tmp_path / "s") as running, looping(tmp_path / "s", active_max=2) as engine:
        asked = [ask(f"session {k}", tokens=100_000) for k in range(4)]
        engine.submit(*asked)
        wait_for(lambda: engine.loop.queued == 2 and all(one.told for one in asked[:2]))
        monkeypatch.setattr(StepLoop, "_keep_pace", None)
        wait_for(lambda: all(one.end is not None for one in asked))
        assert ["internal"] * 4 == [one.kind for one in asked]
        assert "TypeError" in (engine.loop.failure or "")
        assert not engine.loop.submit(ask("late").job)
        wait_for(lambda: running.daemon.causes)


def test_loop_told_nothing_by_a_sink_that_raises_drops_its_request_only(tmp_path):
    """A sender who cannot be told is a sender who has left."""
    with looping(tmp_path / "s") as engine:

        def broken(_: AnswerEvent) -> None:
            raise RuntimeError

        left, other = ask("left", tokens=100_000), ask("other")
        left.job.sink = broken
        engine.submit(left, other)
        wait_for(lambda: other.end is not None and engine.loop.active == 0)
        assert other.kind is None


def test_loop_that_is_closed_tells_every_job_it_took(tmp_path):
    """A job that waits for a thread, for the daemon or for a place when the engine stops is told so."""
    knobs = Knobs(answer_after=0.3)
    with FakeDaemon.running(tmp_path / "s", knobs), looping(tmp_path / "s", active_max=2) as engine:
        asked = [ask(f"session {k}", tokens=100_000) for k in range(6)]
        engine.submit(*asked)
        engine.loop.close()
        assert ["stopping"] * 6 == [one.kind for one in asked]


def test_loop_that_is_closed_tells_a_job_that_waits_for_an_opener(tmp_path):
    """Openers that never came to run are run, not dropped."""
    with looping(tmp_path / "s", active_max=2) as engine:
        gate = threading.Event()
        openers = engine.loop._openers
        for _ in range(2):
            openers.submit(gate.wait, SECONDS)
        waiting = ask("waiting", tokens=100_000)
        engine.submit(waiting)
        closing = threading.Thread(target=engine.loop.close)
        closing.start()
        wait_for(lambda: openers._shutdown)
        gate.set()
        closing.join(SECONDS)
        assert "stopping" == waiting.kind
