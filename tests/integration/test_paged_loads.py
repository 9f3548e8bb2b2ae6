"""Loads of a paged engine that end otherwise than they should: nobody logs what was computed on unfilled blocks."""

from __future__ import annotations

import threading

from tests.integration.paged_engine import PagedOptions, answered, row_of, with_daemon
from tests.integration.test_paged_engine import PROMPT, assert_in_log


def test_rows_of_a_step_in_which_a_load_failed_are_logged_after_it(tmp_path, monkeypatch):
    """Another request may have computed them on the blocks that were not filled: the engine says so after the step."""
    with with_daemon(tmp_path / "s") as (daemon, engine):
        first = answered(engine, PROMPT, 120)
        neighbour = engine.add("n", PROMPT[:20])
        engine.run_until("n", 30)
        engine.add("b", first.tokens, "s")
        seen: list[int] = []
        load = engine.worker.load

        def failing(plan):
            """The load of this step fails."""
            with monkeypatch.context() as patched:
                if plan.loads:
                    patched.setattr(engine.store, "scatter", lambda *_: 1 / 0)
                    seen.append(neighbour.computed)
                load(plan)

        engine.worker.load = failing  # type: ignore[method-assign]
        key = next(key for key, entry in engine.worker._entries.items() if entry.ask.request.session == "n")
        engine.step_until(lambda: seen)
        assert seen == [engine.worker._entries[key].rows.length]
        engine.run_until("b", 130)
        for name, session in (("b", "s"), ("n", "n")):
            assert_in_log(daemon, engine, name, session)


def test_worker_that_is_closed_under_a_load_has_the_blocks_computed(tmp_path):
    """A fault elsewhere has closed it while the load waited for its thread: the step does not fail by it."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(at_once=20)) as (_, engine):
        first = answered(engine, PROMPT, 120)
        second = engine.add("b", first.tokens, "s")
        go_on = threading.Event()
        loads = engine.worker._stagers
        load = engine.worker.load
        parked: list[object] = []

        def behind_others(plan):
            """Both threads are busy when the load comes."""
            if plan.loads:
                parked.extend(loads.submit(go_on.wait, 5) for _ in range(2))
            load(plan)
            if plan.loads:
                engine.worker.close()

        engine.worker.load = behind_others  # type: ignore[method-assign]
        engine.step_until(lambda: second.running)
        go_on.set()
        engine.step(5)
        assert [2, 1] == [len(parked), engine.worker.counts.load_failures]
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")


def test_request_that_leaves_during_its_load_gives_its_blocks_back_afterwards(tmp_path, monkeypatch):
    """Not before the last row is in place, and once; nothing of it is held for the log."""
    with with_daemon(tmp_path / "s", wanted=PagedOptions(at_once=20)) as (_, engine):
        first = answered(engine, PROMPT, 120)
        real, go_on = engine.store.scatter, threading.Event()

        def slow(*arguments):
            """Wait until the test says so."""
            if threading.current_thread().name.startswith("kvlog-stage"):
                assert go_on.wait(5)
            real(*arguments)

        monkeypatch.setattr(engine.store, "scatter", slow)
        second = engine.add("b", first.tokens, "s")
        engine.step_until(lambda: second.loading)
        engine.step(2)
        assert not engine.finish("b").hold
        engine.step(2)
        assert second.blocks
        go_on.set()
        engine.step_until(lambda: not second.blocks)
        assert 64 == len(engine.free)
