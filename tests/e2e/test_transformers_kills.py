"""A real model over real nodes: an answer whose nodes die again and again is that of an undisturbed run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvlog.engines.kv_digests import digests_at
from kvlog.layout import DType
from tests.forks import ENGINES, Forks
from tests.model.llama import Run, random_folder, random_model
from tests.nodes import Node, ask, daemon_config, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = list(b"The tide went out, and what the sea had kept was ")
KILLS = 5
PIECE = 18
TOKENS = 120


@pytest.fixture
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[list[Node]]:
    """Three nodes over one log, so that two can start again while the third one answers, with a random Llama.

    In float32 if the test names no other type, on one thread: so its numerics are fixed.
    """
    dtype = getattr(request, "param", DType.FLOAT32)
    url = f"file://{tmp_path}/log"
    model = ("--model", str(random_folder()), "--dtype", dtype.value, "--threads", "1")
    engine = ("transformers", *model, "--tokens-per-second", "50", "--claim-seconds", "5")
    with Forks(ENGINES) as warm:
        made = [
            Node(tmp_path, name, daemon_config(tmp_path, name, url), engine, start_engine_program=warm.start)
            for name in "abc"
        ]
        try:
            for node in made:
                node.launch_daemon()
            for node in made:
                node.launch_engine()
            yield made
        finally:
            for node in made:
                node.close()


def launch(node: Node) -> None:
    """Start a node's processes; nobody waits for them yet."""
    node.launch_daemon()
    node.launch_engine()


def serving(node: Node) -> None:
    """Wait until a node takes requests and follows its log."""
    until(node.is_serving, seconds=60, what=f"engine {node.name}")
    node.wait_log()


def test_transformers_answer_survives_five_nodes_and_is_the_uninterrupted_one(nodes: list[Node]) -> None:
    """After five times kill -9 of engine and daemon: the same tokens, and the same KV bytes, layer by layer."""
    model = random_model()
    expected, cache = list(PROMPT), model.new_cache()
    Run(model, PROMPT).go_on(cache, expected, until=TOKENS)
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "session": "s", "kv_digests": []}
    shown: list[int] = []
    for kill in range(KILLS):
        node = nodes[kill % 3]
        serving(node)
        stream = ask(node.url, resume_token_ids=shown, **request)
        answer = next(stream)
        while len(answer.tokens) < PIECE:
            answer = next(stream)
        node.kill()
        *_, answer = (answer, *stream)
        assert not answer.done, "it was killed in mid-answer"
        shown += answer.tokens
        assert expected[len(PROMPT) :][: len(shown)] == shown, f"after kill {kill + 1}"
        if kill < KILLS - 2:  # it is needed again
            launch(node)
    last = nodes[KILLS % 3]
    serving(last)
    *_, answer = ask(last.url, resume_token_ids=shown, **request)
    assert (True, None) == (answer.done, answer.error)
    assert expected[len(PROMPT) :] == shown + answer.tokens
    known = len(PROMPT) + len(shown)
    assert answer.kvlog["attached"] >= known - 16, "so few rows are computed one by one, as the first time"
    digests = digests_at(cache, model.identity.layout, (cache.length,))
    assert digests[cache.length] == answer.kvlog["kv_digests"][str(cache.length)]


@pytest.mark.parametrize("nodes", [DType.BFLOAT16], indirect=True)
def test_transformers_rows_in_bfloat16_are_loaded_bit_for_bit(nodes: list[Node]) -> None:
    """What was logged comes back as it was in every layer; that the tokens are equal too is no claim in bfloat16."""
    model = random_model(DType.BFLOAT16)
    expected, cache = list(PROMPT), model.new_cache()
    Run(model, PROMPT).go_on(cache, expected, until=TOKENS)
    compared = len(PROMPT) + PIECE // 2
    request: dict[str, Any] = {
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "session": "s",
        "kv_digests": [compared],
    }
    a, b, _ = nodes
    serving(a)
    stream = ask(a.url, **request)
    answer = next(stream)
    while len(answer.tokens) < 2 * PIECE:
        answer = next(stream)
    a.kill()
    *_, answer = (answer, *stream)
    serving(b)
    *_, rest = ask(b.url, resume_token_ids=answer.tokens, **request)
    told = [*answer.tokens, *rest.tokens]
    ends = next((at for at, token in enumerate(told, 1) if token in model.stop_tokens), TOKENS)
    assert (True, None, ends) == (rest.done, rest.error, len(told))
    assert rest.kvlog["attached"] >= compared
    digests = digests_at(cache, model.identity.layout, (compared,))
    assert digests[compared] == rest.kvlog["kv_digests"][str(compared)]
