"""Latent attention (MLA) on real vLLM servers: one row a token and layer, of one plane and one head, for all ranks.

vLLM's CPU kernels for it have no prefix cache, so what a later request does not compute can only have been loaded. They
compute one row otherwise than several (in the latent space, or by heads), and round otherwise. So tokens are compared
where all rows but one are loaded, and rows that were computed again are compared as numbers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.model.deepseek import LATENT, ROTARY
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.fleet import TAKE_OVER, Row, prompt_of

if TYPE_CHECKING:
    from tests.vllm.fleet import Fleet, VllmNode

ROUNDING = 1e-3
"""Elements of a latent row are normalised: they are of the order of one."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def test_latent_answer_goes_on_after_its_node_was_killed(fleet: Fleet) -> None:
    """SIGKILL of D's process group and daemon in mid-answer: E loads the log's rows, which are an undisturbed run's.

    E is given the tokens of the log's rows and the one after them; its answer is the undisturbed one from there on.
    """
    prompt = prompt_of("test_latent_answer_goes_on_after_its_node_was_killed")
    expected, undisturbed = fleet.undisturbed(prompt, 300, on="d")
    assert (LATENT + ROTARY) * 4 == undisturbed.layers[0].shape[1], "bytes of a row in one layer, in float32"
    d, e = fleet.node("d"), fleet.serving("e")
    shown = d.answer_until("latent", prompt, 150, d.kill)
    known = len(prompt) + len(shown)
    rows = fleet.logged("latent").rows
    count = rows + 1 - len(prompt)
    rest = e.answer("latent", [*prompt, *expected[:count]], 300 - count, kv_transfer_params=TAKE_OVER)
    assert rows == _attached(fleet, e, "latent")
    kv_equal = undisturbed.digests(rows) == fleet.logged("latent").digests(rows)
    tokens_equal = expected == expected[:count] + rest and expected[: len(shown)] == shown
    seconds = d.pace.seconds(known - rows)
    row = Row("latent, D to E", known, d.acked_at_kill["latent"], rows, seconds, kv_equal, tokens_equal)
    fleet.table.append(row)
    assert row.is_right, row


def test_second_turn_of_a_latent_session_loads_the_first(fleet: Fleet) -> None:
    """On the node that computed it, out of the daemon's pool; only new rows are logged."""
    prompt = prompt_of("test_second_turn_of_a_latent_session_loads_the_first")
    node = fleet.serving("d")
    first = node.answer("latent-turns", prompt, 60)
    node.server.last_turn("latent-turns")
    node.answer("latent-turns", [*prompt, *first, 7, 8, 9], 40)
    assert len(prompt) + 59 == _attached(fleet, node, "latent-turns", 2)


def test_flipped_byte_in_a_latent_log_is_refused_and_computed(fleet: Fleet) -> None:
    """The control: of two copies of a session the whole one is loaded whole, the damaged one up to its damage.

    What was loaded is the undisturbed run's, byte for byte. What was computed again, several rows at once, is the same
    but for rounding; so is what a request computes of which nothing could be loaded. Tokens are compared where one row
    is computed, as in the undisturbed run; elsewhere they are noted.
    """
    prompt = prompt_of("test_flipped_byte_in_a_latent_log_is_refused_and_computed")
    expected, undisturbed = fleet.undisturbed(prompt, 100, on="d")
    fleet.serving("d").answer("latent-origin", prompt, 60)
    fleet.node("d").server.last_turn("latent-origin")
    start = asyncio.run(copy_whole_and_damaged(fleet.log_url, "latent-origin"))
    known = [*prompt, *expected[:60]]
    node, most = fleet.serving("e"), len(known) - 1
    assert expected[60:] == node.answer("latent-origin-whole", known, 40, kv_transfer_params=TAKE_OVER)
    assert most == _attached(fleet, node, "latent-origin-whole")
    loads = {"latent-origin-damaged": (start, 0), "latent-fresh": (0, 0)}
    for session, (loaded, log_from) in loads.items():
        answer = node.answer(session, known, 40, kv_transfer_params=TAKE_OVER)
        assert loaded == _attached(fleet, node, session, log_from=log_from), session
        logged = fleet.logged(session)
        assert undisturbed.digests(loaded) == logged.digests(loaded)
        differs = undisturbed.differs_from(logged, len(known))
        fleet.notes.append(
            f"{session}: {loaded} rows loaded, {len(known) - loaded} computed at once: these differ from rows computed"
            f" one by one by {differs:.2g} at most; tokens equal: {expected[60:] == answer}"
        )
        assert differs < ROUNDING, session


def _attached(
    fleet: Fleet, node: VllmNode, session: str, turns: int = 1, *, log_from: int | None = None
) -> int:
    """Rows that a turn attached and put into blocks, once its blocks hold what the log holds, all of it.

    `log_from`: where it began to log; None: after what it attached. A session that is broken here is logged from 0.
    """
    turn = node.server.last_turn(session, turns)
    logged = fleet.logged(session)
    attached = int(turn["attach_length"])
    assert (turn["length"], turn["tokens"]) == (logged.rows, logged.tokens)
    assert turn["digests"] == logged.digests(logged.rows)
    assert turn["log_from"] == (attached if log_from is None else log_from)
    assert turn["worker"]["load_failures"] == 0
    return attached
