"""A paged engine whose worker reaches the cache as it would on a GPU: rows land on the host a step after theirs.

The same link, daemon, scheduler and steps as in test_paged_engine; the cache is the same memory, as torch tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest
import torch

from kvlog.engines.device_layout import stack_layers
from kvlog.engines.device_rows import DeviceOptions, DeviceStore
from tests.integration.fake_daemon import FakeDaemon
from tests.integration.paged_engine import (
    LAYOUT,
    SIZE,
    PagedEngine,
    PagedOptions,
    answered,
    paged,
    row_of,
    with_daemon,
)
from tests.integration.test_paged_engine import PROMPT, assert_in_log, closed
from tests.unit.engines.fake_queue import FakeQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.integration.paged_engine import Memory


class LateQueue(FakeQueue):
    """A step's copy has landed when the next step's is queued."""

    def mark(self):
        """One more; those before it pass."""
        self.arrive()
        return super().mark()


def over(queue: LateQueue, slots: int) -> Callable[[Memory], DeviceStore]:
    """What makes the store of a cache behind a stream."""

    def made(memory: Memory) -> DeviceStore:
        whole = torch.from_numpy(memory).view(torch.bfloat16)
        layers = [whole[layer].unflatten(-1, (SIZE, -1)) for layer in range(LAYOUT.layers)]
        given = DeviceOptions(step_bytes=20 * LAYOUT.row_bytes, slot_bytes=40 * LAYOUT.row_bytes, slots=slots)
        return DeviceStore(stack_layers(layers, 2), SIZE, LAYOUT, queue, given)

    return made


@contextmanager
def on_device(
    path: Path, *, slots: int = 4, blocks: int = 64, at_once: int = 1000
) -> Iterator[tuple[FakeDaemon, PagedEngine, LateQueue]]:
    """An engine with its cache behind a stream, and its daemon."""
    queue = LateQueue()
    wanted = PagedOptions(blocks=blocks, at_once=at_once, over=over(queue, slots))
    with with_daemon(path, wanted=wanted) as (daemon, engine):
        yield daemon, engine, queue


@pytest.mark.parametrize("slots", [2, 4])
def test_prefill_and_decode_are_saved_a_step_later(tmp_path, slots):
    """All rows, right, in order; the last ones when no step is being computed."""
    with on_device(tmp_path / "s", slots=slots) as (daemon, engine, _):
        engine.chunk = 30
        request = engine.add("a", PROMPT)
        engine.run_until("a", 130)
        engine.finish("a")
        engine.step_until(lambda: not request.blocks)
        assert_in_log(daemon, engine, "a")
        assert (129, 0) == (closed(daemon, 1), daemon.refused_entries)


def test_batch_of_sessions_is_kept_apart_in_one_read_a_step(tmp_path):
    """Eight sessions of several lengths."""
    with on_device(tmp_path / "s", blocks=200) as (daemon, engine, queue):
        for k in range(8):
            engine.add(f"s{k}", PROMPT[: 20 + 7 * k])
        engine.run_until("s7", 100)
        assert len(queue.marks) <= len(engine.plans)
        for k in range(8):
            engine.finish(f"s{k}")
        engine.step(3)
        for k in range(8):
            assert_in_log(daemon, engine, f"s{k}")


@pytest.mark.parametrize("at_once", [20, 1000])
def test_second_turn_loads_what_the_log_has(tmp_path, at_once):
    """In a step or beside the steps; only new rows are logged."""
    with on_device(tmp_path / "s", at_once=at_once) as (daemon, engine, queue):
        first = answered(engine, PROMPT, 120)
        assert 119 == closed(daemon, 1)
        second = engine.add("b", [*first.tokens, 7, 8], "s")
        engine.run_until("b", 130)
        assert 119 == engine.worker.counts.rows_loaded
        assert [row_of(second.tokens, p) for p in range(second.computed)] == engine.rows("b")
        assert (at_once == 20) == ("waited" in queue.said)
        engine.finish("b")
        engine.step(3)
        assert_in_log(daemon, engine, "b", "s")


def test_preempted_request_is_logged_to_its_last_row_without_its_blocks(tmp_path):
    """Its rows are under way when its blocks are overwritten; its next turn waits for them, and loads them."""
    with on_device(tmp_path / "s") as (daemon, engine, _):
        request = engine.add("a", PROMPT)
        engine.run_until("a", 120)
        engine.preempt("a")
        engine.run_until("a", 140)
        assert 119 == closed(daemon, 1)
        assert 119 == engine.worker.counts.rows_loaded
        assert [row_of(request.tokens, p) for p in range(request.computed)] == engine.rows("a")
        engine.finish("a")
        engine.step(3)
        assert_in_log(daemon, engine, "a")


def test_daemon_that_comes_late_gets_all_rows_of_running_requests(tmp_path):
    """Rows that were never gathered, since nobody logged them, are read out of blocks that are still held."""
    path = tmp_path / "s"
    queue = LateQueue()
    with paged(path, PagedOptions(over=over(queue, slots=4))) as engine:
        engine.add("a", PROMPT)
        engine.run_until("a", 110)
        assert [] == queue.marks
        with FakeDaemon.running(path) as running:
            engine.step_until(lambda: running.daemon.turns and running.daemon.sessions["a"].rows)
            engine.step(20)
            engine.finish("a")
            engine.step(3)
            assert_in_log(running.daemon, engine, "a")


def test_turn_that_ends_gives_its_pinned_memory_back(tmp_path):
    """Ten requests one after the other through two slots."""
    with on_device(tmp_path / "s", slots=2) as (daemon, engine, _):
        for k in range(10):
            engine.add(f"s{k}", PROMPT[:30])
            engine.run_until(f"s{k}", 33)
            engine.finish(f"s{k}")
        engine.step(4)
        for k in range(10):
            assert_in_log(daemon, engine, f"s{k}")
