"""Failures that users of other KV caches have reported in public, provoked on a paged engine with a real daemon.

Those that need vLLM's own prefix cache are in tests/vllm/test_vllm_reports.py; two more in test_paged_engine.py.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from kvlog.ids import SessionId
from tests.integration.one_request import wait_for
from tests.integration.paged_engine import PagedEngine, PagedOptions, paged, row_of
from tests.nodes import Node, daemon_config, logged_length

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.e2e

PROMPT = list(range(100, 200))


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A daemon over a local log, without an engine."""
    config = daemon_config(tmp_path, "a", f"file://{tmp_path}/log")
    node = Node(tmp_path, "a", config)
    try:
        node.start_daemon()
        node.wait_log()
        yield node
    finally:
        node.close()


def socket_of(node: Node) -> Path:
    """Where its daemon listens."""
    return node.folder / f"{node.name}.sock"


def restart(node: Node) -> None:
    """SIGKILL the daemon, and start another one."""
    assert node.daemon is not None
    node.daemon.stop(signal.SIGKILL)
    node.start_daemon()
    node.wait_log()


def logged(node: Node, session: str) -> int:
    """Positions that a reader of the log finds."""
    return logged_length(node.folder / "log", session)


def answered(engine: PagedEngine, node: Node, tokens: list[int], until: int) -> list[int]:
    """A whole turn of session s, up to so many tokens, all of them in the log; checked against what rows must be."""
    name = f"request-{len(engine.requests)}"
    request = engine.add(name, tokens, "s")
    engine.run_until(name, until)
    assert [row_of(request.tokens, p) for p in range(request.computed)] == engine.rows(name)
    engine.finish(name)
    engine.step(3)
    wait_for(lambda: logged(node, "s") == until - 1, "the whole turn is logged")
    return request.tokens


def test_rows_that_outlive_engine_and_daemon_are_loaded_by_the_next_ones_as_they_were(node: Node) -> None:
    """LMCache/LMCache #4492: after a restart of the engine, a cached prompt was served from wrong rows.

    Each engine has its blocks in other places; of the third one the weights are others, and it loads nothing.
    """
    with paged(socket_of(node)) as engine:
        assert engine.replicator.wait_connected(5)
        tokens = answered(engine, node, PROMPT, 150)
    with paged(socket_of(node), PagedOptions(blocks=50)) as engine:
        assert engine.replicator.wait_connected(5)
        tokens = answered(engine, node, tokens, 170)
        assert 149 == engine.worker.counts.rows_loaded
    restart(node)
    with paged(socket_of(node), PagedOptions(blocks=40)) as engine:
        assert engine.replicator.wait_connected(5)
        wait_for(lambda: logged(node, "s") == 169)
        tokens = answered(engine, node, tokens, 190)
        assert 169 == engine.worker.counts.rows_loaded
        engine.planner.renew()
        engine.step()
        assert engine.replicator.wait_connected(5)
        answered(engine, node, tokens, 210)
        assert 169 == engine.worker.counts.rows_loaded


def test_session_that_was_ended_while_its_link_was_lost_is_not_logged_again(node: Node) -> None:
    """LMCache/LMCache #5062, kvcache-ai/Mooncake #2447: a retry on its way brought a removed session back.

    The engine's link is lost in mid-request; another engine has the session forgotten; the first one comes back, and
    asks for its turn again with all its rows at hand. The request is served; the session stays ended until somebody
    begins it anew, from nothing.
    """
    here = node.folder / "here.sock"
    here.symlink_to(socket_of(node))
    with paged(here) as engine, paged(socket_of(node)) as other:
        assert engine.replicator.wait_connected(5)
        assert other.replicator.wait_connected(5)
        request = engine.add("a", PROMPT, "s")
        engine.run_until("a", 150)
        wait_for(lambda: logged(node, "s") == 149)
        here.unlink()
        link = engine.replicator._link
        assert link is not None
        link.client.close("lost, says the test")
        other.replicator.forget(SessionId("s"))
        wait_for(lambda: logged(node, "s") == 0, "the session has ended")
        here.symlink_to(socket_of(node))
        assert engine.replicator.wait_connected(5)
        engine.step_until(lambda: engine.planner.unlogged)
        engine.run_until("a", 200)
        assert {"not_supported": 1} == engine.planner.unlogged
        assert [row_of(request.tokens, p) for p in range(request.computed)] == engine.rows("a")
        assert 0 == logged(node, "s")
        engine.finish("a")
        answered(engine, node, request.tokens, 220)
        assert 0 == engine.worker.counts.rows_loaded


def test_session_that_was_ended_before_the_daemon_died_is_not_logged_again(node: Node) -> None:
    """The same over the daemon's death: another process reads the End, and the request comes with its epoch."""
    with paged(socket_of(node)) as engine, paged(socket_of(node)) as other:
        assert engine.replicator.wait_connected(5)
        assert other.replicator.wait_connected(5)
        engine.add("a", PROMPT, "s")
        engine.run_until("a", 150)
        wait_for(lambda: logged(node, "s") == 149)
        other.replicator.forget(SessionId("s"))
        wait_for(lambda: logged(node, "s") == 0, "the session has ended")
        restart(node)
        assert engine.replicator.wait_connected(20)
        until = time.monotonic() + 2.0  # longer than a turn takes to be opened again
        while time.monotonic() < until:
            engine.step()
            time.sleep(0.02)
        assert engine.planner.unlogged
        assert 0 == logged(node, "s")
