"""Two real nodes over a local log: a conversation goes on where the other node's process has died, or was only slow."""

from __future__ import annotations

import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.nodes import (
    Answer,
    Node,
    ask,
    last,
    logged_length,
    says_busy,
    synthetic_answer,
    until,
    whole_answer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.e2e

PROMPT = "The cache is the conversation. " * 8
TOKENS = 60
CUT = 20
LONG = 400
"""Tokens of an answer that is not over before a test that waits for a processor has stopped its node."""

whole = partial(whole_answer, prompt=PROMPT, max_tokens=TOKENS)
"""A whole answer."""


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Node, Node]]:
    """Nodes a and b over one log."""
    url = f"file://{tmp_path}/log"
    started: list[Node] = []
    try:
        started.extend(Node.start(tmp_path, name, url) for name in "ab")
        yield started[0], started[1]
    finally:
        for node in started:
            node.close()


def shared_memory() -> set[str]:
    """The files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}


def begin(node: Node, session: str, tokens: int = CUT, **body: object) -> Iterator[Answer]:
    """An answer up to so many tokens; the stream stays open."""
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "session": session, **body}
    stream = ask(node.url, **request)
    while len(next(stream).tokens) < tokens:
        pass
    return stream


def test_session_after_node_is_killed_goes_on_from_its_cache(nodes: tuple[Node, Node]) -> None:
    """After kill -9 of engine and daemon the other node attaches what the log had and gives the same tokens."""
    a, b = nodes
    reference = whole(b, "reference")
    stream = begin(a, "s")
    shown = list(next(stream).tokens)
    a.kill()
    resumed = whole(b, "s", resume_token_ids=shown)
    assert shown + resumed.tokens == reference.tokens
    assert resumed.kvlog["logged"] is True
    prompt_tokens = reference.kvlog["recomputed"]
    assert resumed.kvlog["attached"] >= prompt_tokens
    assert resumed.kvlog["attached"] + resumed.kvlog["recomputed"] == prompt_tokens + len(shown)


def test_session_is_taken_over_again_and_again_without_loss(nodes: tuple[Node, Node]) -> None:
    """A session that moves to and fro keeps every token, and the last node attaches what the others computed."""
    a, b = nodes
    reference = whole(b, "reference")
    shown: list[int] = []
    for turn, node in enumerate([a, b, a, b]):
        stream = ask(node.url, prompt=PROMPT, max_tokens=TOKENS, session="s", resume_token_ids=shown)
        answer = next(stream)
        while len(answer.tokens) < 10:  # a piece of the answer
            answer = next(stream)
        stream.close()  # type: ignore[attr-defined]  # a generator
        shown += answer.tokens
        assert shown == reference.tokens[: len(shown)], f"after turn {turn}"
    last = whole(a, "s", resume_token_ids=shown)
    assert shown + last.tokens == reference.tokens
    assert last.kvlog["recomputed"] <= 10  # what the closed stream had not logged yet


def test_paused_node_finds_itself_fenced_and_stops(nodes: tuple[Node, Node]) -> None:
    """A node that was only slow ends its request as fenced, and what it still wrote is stale for every reader."""
    a, b = nodes
    reference = whole(b, "reference", max_tokens=LONG)
    answers: list[Answer] = []
    at_cut = threading.Event()

    def client() -> None:
        for answer in ask(a.url, prompt=PROMPT, max_tokens=LONG, session="s"):
            answers.append(answer)
            if len(answer.tokens) >= CUT:
                at_cut.set()

    thread = threading.Thread(target=client)
    thread.start()
    assert at_cut.wait(20)
    a.signal(signal.SIGSTOP)
    shown = list(answers[-1].tokens)
    resumed = whole(b, "s", max_tokens=LONG, resume_token_ids=shown)
    a.signal(signal.SIGCONT)
    thread.join(30)
    assert shown + resumed.tokens == reference.tokens
    assert answers[-1].error is not None
    assert answers[-1].error["type"] == "fenced"
    assert len(answers[-1].tokens) < TOKENS
    assert a.daemon is not None
    assert a.daemon.events("node_fenced")[0]["session"] == "s"


def test_engine_killed_alone_attaches_from_its_own_daemon(nodes: tuple[Node, Node]) -> None:
    """An engine that dies while its daemon lives loses nothing: the new one attaches on the same node."""
    a, b = nodes
    reference = whole(b, "reference")
    stream = begin(a, "s")
    shown = list(next(stream).tokens)
    assert a.engine is not None
    a.engine.stop(signal.SIGKILL)
    a.start_engine()
    resumed = whole(a, "s", resume_token_ids=shown)
    assert shown + resumed.tokens == reference.tokens
    assert resumed.kvlog["attached"] >= reference.kvlog["recomputed"]


def test_daemon_killed_alone_leaves_generation_alone_and_catches_up(nodes: tuple[Node, Node]) -> None:
    """While its daemon is dead an engine goes on; a new daemon gets the rows that it missed, in the same request.

    The answer is endless, so that it lasts until the new daemon is there, however long that takes to start.
    """
    a, b = nodes
    log = a.folder / "log"
    stream = ask(a.url, prompt=PROMPT, max_tokens=100_000, session="s")
    prompt = len(PROMPT)
    until(lambda: bool(next(stream)) and logged_length(log, "s") > prompt, seconds=30, what="logged rows")
    assert a.daemon is not None
    a.daemon.stop(signal.SIGKILL)
    shown = len(next(stream).tokens)
    while len(next(stream).tokens) < shown + CUT:
        pass
    daemon = a.start_daemon()
    until(
        lambda: bool(next(stream)) and bool(daemon.events("turn_opened")), seconds=60, what="the turn again"
    )
    missed = prompt + len(next(stream).tokens)
    until(lambda: bool(next(stream)) and logged_length(log, "s") >= missed, seconds=30, what="caught up")
    shown_tokens = list(next(stream).tokens)
    a.kill()
    resumed = whole(b, "s", max_tokens=len(shown_tokens) + 5, resume_token_ids=shown_tokens)
    assert resumed.kvlog["attached"] >= missed, (resumed.kvlog, a.turns("s"), b.turns("s"))
    assert synthetic_answer(PROMPT, len(shown_tokens) + 5) == shown_tokens + resumed.tokens


def test_next_turn_on_another_node_attaches_the_common_prefix(nodes: tuple[Node, Node]) -> None:
    """A conversation's next turn attaches what it has in common with the last one, on whatever node it arrives."""
    a, b = nodes
    first = whole(a, "s")
    prompt = PROMPT + first.text + " And then? "
    answers = [ask(node.url, prompt=prompt, max_tokens=8, session="s") for node in (b, a)]
    for stream in answers:
        answer = last(stream)
        assert answer.kvlog["attached"] >= first.kvlog["recomputed"]


def test_daemon_asked_to_stop_flushes_and_leaves_nothing(nodes: tuple[Node, Node]) -> None:
    """SIGTERM ends a daemon in order: exit code 0, its socket's file is gone, a last heartbeat says goodbye."""
    a, _ = nodes
    whole(a, "s")
    assert a.daemon is not None
    before = shared_memory()
    assert a.daemon.stop(signal.SIGTERM) == 0
    assert not (a.folder / "a.sock").exists()
    assert a.daemon.events("daemon_stopped")
    assert shared_memory() <= before


def test_request_while_the_daemon_is_absent_is_served_unlogged(tmp_path: Path) -> None:
    """An engine without a daemon answers, says that nothing is logged, and logs as soon as there is one."""
    node = Node.start(tmp_path, "a", f"file://{tmp_path}/log")
    try:
        assert node.daemon is not None
        node.daemon.stop(signal.SIGKILL)
        answer = whole(node, "s")
        assert answer.kvlog["logged"] is False
        node.start_daemon()
        node.wait_log()
        until(lambda: whole(node, "s").kvlog["logged"] is True, seconds=10, what="logged again")
    finally:
        node.close()


def test_new_request_elsewhere_leaves_a_living_nodes_turn_alone(nodes: tuple[Node, Node]) -> None:
    """A second request of a session is served unlogged while its owner answers; once that is over it may claim."""
    a, b = nodes
    stream = begin(a, "s", tokens=10, max_tokens=600)
    until(lambda: says_busy(a.folder / "log", "a", "s"), what="the owner's heartbeat")
    time.sleep(1)  # four looks of the other's: nothing tells that it has taken one
    other = whole(b, "s", max_tokens=3)
    assert other.kvlog["logged"] is False
    assert other.tokens == whole(b, "reference", max_tokens=3).tokens
    answer = last(stream)
    assert answer.error is None
    assert answer.done
    until(lambda: whole(b, "s", max_tokens=2).kvlog["logged"] is True, seconds=10, what="the session is idle")


def test_request_that_takes_over_ends_a_living_nodes_turn(nodes: tuple[Node, Node]) -> None:
    """Who asks for it gets the session at once; the other node's stream ends as fenced."""
    a, b = nodes
    stream = begin(a, "s", tokens=10, max_tokens=2000)
    assert whole(b, "s", max_tokens=3, take_over=True).kvlog["logged"] is True
    answer = last(stream)
    assert answer.error is not None
    assert answer.error["type"] == "fenced"
