"""Requests that are not one long answer, on real vLLM servers: ends at once, several answers, beams, caches reset."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from tests.nodes import logged_length, until
from tests.vllm.fleet import TAKE_OVER, prompt_of
from tests.vllm.test_vllm_answers import assert_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

EOS = 258
ROUNDING = 1e-3


def complete(node: VllmNode, **body: object) -> dict[str, Any]:
    """One answer that is not streamed."""
    request = {"model": "m", "temperature": 0, "return_token_ids": True, **body}
    answer = httpx.post(f"{node.server.url}/v1/completions", verify=NO_AUTHORITIES, json=request, timeout=120)
    assert answer.status_code == httpx.codes.OK, answer.text
    said: dict[str, Any] = answer.json()
    return said


@contextmanager
def counted_unlogged(node: VllmNode, reason: str) -> Iterator[None]:
    """Requests are counted under this reason meanwhile, in the server's own metrics."""
    before = unlogged(node, reason)
    yield
    until(lambda: unlogged(node, reason) > before, seconds=30, what=f"a request counted as {reason}")


def unlogged(node: VllmNode, reason: str) -> float:
    """Requests that were served unlogged for this reason, as Prometheus reads it."""
    text = httpx.get(f"{node.server.url}/metrics", verify=NO_AUTHORITIES, timeout=10).text
    lines = [line for line in text.splitlines() if line.startswith("vllm:kvlog_unlogged_requests_total")]
    return sum(float(line.split()[-1]) for line in lines if f'reason="{reason}"' in line)


def test_request_that_ends_at_eos_on_resume_leaves_a_whole_session(fleet: Fleet) -> None:
    """The client had every token but the end: B loads all, computes one row, and says stop; A goes on from there."""
    prompt = prompt_of("test_request_that_ends_at_eos_on_resume_leaves_a_whole_session")
    a, b = fleet.a, fleet.b
    shown = a.answer("ended", prompt, 60)
    known = [*prompt, *shown]
    a.server.last_turn("ended")
    body = {"session_id": "ended", "max_tokens": 50, "kv_transfer_params": TAKE_OVER}
    answer = complete(b, prompt=known, logit_bias={str(EOS): 100}, **body)
    assert ("stop", [EOS]) == (answer["choices"][0]["finish_reason"], answer["choices"][0]["token_ids"])
    assert {"loaded": len(known) - 1, "unlogged": None} == answer["kv_transfer_params"]["kvlog"]
    turn = assert_bytes(fleet, b, "ended")
    assert known == turn["tokens"]
    a.answer("ended", [*known, EOS, 7, 8], 20)
    turn = assert_bytes(fleet, a, "ended", 2)
    assert len(known) == turn["log_from"]


def test_several_answers_of_one_request_are_served_and_not_replicated(fleet: Fleet) -> None:
    """N > 1: which of them would be the session? Counted, and not in the log."""
    prompt = prompt_of("test_several_answers_of_one_request_are_served_and_not_replicated")
    expected = fleet.undisturbed(prompt, 5)[0]
    with counted_unlogged(fleet.a, "n_over_1"):
        answer = complete(
            fleet.a, prompt=list(prompt), max_tokens=5, n=2, temperature=1.0, session_id="several", top_k=1
        )
    assert [expected, expected] == [choice["token_ids"] for choice in answer["choices"]]
    assert "n_over_1" == answer["kv_transfer_params"]["kvlog"]["unlogged"]
    assert_not_logged(fleet, "several")


def test_request_named_by_nobody_ends_with_itself(fleet: Fleet) -> None:
    """It is replicated under the engine's own id, which nobody can ask for afterwards."""
    prompt = prompt_of("test_request_named_by_nobody_ends_with_itself")
    answer = complete(fleet.a, prompt=list(prompt), max_tokens=5)
    assert {"loaded": 0, "unlogged": None} == answer["kv_transfer_params"]["kvlog"]


def test_beam_search_is_served_and_not_replicated(fleet: Fleet) -> None:
    """Its beams share vLLM's session id, and none of them is the session: counted, and not in the log."""
    prompt = prompt_of("test_beam_search_is_served_and_not_replicated")
    beams: dict[str, Any] = {"prompt": list(prompt), "max_tokens": 6, "n": 3, "use_beam_search": True}
    with counted_unlogged(fleet.a, "beam_search"):
        answer = complete(fleet.a, session_id="beams", **beams)
    assert 3 == len(answer["choices"])
    assert_not_logged(fleet, "beams")
    assert fleet.undisturbed(prompt, 20)[0] == fleet.a.answer("beams", prompt, 20)
    assert_bytes(fleet, fleet.a, "beams")


def assert_not_logged(fleet: Fleet, session: str) -> None:
    """Neither a turn nor a row of it."""
    assert [] == fleet.node("a").server.turns(session)
    assert 0 == logged_length(fleet.folder / "log", session)


RESETS = {
    "reset_prefix_cache": [
        ("reset_prefix_cache", {"reset_running_requests": "true", "reset_external": "true"})
    ],
    "pause": [("pause", {"clear_cache": "true"}), ("resume", {})],
    "sleep": [("sleep", {"level": "1"}), ("wake_up", {})],
}
"""What vLLM 0.32 has over HTTP (VLLM_SERVER_DEV_MODE=1) that reaches the connector's reset_cache."""


@pytest.mark.parametrize("how", RESETS)
def test_cache_that_is_reset_over_http_claims_anew_and_attaches_no_old_row(fleet: Fleet, how: str) -> None:
    """What was logged before, here or elsewhere, is never loaded here again; nor elsewhere what comes after."""
    prompt = prompt_of(f"test_cache_that_is_reset_{how}")
    c, a = fleet.serving("c", to_reset=True), fleet.a
    expected, undisturbed = fleet.undisturbed(prompt, 140)
    old, foreign = f"old-{how}", f"foreign-{how}"
    assert expected[:60] == c.answer(old, prompt, 60)
    assert expected[:60] == a.answer(foreign, prompt, 60)
    c.server.last_turn(old)
    a.server.last_turn(foreign)
    known = [*prompt, *expected[:60]]
    for path, query in RESETS[how]:
        c.server.post(path, **query)
    for session in (old, foreign):
        body: dict[str, Any] = {"session_id": session, "kv_transfer_params": TAKE_OVER}
        answer = complete(c, prompt=known, max_tokens=40, ignore_eos=True, **body)
        assert {"loaded": 0, "unlogged": None} == answer["kv_transfer_params"]["kvlog"], session
        assert expected[60:100] == answer["choices"][0]["token_ids"]
        turn = assert_bytes(fleet, c, session, 1 + (session == old))
        assert (0, 0) == (turn["attach_length"], turn["log_from"]), session
        assert undisturbed.differs_from(fleet.logged(session), turn["length"]) < ROUNDING
    answer = complete(a, prompt=[*prompt, *expected[:100]], max_tokens=40, ignore_eos=True, session_id=old)
    assert {"loaded": 0, "unlogged": None} == answer["kv_transfer_params"]["kvlog"]
    assert expected[100:] == answer["choices"][0]["token_ids"]


def test_local_prefix_cache_that_is_reset_alone_keeps_the_log(fleet: Fleet) -> None:
    """The control: without the word for the connector, all that the log has is loaded into the empty cache."""
    prompt = prompt_of("test_local_prefix_cache_that_is_reset_alone_keeps_the_log")
    a = fleet.a
    first = a.answer("kept", prompt, 60)
    a.server.last_turn("kept")
    known = [*prompt, *first]
    until(lambda: a.server.post("reset_prefix_cache")["success"], what="no block held")
    answer = complete(a, prompt=known, max_tokens=20, ignore_eos=True, session_id="kept")
    assert {"loaded": len(known) - 1, "unlogged": None} == answer["kv_transfer_params"]["kvlog"]
    assert_bytes(fleet, a, "kept", 2)


def test_request_that_runs_when_the_cache_is_reset_stays_unlogged(fleet: Fleet) -> None:
    """Its answer is whole; its log ends where the reset came; what follows is counted as old weights."""
    prompt = prompt_of("test_request_that_runs_when_the_cache_is_reset_stays_unlogged")
    c = fleet.serving("c", to_reset=True)
    expected, undisturbed = fleet.undisturbed(prompt, 400)
    shown: list[int] = []
    with counted_unlogged(c, "old_weights"):
        for answer in c.stream("running", prompt, 400):
            if not shown and len(answer.tokens) >= 100:
                query = {"reset_running_requests": "true", "reset_external": "true"}
                assert c.server.post("reset_prefix_cache", **query)["success"]
                shown = list(answer.tokens)
    assert expected == answer.tokens
    logged = fleet.logged("running")
    assert len(prompt) < logged.rows < len(prompt) + 399
    assert undisturbed.tokens[: logged.rows] == logged.tokens
    assert undisturbed.differs_from(logged, logged.rows) < ROUNDING
