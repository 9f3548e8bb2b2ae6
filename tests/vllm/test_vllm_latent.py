"""Latent attention (MLA) on real vLLM servers: one row a token and layer, of one plane and one head, for all ranks.

vLLM's CPU kernels for it have no prefix cache, so what a later request does not compute can only have been loaded. What
they compute of a position depends on how many are computed at once, also without a connector, and by far more than
rounding (docs/vllm.md). So tokens are compared where all rows but one are loaded; elsewhere they are noted.
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
    rows = fleet.logged("latent").rows
    count = rows + 1 - len(prompt)
    known = len(prompt) + max(count, len(shown))
    rest = e.answer("latent", [*prompt, *expected[:count]], 300 - count, kv_transfer_params=TAKE_OVER)
    assert rows == _loaded(fleet, e, "latent")
    kv_equal = undisturbed.digests(rows) == fleet.logged("latent").digests(rows)
    tokens_equal = expected == expected[:count] + rest and expected[: len(shown)] == shown
    seconds = d.pace.seconds(known - rows)
    row = Row("latent, D to E", known, d.acked_at_kill["latent"], rows, seconds, kv_equal, tokens_equal)
    fleet.table.append(row)
    assert row.is_right, row


def test_second_turn_of_a_latent_session_loads_the_first(fleet: Fleet) -> None:
    """Out of the daemon's pool; only new rows are logged. With one row left to compute it is the undisturbed answer."""
    prompt = prompt_of("test_second_turn_of_a_latent_session_loads_the_first")
    node = fleet.serving("d")
    expected, undisturbed = fleet.undisturbed(prompt, 100, on="d")
    node.answer("latent-turns", prompt, 60)
    fleet.wait_rows("latent-turns", len(prompt) + 59)
    answer = node.answer("latent-turns", [*prompt, *expected[:60]], 40)
    assert len(prompt) + 59 == _loaded(fleet, node, "latent-turns", 2)
    assert expected[60:] == answer
    fleet.wait_rows("latent-turns", len(prompt) + 99)
    assert undisturbed.digests(len(prompt) + 99) == fleet.logged("latent-turns").digests(len(prompt) + 99)
    node.answer("latent-turns", [*prompt, *expected, 7, 8, 9], 40)
    assert len(prompt) + 99 == _loaded(fleet, node, "latent-turns", 3)
    assert undisturbed.digests(len(prompt) + 99) == fleet.logged("latent-turns").digests(len(prompt) + 99)


def test_flipped_byte_in_a_latent_log_is_refused_and_computed(fleet: Fleet) -> None:
    """The control: of two copies of a session the whole one is loaded whole, the damaged one up to its damage.

    What was loaded is the undisturbed run's, byte for byte. How far rows that are computed at once are from rows that
    were computed one by one is noted, also of a session of which nothing is loaded.
    """
    prompt = prompt_of("test_flipped_byte_in_a_latent_log_is_refused_and_computed")
    expected, undisturbed = fleet.undisturbed(prompt, 100, on="d")
    fleet.serving("d").answer("latent-origin", prompt, 60)
    fleet.wait_rows("latent-origin", len(prompt) + 59)
    start = asyncio.run(copy_whole_and_damaged(fleet.log_url, "latent-origin"))
    known = [*prompt, *expected[:60]]
    node = fleet.serving("e")
    answer = node.answer("latent-origin-whole", known, 40, kv_transfer_params=TAKE_OVER)
    assert len(known) - 1 == _loaded(fleet, node, "latent-origin-whole")
    assert expected[60:] == answer
    for session, loaded in (("latent-origin-damaged", start), ("latent-new", 0)):
        answer = node.answer(session, known, 40, kv_transfer_params=TAKE_OVER)
        assert loaded == _loaded(fleet, node, session), session
        logged = fleet.logged(session)
        assert undisturbed.digests(loaded) == logged.digests(loaded), session
        fleet.notes.append(
            f"{session}: {loaded} of {len(known)} rows loaded; the others were computed at once and differ from those"
            f" of a run that computed 60 one by one by {undisturbed.differs_from(logged, len(known)):.2g} at most;"
            f" tokens equal: {expected[60:] == answer}"
        )


def _loaded(fleet: Fleet, node: VllmNode, session: str, turns: int = 1) -> int:
    """Rows that a turn put into blocks, once the log has all of it: what was loaded and logged, byte for byte."""
    turn = node.server.last_turn(session, turns)
    fleet.wait_rows(session, turn["length"])
    logged = fleet.logged(session)
    assert (turn["length"], turn["tokens"]) == (logged.rows, logged.tokens)
    assert turn["sure_digests"] == logged.digests(logged.rows, turn["sure_from"])
    assert turn["worker"]["load_failures"] == 0
    return int(turn["loaded"])
