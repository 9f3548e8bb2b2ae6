"""A paged engine of two ranks over real daemons and a log: one turn of two links, one shard of each."""

from __future__ import annotations

import asyncio
import signal
import time
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.integration.paged_engine import LAYOUT, PagedEngine, PagedOptions, paged, row_of
from tests.nodes import Node, daemon_config, logged_length, until
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.servers import logged_session

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

PROMPT = list(range(100, 200))
RANKS = 2
AWAY_SECONDS = 3.0


@contextmanager
def daemons(folder: Path, names: str) -> Iterator[list[Node]]:
    """Daemons over one log."""
    url = f"file://{folder}/log"
    nodes = [Node(folder, name, daemon_config(folder, name, url)) for name in names]
    try:
        for node in nodes:
            node.start_daemon()
            node.wait_log()
        yield nodes
    finally:
        for node in nodes:
            node.close()


@contextmanager
def beside(node: Node, wanted: PagedOptions) -> Iterator[PagedEngine]:
    """An engine beside a daemon, all links up."""
    with paged(node.folder / f"{node.name}.sock", wanted) as engine:
        for worker in engine.workers:
            assert worker.replicator.wait_connected(5)
        yield engine


def two_ranks(node: Node, *, wait: float = 10.0, blocks: int = 64) -> AbstractContextManager[PagedEngine]:
    """An engine of two ranks beside a daemon."""
    return beside(node, PagedOptions(ranks=RANKS, wait=wait, blocks=blocks))


def expected_layers(tokens: list[int], shard: int, positions: int) -> list[bytes]:
    """What the log should hold of a shard, layer by layer."""
    rows = b"".join(row_of(tokens, position, shard) for position in range(positions))
    cut = np.frombuffer(rows, np.uint8).reshape(positions, LAYOUT.layers, -1)
    return [cut[:, layer].tobytes() for layer in range(LAYOUT.layers)]


def assert_logged(node: Node, engine: PagedEngine, name: str, session: str, positions: int) -> None:
    """The log holds that many positions of both shards, each with its own rank's bytes."""
    tokens = engine.requests[name].tokens
    for shard in range(RANKS):
        logged = logged_session(f"file://{node.folder}/log", session, node.folder, shard)
        assert tokens[:positions] == logged.tokens
        assert expected_layers(tokens, shard, positions) == [layer.tobytes() for layer in logged.layers]


def assert_blocks(engine: PagedEngine, name: str) -> None:
    """Every rank's blocks hold its own rows of what was computed or loaded."""
    request = engine.requests[name]
    for rank in range(RANKS):
        wanted = [row_of(request.tokens, position, rank) for position in range(request.computed)]
        assert wanted == engine.rows(name, rank)


def finish(engine: PagedEngine, node: Node, name: str, session: str = "s") -> list[int]:
    """End a request, and wait until the log has its rows; its tokens."""
    tokens = engine.requests[name].tokens
    engine.finish(name)
    engine.step_until(lambda: not any(worker._entries for worker in engine.workers))
    log = node.folder / "log"
    until(lambda: logged_length(log, session) >= len(tokens) - 1, what=f"{len(tokens) - 1} rows in the log")
    return tokens


def answered_past_a_kill(engine: PagedEngine, node: Node) -> None:
    """Request r1, during which the daemon is killed and comes back: all ranks reconnect, at different moments."""
    engine.add("r1", PROMPT, "s")
    engine.run_until("r1", 120)
    assert node.daemon is not None
    node.daemon.stop(signal.SIGKILL)
    engine.run_until("r1", 125)
    node.start_daemon()
    node.wait_log()
    engine.step_until(lambda: all(w.replicator.counts.turns_reopened for w in engine.workers))
    engine.run_until("r1", len(engine.requests["r1"].tokens) + 5)


def test_two_ranks_are_one_turn_and_each_shard_is_logged(tmp_path: Path) -> None:
    """One claim, one turn, rows of each rank in its own shard, whole; the next turn loads them on both."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 130)
        first = finish(engine, node, "r1")
        assert node.daemon is not None
        until(lambda: len(node.daemon.events("turn_opened")) == 1)  # type: ignore[union-attr]
        assert_logged(node, engine, "r1", "s", 129)
        engine.add("r2", [*first, 7, 8], "s")
        engine.run_until("r2", 140)
        assert [129, 129] == [worker.counts.rows_loaded for worker in engine.workers]
        assert_blocks(engine, "r2")
        opened = node.daemon.events("turn_opened")
        assert [2, 2] == [event["ranks"] for event in opened]
        assert [0, 129] == [event["log_from"] for event in opened]
        assert {} == engine.planner.unlogged


def test_answer_of_two_ranks_goes_on_on_another_node(tmp_path: Path) -> None:
    """SIGKILL of the daemon in mid-answer, and the engine is gone: the other node's ranks load one common length."""
    with daemons(tmp_path, "ab") as (a, b):
        with two_ranks(a) as engine:
            request = engine.add("r1", PROMPT, "s")
            engine.run_until("r1", 150)
            until(lambda: min(worker.replicator.counts.rows for worker in engine.workers) >= 140)
            a.kill()
        with two_ranks(b) as other:
            other.add("r2", request.tokens, "s", take_over=True)
            other.run_until("r2", 170)
            loaded = [worker.counts.rows_loaded for worker in other.workers]
            assert loaded[0] == loaded[1] > 0
            assert_blocks(other, "r2")
            assert_logged(b, other, "r2", "s", len(finish(other, b, "r2")) - 1)


def test_rank_whose_link_dies_costs_the_log_nothing_but_time(tmp_path: Path) -> None:
    """The turn ends for both, both ask again, and the log has all rows of both."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 120)
        link = engine.workers[1].replicator._link
        assert link is not None
        link.client.close("cut by the test")
        engine.run_until("r1", 140)
        engine.step_until(lambda: engine.workers[0].replicator.counts.turns_reopened == 1)
        engine.step_until(lambda: engine.workers[1].replicator.counts.turns_reopened == 1)
        engine.run_until("r1", 160)
        assert_logged(node, engine, "r1", "s", len(finish(engine, node, "r1")) - 1)
        assert node.daemon is not None
        assert {} == engine.planner.unlogged


def test_daemon_that_is_killed_and_comes_back_has_all_rows_of_both_ranks(tmp_path: Path) -> None:
    """Both reconnect by themselves, at different moments, and meet."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        answered_past_a_kill(engine, node)
        assert_logged(node, engine, "r1", "s", len(finish(engine, node, "r1")) - 1)


@pytest.mark.parametrize("shard", [0, 1])
def test_flipped_byte_in_one_shard_is_computed_from_there_on_both_ranks(tmp_path: Path, shard: int) -> None:
    """The control: the undamaged copy is loaded whole; of the other, what comes before the damage, on both."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "origin")
        engine.run_until("r1", 130)
        tokens = finish(engine, node, "r1", "origin")
        damaged_from = asyncio.run(copy_whole_and_damaged(f"file://{tmp_path}/log", "origin", shard))
        for session, wanted in (("origin-damaged", damaged_from), ("origin-whole", 129)):
            before = [worker.counts.rows_loaded for worker in engine.workers]
            engine.add(session, [*tokens, 7], session)
            engine.run_until(session, 140)
            after = [worker.counts.rows_loaded for worker in engine.workers]
            assert [wanted, wanted] == [now - then for now, then in zip(after, before, strict=True)], session
            assert_blocks(engine, session)


def test_load_that_fails_on_one_rank_is_computed_on_both_and_no_wrong_row_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What both computed on top of the block that one had not filled is not their log's: it is computed again first."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 130)
        tokens = finish(engine, node, "r1")
        real = engine.stores[1].scatter

        def failing(*arguments: object) -> None:
            """Once: the load."""
            monkeypatch.setattr(engine.stores[1], "scatter", real)
            raise OSError(*arguments)

        engine.chunk = 30
        request = engine.add("r2", [*tokens, *range(300, 350)], "s")
        engine.step_until(lambda: request.name in engine.requests and _is_ready(engine, "r2"))
        monkeypatch.setattr(engine.stores[1], "scatter", failing)
        engine.run_until("r2", 190)
        assert [129, 0] == [worker.counts.rows_loaded for worker in engine.workers]
        assert 1 == engine.workers[1].counts.load_failures
        assert_blocks(engine, "r2")
        assert_logged(node, engine, "r2", "s", len(finish(engine, node, "r2")) - 1)


def test_rows_of_a_step_with_a_load_are_written_a_step_later(tmp_path: Path) -> None:
    """Also those of others: they may stand on a block that another rank has not filled."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 130)
        tokens = finish(engine, node, "r1")
        engine.add("other", PROMPT[:20])
        engine.run_until("other", 30)
        engine.add("r2", [*tokens, 7], "s")
        engine.step_until(lambda: any(plan.loads for plan in engine.plans))
        behind = [_entry_length(engine, rank, "other") for rank in range(RANKS)]
        assert [engine.requests["other"].computed - 1] * RANKS == behind
        assert [129] * RANKS == [_entry_length(engine, rank, "r2") for rank in range(RANKS)]
        engine.step()
        caught_up = [_entry_length(engine, rank, "other") for rank in range(RANKS)]
        assert [engine.requests["other"].computed] * RANKS == caught_up


def _entry_length(engine: PagedEngine, rank: int, name: str) -> int:
    key = engine.planner._requests[name].key
    return engine.workers[rank]._entries[key].rows.length


def _is_ready(engine: PagedEngine, name: str) -> bool:
    tracked = engine.planner._requests[name]
    return len(tracked.ready) == RANKS


@contextmanager
def rank_away(engine: PagedEngine, rank: int) -> Iterator[None]:
    """Within this, a rank has no link."""
    replicator = engine.workers[rank].replicator
    real, link = replicator._connect, replicator._link
    replicator._connect = lambda: None  # type: ignore[method-assign]
    assert link is not None
    link.client.close("cut by the test")
    engine.step_until(lambda: not replicator.connected)
    yield
    replicator._connect = real  # type: ignore[method-assign]


def test_rank_without_a_link_leaves_the_request_unlogged_on_both_until_it_has_one(tmp_path: Path) -> None:
    """The answer does not wait for it; nothing is claimed; once it is there, all rows are logged."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node, wait=0.2) as engine:
        assert node.daemon is not None
        with rank_away(engine, 1):
            engine.add("r1", PROMPT, "s")
            engine.run_until("r1", 110)
            assert [] == node.daemon.events("turn_opened")
        engine.step_until(lambda: all(worker.replicator.counts.turns_opened for worker in engine.workers))
        engine.run_until("r1", len(engine.requests["r1"].tokens) + 10)
        assert_logged(node, engine, "r1", "s", len(finish(engine, node, "r1")) - 1)


def test_rank_that_stays_away_is_asked_for_seldom_and_found_soon_when_it_comes(tmp_path: Path) -> None:
    """Each question has all token ids of its request; and who waits longer each time still finds a late rank."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node, wait=0.2, blocks=1024) as engine:
        assert node.daemon is not None
        with rank_away(engine, 1):
            engine.add("r1", PROMPT, "s")
            engine.run_until("r1", 110)
            came = time.monotonic() + AWAY_SECONDS
            engine.step_until(lambda: time.monotonic() > came)
            missed = [event["reason"] for event in node.daemon.events("turn_unlogged")]
        came = time.monotonic()
        engine.step_until(lambda: all(worker.replicator.counts.turns_opened for worker in engine.workers))
        assert 2 <= len(missed) <= 6
        assert {"rank_missing"} == set(missed)
        assert time.monotonic() - came < 2.0
        engine.run_until("r1", len(engine.requests["r1"].tokens) + 10)
        assert_logged(node, engine, "r1", "s", len(finish(engine, node, "r1")) - 1)


def test_new_weights_are_the_same_model_on_both_ranks(tmp_path: Path) -> None:
    """Each rank introduces itself anew, by one word; the next request is logged."""
    with daemons(tmp_path, "a") as (node,), two_ranks(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 110)
        finish(engine, node, "r1")
        engine.planner.renew()
        engine.step(2)
        for worker in engine.workers:
            assert worker.replicator.wait_connected(5)
        engine.add("r2", PROMPT, "s")
        engine.run_until("r2", 120)
        assert [0, 0] == [worker.counts.rows_loaded for worker in engine.workers]
        assert_logged(node, engine, "r2", "s", len(finish(engine, node, "r2")) - 1)
