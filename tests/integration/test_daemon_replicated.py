"""A paged engine whose ranks all have the same rows (latent attention), over real daemons: one shard, one writer."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvlog.engines import step_worker
from kvlog.engines.staged_rows import stage_rows
from kvlog.wire.replayed import PREFIX_BYTES, read_head
from tests.integration.paged_engine import LATENT, PagedEngine, PagedOptions, row_of
from tests.integration.test_daemon_ranks import (
    PROMPT,
    answered_past_a_kill,
    beside,
    daemons,
    finish,
    rank_away,
)
from tests.nodes import until
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.servers import logged_session

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from pathlib import Path

    from kvlog.engines.staged_rows import StagedRows
    from kvlog.engines.turns import TurnHandle
    from tests.nodes import Node

pytestmark = pytest.mark.e2e


def alike(node: Node, ranks: int = 2, *, wait: float = 10.0) -> AbstractContextManager[PagedEngine]:
    """An engine beside a daemon, of ranks that have the same rows."""
    return beside(node, PagedOptions(layout=LATENT, ranks=ranks, wait=wait))


def assert_logged(node: Node, session: str, tokens: list[int]) -> None:
    """The log has one shard, and in it the rows of all tokens but the last."""
    logged = logged_session(f"file://{node.folder}/log", session, node.folder)
    count = len(tokens) - 1
    assert tokens[:count] == logged.tokens
    rows = b"".join(row_of(tokens, position) for position in range(count))
    cut = np.frombuffer(rows, np.uint8).reshape(count, LATENT.layers, -1)
    assert [cut[:, layer].tobytes() for layer in range(LATENT.layers)] == [
        layer.tobytes() for layer in logged.layers
    ]
    newest = max(node.folder.glob("replayed-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    data = newest.read_bytes()
    size = int.from_bytes(data[:PREFIX_BYTES], "little")
    assert 1 == read_head(data[: PREFIX_BYTES + size]).identity.shards


def assert_blocks(engine: PagedEngine, name: str) -> None:
    """Every rank's blocks hold the rows of what was computed or loaded."""
    request = engine.requests[name]
    wanted = [row_of(request.tokens, position) for position in range(request.computed)]
    for rank in range(len(engine.stores)):
        assert wanted == engine.rows(name, rank), f"rank {rank}"


def loaded(engine: PagedEngine) -> list[int]:
    """Verified rows that each rank has put into blocks."""
    return [worker.counts.rows_loaded for worker in engine.workers]


def written(engine: PagedEngine) -> list[int]:
    """Rows that each rank has put into its ring."""
    return [worker.replicator.counts.rows for worker in engine.workers]


def answered(engine: PagedEngine, node: Node, session: str = "s") -> list[int]:
    """A first turn of 130 tokens, in the log; its tokens."""
    engine.add("r1", PROMPT, session)
    engine.run_until("r1", 130)
    return finish(engine, node, "r1", session)


def test_ranks_that_are_alike_are_one_turn_of_one_shard_that_one_of_them_writes(tmp_path: Path) -> None:
    """The log has each row once; the next turn loads all of them on both ranks, each out of its own attach."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        first = answered(engine, node)
        assert [129, 0] == written(engine)
        assert_logged(node, "s", first)
        engine.add("r2", [*first, 7, 8], "s")
        engine.run_until("r2", 140)
        assert [129, 129] == loaded(engine)
        assert_blocks(engine, "r2")
        assert_logged(node, "s", finish(engine, node, "r2"))
        assert node.daemon is not None
        opened = node.daemon.events("turn_opened")
        assert [(2, 0), (2, 129)] == [(event["ranks"], event["log_from"]) for event in opened]
        assert {} == engine.planner.unlogged


def test_session_goes_on_on_engines_of_other_numbers_of_ranks(tmp_path: Path) -> None:
    """TP 2, 2, 1, 2 and 3 in turn, each killed in mid-answer with its daemon: its bytes are the same on any of them."""
    with daemons(tmp_path, "abcde") as nodes:
        tokens, known = list(PROMPT), 0
        for node, ranks in zip(nodes, (2, 2, 1, 2, 3), strict=True):
            with alike(node, ranks) as engine:
                request = engine.add("r", tokens, "s", take_over=known > 0)
                engine.run_until("r", len(tokens) + 30)
                assert [loaded(engine)[0]] * ranks == loaded(engine)
                assert loaded(engine)[0] >= known
                assert_blocks(engine, "r")
                handle = next(iter(engine.worker._entries.values())).handle
                assert handle is not None
                engine.step_until(lambda: handle.acked_length >= len(tokens))  # noqa: B023 # now
                tokens, known = list(request.tokens), handle.acked_length
                if node is nodes[-1]:
                    tokens = finish(engine, node, "r")
                else:
                    node.kill()
        assert_logged(nodes[-1], "s", tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_flipped_byte_in_the_log_is_refused_by_all_ranks(tmp_path: Path, ranks: int) -> None:
    """The control: the undamaged copy is loaded whole; of the other, what comes before the damage, on every rank."""
    with daemons(tmp_path, "ab") as (a, b):
        with alike(a) as engine:
            tokens = answered(engine, a, "origin")
        damaged_from = asyncio.run(copy_whole_and_damaged(f"file://{tmp_path}/log", "origin"))
        with alike(b, ranks) as engine:
            for session, wanted in (("origin-damaged", damaged_from), ("origin-whole", 129)):
                before = loaded(engine)
                engine.add(session, [*tokens, 7], session, take_over=True)
                engine.run_until(session, 140)
                assert [wanted] * ranks == [
                    now - then for now, then in zip(loaded(engine), before, strict=True)
                ]
                assert_blocks(engine, session)


@pytest.mark.parametrize("rank", [0, 1])
def test_flipped_byte_that_one_rank_has_copied_is_computed_by_both(tmp_path: Path, rank: int) -> None:
    """Each verifies its own copy: what the other one has read well is no witness."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        tokens = answered(engine, node)
        link: Any = engine.workers[rank].replicator._link
        pool = link._pool
        damaged = bytearray(pool.view)
        damaged[damaged.find(row_of(tokens, 77)) + 5] ^= 1
        try:
            link._pool = type("Rotten", (), {"view": memoryview(damaged), "close": pool.close})()
            engine.add("r2", [*tokens, 7], "s")
            engine.run_until("r2", 140)
        finally:
            link._pool = pool
        assert [77, 77] == loaded(engine)
        assert_blocks(engine, "r2")
        assert_logged(node, "s", finish(engine, node, "r2"))


@pytest.mark.parametrize(("seconds", "expected"), [(0.3, 129), (5.0, 0)], ids=["waited for", "too late"])
def test_rank_that_only_reads_and_lags_is_waited_for_or_both_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, expected: int
) -> None:
    """One never loads what the other does not; the log goes on at the same row either way."""

    def slow(handle: TurnHandle, row_bytes: int, skip: int, length: int) -> StagedRows:
        if handle.turn.only_reads:
            time.sleep(seconds)
        return stage_rows(handle, row_bytes, skip, length)

    with daemons(tmp_path, "a") as (node,), alike(node, wait=2.0) as engine:
        tokens = answered(engine, node)
        monkeypatch.setattr(step_worker, "stage_rows", slow)
        engine.add("r2", [*tokens, 7], "s")
        engine.run_until("r2", 140)
        assert [expected, expected] == loaded(engine)
        assert_blocks(engine, "r2")
        assert_logged(node, "s", finish(engine, node, "r2"))


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_without_a_link_leaves_the_request_unlogged_until_it_has_one(tmp_path: Path, rank: int) -> None:
    """The answer does not wait for it; nothing is claimed; once it is there, all rows are logged."""
    with daemons(tmp_path, "a") as (node,), alike(node, wait=0.2) as engine:
        assert node.daemon is not None
        with rank_away(engine, rank):
            engine.add("r1", PROMPT, "s")
            engine.run_until("r1", 110)
            assert [] == node.daemon.events("turn_opened")
        engine.step_until(lambda: all(worker.replicator.counts.turns_opened for worker in engine.workers))
        engine.run_until("r1", len(engine.requests["r1"].tokens) + 10)
        tokens = finish(engine, node, "r1")
        assert [len(tokens) - 1, 0] == written(engine)
        assert_logged(node, "s", tokens)


def test_link_of_a_rank_that_only_reads_costs_the_log_nothing(tmp_path: Path) -> None:
    """The turn goes on, and is the same when the rank is back; the next one loads on both."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 110)
        with rank_away(engine, 1):
            engine.run_until("r1", 130)
            engine.step_until(lambda: written(engine)[0] >= 129)
        engine.step_until(lambda: engine.workers[1].replicator.counts.turns_reopened == 1)
        engine.run_until("r1", 140)
        tokens = finish(engine, node, "r1")
        assert_logged(node, "s", tokens)
        assert node.daemon is not None
        assert (1, []) == (len(node.daemon.events("turn_opened")), node.daemon.events("turn_ended"))
        engine.add("r2", [*tokens, 7], "s")
        engine.run_until("r2", len(tokens) + 5)
        assert [len(tokens) - 1] * 2 == loaded(engine)
        assert_blocks(engine, "r2")


def test_turn_ends_while_the_rank_that_only_reads_has_no_link(tmp_path: Path) -> None:
    """It is over with its writer: its session is free at once, also for the engine of one rank beside it."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine, alike(node, 1) as other:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 130)
        with rank_away(engine, 1):
            tokens = finish(engine, node, "r1")
            other.add("r2", [*tokens, 7], "s")
            other.run_until("r2", len(tokens) + 5)
            assert [len(tokens) - 1] == loaded(other)
            assert_blocks(other, "r2")
            assert_logged(node, "s", finish(other, node, "r2"))


def test_link_that_a_rank_loses_between_opening_and_copy_makes_both_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it cannot verify, nobody loads."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        tokens = answered(engine, node)
        replicator = engine.workers[1].replicator

        def cut(handle: TurnHandle, row_bytes: int, skip: int, length: int) -> StagedRows:
            link = replicator._link
            if handle.turn.only_reads and link is not None:
                link.client.close("cut by the test")
                until(lambda: link._pool is None, what="the link's end")
            return stage_rows(handle, row_bytes, skip, length)

        monkeypatch.setattr(step_worker, "stage_rows", cut)
        engine.add("r2", [*tokens, 7], "s")
        engine.run_until("r2", 140)
        assert [0, 0] == loaded(engine)
        assert_blocks(engine, "r2")
        assert_logged(node, "s", finish(engine, node, "r2"))


def test_link_of_the_rank_that_writes_ends_the_turn_for_both(tmp_path: Path) -> None:
    """Both ask again, and the log has all rows."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 120)
        link = engine.workers[0].replicator._link
        assert link is not None
        link.client.close("cut by the test")
        engine.run_until("r1", 140)
        engine.step_until(lambda: all(w.replicator.counts.turns_reopened == 1 for w in engine.workers))
        engine.run_until("r1", len(engine.requests["r1"].tokens) + 5)
        assert_logged(node, "s", finish(engine, node, "r1"))
        assert {} == engine.planner.unlogged


def test_daemon_that_is_killed_and_comes_back_has_all_rows_of_ranks_that_are_alike(tmp_path: Path) -> None:
    """Both reconnect by themselves, at different moments, and meet."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        answered_past_a_kill(engine, node)
        assert_logged(node, "s", finish(engine, node, "r1"))


@pytest.mark.parametrize("rank", [0, 1])
def test_load_that_fails_on_a_rank_is_computed_on_both_and_no_wrong_row_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """What the writer has computed on top of a block that the reader had not filled is not the log's."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        tokens = answered(engine, node)
        real = engine.stores[rank].scatter

        def failing(*arguments: object) -> None:
            """Once: the load."""
            monkeypatch.setattr(engine.stores[rank], "scatter", real)
            raise OSError(*arguments)

        engine.chunk = 30
        request = engine.add("r2", [*tokens, *range(300, 350)], "s")
        engine.step_until(lambda: len(engine.planner._requests[request.name].ready) == 2)
        monkeypatch.setattr(engine.stores[rank], "scatter", failing)
        engine.run_until("r2", 190)
        assert [(0, 1), (129, 0)][rank] == (loaded(engine)[0], engine.workers[0].counts.load_failures)
        assert_blocks(engine, "r2")
        assert_logged(node, "s", finish(engine, node, "r2"))


def test_preempted_request_of_ranks_that_are_alike_resumes_from_its_own_log(tmp_path: Path) -> None:
    """Its blocks go to another on both; both load what the one has written."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 120)
        engine.preempt("r1")
        engine.add("r2", PROMPT[:90], "t")
        engine.run_until("r1", 140)
        assert loaded(engine)[0] == loaded(engine)[1] > 0
        assert_blocks(engine, "r1")
        engine.finish("r2")
        assert_logged(node, "s", finish(engine, node, "r1"))
        assert_logged(node, "t", engine.requests["r2"].tokens)


def test_only_the_rank_that_writes_holds_a_finished_requests_blocks(tmp_path: Path) -> None:
    """It has lost its link, and may have one again in time; the one that only reads has nothing to wait for."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        engine.add("r1", PROMPT, "s")
        engine.run_until("r1", 120)
        with rank_away(engine, 0):
            engine.run_until("r1", 125)
            assert engine.finish("r1").hold
            engine.step()
            assert [1, 0] == [len(worker._entries) for worker in engine.workers]
        engine.step_until(lambda: not engine.requests["r1"].blocks)


def test_request_aborted_while_ranks_that_are_alike_ask_leaves_the_session_free(tmp_path: Path) -> None:
    """Whatever the daemon has opened by then is closed again by both."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        tokens = answered(engine, node)
        engine.add("r2", [*tokens, 7], "s")
        engine.step(2)
        engine.finish("r2")
        engine.step(2)
        engine.add("r3", [*tokens, 8], "s")
        engine.run_until("r3", 140)
        assert [129, 129] == loaded(engine)
        assert_logged(node, "s", finish(engine, node, "r3"))


def test_new_weights_are_the_same_model_on_ranks_that_are_alike(tmp_path: Path) -> None:
    """Each rank introduces itself anew, by one word; the next request is logged, and loads nothing of the old."""
    with daemons(tmp_path, "a") as (node,), alike(node) as engine:
        answered(engine, node)
        engine.planner.renew()
        engine.step(2)
        for worker in engine.workers:
            assert worker.replicator.wait_connected(5)
        engine.add("r2", PROMPT, "s")
        engine.run_until("r2", 120)
        assert [0, 0] == loaded(engine)
        assert_logged(node, "s", finish(engine, node, "r2"))
