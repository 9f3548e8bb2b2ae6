"""Failures that users of vLLM and LMCache have reported in public, provoked on real vLLM servers with the connector.

tests/integration/test_public_reports.py has those that need no engine.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import pytest

from tests.model.llama import random_folder
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.fleet import TAKE_OVER, prompt_of
from tests.vllm.servers import run_vllm_python
from tests.vllm.test_vllm_answers import assert_bytes

if TYPE_CHECKING:
    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ROUNDING = 1e-3
_GATHER_SECONDS = 1.0
"""A request's way from its client to the scheduler takes milliseconds."""


def at_once(fleet: Fleet, node: VllmNode, asked: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """Answers of several sessions whose requests the scheduler meets in one step: it stands still until it has all."""
    answers: dict[str, list[int]] = {}
    node.server.post("pause", mode="keep", clear_cache="false")

    def run(session: str) -> None:
        answers[session] = node.answer(session, asked[session], count, kv_transfer_params=TAKE_OVER)

    def go_on() -> None:
        time.sleep(_GATHER_SECONDS)
        node.server.post("resume")

    fleet.at_once(go_on, *[lambda session=session: run(session) for session in asked])
    return answers


@pytest.mark.parametrize("name", ["a", "b", "c"])
def test_load_that_fails_changes_no_token_of_its_request_nor_of_one_with_the_same_prefix(
    fleet: Fleet, name: str
) -> None:
    """vllm-project/vllm #49250, #19330: a failed load reported as recovered, and wrong output of who shared its blocks.

    There, the second request took blocks for computed that the first one was still computing, piece by piece. Here the
    rows that were verified cannot be put into blocks, of two sessions with the same prompt that are met in one step.
    local-inference-lab/vllm #191: such a request stood until another one came.
    """
    prompt = prompt_of(f"test_load_that_fails_{name}")
    other, node = fleet.serving("b" if name == "a" else "a"), fleet.serving(name)
    sessions = [f"fails-{name}-{k}" for k in range(2)]
    shown = {session: other.answer(session, prompt, 60) for session in sessions}
    for session in sessions:
        other.server.last_turn(session)
    failures, shared = node.load_failures(), node.metric("vllm:prefix_cache_hits_total")
    known = {session: [*prompt, *shown[session], *range(k)] for k, session in enumerate(sessions)}
    with node.server.failing_loads():
        answers = at_once(fleet, node, known, 60)
    assert node.load_failures() > failures, "no load has failed: the scenario proves nothing"
    shared = node.metric("vllm:prefix_cache_hits_total") - shared
    fleet.notes.append(f"load failure on {name}: {shared:.0f} tokens of a prefix were shared meanwhile")
    for session in sessions:
        turn = assert_bytes(fleet, node, session)
        expected, undisturbed = fleet.undisturbed(known[session], 60)
        assert expected == answers[session], session
        assert undisturbed.differs_from(fleet.logged(session), turn["length"]) < ROUNDING, session


@pytest.mark.vllm_ci
@pytest.mark.parametrize(("load_step_bytes", "is_safe"), [(0, True), (8 << 20, False)])
def test_blocks_of_a_failed_load_are_read_by_nobody_before_they_are_computed(
    load_step_bytes: int, is_safe: bool
) -> None:
    """vllm-project/vllm #49250 in its own scheduler, where prefills share a step; the control is why it is not ours.

    A load within a step would be as much as a step faster: the second request then computes its whole answer on blocks
    that the first one has only begun to compute. Should the control fail, vLLM has mended it.
    """
    command = ["-m", "tests.vllm.failed_load", str(random_folder()), str(load_step_bytes)]
    done = run_vllm_python(command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert is_safe == (int(done.stdout.strip().splitlines()[-1]) == 0)


def test_two_sessions_with_one_prefix_are_right_where_the_rows_of_one_are_bad(fleet: Fleet) -> None:
    """LMCache/LMCache #4991, #5032: what had failed to be stored was found, loaded, and shared by token hash.

    Two copies of a session in the log, one of them with a flipped byte, loaded in the same steps.
    """
    prompt = prompt_of("test_two_sessions_with_one_prefix_are_right_where_the_rows_of_one_are_bad")
    expected, undisturbed = fleet.undisturbed(prompt, 100)
    fleet.a.answer("shared", prompt, 60)
    fleet.a.server.last_turn("shared")
    start = asyncio.run(copy_whole_and_damaged(fleet.log_url, "shared"))
    known = [*prompt, *expected[:60]]
    node = fleet.b
    asked = {"shared-damaged": known, "shared-whole": known}
    for session, answer in at_once(fleet, node, asked, 40).items():
        assert expected[60:] == answer, session
        turn = assert_bytes(fleet, node, session)
        assert undisturbed.differs_from(fleet.logged(session), turn["length"]) < ROUNDING, session
        assert turn["attach_length"] == (start if session == "shared-damaged" else len(known) - 1)


def test_engine_started_again_loads_what_was_logged_and_answers_as_before(fleet: Fleet) -> None:
    """LMCache/LMCache #4492: after a restart of vLLM alone, a cached prompt gave wrong output, again and again.

    SIGKILL of the engine in mid-answer; its daemon lives. Another engine comes, with other blocks in other places.
    """
    prompt = prompt_of("test_engine_started_again_loads_what_was_logged_and_answers_as_before")
    expected, undisturbed = fleet.undisturbed(prompt, 300)
    shown = fleet.node("a").answer_until("restarted", prompt, 150, fleet.node("a").server.kill)
    a = fleet.a
    for count in (20, 60):  # the first answer fills blocks, the second one finds them in the prefix cache
        known = [*prompt, *shown]
        more = a.answer("restarted", known, count)
        shown += more
        assert expected[: len(shown)] == shown
    turn = assert_bytes(fleet, a, "restarted", 2)
    assert undisturbed.differs_from(fleet.logged("restarted"), turn["length"]) < ROUNDING
    assert turn["worker"]["rows_loaded"] > len(prompt) + 100
