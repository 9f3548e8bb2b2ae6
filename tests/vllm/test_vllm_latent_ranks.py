"""Latent attention (MLA) on vLLM servers of two ranks: both have the same rows, one logs them, each loads its own copy.

The log has one shard, so that servers of one rank and of two go on with each other's sessions. Tokens are compared
where all rows but one are loaded, between servers of two ranks; a server of one adds its sums up in another order, and
what it answers is noted (see test_vllm_latent).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.fleet import TAKE_OVER, Row, prompt_of
from tests.vllm.test_vllm_ranks import RANKS, warmed

if TYPE_CHECKING:
    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]


def test_latent_session_goes_on_on_servers_of_two_ranks_and_of_one(fleet: Fleet) -> None:
    """SIGKILL of M (two ranks) and its daemon in mid-answer: N (two) loads all rows on both; then E (one), and N again.

    The control: of two copies of a session the whole one is loaded whole by both ranks, the damaged one up to its
    damage.
    """
    prompt = prompt_of("test_latent_session_goes_on_on_servers_of_two_ranks_and_of_one")
    for name in "abcdepq":
        fleet.node(name).server.kill()
    m = warmed(fleet.serving("m"))
    expected, undisturbed = fleet.undisturbed(prompt, 300, on="m")
    m.answer("latent-alike-origin", prompt, 60)
    _turns(fleet, m, "latent-alike-origin")
    shown = m.answer_until("latent-alike", prompt, 150, m.kill)
    n = warmed(fleet.serving("n"))
    known, rows = len(prompt) + len(shown), fleet.logged("latent-alike").rows
    count = rows + 1 - len(prompt)
    rest = n.answer("latent-alike", [*prompt, *expected[:count]], 300 - count, kv_transfer_params=TAKE_OVER)
    assert [rows, rows] == [turn["loaded"] for turn in _turns(fleet, n, "latent-alike")]
    kv_equal = undisturbed.digests(rows) == fleet.logged("latent-alike").digests(rows)
    tokens_equal = expected == expected[:count] + rest and expected[: len(shown)] == shown
    acked = m.acked_at_kill["latent-alike"]
    seconds = m.pace.seconds(known - rows)
    row = Row("latent, M to N", known, acked, rows, seconds, kv_equal, tokens_equal)
    fleet.table.append(row)
    assert (True, True) == (row.kv_equal, row.tokens_equal), row
    assert min(acked, known - 1) <= rows < known, (
        "how far behind is not judged: two ranks leave the daemon no core"
    )

    start = asyncio.run(copy_whole_and_damaged(fleet.log_url, "latent-alike-origin"))
    whole = [*prompt, *expected[:60]]
    answer = n.answer("latent-alike-origin-whole", whole, 40, kv_transfer_params=TAKE_OVER)
    assert [len(whole) - 1] * 2 == [turn["loaded"] for turn in _turns(fleet, n, "latent-alike-origin-whole")]
    assert expected[60:100] == answer
    n.answer("latent-alike-origin-damaged", whole, 40, kv_transfer_params=TAKE_OVER)
    assert [start] * 2 == [turn["loaded"] for turn in _turns(fleet, n, "latent-alike-origin-damaged")]
    damaged = fleet.logged("latent-alike-origin-damaged")
    assert undisturbed.digests(start) == damaged.digests(start)

    _go_on_with_one_rank_and_back(fleet, n, [*prompt, *expected])


def _go_on_with_one_rank_and_back(fleet: Fleet, n: VllmNode, known: list[int]) -> None:
    """N and its daemon are killed; E goes on, and is killed; N goes on with E's rows."""
    n.kill()
    e = fleet.node("e")
    e.launch()
    e.server.wait_ready()
    before = fleet.logged("latent-alike")
    answer = e.answer("latent-alike", [*known, 7], 40, kv_transfer_params=TAKE_OVER)
    (turn,) = _turns(fleet, e, "latent-alike", ranks=(0,))
    assert len(known) - 1 <= before.rows <= turn["loaded"] + 1
    assert before.digests(turn["loaded"]) == fleet.logged("latent-alike").digests(turn["loaded"])
    e.kill()
    before = fleet.logged("latent-alike")
    n = warmed(fleet.serving("n"))
    known = [*known, 7, *answer]
    n.answer("latent-alike", [*known, 9], 20, kv_transfer_params=TAKE_OVER)
    turns = _turns(fleet, n, "latent-alike", count=2)
    assert [before.rows] * 2 == [turn["loaded"] for turn in turns]
    assert before.digests(before.rows) == fleet.logged("latent-alike").digests(before.rows)


def _turns(
    fleet: Fleet, node: VllmNode, session: str, *, count: int = 1, ranks: tuple[int, ...] = RANKS
) -> list[dict[str, Any]]:
    """A turn as each rank has it, once the log has all of it: what was loaded and logged, byte for byte, on each."""
    said = [node.server.last_turn(session, count, rank) for rank in ranks]
    fleet.wait_rows(session, said[0]["length"])
    logged = fleet.logged(session)
    for turn in said:
        assert (turn["length"], turn["tokens"]) == (logged.rows, logged.tokens)
        assert turn["sure_digests"] == logged.digests(logged.rows, turn["sure_from"])
        assert turn["worker"]["load_failures"] == 0
    assert [0] * (len(said) - 1) == [turn["replicator"]["rows"] for turn in said[1:]]
    assert said[0]["replicator"]["rows"] > 0
    return said
