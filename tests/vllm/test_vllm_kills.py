"""Whole nodes die again and again under conversations on real vLLM servers: nothing lost, repeated, or wrong.

Three unlike nodes: blocks of 128 and prefill in chunks, few blocks of 32 and loads beside the steps, and drafts. One of
them dies at a random point, its daemon with it, while the others go on, and is started again beside them. Clients are
what a plain load balancer and a router make of them: each request goes to any node that is up; an answer that breaks
off goes on at another one with the tokens that were shown.

Servers are forks here (tests.vllm.fork_servers): the time of this test would be that of sixty processes' imports.
"""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

from tests.nodes import until
from tests.vllm.fleet import TAKE_OVER, prompt_of

if TYPE_CHECKING:
    from tests.vllm.fleet import Fleet, VllmNode

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

KILLS = 20
CLIENTS = 4
ANSWER = 700
PIECE = (20, 200)
THINK_SECONDS = 0.5
SECONDS = 1800.0
ROUNDING = 1e-3
_REFUSED_SECONDS = 0.1


@dataclass(frozen=True)
class Move:
    """An answer that broke off, and went on elsewhere."""

    known: int
    attached: int
    acked: int


@dataclass
class Talk:
    """One client: a conversation after the other, each with the answer that an undisturbed run gave.

    Args:
        done: sessions whose whole answer has come.
        moves: what became of answers that broke off.
        wrong: what was not as it must be, for the failure's message.
        serving: the node that an answer is coming from.
    """

    name: str
    prompt: tuple[int, ...]
    expected: list[int]
    chance: random.Random
    done: list[str] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    shown: list[int] = field(default_factory=list)
    serving: VllmNode | None = None
    broken: bool = False

    def run(self, fates: Fates) -> None:
        """Talk until there are no more kills, and then to the end of the answer."""
        while not self.wrong and not fates.over.is_set():
            session = f"{self.name}-{len(self.done)}"
            self.shown = []
            while len(self.shown) < ANSWER and not self.wrong and not fates.given_up:
                self._ask(session, fates)
            self.done.append(session)

    def _ask(self, session: str, fates: Fates) -> None:
        """One request; `shown` grows by what comes."""
        node = fates.any_node(self.chance)
        count = min(ANSWER - len(self.shown), self.chance.randint(*PIECE))
        before, began = list(self.shown), time.monotonic()
        # Salted, or it would find blocks of an older conversation in the prefix cache, equal but for rounding.
        more: dict[str, object] = {"cache_salt": session}
        if self.broken:
            more["kv_transfer_params"] = TAKE_OVER
        turns = len(_opened(node, session)) if self.broken else 0
        self.serving = node
        for answer in node.stream(session, [*self.prompt, *before], count, **more):
            if self.broken and answer.tokens:
                self._moved(session, node, _opened(node, session)[turns:], fates)
            self.shown = before + answer.tokens
            if self.shown != self.expected[: len(self.shown)]:
                self.wrong.append(f"{session} at {node.name}, from {len(before)}: {answer.tokens}")
        self.serving = None
        came = len(self.shown) - len(before)
        self.broken = came < count
        if not self.broken:
            time.sleep(self.chance.uniform(0, THINK_SECONDS))
        elif not came and time.monotonic() - began < _REFUSED_SECONDS:
            time.sleep(_REFUSED_SECONDS)  # nobody listens there any more

    def _moved(self, session: str, node: VllmNode, opened: list[int], fates: Fates) -> None:
        """It has gone on: what had been acknowledged of it is there, as far as it was shown."""
        self.broken = False
        acked = fates.acked.pop(session, None)
        if not opened or acked is None:
            return
        known = len(self.prompt) + len(self.shown)
        move = Move(known, opened[-1], acked)
        self.moves.append(move)
        if move.attached < min(move.acked, known):
            self.wrong.append(f"{session} at {node.name} lost acknowledged rows: {move}")


def _opened(node: VllmNode, session: str) -> list[int]:
    """Rows that each turn of a session could load, as its node's daemon says."""
    daemon = node.daemon.daemon
    assert daemon is not None
    return [event["attach"] for event in daemon.events("turn_opened") if event["session"] == session]


class Fates:
    """Who is up, and what had been acknowledged of whose session when its node died."""

    def __init__(self, nodes: list[VllmNode]) -> None:
        self.nodes = nodes
        self.up = list(nodes)
        self.acked: dict[str, int] = {}
        self.over = threading.Event()
        self.given_up = False

    def any_node(self, chance: random.Random) -> VllmNode:
        """A node that takes requests, as far as is known."""
        until(lambda: bool(self.up), seconds=120, what="a node that is up")
        return chance.choice(self.up)

    def kill(self, node: VllmNode) -> None:
        """SIGKILL, and start it again; it is not there yet."""
        self.up.remove(node)
        node.kill()
        self.acked.update(node.acked_at_kill)
        node.launch()

    def look(self) -> None:
        """Who has come back?"""
        self.up += [node for node in self.nodes if node not in self.up and node.server.is_serving()]


def test_twenty_nodes_killed_under_conversations_lose_repeat_and_change_nothing(fleet: Fleet) -> None:
    """At random points, under four conversations: every token is the undisturbed run's, in its place, once.

    No row that was acknowledged when its node died is computed again. The log holds the undisturbed run's rows.
    """
    seed = int(os.environ.get("KVLOG_SEED") or time.time_ns() % 1_000_000)
    chance = random.Random(seed)
    fleet.fork_servers()
    prompt = prompt_of("test_twenty_nodes_killed_under_conversations_lose_repeat_and_change_nothing")
    prompts = [prompt[k:] for k in range(CLIENTS)]
    talks = [
        Talk(f"talk-{seed}-{k}", each, fleet.undisturbed(each, ANSWER)[0], random.Random(seed + k))
        for k, each in enumerate(prompts)
    ]
    fates = Fates([fleet.serving(name) for name in "abc"])
    clients = [threading.Thread(target=talk.run, args=(fates,), daemon=True) for talk in talks]
    began = time.monotonic()
    for client in clients:
        client.start()
    try:
        kills, in_answer = _kill(fates, talks, chance)
        fates.over.set()
        for client in clients:
            client.join(120)
    finally:
        fates.over.set()
        fates.given_up = True
    moves = [move for talk in talks for move in talk.moves]
    lost = sorted(move.known - move.attached for move in moves)
    fleet.notes.append(
        f"kills, seed {seed}: {kills} nodes in {time.monotonic() - began:.0f} s, {in_answer} of them in mid-answer; "
        f"{sum(len(talk.done) for talk in talks)} answers of {ANSWER} tokens; {len(moves)} answers went on elsewhere, "
        f"rows computed there: {lost}"
    )
    assert [] == [wrong for talk in talks for wrong in talk.wrong], f"seed {seed}"
    assert KILLS == kills, f"seed {seed}"
    assert all(not client.is_alive() for client in clients), f"seed {seed}"
    assert moves, "nothing was moved: the scenario proves nothing"
    compared = sum(_assert_logged(fleet, talk, seed) for talk in talks)
    fleet.notes.append(
        f"kills: the log has the blocks' bytes of {compared} conversations, the others' nodes died"
    )
    assert compared > 0, f"seed {seed}"


def _kill(fates: Fates, talks: list[Talk], chance: random.Random) -> tuple[int, int]:
    """Kill nodes, one after the other stays up. Returns: how many, and how many of them in mid-answer."""
    kills, in_answer, deadline = 0, 0, time.monotonic() + SECONDS
    while kills < KILLS and time.monotonic() < deadline and not any(talk.wrong for talk in talks):
        fates.look()
        if len(fates.up) < 2:
            time.sleep(0.2)
            continue
        until(lambda: bool(_working(fates.up, talks)), seconds=60, what="work for a node that is up")
        victim = chance.choice(_working(fates.up, talks) or fates.up)
        time.sleep(chance.uniform(0, 1.0))
        in_answer += victim in _working([victim], talks)
        fates.kill(victim)
        kills += 1
    return kills, in_answer


def _working(nodes: list[VllmNode], talks: list[Talk]) -> list[VllmNode]:
    """Those that have a request."""
    return [node for node in nodes if any(talk.serving is node for talk in talks)]


def _assert_logged(fleet: Fleet, talk: Talk, seed: int) -> int:
    """The log has what an undisturbed run computed: of each conversation, whichever nodes have written it.

    Returns: conversations whose last node lived long enough to say what its blocks held: what it had loaded and what it
    logged is the log's, byte for byte.
    """
    _, undisturbed = fleet.undisturbed(talk.prompt, ANSWER)
    assert talk.done
    compared = 0
    for session in talk.done:
        logged = fleet.logged(session)
        assert undisturbed.tokens[: logged.rows] == logged.tokens, f"{session}, seed {seed}"
        assert undisturbed.differs_from(logged, logged.rows) < ROUNDING, f"{session}, seed {seed}"
        turns = [turn for name in "abc" for turn in fleet.node(name).server.turns(session)]
        ended = [turn for turn in turns if turn["length"] == logged.rows and turn["logged"]]
        for turn in ended:
            theirs = logged.digests(logged.rows, turn["sure_from"])
            assert turn["sure_digests"] == theirs, f"{session} from {turn['sure_from']}, seed {seed}"
        compared += any(turn["sure_from"] < logged.rows for turn in ended)
    return compared
