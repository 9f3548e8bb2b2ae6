"""`acked` over a real daemon and a real log: what a user has seen when the node dies is in the log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.nodes import Node, ask, synthetic_answer

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

PROMPT = list(b"Nothing that was said is ever taken back. ")
TOKENS = 400


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """A node that answers as fast as it can, and by itself logs token ids only."""
    url = f"file://{tmp_path}/log"
    node = Node.start(tmp_path, "a", url, engine=("synthetic",), sync={"mode": "ids"})
    try:
        yield node
    finally:
        node.close()


def test_acked_tokens_that_were_shown_before_the_node_died_have_their_rows_in_the_log(node: Node) -> None:
    """Kill -9 of engine and daemon in mid-answer: the log has the rows before the last token shown."""
    request: dict[str, Any] = {"prompt": PROMPT, "max_tokens": TOKENS, "session": "s"}
    stream = ask(node.url, acked=True, acked_seconds=30, **request)
    answer = next(stream)
    while len(answer.tokens) < 40:
        answer = next(stream)
    node.kill()
    *_, answer = (answer, *stream)
    assert not answer.done, "it was killed in mid-answer"
    node.start_daemon()
    node.wait_log()
    node.start_engine()
    *_, rest = ask(node.url, resume_token_ids=answer.tokens, acked=True, acked_seconds=30, **request)
    assert rest.kvlog["attached"] >= len(PROMPT) + len(answer.tokens) - 1
    assert ("held", None) == (rest.kvlog["acked"], rest.kvlog["acked_reason"])
    assert synthetic_answer(PROMPT, TOKENS) == answer.tokens + rest.tokens
