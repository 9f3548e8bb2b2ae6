"""A paged engine over a real link: what is saved, what is loaded, and whose blocks are read."""

from __future__ import annotations

import threading
import time

import pytest

from kvlog.engines.step_plan import TurnKey
from kvlog.link.messages import UnloggedReason
from tests.integration.fake_daemon import FakeDaemon, Knobs
from tests.integration.one_request import wait_for
from tests.integration.paged_engine import (
    SIZE,
    PagedEngine,
    PagedOptions,
    answered,
    paged,
    row_of,
    with_daemon,
)

PROMPT = list(range(100, 200))


def assert_in_log(daemon: FakeDaemon, engine: PagedEngine, name: str, session: str | None = None) -> None:
    """The daemon comes to have the rows of all computed positions, and they are right."""
    request = engine.requests[name]
    kept = daemon.sessions[session or name]
    wait_for(lambda: len(kept.tokens) >= request.computed, f"{len(kept.tokens)} of {request.computed} rows")
    assert request.tokens[: request.computed] == kept.tokens
    assert [row_of(request.tokens, position) for position in range(request.computed)] == kept.rows


def closed(daemon: FakeDaemon, turn: int) -> int:
    """Where a turn was closed, once it is."""
    wait_for(lambda: turn in daemon.turns and daemon.turns[turn].closed_at is not None, "the turn stays open")
    at = daemon.turns[turn].closed_at
    assert at is not None
    return at


def test_prefill_in_chunks_and_decode_are_saved_whole(tmp_path):
    """Every row once, whatever a step computes; the budget makes a long prefill catch up over steps."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        engine.chunk = 30
        engine.add("a", PROMPT)
        engine.run_until("a", 130)
        assert_in_log(daemon, engine, "a")
        assert 0 == daemon.refused_entries


def test_batch_of_sessions_is_kept_apart(tmp_path):
    """Eight sessions of several lengths in the same steps."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(blocks=200)) as (daemon, engine):
        for k in range(8):
            engine.add(f"s{k}", PROMPT[: 20 + 7 * k])
        engine.run_until("s7", 100)
        for k in range(8):
            assert_in_log(daemon, engine, f"s{k}")


def test_second_turn_loads_what_the_log_has(tmp_path):
    """All but the last token are loaded, right, and only new rows are logged."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        first = engine.add("a", PROMPT, "s")
        engine.run_until("a", 120)
        assert engine.finish("a").hold
        engine.step(3)
        assert 119 == closed(daemon, 1)
        second = engine.add("b", [*first.tokens, 7, 8], "s")
        engine.run_until("b", 130)
        assert 119 == engine.worker.counts.rows_loaded
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")
        assert engine.finish("b").loaded == 119


def test_worker_bears_witness_of_a_turn(tmp_path):
    """What it knew, what was loaded, what its blocks hold, what each part of the way took; nothing once it is over."""
    with with_daemon(tmp_path / "s") as (_, engine):
        first = engine.add("a", PROMPT, "s")
        engine.run_until("a", 120)
        told = engine.worker.evidence(TurnKey(1))
        assert told is not None
        assert (100, 0, 0.0) == (told.known, told.loaded, told.times.attach_ms)
        engine.finish("a")
        engine.step(3)
        assert engine.worker.evidence(TurnKey(1)) is None
        engine.add("b", [*first.tokens, 7, 8], "s")
        engine.run_until("b", 130)
        told = engine.worker.evidence(TurnKey(2))
        assert told is not None
        assert ("s", len(first.tokens) + 2, 119) == (told.session, told.known, told.loaded)
        assert told.handle is not None
        assert told.handle.logged
        assert told.times.open_ms > 0
        assert told.times.attach_ms > 0
        rows = bytearray(told.rows.length * told.layout.row_bytes)
        told.rows.copy_rows(0, memoryview(rows))
        assert b"".join(engine.rows("b")) == rows


def test_long_load_is_done_beside_the_steps(tmp_path):
    """The others go on; the request goes on with all rows, and only new ones are logged."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(at_once=20)) as (daemon, engine):
        first = answered(engine, PROMPT, 120)
        engine.add("c", PROMPT)
        second = engine.add("b", [*first.tokens, 7, 8], "s")
        engine.run_until("b", 130)
        assert 119 == engine.worker.counts.rows_loaded
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")


def test_long_load_that_fails_is_computed(tmp_path, monkeypatch):
    """As a short one; the request is told that it is over, and which blocks are bad."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(at_once=20)) as (daemon, engine):
        first = answered(engine, PROMPT, 110)
        real = engine.store.scatter

        def broken(*arguments):
            """Fail beside the steps."""
            if threading.current_thread().name.startswith("kvlog-stage"):
                raise OSError
            real(*arguments)

        monkeypatch.setattr(engine.store, "scatter", broken)
        second = engine.add("b", first.tokens, "s")
        engine.run_until("b", 115)
        assert (0, 1) == (engine.worker.counts.rows_loaded, engine.worker.counts.load_failures)
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")


def test_load_beside_the_steps_that_always_fails_is_tried_once(tmp_path, monkeypatch):
    """A request whose load has failed comes back to the scheduler: what failed once is computed, not loaded again."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(at_once=0)) as (daemon, engine):
        first = answered(engine, PROMPT, 110)
        real = engine.store.scatter

        def broken(*arguments):
            """Fail beside the steps."""
            if threading.current_thread().name.startswith("kvlog-stage"):
                raise OSError
            real(*arguments)

        monkeypatch.setattr(engine.store, "scatter", broken)
        second = engine.add("b", first.tokens, "s")
        engine.run_until("b", 115)
        assert (0, 1) == (engine.worker.counts.rows_loaded, engine.worker.counts.load_failures)
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")
        assert 0 == engine.finish("b").loaded


def test_row_that_does_not_verify_never_reaches_a_block(tmp_path):
    """The load is shorter, the rest is computed, and nobody had to be told that a load failed.

    LMCache/LMCache #3388: what could not be retrieved was served all the same.
    """
    with with_daemon(tmp_path / "s", Knobs(spoil_row=50)) as (daemon, engine):
        first = answered(engine, PROMPT, 110)
        second = engine.add("b", first.tokens, "s")
        engine.run_until("b", 115)
        counts = engine.worker.counts
        assert (50, 0, 1) == (counts.rows_loaded, counts.load_failures, engine.replicator.loads.failed)
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")


def test_load_that_fails_gives_its_blocks_back(tmp_path, monkeypatch):
    """Whatever went wrong: the blocks are computed, and what was computed on them is not logged."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        first = answered(engine, PROMPT, 110)
        second = engine.add("b", first.tokens, "s")
        real = engine.store.scatter

        def broken(*_):
            """Fail once."""
            monkeypatch.setattr(engine.store, "scatter", real)
            raise OSError

        wait_for(lambda: _matched(engine, "b"))
        monkeypatch.setattr(engine.store, "scatter", broken)
        engine.run_until("b", 115)
        counts = engine.worker.counts
        assert (0, 1, 1) == (counts.rows_loaded, counts.load_failures, counts.faults)
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert_in_log(daemon, engine, "b", "s")


def _matched(engine: PagedEngine, name: str) -> bool:
    """Step until the next admission will load."""
    if engine.planner.matched(name, 0, time.monotonic()):
        return True
    plan = engine.planner.plan((), ())
    engine.worker.before_step(plan)
    engine.worker.after_step(plan)
    engine.planner.take(engine.worker.report())
    return False


def test_preempted_request_resumes_from_its_own_log(tmp_path):
    """Its blocks go to another; the log has only its own rows, and gives them back.

    vllm-project/vllm #52360: a preempted request's blocks were still read for the store when others wrote to them.
    """
    with with_daemon(tmp_path / "s", wanted=PagedOptions(blocks=20)) as (daemon, engine):
        engine.add("a", PROMPT)
        engine.run_until("a", 120)
        engine.preempt("a")
        engine.add("b", PROMPT[:90])
        engine.run_until("a", 140)
        assert 119 == closed(daemon, 1)
        assert engine.worker.counts.rows_loaded >= 119
        for name in "ab":
            assert_in_log(daemon, engine, name)
        assert 0 == daemon.refused_entries


def test_finished_request_behind_its_cursor_is_held_until_it_is_read(tmp_path):
    """A daemon that does not read for a while costs blocks for a while, and no row."""
    with with_daemon(tmp_path / "s", Knobs(ring_bytes=1 << 14, paused=True)) as (daemon, engine):
        request = engine.add("a", PROMPT)
        engine.run_until("a", 120)
        assert engine.finish("a").hold
        engine.step(5)
        assert request.blocks
        daemon.knobs.paused = False
        _until_given_back(daemon, engine, "a")
        assert 119 == closed(daemon, 1)
        assert [row_of(request.tokens, p) for p in range(119)] == daemon.sessions["a"].rows


def test_finished_request_is_held_for_a_bounded_time(tmp_path):
    """Then its log ends at the cursor: a shorter prefix, and no row of somebody else.

    vllm-project/vllm #46951: blocks of transfers in flight were given to the next request.
    """
    knobs = Knobs(ring_bytes=1 << 14, paused=True)
    with with_daemon(tmp_path / "s", knobs, hold_seconds=0.1) as (daemon, engine):
        request = engine.add("a", PROMPT)
        engine.run_until("a", 120)
        engine.finish("a")
        engine.step_until(lambda: not request.blocks)
        daemon.knobs.paused = False
        at = _closed_after_reading(daemon, engine)
        assert 0 < at < 119
        assert [row_of(request.tokens, p) for p in range(at)] == daemon.sessions["a"].rows
        assert 1 == engine.replicator.counts.turns_cut


def _until_given_back(daemon: FakeDaemon, engine: PagedEngine, name: str) -> None:
    def given_back() -> bool:
        for peer in daemon.peers:
            daemon.drain(peer)
        engine.step()
        return not engine.requests[name].blocks

    wait_for(given_back)


def _closed_after_reading(daemon: FakeDaemon, engine: PagedEngine) -> int:
    for peer in daemon.peers:
        daemon.drain(peer)
    engine.step()
    return closed(daemon, 1)


def test_next_turn_waits_for_the_one_that_is_being_closed(tmp_path):
    """A client that goes on at once is not told that its own last turn is in the way."""
    knobs = Knobs(ring_bytes=1 << 14, paused=True)
    with with_daemon(tmp_path / "s", knobs) as (daemon, engine):
        first = engine.add("a", PROMPT, "s")
        engine.run_until("a", 120)
        engine.finish("a")
        second = engine.add("b", first.tokens, "s")
        engine.step(3)
        assert (1, False) == (len(daemon.opened), second.running)
        daemon.knobs.paused = False
        _until_given_back(daemon, engine, "a")
        engine.run_until("b", 130)
        assert 119 == engine.worker.counts.rows_loaded


def test_request_aborted_before_its_answer_closes_its_turn(tmp_path):
    """A client that left while the daemon was thinking."""
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.05)) as (daemon, engine):
        engine.add("a", PROMPT)
        engine.step(2)
        assert not engine.finish("a").hold
        engine.step(2)
        wait_for(lambda: daemon.turns)
        assert 0 == closed(daemon, 1)
        wait_for(lambda: daemon.released == [1])


def test_late_answer_is_logged_from_the_first_row_without_a_load(tmp_path):
    """The request does not wait longer than it may; its rows are logged once the turn is there."""
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.3), PagedOptions(wait=0.05)) as (daemon, engine):
        engine.add("a", PROMPT)
        began = time.monotonic()
        engine.run_until("a", 105)
        assert time.monotonic() - began < 0.3
        engine.step_until(lambda: daemon.turns and daemon.sessions["a"].rows)
        engine.step(20)
        assert_in_log(daemon, engine, "a")
        assert 0 == engine.worker.counts.rows_loaded


def test_request_with_little_to_compute_waits_for_no_answer_and_is_logged_whole(tmp_path):
    """Its turn opens while it is computed."""
    wanted = PagedOptions(few=SIZE)
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.3), wanted) as (daemon, engine):
        engine.add("a", PROMPT[:SIZE])
        began = time.monotonic()
        engine.run_until("a", SIZE + 1)
        assert time.monotonic() - began < 0.3
        engine.step_until(lambda: daemon.turns and daemon.sessions["a"].rows)
        engine.step(20)
        assert_in_log(daemon, engine, "a")
        engine.add("b", PROMPT)
        began = time.monotonic()
        engine.run_until("b", len(PROMPT) + 1)
        assert time.monotonic() - began >= 0.3, "the control: with more to compute it waits"
        assert 0 == engine.worker.counts.rows_loaded


def test_request_with_little_to_compute_that_ends_before_its_answer_is_held_and_logged(tmp_path):
    """One token of an answer, in one step: its rows are read from the blocks that are kept for it."""
    wanted = PagedOptions(few=SIZE)
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.3), wanted) as (daemon, engine):
        engine.add("a", PROMPT[:SIZE])
        engine.run_until("a", SIZE + 1)
        assert not daemon.turns or not daemon.sessions["a"].rows, "it ended before its turn was there"
        assert engine.finish("a").hold
        engine.step_until(lambda: daemon.turns and daemon.turns[1].closed_at is not None)
        assert SIZE == closed(daemon, 1)
        assert PROMPT[:SIZE] == daemon.sessions["a"].tokens


def test_turn_behind_one_that_ended_before_its_answer_is_logged_too(tmp_path):
    """However little it has to compute: it waits until the one before it is over."""
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.3), PagedOptions(few=SIZE)) as (daemon, engine):
        first = engine.add("a", PROMPT[:8], "s")
        engine.run_until("a", 9)
        assert engine.finish("a").hold
        second = engine.add("b", [*first.tokens, 7], "s")
        engine.run_until("b", 11)
        engine.finish("b")
        engine.step_until(lambda: 2 in daemon.turns and daemon.turns[2].closed_at is not None)
        assert second.tokens[:10] == daemon.sessions["s"].tokens


def test_engine_without_a_daemon_serves_at_once(tmp_path):
    """Nothing is waited for, nothing is held for long, nothing fails."""
    with paged(tmp_path / "s", hold_seconds=0.05) as engine:
        request = engine.add("a", PROMPT)
        engine.run_until("a", 110)
        engine.finish("a")
        engine.step_until(lambda: not request.blocks)
        assert (0, 0) == (engine.worker.counts.faults, engine.replicator.counts.rows)


def test_daemon_that_comes_late_gets_all_rows_of_running_requests(tmp_path):
    """From the first row, out of blocks that are still held."""
    with paged(tmp_path / "s") as engine:
        engine.add("a", PROMPT)
        engine.run_until("a", 110)
        with FakeDaemon.running(tmp_path / "s") as running:
            engine.step_until(lambda: running.daemon.turns and running.daemon.sessions["a"].rows)
            engine.step(20)
            assert_in_log(running.daemon, engine, "a")


def test_fenced_turn_is_dropped_and_the_request_goes_on(tmp_path):
    """The planner hears of it, and nothing more is written."""
    with FakeDaemon.running(tmp_path / "s") as running, paged(tmp_path / "s") as engine:
        assert engine.replicator.wait_connected(5)
        engine.add("a", PROMPT)
        engine.run_until("a", 110)
        running.call(lambda: running.daemon.fence("a"))
        engine.step_until(lambda: engine.planner.unlogged)
        assert {"fenced": 1} == engine.planner.unlogged
        before = len(engine.requests["a"].tokens)
        engine.step(5)
        assert (before + 5, ()) == (len(engine.requests["a"].tokens), engine.plans[-1].rows)
        over = engine.finish("a")
        assert ("fenced", False) == (over.cause, over.hold)


def test_new_weights_void_the_log_for_whoever_holds_old_rows(tmp_path):
    """A running request stays unlogged; the next one comes under another identity, over another link."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        engine.add("a", PROMPT)
        engine.run_until("a", 110)
        assert_in_log(daemon, engine, "a")
        engine.planner.renew()
        engine.run_until("a", 120)
        assert 109 == closed(daemon, 1)
        assert {"old_weights": 1} == engine.planner.unlogged
        assert not engine.finish("a").hold
        assert engine.replicator.wait_connected(5)
        engine.add("b", PROMPT)
        engine.step_until(lambda: 2 in daemon.turns)
        engine.run_until("b", 110)
        first, second = (peer.hello.identity for peer in daemon.peers)
        assert ("weights", first.weights, second.weights) == first.difference(second)


def test_busy_session_is_served_unlogged(tmp_path):
    """The daemon says no for good: no row is written, no block is held."""
    with with_daemon(tmp_path / "s", Knobs(refuse=UnloggedReason.BUSY)) as (daemon, engine):
        engine.add("a", PROMPT)
        engine.run_until("a", 110)
        assert ({"busy": 1}, []) == (engine.planner.unlogged, daemon.sessions["a"].rows)
        assert not engine.finish("a").hold


def test_attach_beyond_the_staging_bound_is_computed(tmp_path):
    """Memory is bounded; the blocks of the pool are given back."""
    with with_daemon(tmp_path / "s", staging_bytes_max=1000) as (daemon, engine):
        first = answered(engine, PROMPT, 110)
        engine.add("b", first.tokens, "s")
        engine.run_until("b", 115)
        assert (0, 1) == (engine.worker.counts.rows_loaded, engine.worker.counts.staging_refused)
        wait_for(lambda: 2 in daemon.released)
        assert_in_log(daemon, engine, "b", "s")


def test_session_that_is_busy_with_our_own_last_turn_is_asked_for_again(tmp_path):
    """The daemon still works at a turn that has ended here; the next one is logged as soon as it is done."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        first = answered(engine, PROMPT, 105)
        daemon.knobs.refuse = UnloggedReason.BUSY
        engine.add("b", first.tokens, "s")
        engine.step_until(lambda: len(daemon.opened) >= 3)
        daemon.knobs.refuse = None
        engine.run_until("b", 115)
        engine.step(3)
        assert_in_log(daemon, engine, "b", "s")
        assert (104, {}) == (engine.worker.counts.rows_loaded, engine.planner.unlogged)


@pytest.mark.parametrize("named", [True, False])
def test_session_named_by_its_request_only_ends_with_it(tmp_path, named):
    """Nobody could ever ask for it again."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        engine.add("a", PROMPT, named=named)
        engine.run_until("a", 110)
        engine.finish("a")
        engine.step_until(lambda: daemon.turns and daemon.turns[1].closed_at is not None)
        if named:
            assert [] == daemon.forgotten
        else:
            wait_for(lambda: daemon.forgotten == ["a"])


def test_session_of_a_request_that_is_aborted_before_its_answer_ends_with_it(tmp_path):
    """The turn opens for nobody: only then is there something to end, or it would be claimed once more."""
    with with_daemon(tmp_path / "s", Knobs(answer_after=0.3)) as (daemon, engine):
        engine.add("a", PROMPT, named=False)
        engine.step(2)
        assert not engine.finish("a").hold
        engine.step(2)
        assert ([], {}) == (daemon.forgotten, daemon.turns)
        wait_for(lambda: daemon.forgotten == ["a"])
        assert 0 == closed(daemon, 1)


def test_blocks_are_of_the_size_that_the_tests_speak_of():
    """A hundred rows end within a block."""
    assert 0 != len(PROMPT) % SIZE
