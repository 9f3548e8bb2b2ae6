"""Much at once, and a log that stands still: generation never waits, and afterwards everything is where it belongs."""

from __future__ import annotations

import socket
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from tests.nodes import (
    Node,
    ask,
    daemon_config,
    logged_length,
    running,
    synthetic_answer,
    until,
    whole_answer,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = "How is it? "
SESSIONS = 100
TOKENS = 40
CHURN = 300
LONG = 32_000
ROW_BYTES = 1024

whole = partial(whole_answer, prompt=PROMPT, max_tokens=TOKENS)
"""A whole answer."""


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """Two nodes, engines of 1 KiB rows that take a hundred requests at once; `a` has a metrics port."""
    folder = tmp_path_factory.mktemp("load")
    engine = (
        "synthetic",
        "--row-bytes",
        str(ROW_BYTES),
        "--active",
        "100",
        "--queue",
        "64",
        "--claim-seconds",
        "5",
    )
    url = f"file://{folder}/log"
    nodes = [
        Node(
            folder,
            name,
            daemon_config(
                folder,
                name,
                url,
                metrics={"port": free_port()},
                diagnostics={"level": "info"},
                pool={"bytes": 256 << 20},  # a block for each of the sessions, and the long one beside them
            ),
            (*engine, "--tokens-per-second", "20") if name == "a" else engine,
        )
        for name in "ab"
    ]
    with running(nodes):
        yield nodes[0], nodes[1]


def figures(node: Node) -> dict[str, float]:
    """What its Prometheus endpoint says: `name{labels}` → value."""
    port = next(
        line.split("=")[1] for line in node.config.read_text().splitlines() if line.startswith("port")
    )
    text = httpx.get(f"http://127.0.0.1:{int(port)}/metrics", verify=NO_AUTHORITIES).text
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def test_hundred_sessions_over_a_log_that_stands_still_go_on_and_catch_up(nodes: tuple[Node, Node]) -> None:
    """While another process keeps the log's database locked nothing waits; then all of it is logged, and moves."""
    a, b = nodes
    expected = synthetic_answer(PROMPT, TOKENS, row_bytes=ROW_BYTES)
    directory = a.folder / "log"
    before = figures(a)["kvlog_turns_opened_total"]
    with ThreadPoolExecutor(SESSIONS) as clients:
        answers = [clients.submit(whole, a, f"many-{number}") for number in range(SESSIONS)]
        until(
            lambda: SESSIONS <= figures(a)["kvlog_turns_opened_total"] - before,
            seconds=30,
            what="all turns open",
        )
        locked = sqlite3.connect(directory / "log.db", isolation_level=None, timeout=10)
        locked.execute("BEGIN IMMEDIATE")
        try:
            assert [expected] * SESSIONS == [answer.result(60).tokens for answer in answers]
            assert figures(a)["kvlog_append_queue_bytes"] > 0, "the log did stand still"
        finally:
            locked.execute("ROLLBACK")
            locked.close()
        rows = len(PROMPT) + TOKENS - 1
        for number in range(0, SESSIONS, 9):
            name = f"many-{number}"
            until(lambda: logged_length(directory, name) == rows, seconds=30, what=name)  # noqa: B023
        moved = [
            clients.submit(whole, b, f"many-{number}", resume_token_ids=expected[:30])
            for number in range(SESSIONS)
        ]
        for answer in moved:
            assert expected[30:] == answer.result(60).tokens
        told = [answer.result().kvlog for answer in moved]
        assert [(len(PROMPT) + 29, None)] * SESSIONS == [(one["attached"], one["reason"]) for one in told]


def test_churn_of_short_sessions_leaves_nothing_open_and_its_figures_right(nodes: tuple[Node, Node]) -> None:
    """Three hundred short sessions beside somebody who connects and says nothing: all answered, and no lag is left."""
    a, b = nodes
    before = figures(b)["kvlog_turns_opened_total"]
    with socket.socket(socket.AF_UNIX) as silent:
        silent.connect(str(b.folder / "b.sock"))
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda n: whole(b, f"churn-{n}", max_tokens=2), range(CHURN)))
    assert [synthetic_answer(PROMPT, 2, row_bytes=ROW_BYTES)] * CHURN == [answer.tokens for answer in answers]
    assert CHURN <= figures(b)["kvlog_turns_opened_total"] - before
    for node in (a, b):
        until(lambda: _is_at_rest(figures(node)), seconds=20, what=f"{node.name} at rest")  # noqa: B023


def _is_at_rest(said: dict[str, float]) -> bool:
    lags = [value for name, value in said.items() if name.startswith("kvlog_lag_records{")]
    return [0.0] * 4 == lags and 0 == said["kvlog_append_queue_bytes"]


def test_session_of_32k_positions_moves_whole(nodes: tuple[Node, Node]) -> None:
    """A long context is logged, applied and attached like a short one."""
    a, b = nodes
    prompt = [number % 256 for number in range(LONG)]
    answer = whole(a, "long", prompt=prompt, max_tokens=3)
    until(lambda: logged_length(a.folder / "log", "long") >= LONG + 2, seconds=60, what="long one logged")
    resumed = whole(b, "long", prompt=prompt, max_tokens=3, resume_token_ids=answer.tokens[:2])
    assert (answer.tokens[2:], LONG + 1) == (resumed.tokens, resumed.kvlog["attached"])


def test_daemon_keeps_no_descriptors_of_engines_that_were_killed(nodes: tuple[Node, Node]) -> None:
    """Ring, doorbell and socket of an engine go with it, and its turns too."""
    _, b = nodes
    assert b.daemon is not None
    whole(b, "before")

    def descriptors() -> int:
        return len(list(Path(f"/proc/{b.daemon.pid if b.daemon else 0}/fd").iterdir()))

    with_engine = descriptors()
    for _ in range(2):
        stream = ask(b.url, prompt=PROMPT, max_tokens=100_000, session="cut")
        next(stream)
        assert b.engine is not None
        b.engine.stop(9)
        b.start_engine()
        assert whole(b, "cut", max_tokens=3).kvlog["logged"] is True
    until(lambda: descriptors() <= with_engine, what="descriptors given back")
