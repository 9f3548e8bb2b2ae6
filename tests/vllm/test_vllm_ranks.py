"""Two ranks of one vLLM server, each with a link and a shard of its own: what their blocks and the log hold."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.checksums import checksum
from tests.model.llama import random_folder
from tests.nodes import Node, ask, daemon_config, last
from tests.processes import die_with_parent
from tests.vllm.copies import copy_damaged
from tests.vllm.fleet import TAKE_OVER, Row, prompt_of
from tests.vllm.servers import ROOT, logged_session, vllm_python, why_not

if TYPE_CHECKING:
    from pathlib import Path

    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

RANKS = (0, 1)


def assert_bytes(fleet: Fleet, node: VllmNode, session: str, turns: int = 1) -> list[dict[str, Any]]:
    """Each rank's blocks hold its shard of the log, all of it; the turn as each rank has it."""
    said = [node.server.last_turn(session, turns, rank) for rank in RANKS]
    fleet.wait_rows(session, said[0]["length"])
    for rank, turn in zip(RANKS, said, strict=True):
        logged = logged_session(fleet.log_url, session, fleet.folder, rank)
        assert (turn["length"], turn["tokens"]) == (logged.rows, logged.tokens), f"rank {rank}"
        assert turn["digests"] == logged.digests(logged.rows), f"rank {rank}"
    assert said[0]["digests"] != said[1]["digests"], "two shards of one model differ"
    return said


def equal_below(fleet: Fleet, sessions: tuple[str, str], length: int) -> bool:
    """Whether the first rows of two sessions are the same bytes in the log, in both shards."""
    digests = [
        [logged_session(fleet.log_url, session, fleet.folder, rank).digests(length) for rank in RANKS]
        for session in sessions
    ]
    return digests[0] == digests[1]


def warmed(node: VllmNode) -> VllmNode:
    """The first step of a server of two ranks takes its time: it is not the scenario's."""
    body: dict[str, Any] = {"model": "m", "prompt": [1, 2, 3], "max_tokens": 1, "session_id": "warm"}
    last(ask(node.server.url, seconds=300, **body))
    return node


def test_answer_of_two_ranks_goes_on_on_another_server_of_two_ranks(fleet: Fleet) -> None:
    """SIGKILL of P's process group and daemon in mid-answer: Q's ranks load one common length, each its own shard.

    The control: of a copy with one flipped byte in one shard, both ranks load what comes before it.
    """
    prompt = prompt_of("test_answer_of_two_ranks_goes_on_on_another_server_of_two_ranks")
    for name in "abc":
        fleet.node(name).server.kill()
    p = warmed(fleet.serving("p"))
    expected = p.answer("undisturbed-ranks", prompt, 400)
    assert_bytes(fleet, p, "undisturbed-ranks")
    p.answer("origin-ranks", prompt[1:], 60)
    assert_bytes(fleet, p, "origin-ranks")
    shown = p.answer_until("ranks", prompt, 150, p.kill)
    q = warmed(fleet.serving("q"))
    warm = [q.server.last_turn("warm", 1, rank)["worker"]["rows_loaded"] for rank in RANKS]
    known = [*prompt, *shown]
    rest = q.answer("ranks", known, 400 - len(shown), kv_transfer_params=TAKE_OVER)
    turns = assert_bytes(fleet, q, "ranks")
    loaded = turns[0]["attach_length"]
    kv_equal = equal_below(fleet, ("ranks", "undisturbed-ranks"), loaded)
    acked, seconds = p.acked_at_kill["ranks"], p.pace.seconds(len(known) - loaded)
    tokens_equal = expected == shown + rest
    row = Row("two ranks, P to Q", len(known), acked, loaded, seconds, kv_equal, tokens_equal)
    fleet.table.append(row)
    assert [loaded, loaded] == [
        turn["worker"]["rows_loaded"] - then for turn, then in zip(turns, warm, strict=True)
    ]
    assert (True, True) == (row.kv_equal, row.tokens_equal), row
    assert acked <= loaded < len(known), "how far behind is not judged: two ranks leave the daemon no core"

    start = asyncio.run(copy_damaged(fleet.log_url, "origin-ranks", shard=1))
    origin = logged_session(fleet.log_url, "origin-ranks", fleet.folder)
    before = [turn["worker"]["rows_loaded"] for turn in turns]
    answer = q.answer("origin-ranks-damaged", [*origin.tokens, 5], 20, kv_transfer_params=TAKE_OVER)
    assert 20 == len(answer)
    turns = assert_bytes(fleet, q, "origin-ranks-damaged")
    assert [start, start] == [turn["attach_length"] for turn in turns]
    assert [start, start] == [
        turn["worker"]["rows_loaded"] - then for turn, then in zip(turns, before, strict=True)
    ]
    assert equal_below(fleet, ("origin-ranks-damaged", "origin-ranks"), start)


@pytest.mark.parametrize("kind", ["heads", "latent"])
def test_vllms_scheduler_and_aggregator_serve_two_ranks(tmp_path: Path, kind: str) -> None:
    """Without a model: all load, or all compute what one could not load, and the log has each rank's own rows.

    Three turns of one session over a real daemon; the third one's load fails on the second rank. Latent rows are the
    same on both: the first one logs them, and an engine of one rank goes on with them.
    """
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    url = f"file://{tmp_path}/log"
    node = Node(tmp_path, "a", daemon_config(tmp_path, "a", url))
    try:
        node.start_daemon()
        node.wait_log()
        told = _two_ranks(node, kind)
    finally:
        node.close()
    assert ({}, [129, 129], [0, 1]) == (told["unlogged"], told["loaded"], told["failures"])
    assert [129 + 151, 129] == told["loaded_third"]
    shards = RANKS if kind == "heads" else RANKS[:1]
    assert [rank in shards for rank in RANKS] == [rows > 0 for rows in told["written"]]
    if kind == "latent":
        assert len(told["tokens"]) - 7 == told["loaded_alone"]
    for rank in shards:
        logged = logged_session(url, "s", tmp_path, rank)
        assert told["tokens"][:-1] == logged.tokens
        positions = range(logged.rows)
        rows = [b"".join(layer[position].tobytes() for layer in logged.layers) for position in positions]
        assert told["rows"][rank] == [checksum(row) for row in rows]


def _two_ranks(node: Node, kind: str) -> dict[str, Any]:
    command = [str(vllm_python()), "-m", "tests.vllm.two_ranks", str(random_folder())]
    done = subprocess.run(
        [*command, str(node.folder / "a.sock"), kind],
        capture_output=True,
        text=True,
        check=False,
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HUB_OFFLINE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_CPU_KVCACHE_SPACE": "1",
        },
        preexec_fn=die_with_parent,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return told
