"""What the connector's calls cost a real engine's steps while its daemon dies and comes back."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from tests.nodes import until
from tests.vllm.fleet import Fleet, VllmNode, prompt_of

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

CALL_MS_MAX = 5.0
"""Of any one call's own time, computing and sleeping (tests.vllm.call_times). Wall time is printed and not asserted: it
has the queue for a core in it too, which a machine with more threads than cores can make anything."""

STREAMS, TOKENS, KILL_AT = 4, 3400, (150, 1700)
AFTER_MAX = 300
"""Short answers, a minute of them: a link is tried for at least every two seconds."""


def test_no_call_takes_long_while_the_daemon_is_killed_under_load(fleet: Fleet) -> None:
    """Four answers in one batch, their prompts in chunks; the daemon is killed twice, and comes back; none fails."""
    prompt = prompt_of("test_no_call_takes_long_while_the_daemon_is_killed_under_load")
    node = fleet.node("a")
    node.launch()
    node.server.wait_ready()
    shown: dict[int, int] = dict.fromkeys(range(STREAMS), 0)

    def stream(index: int) -> None:
        for answer in node.stream(f"calls-{index}", prompt[index:], TOKENS):
            assert answer.error is None, answer.error
            shown[index] = len(answer.tokens)

    def all_have(many: int) -> bool:
        return min(shown.values()) >= many

    def kill() -> None:
        for many in KILL_AT:
            until(partial(all_have, many), seconds=300, what=f"{many} tokens of each")
            assert node.daemon.daemon is not None
            node.daemon.daemon.stop(9)
            node.daemon.launch_daemon()
            node.daemon.wait_log()

    connects = _ended_turn(node, "calls-before")["replicator"]["connects"]
    with ThreadPoolExecutor(STREAMS) as pool:
        answers = [pool.submit(stream, index) for index in range(STREAMS)]
        kill()  # here: a daemon dies with the thread that started it
        for answer in answers:
            answer.result()
    assert dict.fromkeys(range(STREAMS), TOKENS) == shown
    for asked in range(AFTER_MAX):  # the answers may be over before the link to the last daemon is there
        turn = _ended_turn(node, f"calls-after-{asked}")
        if turn["replicator"]["connects"] >= connects + len(KILL_AT):
            break
    else:
        pytest.fail("no link to the last daemon")
    times = turn["call_times"]
    worst = "; ".join(
        str({name: _short(value) for name, value in call.items()}) for call in times["long"][:8]
    )
    fleet.notes.append(f"{times['calls']} calls, longest own time, ms: {_all_short(times['own_ms'])}")
    fleet.notes.append(f"longest wall time, ms: {_all_short(turn['longest_ms'])}; of these: {worst}")
    assert max(times["own_ms"].values()) < CALL_MS_MAX, worst


def _ended_turn(node: VllmNode, session: str) -> dict[str, Any]:
    """What its engine says at the end of a short answer."""
    node.answer(session, prompt_of(session), 5)
    return node.server.last_turn(session)


def _short(value: float | str) -> float | str:
    return value if isinstance(value, str) else round(value, 2)


def _all_short(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.2f}" for name, value in values.items())
