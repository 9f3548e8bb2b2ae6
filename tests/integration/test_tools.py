"""The tools beside real nodes, as processes: what they say of a log that daemons and engines are writing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.engines.replayed import load_replayed
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from tests.model.llama import Run, random_folder, random_model
from tests.nodes import Answer, Node, ask, until
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvlog.engines.base import RowCache, StepModel

pytestmark = pytest.mark.e2e

PROMPT = list(b"The log is the conversation. " * 4)
TOKENS = 30
CUT = 10


def tool(*arguments: object, **environment: str) -> tuple[int, dict[str, Any]]:
    """Runs `kvlog` as a process. Returns: its exit code, and its one object."""
    done = subprocess.run(
        [sys.executable, "-m", "consumers", *map(str, arguments), "--json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, **environment},
        preexec_fn=die_with_parent,
    )
    assert "" == done.stderr
    return done.returncode, json.loads(done.stdout)


def answered(node: Node, session: str, max_tokens: int = TOKENS, resume: list[int] | None = None) -> Answer:
    """A whole answer."""
    *_, answer = ask(
        node.url, prompt=PROMPT, session=session, max_tokens=max_tokens, resume_token_ids=resume or []
    )
    assert answer.error is None
    assert answer.done
    return answer


@contextmanager
def pair(folder: Path) -> Iterator[tuple[Node, Node]]:
    """Nodes a and b over one log."""
    started: list[Node] = []
    try:
        started.extend(Node.start(folder, name, f"file://{folder}/log") for name in "ab")
        yield started[0], started[1]
    finally:
        for node in started:
            node.close()


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Node, Node]]:
    """A pair that several tests share; each uses sessions of its own, and leaves both running."""
    with pair(tmp_path_factory.mktemp("nodes")) as started:
        yield started


def by_name(said: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Nodes by name."""
    return {node["node"]: node for node in said["nodes"]}


def test_tools_tell_of_a_takeover_after_a_kill(tmp_path: Path) -> None:
    """Whose session it was and is, that the log is whole, and that the dead node is silent."""
    with pair(tmp_path) as (a, b):
        tell_of_a_takeover(a, b, f"{tmp_path}/log")


def tell_of_a_takeover(a: Node, b: Node, log: str) -> None:
    """The test's body."""
    stream = ask(a.url, prompt=PROMPT, max_tokens=TOKENS, session="s")
    while len((answer := next(stream)).tokens) < CUT:
        pass
    shown = list(answer.tokens)
    a.kill()
    resumed = answered(b, "s", resume=shown)
    assert resumed.kvlog["attached"] > len(PROMPT)

    code, said = tool("show", "s", "--log", log)
    assert (0, "whole", "b") == (code, said["standing"], said["owner"])
    told = [(moment["what"], moment["node"]) for moment in said["timeline"]]
    assert ("claim", "a") == told[0]
    assert ("claim", "b") in told
    assert told.index(("claim", "a")) < told.index(("delta", "a")) < told.index(("claim", "b"))
    assert "taken over from a" in next(m["detail"] for m in said["timeline"] if m["node"] == "b")
    assert "tokens" not in json.dumps(said)

    code, said = tool("verify", "--config", b.config)
    assert (0, "whole", 1) == (code, said["verdict"], said["sessions"]["whole"])

    code, said = tool("lag", KVLOG_LOG__URL=f"file://{log}")
    lags = by_name(said)
    assert (0, "silent", "live") == (code, lags["a"]["state"], lags["b"]["state"])
    assert 0 == lags["b"]["lag"]["records"]


def test_lag_grows_while_a_standby_is_paused_and_closes_afterwards(nodes: tuple[Node, Node]) -> None:
    """Records, bytes and tokens of what the paused node has not applied, by session; then none."""
    a, b = nodes
    answered(a, "before", max_tokens=1)
    until(lambda: 0 == by_name(tool("lag", "--config", a.config)[1])["b"]["lag"]["records"], seconds=30)
    b.signal(signal.SIGSTOP)
    answered(a, "lagging")
    lags = by_name(tool("lag", "--config", a.config)[1])
    lag = lags["b"]["lag"]
    assert ("live", "silent") == (lags["a"]["state"], lags["b"]["state"])
    assert TOKENS - 1 <= lag["tokens"] - len(PROMPT) <= TOKENS
    assert lag["records"] >= TOKENS
    assert lag["bytes"] > lag["tokens"] * 4096
    assert lag["seconds"] > 0
    sessions = tool("lag", "--config", a.config)[1]["sessions"]
    assert [("lagging", "b")] == [(one["session"], one["node"]) for one in sessions]
    b.signal(signal.SIGCONT)

    def closed() -> bool:
        now = by_name(tool("lag", "--config", a.config)[1])["b"]
        return ("live", 0) == (now["state"], now["lag"]["records"])

    until(closed, seconds=30, what="b has caught up")


def test_replay_beside_a_writing_node_disturbs_nobody(nodes: tuple[Node, Node], tmp_path: Path) -> None:
    """A tool that reads the whole log while it is written: the answer is the same, and so is the retention."""
    a, b = nodes
    reference = answered(b, "reference")
    stream = ask(a.url, prompt=PROMPT, max_tokens=TOKENS, session="disturbed")
    next(stream)
    for number in range(2):
        assert 0 == tool("replay", "reference", "--config", a.config, "--out", tmp_path / str(number))[0]
    *_, answer = stream
    assert reference.tokens == answer.tokens
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def go_on(model: StepModel, cache: RowCache, tokens: list[int], until_tokens: int) -> list[int]:
    """Greedy from what the cache and the token ids give. Returns: all tokens."""
    while len(tokens) < until_tokens:
        logits = model.forward(cache, tokens[cache.length :])
        tokens.append(int(logits.argmax()))
    return tokens


def test_replayed_synthetic_session_gives_the_same_next_tokens(
    nodes: tuple[Node, Node], tmp_path: Path
) -> None:
    """Every byte of its cache counts for its next token, so the bytes are right."""
    a, b = nodes
    reference = answered(b, "reference")
    answered(a, "cut", CUT)
    out = tmp_path / "s.safetensors"
    code, said = tool("replay", "cut", "--config", a.config, "--out", out)
    assert (0, "whole") == (code, said["standing"])
    assert said["positions"] >= len(PROMPT) + CUT - 1
    model = SyntheticModel(SyntheticOptions())
    tokens, cache = load_replayed(out, model)
    assert [*PROMPT, *reference.tokens][: len(tokens)] == tokens
    assert cache.length == len(tokens)
    cache.cut(len(tokens) - 1)  # the next token needs the logits after the last one
    assert [*PROMPT, *reference.tokens] == go_on(model, cache, tokens, len(PROMPT) + TOKENS)


def test_replayed_transformers_session_gives_the_same_next_tokens(tmp_path: Path) -> None:
    """A Llama's session, from a real engine over a real daemon and log, goes on in another process from the file."""
    log = f"file://{tmp_path}/log"
    engine = ("transformers", "--model", str(random_folder()))
    node = Node.start(tmp_path, "a", log, engine=engine)
    try:
        reference = answered(node, "reference")
        answered(node, "s", CUT)
        out = tmp_path / "s.safetensors"
        code, said = tool("replay", "s", "--log", log, "--out", out)
    finally:
        node.close()
    assert (0, "whole") == (code, said["standing"])
    run = Run(random_model(), PROMPT)
    tokens, cache = run.model.load_replayed(out)
    assert cache.length == len(tokens) == said["positions"] >= len(PROMPT) + CUT - 1
    cache.cut(len(tokens) - 1)  # the next token needs the logits after the last one
    run.go_on(cache, tokens, until=TOKENS)
    assert [*PROMPT, *reference.tokens] == tokens
