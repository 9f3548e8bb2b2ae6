"""What is left of turns that are over, and of a system that had no threads or descriptors to give: nothing."""

from __future__ import annotations

import errno
import os
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.engines.turn_state import TurnRequest, TurnState
from kvlog.engines.turns import LoadCounts, TurnHandle
from kvlog.link.messages import EndedReason, EngineRank
from tests.integration.fake_daemon import FakeDaemon
from tests.integration.one_request import MODEL, ROW_BYTES, SECONDS, Engine, S, linked, replicating, wait_for

if TYPE_CHECKING:
    from collections.abc import Callable


def open_descriptors() -> int:
    """Of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


def starved(what: str) -> Callable[..., Any]:
    """A system that has no more of something, twice."""
    left = [2]
    calls: dict[str, Callable[..., Any]] = {
        "thread": threading.Thread.start,
        "socket": socket.socket,
        "dup": os.dup,
    }
    real = calls[what]

    def call(*args, **kwargs):
        ours = what != "thread" or args[0].name == "kvlog-link-reader"
        if ours and left[0]:
            left[0] -= 1
            raise (
                RuntimeError("can't start new thread") if what == "thread" else OSError(errno.EMFILE, "full")
            )
        return real(*args, **kwargs)

    return call


@pytest.mark.parametrize(
    ("what", "where"),
    [("thread", "threading.Thread.start"), ("socket", "kvlog.link.client.socket.socket"), ("dup", "os.dup")],
)
def test_replicator_of_a_process_without_threads_or_descriptors_tries_again(
    tmp_path, monkeypatch, what, where
):
    """A moment without resources leaves no engine unlogged for good, is counted, and leaks nothing."""
    with FakeDaemon.running(tmp_path / "s"):
        before = open_descriptors()
        with monkeypatch.context() as patched:
            patched.setattr(where, starved(what))
            with replicating(tmp_path / "s") as replicator:
                assert replicator.wait_connected(SECONDS)
                assert 2 == replicator.counts.failures
                engine = Engine(replicator)
                assert engine.handle.logged
                engine.close()
        wait_for(lambda: open_descriptors() <= before)


@pytest.mark.parametrize("how", ["fenced", "ended", "closed"])
def test_replicator_turn_that_is_over_is_kept_nowhere(tmp_path, how):
    """A link lives for months: no token list of a turn that is over stays with it."""
    with linked(tmp_path / "s") as (running, replicator):
        link = replicator._link
        assert link is not None
        engine = Engine(replicator)
        engine.step(3)
        assert 1 == len(link.turns)
        if how == "fenced":
            running.call(lambda: running.daemon.fence(S))
        if how == "ended":
            running.call(lambda: running.daemon.end_turns(EndedReason.HANDED_OVER))
        wait_for(lambda: how == "closed" or not engine.handle.logged)
        engine.close()
        assert ({}, set()) == (link.turns, replicator._live)


def test_replicator_turn_closed_while_its_answer_is_taken_is_kept_nowhere(tmp_path, monkeypatch):
    """A request that gives up between the answer and its place in the link's table leaves nothing behind."""
    with linked(tmp_path / "s", answer_seconds=0.05) as (running, replicator):
        link = replicator._link
        assert link is not None
        take = TurnState.answered

        def taken(self, *args):
            wanted = take(self, *args)
            replicator.close_turn(TurnHandle(self, ROW_BYTES, LoadCounts()), MODEL.new_cache(), [1])
            return wanted

        monkeypatch.setattr(TurnState, "answered", taken)
        replicator.open_turn(TurnRequest(session=S, wait_seconds=0.05), [1])
        wait_for(lambda: [0] == [turn.closed_at for turn in running.daemon.turns.values()])
        wait_for(lambda: not link.turns)
        assert set() == replicator._live


def test_replicator_that_leaves_has_said_where_its_last_turn_ended(tmp_path):
    """An engine that stops in good order tells the end of its turns before its link ends."""
    with linked(tmp_path / "s") as (running, replicator):
        engine = Engine(replicator)
        engine.step(3)
        engine.close()
        replicator.close()
        wait_for(lambda: running.daemon.causes)
        assert [engine.cache.length] == [turn.closed_at for turn in running.daemon.turns.values()]


def test_replicator_of_a_rank_that_only_reads_writes_nothing_and_waits_for_nobody(tmp_path):
    """Neither while it has a link nor at its end, when it has lost it: the first rank writes."""
    path = tmp_path / "s"
    with (
        FakeDaemon.running(path) as running,
        replicating(path, EngineRank(1, 2), close_seconds=5) as replicator,
    ):
        assert replicator.wait_connected(SECONDS)
        engine = Engine(replicator)
        engine.step(20)
        assert (True, None) == (engine.handle.logged, engine.handle.cursor)
        assert not engine.handle.may_write_more(engine.cache)
        assert [EngineRank(1, 2)] == [peer.hello.rank for peer in running.daemon.peers]
        replicator._connect = lambda: None
        running.call(lambda: running.daemon.peers[0].close("cut by the test"))
        wait_for(lambda: not replicator.connected)
        began = time.monotonic()
        assert not engine.handle.may_write_more(engine.cache)
        engine.close()
        assert time.monotonic() - began < 1
        counts = replicator.counts
        assert (0, 0, 0, {}) == (
            counts.rows,
            counts.ring_full,
            counts.turns_cut,
            {session: held.rows for session, held in running.daemon.sessions.items() if held.rows},
        )
