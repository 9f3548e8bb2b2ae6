"""Processes die again and again under conversations that go on: nothing lost, nothing repeated, no wrong token."""

from __future__ import annotations

import random
import signal
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from tests.nodes import Node, ask, daemon_config, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

KILLS = 20
NODES = 3
CLIENTS = 6
SECONDS = 150.0
TURN_TOKENS = (20, 120)


@dataclass
class Talk:
    """One conversation, and the answer that it must get: each token is checked when it comes.

    Args:
        turns: answers that were completed.
        moves: requests that went on where another one had broken off.
        moves_attached: those of them that attached something.
        wrong: what was not as it must be, for the failure's message.
    """

    session: str
    chance: random.Random
    turns: int = 0
    moves: int = 0
    moves_attached: int = 0
    wrong: list[str] = field(default_factory=list)

    def run(self, nodes: list[Node], stop: threading.Event) -> None:
        """Talk until told to stop, with whatever node is there."""
        model = SyntheticModel(SyntheticOptions())
        cache = model.new_cache()
        known = model.encode(f"This is {self.session}. ")
        while not stop.is_set() and not self.wrong:
            wanted = []
            new = known[cache.length :]
            for _ in range(self.chance.randint(*TURN_TOKENS)):
                new = [int(np.argmax(model.forward(cache, new)))]
                wanted += new
            self._turn(nodes, stop, known, wanted)
            known = [*known, *wanted, *model.encode(" And then? ")]

    def _turn(self, nodes: list[Node], stop: threading.Event, prompt: list[int], wanted: list[int]) -> None:
        shown: list[int] = []
        first = True
        while len(shown) < len(wanted) and not stop.is_set() and not self.wrong:
            node = self.chance.choice(nodes)
            if not node.url:
                time.sleep(0.02)  # this one is being started: look at another one
                continue
            before, done = len(shown), self._ask(node, prompt, wanted, shown)
            if not first and done is not None:
                self.moves += 1
                self.moves_attached += done > 0
            first = first and len(shown) == before
        self.turns += len(shown) == len(wanted)

    def _ask(self, node: Node, prompt: list[int], wanted: list[int], shown: list[int]) -> int | None:
        """One request; `shown` grows by what came. Returns: rows attached, None: it broke off."""
        before, attached = list(shown), None
        request: dict[str, Any] = {"prompt": prompt, "max_tokens": len(wanted), "session": self.session}
        for answer in ask(node.url, seconds=15, resume_token_ids=before, **request):
            got = before + answer.tokens
            if got != wanted[: len(got)]:
                self.wrong.append(f"{self.session} at {node.name}: {wanted[: len(got)][-8:]} was {got[-8:]}")
                return None
            shown[:] = got
            if answer.done:
                attached = int(answer.kvlog["attached"])
        return attached


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[list[Node]]:
    """Nodes over one log."""
    url = f"file://{tmp_path}/log"
    nodes = [
        Node(
            tmp_path,
            name,
            daemon_config(tmp_path, name, url, diagnostics={"level": "info"}),
            ("synthetic", "--tokens-per-second", "100", "--claim-seconds", "2"),
        )
        for name in "abc"[:NODES]
    ]
    try:
        for node in nodes:
            node.launch_daemon()
            node.launch_engine()
        for node in nodes:
            until(node.is_serving, seconds=60, what=f"node {node.name}")
        yield nodes
    finally:
        for node in nodes:
            node.close()


def kill(node: Node, chance: random.Random) -> None:
    """Kill a node, its engine or its daemon, with -9, and start again what died."""
    assert node.engine is not None
    assert node.daemon is not None
    what = chance.choice(["node", "node", "engine", "daemon"])
    if what != "daemon":
        node.url = ""
        node.engine.stop(signal.SIGKILL)
    if what != "engine":
        node.daemon.stop(signal.SIGKILL)
        node.launch_daemon()
    if what != "daemon":
        node.launch_engine()


@pytest.mark.timeout(240)
def test_twenty_kills_under_conversations_lose_repeat_and_change_nothing(nodes: list[Node]) -> None:
    """Random processes of random nodes die at random points of a random mix of sessions."""
    chance = random.Random(7)
    talks = [Talk(f"talk-{number}", random.Random(number)) for number in range(CLIENTS)]
    stop = threading.Event()
    clients = [threading.Thread(target=talk.run, args=(nodes, stop)) for talk in talks]
    for client in clients:
        client.start()
    kills, deadline = 0, time.monotonic() + SECONDS
    while kills < KILLS and time.monotonic() < deadline and not any(talk.wrong for talk in talks):
        time.sleep(chance.uniform(0.1, 0.8))
        up = [node for node in nodes if node.is_serving()]
        if len(up) >= 2:  # one stays, so that conversations go on
            kill(chance.choice(up), chance)
            kills += 1
    turns = sum(talk.turns for talk in talks)
    until(
        lambda: (
            all(node.is_serving() for node in nodes)
            and (sum(talk.turns for talk in talks) >= turns + CLIENTS or any(talk.wrong for talk in talks))
        ),
        seconds=60,
        what="conversations go on after the last kill",
    )
    stop.set()
    for client in clients:
        client.join(60)
    assert [] == [wrong for talk in talks for wrong in talk.wrong]
    assert KILLS == kills
    moves = sum(talk.moves for talk in talks)
    assert min(moves, sum(talk.moves_attached for talk in talks)) > 0
