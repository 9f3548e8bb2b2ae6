"""How closely a session is followed, by setting and by request, with each codec, over real processes."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from tests.nodes import (
    Node,
    daemon_config,
    logged_length,
    running,
    synthetic_answer,
    until,
    whole_answer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = pytest.mark.e2e

PROMPT = "The cache is the conversation. " * 8
TOKENS = 20
KNOWN = 10
ALL = len(PROMPT) + KNOWN - 1
"""What can be attached of a prompt and KNOWN tokens: the last one's row is always computed."""

whole = partial(whole_answer, prompt=PROMPT, max_tokens=TOKENS)
"""A whole answer."""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Node]]:
    """`a` holds rows back and packs by lz4, `b` logs token ids only where a request says no more, and splits."""
    folder = tmp_path_factory.mktemp("modes")
    url = f"file://{folder}/log"
    nodes = {
        "a": Node(
            folder,
            "a",
            daemon_config(folder, "a", url, sync={"mode": "every:16,50ms", "codec": "lz4"}),
            ("synthetic",),
        ),
        "b": Node(
            folder,
            "b",
            daemon_config(folder, "b", url, sync={"mode": "ids", "codec": "split_zstd"}),
            ("synthetic",),
        ),
        "capped": Node(
            folder,
            "capped",
            daemon_config(
                folder, "capped", url, sync={"codec": "raw", "bandwidth_bytes_per_second": 1 << 19}
            ),
            ("synthetic",),
        ),
    }
    with running(list(nodes.values())):
        yield nodes


def health(node: Node) -> dict[str, Any]:
    """What the engine says of itself."""
    said: dict[str, Any] = httpx.get(f"{node.url}/health", verify=NO_AUTHORITIES).json()
    return said


@pytest.mark.parametrize(
    ("first", "then", "sync", "attached"),
    [
        ("a", "b", None, ALL),
        ("a", "b", "full", ALL),
        ("a", "b", "every:4096,60000ms", ALL),
        ("a", "b", "ids", 0),
        ("b", "a", None, 0),
        ("b", "a", "full", ALL),
    ],
)
def test_session_moves_with_what_its_mode_kept(
    nodes: dict[str, Node], first: str, then: str, sync: str | None, attached: int
) -> None:
    """Rows that were logged are attached, however held back and packed; after `ids` the answer goes on all the same.

    What `every` still holds back goes out with the turn's end.
    """
    session = f"{first}-{sync}"
    body = {} if sync is None else {"sync": sync}
    answer = whole(nodes[first], session, **body)
    directory = nodes[first].folder / "log"
    until(
        lambda: logged_length(directory, session) >= len(PROMPT) + TOKENS - 1, seconds=20, what="all logged"
    )
    resumed = whole(nodes[then], session, resume_token_ids=answer.tokens[:KNOWN])
    assert synthetic_answer(PROMPT, TOKENS) == answer.tokens == answer.tokens[:KNOWN] + resumed.tokens
    assert (attached, True) == (resumed.kvlog["attached"], resumed.kvlog["logged"])


def test_bandwidth_cap_slows_the_log_down_and_loses_nothing(nodes: dict[str, Node]) -> None:
    """A megabyte at half a megabyte a second: the answer does not wait for it, the log has all of it in the end."""
    node = nodes["capped"]
    began = time.monotonic()
    whole(node, "capped")
    rows = len(PROMPT) + TOKENS - 1
    until(lambda: logged_length(node.folder / "log", "capped") == rows, seconds=30, what="all logged")
    burst = (1 << 19) / 4
    assert time.monotonic() - began > (rows * 4096 - burst) / (1 << 19) - 0.5


def test_turn_behind_a_cap_ends_although_the_ring_is_never_empty(nodes: dict[str, Node]) -> None:
    """A session's next turn is logged while others keep the ring full: it waits for its own rows, not for theirs."""
    node = nodes["capped"]
    with ThreadPoolExecutor(4) as others:
        busy = [others.submit(whole, node, f"busy-{number}", max_tokens=60) for number in range(4)]
        until(
            lambda: whole(node, "turns", prompt="Hello. ", max_tokens=2).kvlog["logged"] is True,
            seconds=30,
            what="a turn",
        )
        assert [60] * 4 == [len(each.result().tokens) for each in busy]


def test_closed_sessions_survive_a_stop_that_follows_at_once(nodes: dict[str, Node]) -> None:
    """SIGTERM right after the answers: what the engine had closed is in the log, held back or not."""
    node = nodes["a"]
    with ThreadPoolExecutor(8) as clients:
        list(clients.map(lambda n: whole(node, f"stop-{n}", sync="every:4096,60000ms"), range(8)))
    assert node.daemon is not None
    until(lambda: 0 == health(node)["active"], what="turns closed by the engine")
    assert 0 == node.daemon.stop()
    lengths = [logged_length(node.folder / "log", f"stop-{number}") for number in range(8)]
    assert [len(PROMPT) + TOKENS - 1] * 8 == lengths
    node.start_daemon()
    node.wait_log()
    until(lambda: bool(health(node)["connected"]), what="the engine's link")
