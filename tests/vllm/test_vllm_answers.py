"""What a client sees of two real vLLM servers with the connector, and what their blocks and the log hold meanwhile.

Equal tokens alone prove little here: recomputing gives the same tokens. So each scenario looks at the rows that were
loaded, and at the bytes: of the blocks when a turn ends, of the log, and of a run that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from tests.nodes import until
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.fleet import TAKE_OVER, Row, prompt_of, stock_client

if TYPE_CHECKING:
    from tests.vllm.fleet import Fleet, VllmNode
    from tests.vllm.servers import LoggedSession

LOST_MAX = 200
"""Rows that a whole node's death may lose: what was in the ring, or on its way to the log. This model makes 300 a
second; 55 were lost where a daemon shared two busy cores with two engines."""

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def assert_bytes(fleet: Fleet, node: VllmNode, session: str, turns: int = 1) -> dict[str, Any]:
    """A turn's blocks hold what the log holds, all of it; the turn."""
    turn = node.server.last_turn(session, turns)
    logged = fleet.logged(session)
    assert turn["length"] == logged.rows
    assert turn["tokens"] == logged.tokens
    assert turn["digests"] == logged.digests(logged.rows)
    return turn


def loaded_by(turn: dict[str, Any], before: dict[str, Any] | None) -> int:
    """Rows that a turn put into blocks."""
    earlier = 0 if before is None else before["worker"]["rows_loaded"]
    return int(turn["worker"]["rows_loaded"] - earlier)


def test_second_turn_on_the_same_node_computes_only_what_is_new(fleet: Fleet) -> None:
    """Its own blocks or the log's rows; only new rows are logged."""
    prompt = prompt_of("test_second_turn_on_the_same_node_computes_only_what_is_new")
    node = fleet.a
    first = node.answer("turns", prompt, 60)
    conversation = [*prompt, *first, 7, 8, 9]
    node.answer("turns", conversation, 40)
    turn = assert_bytes(fleet, node, "turns", 2)
    assert len(prompt) + 59 == turn["log_from"]


def test_second_turn_on_another_node_loads_it_there(fleet: Fleet) -> None:
    """Through a plain load balancer: no word of a take-over, other block sizes; all but the last token is loaded."""
    prompt = prompt_of("test_second_turn_on_another_node_loads_it_there")
    first = fleet.a.answer("moved", prompt, 60)
    fleet.a.server.last_turn("moved")
    conversation = [*prompt, *first, 7, 8, 9]
    fleet.b.answer("moved", conversation, 40)
    turn = assert_bytes(fleet, fleet.b, "moved")
    assert len(prompt) + 59 == turn["attach_length"] == turn["log_from"]


def test_second_turn_that_goes_elsewhere_keeps_the_common_prefix(fleet: Fleet) -> None:
    """An edited conversation: the log is cut where it differs."""
    prompt = prompt_of("test_second_turn_that_goes_elsewhere_keeps_the_common_prefix")
    node = fleet.a
    node.answer("edited", prompt, 30)
    node.answer("edited", [*prompt[:150], 1, 2, 3], 30)
    turn = assert_bytes(fleet, node, "edited", 2)
    assert 150 == turn["log_from"]


def test_two_requests_at_once_on_one_session_are_one_turn_and_one_unlogged(fleet: Fleet) -> None:
    """Both are answered, one is in the log."""
    prompt = prompt_of("test_two_requests_at_once_on_one_session_are_one_turn_and_one_unlogged")
    expected = fleet.undisturbed(prompt, 60)[0]
    answers: list[list[int]] = []
    fleet.at_once(*[lambda: answers.append(fleet.a.answer("double", prompt, 60))] * 2)
    assert [expected, expected] == answers
    assert_bytes(fleet, fleet.a, "double")
    assert 1 == len(fleet.a.server.turns("double"))


def test_aborted_request_leaves_a_session_that_goes_on(fleet: Fleet) -> None:
    """The client closes its connection; its next request loads what was computed."""
    prompt = prompt_of("test_aborted_request_leaves_a_session_that_goes_on")
    expected = fleet.undisturbed(prompt, 300)[0]
    stream = fleet.a.stream("aborted", prompt, 2000)
    shown: list[int] = []
    for answer in stream:
        if len(answer.tokens) >= 50:
            shown = list(answer.tokens)
            break
    stream.close()
    fleet.a.server.last_turn("aborted")
    assert expected == shown + fleet.a.answer("aborted", [*prompt, *shown], 300 - len(shown))
    assert_bytes(fleet, fleet.a, "aborted", 2)


def test_several_answers_of_one_request_are_served_and_not_replicated(fleet: Fleet) -> None:
    """N > 1: which of them would be the session?"""
    prompt = prompt_of("test_several_answers_of_one_request_are_served_and_not_replicated")
    body = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": 5,
        "n": 2,
        "temperature": 1.0,
        "session_id": "several",
    }
    answer = httpx.post(f"{fleet.a.server.url}/v1/completions", json=body, timeout=60).json()
    assert 2 == len(answer["choices"])
    assert "n_over_1" == answer["kv_transfer_params"]["kvlog"]["unlogged"]
    assert [] == fleet.a.server.turns("several")


def test_request_named_by_nobody_ends_with_itself(fleet: Fleet) -> None:
    """It is replicated under the engine's own id, which nobody can ask for afterwards."""
    prompt = prompt_of("test_request_named_by_nobody_ends_with_itself")
    body = {"model": "m", "prompt": list(prompt), "max_tokens": 5, "temperature": 0}
    answer = httpx.post(f"{fleet.a.server.url}/v1/completions", json=body, timeout=60).json()
    assert {"loaded": 0, "unlogged": None} == answer["kv_transfer_params"]["kvlog"]


def test_preempted_requests_resume_from_their_own_log(fleet: Fleet) -> None:
    """Four long answers do not fit into B's blocks; each is what it is alone, and the log has all of each."""
    prompt = prompt_of("test_preempted_requests_resume_from_their_own_log")
    prompts = [prompt[k:] for k in range(4)]
    expected = [fleet.undisturbed(each, 400)[0] for each in prompts]
    answers: dict[int, list[int]] = {}

    def run(index: int) -> None:
        answers[index] = fleet.b.answer(f"pressed-{index}", prompts[index], 400)

    fleet.at_once(*[lambda index=index: run(index) for index in range(4)])
    assert expected == [answers[index] for index in range(4)]
    turns = [fleet.b.server.turns(f"pressed-{index}") for index in range(4)]
    assert any(len(each) > 1 for each in turns), "nobody was preempted: the scenario proves nothing"
    for index in range(4):
        fleet.b.server.last_turn(f"pressed-{index}")
        assert_bytes(fleet, fleet.b, f"pressed-{index}")


def test_flipped_byte_in_the_log_is_refused_and_computed(fleet: Fleet) -> None:
    """The control: two copies of a session, one damaged; the whole one is loaded whole, the other up to the damage."""
    prompt = prompt_of("test_flipped_byte_in_the_log_is_refused_and_computed")
    expected, undisturbed = fleet.undisturbed(prompt, 100)
    fleet.a.answer("origin", prompt, 60)
    fleet.a.server.last_turn("origin")
    start = asyncio.run(copy_whole_and_damaged(fleet.log_url, "origin"))
    known = [*prompt, *expected[:60]]
    node = fleet.b
    before = node.server.newest_turn()
    for session, loads in (("origin-damaged", start), ("origin-whole", len(known) - 1)):
        assert expected[60:] == node.answer(session, known, 40, kv_transfer_params=TAKE_OVER)
        turn = node.server.last_turn(session)
        assert loads == turn["attach_length"], session
        assert undisturbed.digests(loads) == fleet.logged(session).digests(loads)
        assert undisturbed.tokens == turn["tokens"]
    assert start == loaded_by(node.server.last_turn("origin-damaged"), before)


def test_daemon_that_is_killed_and_comes_back_costs_the_answer_nothing(fleet: Fleet) -> None:
    """In mid-answer: no token is lost or late, and the log has all rows once a daemon is there again."""
    prompt = prompt_of("test_daemon_that_is_killed_and_comes_back_costs_the_answer_nothing")
    node = fleet.a
    expected = fleet.undisturbed(prompt, 1500)[0]
    shown: list[int] = []
    gaps: list[float] = []
    last = time.monotonic()
    killed = False
    for answer in node.stream("orphan", prompt, 1500):
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
        shown = answer.tokens
        if len(shown) >= 100 and not killed:
            killed = True
            assert node.daemon.daemon is not None
            node.daemon.daemon.stop(9)
            node.daemon.launch_daemon()
            last = time.monotonic()
    assert expected == shown
    turn = node.server.last_turn("orphan")
    assert 2 <= turn["replicator"]["connects"]
    assert_bytes(fleet, node, "orphan")
    assert max(gaps[1:]) < 2.0
    node.daemon.wait_log()


def test_engine_without_a_daemon_serves_and_logs_again_with_one(fleet: Fleet) -> None:
    """Absent for a whole answer: nothing waits; the next answer is in the log, all of it."""
    prompt = prompt_of("test_engine_without_a_daemon_serves_and_logs_again_with_one")
    node = fleet.a
    expected, _ = fleet.undisturbed(prompt, 100)
    assert node.daemon.daemon is not None
    node.daemon.daemon.stop(9)
    assert expected == node.answer("absent", prompt, 100)
    node.launch()
    known = [*prompt, *expected]
    node.answer("absent", known, 50)
    until(lambda: len(node.server.turns("absent")) >= 2, what="both turns ended")
    node.answer("absent", known, 1500)  # long enough for a daemon that has just begun to claim
    assert_bytes(fleet, node, "absent", 3)


def test_answer_goes_on_after_both_its_nodes_were_killed(fleet: Fleet) -> None:
    """SIGKILL of A's process group and daemon in mid-answer, then of B's: each standby loads what the log has.

    What the third engine loaded are the log's bytes, and those of a run that nobody disturbed.
    """
    prompt = prompt_of("test_answer_goes_on_after_both_its_nodes_were_killed")
    expected, undisturbed = fleet.undisturbed(prompt, 500)
    assert fleet.b.server.url
    shown = fleet.node("a").answer_until("killed", prompt, 150, fleet.node("a").kill)
    fleet.node("a").launch()  # starts while B goes on
    b = fleet.node("b")
    kill = {"kv_transfer_params": TAKE_OVER}
    known = len(prompt) + len(shown)
    shown += b.answer_until("killed", [*prompt, *shown], 120, b.kill, **kill)
    attached = [each["attach"] for each in b.daemon.turns("killed") if each["event"] == "turn_opened"][-1]
    fleet.table.append(
        _row(fleet, "first kill, A to B", undisturbed, known, attached, expected=expected, shown=shown)
    )
    known = len(prompt) + len(shown)
    rest = fleet.serving("a").answer("killed", [*prompt, *shown], 500 - len(shown), **kill)
    turn = assert_bytes(fleet, fleet.node("a"), "killed")
    assert turn["attach_length"] == turn["worker"]["rows_loaded"]
    fleet.table.append(
        _row(
            fleet,
            "second kill, B to A",
            undisturbed,
            known,
            turn["attach_length"],
            expected=expected,
            shown=shown + rest,
        )
    )
    assert 0 < known - turn["attach_length"] <= LOST_MAX
    for row in fleet.table[-2:]:
        assert (True, True) == (row.kv_equal, row.tokens_equal), row


def test_stock_client_goes_on_at_another_server(fleet: Fleet) -> None:
    """The `openai` package streams from A; A's node is killed; the same request with the tokens so far goes to B."""
    prompt = prompt_of("test_stock_client_goes_on_at_another_server")
    expected, undisturbed = fleet.undisturbed(prompt, 400)
    assert fleet.b.server.url
    shown: list[int] = []
    for token in stock_client(fleet.node("a"), "stock", prompt, 3000):
        shown.append(token)
        if len(shown) == 150:
            fleet.node("a").kill()
    known = [*prompt, *shown]
    b = fleet.node("b")
    rest = list(stock_client(b, "stock", known, 400 - len(shown), take_over=True))
    turn = assert_bytes(fleet, b, "stock")
    loaded = turn["attach_length"]
    equal = undisturbed.digests(loaded) == fleet.logged("stock").digests(loaded)
    fleet.table.append(Row("stock client, A to B", len(known), loaded, equal, expected == shown + rest))
    assert (True, True) == (fleet.table[-1].kv_equal, fleet.table[-1].tokens_equal)
    assert 0 < len(known) - loaded <= LOST_MAX


def _row(fleet: Fleet, scenario: str, undisturbed: LoggedSession, *counts: int, **tokens: list[int]) -> Row:
    known, loaded = counts
    loaded = min(loaded, known - 1)
    kv_equal = undisturbed.digests(loaded) == fleet.logged("killed").digests(loaded)
    return Row(
        scenario, known, loaded, kv_equal, tokens["expected"][: len(tokens["shown"])] == tokens["shown"]
    )


def test_fenced_answer_ends_with_an_error_that_its_client_can_read(fleet: Fleet) -> None:
    """Both nodes live; B is told to take the session over. A's client hears of it soon, B's goes on where A's stood."""
    prompt = prompt_of("test_fenced_answer_ends_with_an_error_that_its_client_can_read")
    a, b = fleet.a, fleet.b
    expected, _ = fleet.undisturbed(prompt, 400)
    shown: list[int] = []
    rest: list[int] = []
    taken_at: list[float] = []
    ended_at: list[float] = []
    error: dict[str, Any] | None = None

    def take_over() -> None:
        until(lambda: len(shown) >= 100, seconds=60, what="100 tokens")
        known = [*prompt, *expected[:100]]
        for answer in b.stream("fenced", known, 300, kv_transfer_params=TAKE_OVER):
            if not taken_at:
                taken_at.append(time.monotonic())
            rest[:] = answer.tokens

    def go_on() -> None:
        nonlocal error
        for answer in a.stream("fenced", prompt, 3000):
            shown[:] = answer.tokens
            if answer.error is not None:
                error = answer.error
                ended_at.append(time.monotonic())

    fleet.at_once(take_over, go_on)
    assert error is not None
    assert "fenced" == error["type"]
    assert expected == expected[:100] + rest
    late, seconds = len(shown) - 100, ended_at[0] - taken_at[0]
    fleet.notes.append(f"fenced: {late} tokens after B was asked, over {seconds:.3f} s after B's first token")
    assert len(shown) < 2000
    assert_bytes(fleet, b, "fenced")


def test_drafts_that_are_not_verified_are_never_logged(fleet: Fleet) -> None:
    """Four drafts a step from a prompt that repeats itself: the log has what the blocks hold when all is decided."""
    prompt = [*range(20), *range(20), *prompt_of("test_drafts_that_are_not_verified_are_never_logged")]
    node = fleet.serving("c")
    first = node.answer("drafts", prompt, 150)
    assert_bytes(fleet, node, "drafts")
    drafted = _counter(node, "vllm:spec_decode_num_draft_tokens_total")
    accepted = _counter(node, "vllm:spec_decode_num_accepted_tokens_total")
    assert drafted > accepted, "no draft was refused: the scenario proves nothing"
    node.answer("drafts", [*prompt, *first, 3], 100)
    turn = assert_bytes(fleet, node, "drafts", 2)
    assert (
        len(prompt) + 149 - turn["log_from"] <= 4
    )  # what was accepted in the last step is logged by the next turn
    node.server.kill()


def _counter(node: VllmNode, name: str) -> float:
    text = httpx.get(f"{node.server.url}/metrics", timeout=10).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


def test_metrics_are_vllms_own(fleet: Fleet) -> None:
    """Prometheus reads the connector's counters where it reads vLLM's."""
    prompt = prompt_of("test_metrics_are_vllms_own")
    fleet.a.answer("metrics", prompt, 20)
    assert _counter(fleet.node("a"), "vllm:kvlog_saved_tokens_total") > 200


def test_batch_of_answers_goes_on_after_its_node_was_killed(fleet: Fleet) -> None:
    """Four sessions in one batch, prefilled in chunks: B loads all of each but the last token."""
    prompt = prompt_of("test_batch_of_answers_goes_on_after_its_node_was_killed")
    prompts = [prompt[k:] for k in range(4)]
    shown: dict[int, list[int]] = {index: [] for index in range(4)}
    node = fleet.a
    assert fleet.b.server.url

    def stream(index: int) -> None:
        for answer in node.stream(f"batch-{index}", prompts[index], 2000):
            shown[index] = list(answer.tokens)

    def kill() -> None:
        until(lambda: min(map(len, shown.values())) >= 120, seconds=120, what="120 tokens of each")
        node.kill()

    fleet.at_once(kill, *[lambda index=index: stream(index) for index in range(4)])
    b = fleet.node("b")
    for index in range(4):
        known = [*prompts[index], *shown[index]]
        b.answer(f"batch-{index}", known, 30, kv_transfer_params=TAKE_OVER)
        turn = assert_bytes(fleet, b, f"batch-{index}")
        assert 0 < len(known) - turn["attach_length"] <= LOST_MAX
