"""What a client sees of two real vLLM servers with the connector, and what their blocks and the log hold meanwhile.

Equal tokens alone prove little here: recomputing gives the same tokens. So each scenario looks at the rows that were
loaded, and at the bytes: of the blocks when a turn ends, of the log, and of a run that nobody disturbed.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from tests.nodes import until
from tests.vllm.copies import copy_whole_and_damaged
from tests.vllm.fleet import DRAFTS, LOST_SECONDS, TAKE_OVER, Pace, Row, prompt_of, stock_client

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def assert_bytes(fleet: Fleet, node: VllmNode, session: str, turns: int = 1) -> dict[str, Any]:
    """A turn's blocks hold what the log holds, all of it, once the daemon has read it from the ring; the turn.

    Drafts that are accepted in the last step are logged with it: after the watched connector has looked.
    """
    turn = node.server.last_turn(session, turns)
    length = turn["length"]
    fleet.wait_rows(session, length)
    logged = fleet.logged(session)
    assert 0 <= logged.rows - length <= (DRAFTS if node.name == "c" else 0)
    assert turn["tokens"] == logged.tokens[:length]
    assert turn["digests"] == logged.digests(length)
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


@pytest.mark.vllm_ci
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


@pytest.mark.vllm_ci
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


@pytest.mark.vllm_ci
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


@pytest.mark.vllm_ci
def test_answer_goes_on_after_both_its_nodes_were_killed(fleet: Fleet) -> None:
    """SIGKILL of A's process group and daemon in mid-answer, then of B's: each standby loads what the log has.

    What the third engine loaded are the log's bytes, and those of a run that nobody disturbed.
    """
    prompt = prompt_of("test_answer_goes_on_after_both_its_nodes_were_killed")
    expected, _ = fleet.undisturbed(prompt, 500)
    assert fleet.b.server.url
    a, b = fleet.node("a"), fleet.node("b")
    shown = a.answer_until("killed", prompt, 150, a.kill)
    acked = a.acked_at_kill
    a.launch()  # starts while B goes on
    kill = {"kv_transfer_params": TAKE_OVER}
    known = len(prompt) + len(shown)
    shown += b.answer_until("killed", [*prompt, *shown], 120, b.kill, **kill)
    attached = [each["attach"] for each in b.daemon.turns("killed") if each["event"] == "turn_opened"][-1]
    row = _row(fleet, "killed", (known, acked["killed"], attached), a.pace, (prompt, expected, shown))
    fleet.table.append(replace(row, scenario="first kill, A to B"))
    known = len(prompt) + len(shown)
    rest = fleet.serving("a").answer("killed", [*prompt, *shown], 500 - len(shown), **kill)
    turn = assert_bytes(fleet, a, "killed")
    loaded = turn["worker"]["rows_loaded"]
    assert turn["attach_length"] == loaded
    counts = known, b.acked_at_kill["killed"], loaded
    row = _row(fleet, "killed", counts, b.pace, (prompt, expected, shown + rest))
    fleet.table.append(replace(row, scenario="second kill, B to A"))
    for row in fleet.table[-2:]:
        assert row.is_right, row


@pytest.mark.vllm_ci
def test_stock_client_goes_on_at_another_server(fleet: Fleet) -> None:
    """The `openai` package streams from A; A's node is killed; the same request with the tokens so far goes to B."""
    prompt = prompt_of("test_stock_client_goes_on_at_another_server")
    expected, _ = fleet.undisturbed(prompt, 400)
    assert fleet.b.server.url
    a, b = fleet.node("a"), fleet.node("b")
    shown: list[int] = []
    pace = Pace()
    for token in stock_client(a, "stock", prompt, 3000):
        shown.append(token)
        pace.shown(len(shown))
        if len(shown) == 150:
            a.kill()
    known = [*prompt, *shown]
    rest = list(stock_client(b, "stock", known, 400 - len(shown), take_over=True))
    loaded = assert_bytes(fleet, b, "stock")["attach_length"]
    counts = len(known), a.acked_at_kill["stock"], loaded
    row = _row(fleet, "stock", counts, pace, (prompt, expected, shown + rest))
    fleet.table.append(replace(row, scenario="stock client, A to B"))
    assert row.is_right, row


def _row(
    fleet: Fleet,
    session: str,
    counts: tuple[int, int, int],
    pace: Pace,
    tokens: tuple[Sequence[int], list[int], list[int]],
) -> Row:
    """Counts: known, acknowledged, loaded. Tokens: the prompt, the undisturbed answer, and what was shown."""
    known, acked, loaded = counts
    prompt, expected, shown = tokens
    _, undisturbed = fleet.undisturbed(prompt, len(expected))
    loaded = min(loaded, known - 1)
    kv_equal = undisturbed.digests(loaded) == fleet.logged(session).digests(loaded)
    seconds = pace.seconds(known - loaded)
    return Row(session, known, acked, loaded, seconds, kv_equal, expected[: len(shown)] == shown)


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
    drafted = node.metric("vllm:spec_decode_num_draft_tokens_total")
    accepted = node.metric("vllm:spec_decode_num_accepted_tokens_total")
    assert drafted > accepted, "no draft was refused: the scenario proves nothing"
    node.answer("drafts", [*prompt, *first, 3], 100)
    turn = assert_bytes(fleet, node, "drafts", 2)
    assert (
        len(prompt) + 149 - turn["log_from"] <= 4
    )  # what was accepted in the last step is logged with that step, or by the next turn
    node.server.kill()


def test_metrics_are_vllms_own(fleet: Fleet) -> None:
    """Prometheus reads the connector's counters where it reads vLLM's."""
    prompt = prompt_of("test_metrics_are_vllms_own")
    fleet.a.answer("metrics", prompt, 20)
    assert fleet.node("a").metric("vllm:kvlog_saved_tokens_total") > 200


@pytest.mark.vllm_ci
def test_batch_of_answers_goes_on_after_its_node_was_killed(fleet: Fleet) -> None:
    """Four sessions in one batch, prefilled in chunks: B loads all of each but the last token."""
    prompt = prompt_of("test_batch_of_answers_goes_on_after_its_node_was_killed")
    prompts = [prompt[k:] for k in range(4)]
    shown: dict[int, list[int]] = {index: [] for index in range(4)}
    paces = [Pace() for _ in range(4)]
    expected = [fleet.undisturbed(each, 400)[0] for each in prompts]
    node = fleet.a
    assert fleet.b.server.url

    def stream(index: int) -> None:
        for answer in node.stream(f"batch-{index}", prompts[index], 2000):
            shown[index] = list(answer.tokens)
            paces[index].shown(len(answer.tokens))

    def kill() -> None:
        until(lambda: min(map(len, shown.values())) >= 120, seconds=120, what="120 tokens of each")
        node.kill()

    fleet.at_once(kill, *[lambda index=index: stream(index) for index in range(4)])
    b = fleet.node("b")
    for index in range(4):
        known = [*prompts[index], *shown[index]]
        session = f"batch-{index}"
        rest = b.answer(session, known, 30, kv_transfer_params=TAKE_OVER)
        loaded = assert_bytes(fleet, b, session)["attach_length"]
        counts = len(known), node.acked_at_kill[session], loaded
        assert min(counts[1], len(known) - 1) <= loaded, counts
        assert paces[index].seconds(len(known) - loaded) <= LOST_SECONDS, counts
        assert len(known) + 29 == len(fleet.logged(session).tokens)
        assert expected[index][: len(shown[index]) + 30] == shown[index] + rest
