"""A daemon that dies in the middle of an attach: the engine answers right, whatever it had copied, and comes back."""

from __future__ import annotations

import random
import threading
import time
from typing import TYPE_CHECKING

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from tests.nodes import Node, ask, daemon_config, last, synthetic_answer, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.nodes import Answer

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROW_BYTES = 128 << 10
PROMPT = "The cache is the conversation. " * 30
"""930 rows, 116 MiB: an attach takes long enough to be met in its middle."""
TOKENS = 8
ROUNDS = 4
MIB = 1 << 20


def test_daemon_killed_in_mid_attach_costs_time_and_never_a_token(tmp_path: Path) -> None:
    """At random moments between the request and its first token; the engine connects again each time and is logged."""
    pool: dict[str, object] = {"bytes": 256 * MIB, "block_bytes": MIB}
    config = daemon_config(tmp_path, "a", f"file://{tmp_path}/log", pool=pool, sync={"codec": "raw"})
    node = Node(tmp_path, "a", config, ("synthetic", "--row-bytes", str(ROW_BYTES)))
    expected = synthetic_answer(PROMPT, TOKENS, row_bytes=ROW_BYTES)
    chance = random.Random(7)
    try:
        node.start_daemon()
        node.wait_log()
        node.start_engine()
        assert expected == answer_of(node).tokens
        until(lambda: attached(node) == len(PROMPT) - 1, seconds=60, what="warm")
        usual = answer_of(node).kvlog["first_token_ms"] / 1000
        early = 0
        for number in range(ROUNDS):
            delay = usual * chance.random() * 1.2
            answer, seconds = answer_while_killed(node, delay)
            assert expected == answer.tokens, f"round {number}, killed after {delay:.3f} s"
            assert (None, True) == (answer.error, answer.done)
            early += delay < seconds
            node.start_daemon()
            node.wait_log()
            until(lambda: bool(health(node)["connected"]), seconds=20, what="connected again")
            until(lambda: attached(node) == len(PROMPT) - 1, seconds=60, what="attached again")
        assert early >= ROUNDS // 2, "the daemon died before the first token, in half of the rounds at least"
        assert 0 == health(node)["replication"]["failures"]
    finally:
        node.close()


def answer_of(node: Node) -> Answer:
    """A whole answer."""
    return last(ask(node.url, prompt=PROMPT, max_tokens=TOKENS, session="s"))


def answer_while_killed(node: Node, delay: float) -> tuple[Answer, float]:
    """The answer, and how long its first token took, while the daemon is killed after a delay."""
    daemon = node.daemon
    assert daemon is not None
    killer = threading.Timer(delay, daemon.send, (9,))
    began = time.monotonic()
    killer.start()
    stream = ask(node.url, prompt=PROMPT, max_tokens=TOKENS, session="s")
    answer = next(stream)
    seconds = time.monotonic() - began
    for answer in stream:  # noqa: B007  # the last one
        pass
    killer.join()
    daemon.wait()
    return answer, seconds


def attached(node: Node) -> int:
    """Rows that a request attaches now; it must be answered in any case."""
    rows: int = answer_of(node).kvlog["attached"]
    return rows


def health(node: Node) -> dict[str, dict[str, int]]:
    """What the engine says of itself."""
    said: dict[str, dict[str, int]] = httpx.get(f"{node.url}/health", verify=NO_AUTHORITIES).json()
    return said
