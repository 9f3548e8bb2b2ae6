"""A session that lives long is logged again before the log loses its beginning: a node that starts later knows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.ids import Offset, Partition
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.log.topics import records_topic
from tests.kafka.admin import Admin
from tests.nodes import Node, synthetic_answer, until, whole_answer
from tests.unit.consumers.written_log import kvlog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.nodes import Answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "The cache is the conversation. "
TOKENS = 20
KNOWN = 10
ALL = len(PROMPT) + KNOWN - 1
"""What can be attached of a prompt and KNOWN tokens: the last one's row is always computed."""
NOISE = PROMPT * 8
"""A session of more than a megabyte: past half of what the log keeps, and too large to be logged again in it."""
RETENTION_BYTES = 2 << 20
CAPPED = 256 << 10
"""Bytes a second at which a rewrite of the session takes half a second."""

whole = partial(whole_answer, prompt=PROMPT, max_tokens=TOKENS)
"""A whole answer."""


@dataclass(frozen=True)
class Place:
    """A log of one partition."""

    folder: Path
    url: str
    prefix: str

    def node(self, name: str, **sync: object) -> Node:
        """A node, started, that logs sessions again when half of their life is left."""
        return Node.start(
            self.folder,
            name,
            self.url,
            engine=("synthetic",),
            log={"partitions": 1, "topic_prefix": self.prefix, "retention_bytes": RETENTION_BYTES},
            sync={"codec": "raw", **sync},
            primary={"rewrite_when_left": 0.5},
        )

    def delete(self, before: int) -> None:
        """The log loses everything below an offset."""
        asyncio.run(self._delete(Offset(before)))

    async def _delete(self, before: Offset) -> None:
        if self.url.startswith("kafka://"):
            admin = Admin(self.url.removeprefix("kafka://"))
            await admin.delete_records(records_topic(self.prefix), 0, before)
            await admin.close()
            return
        log = LocalLog(self.folder / "log", LocalLogOptions(partitions=1, retention_bytes=None))
        await log.open()
        await log.delete_records(Partition(0), before=before)
        await log.close()

    def show(self, session: str) -> dict[str, Any]:
        """What `kvlog show` says."""
        code, said = kvlog("show", session, "--log", self.url, "--prefix", self.prefix)
        assert 0 == code, said
        return said


@pytest.fixture(params=["local", pytest.param("kafka", marks=pytest.mark.kafka)])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty log of either kind."""
    if request.param == "local":
        return Place(tmp_path, f"file://{tmp_path}/log", "kvlog")
    bootstrap: str = request.getfixturevalue("kafka_broker")
    return Place(tmp_path, f"kafka://{bootstrap}", f"rewrite-{time.time_ns()}")


@pytest.fixture
def nodes(place: Place) -> Iterator[list[Node]]:
    """The nodes that a test has started."""
    started: list[Node] = []
    try:
        started.append(place.node("a"))
        yield started
    finally:
        for node in started:
            node.close()


def said(node: Node, event: str, session: str) -> list[dict[str, Any]]:
    """The events of a session."""
    assert node.daemon is not None
    return [one for one in node.daemon.events(event) if one["session"] == session]


def test_session_that_was_logged_again_is_taken_over_whole_by_a_node_that_starts_later(
    place: Place, nodes: list[Node]
) -> None:
    """Its first records are gone when the other node starts: it attaches every position and gives the same tokens.

    The control is a session that was too large to be logged again: that one is prefilled.
    """
    a = nodes[0]
    answer = whole(a, "s")
    noise = whole(a, "noise", prompt=NOISE)
    until(lambda: bool(said(a, "session_rewritten", "s")), seconds=30, what="rewritten")
    (rewritten,) = said(a, "session_rewritten", "s")
    rows = len(PROMPT) + TOKENS - 1
    assert (rows, rows, rows * 4096) == tuple(rewritten[f] for f in ("positions", "rows", "payload_bytes"))
    assert ["log_too_small"] == [one["reason"] for one in said(a, "rewrite_skipped", "noise")]
    root = rewritten["epoch"] - 1
    place.delete(root)

    b = place.node("b")
    nodes.append(b)
    resumed = whole(b, "s", resume_token_ids=answer.tokens[:KNOWN])
    assert synthetic_answer(PROMPT, TOKENS) == answer.tokens == answer.tokens[:KNOWN] + resumed.tokens
    assert (ALL, True) == (resumed.kvlog["attached"], resumed.kvlog["logged"])
    lost = whole(b, "noise", prompt=NOISE, resume_token_ids=noise.tokens[:KNOWN])
    assert (noise.tokens[KNOWN:], 0) == (lost.tokens, lost.kvlog["attached"])

    shown = place.show("s")
    assert root == shown["first_needed"], shown


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Place, list[Node]]]:
    """A node whose rewrites take a while, over a local log."""
    place = Place(tmp_path, f"file://{tmp_path}/log", "kvlog")
    started: list[Node] = []
    try:
        started.append(place.node("a", bandwidth_bytes_per_second=CAPPED))
        yield place, started
    finally:
        for node in started:
            node.close()


def rewriting(node: Node) -> Answer:
    """The answer of a session whose rewrite has just begun: its claim is read back."""
    answer = whole(node, "s")
    whole(node, "noise", prompt=NOISE)
    until(lambda: len(said(node, "takeover_completed", "s")) > 1, seconds=60, what="claimed anew")
    assert [] == said(node, "session_rewritten", "s")
    return answer


def test_request_in_mid_rewrite_is_logged_and_the_rewrite_gives_way(slow: tuple[Place, list[Node]]) -> None:
    """Nobody waits for a rewrite, and nothing of the session is lost by it; it is rewritten when it is idle again."""
    _, (a,) = slow
    answer = rewriting(a)
    again = whole(a, "s", resume_token_ids=answer.tokens[:KNOWN])
    assert (answer.tokens[KNOWN:], True) == (again.tokens, again.kvlog["logged"])
    until(lambda: bool(said(a, "rewrite_interrupted", "s")), what="the rewrite's end")
    assert ["gave_way"] == [one["reason"] for one in said(a, "rewrite_interrupted", "s")]
    assert [] == said(a, "turn_unlogged", "s")
    until(lambda: bool(said(a, "session_rewritten", "s")), seconds=30, what="rewritten")


def test_session_whose_owner_is_killed_in_mid_rewrite_goes_on(slow: tuple[Place, list[Node]]) -> None:
    """After kill -9 between the new claim and the last row: another node gives the same tokens."""
    place, nodes = slow
    answer = rewriting(nodes[0])
    nodes[0].kill()
    nodes.append(place.node("b"))
    resumed = whole(nodes[1], "s", resume_token_ids=answer.tokens[:KNOWN])
    assert (answer.tokens[KNOWN:], True) == (resumed.tokens, resumed.kvlog["logged"])
