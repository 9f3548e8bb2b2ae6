"""The order of the demo's acts, and what runs at once: everything, or one server after the other.

Engines that start in a second or two start side by side. Servers that keep every core busy for half a minute do not:
then node A that comes back for the last act is the server that answered alone, without a daemon, in the act before.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from consumers.demo_acts import Scene, kill_and_go_on, prefill_again, uninterrupted, warm_up
from consumers.demo_controls import flip_a_byte, pause_and_continue
from consumers.demo_nodes import add_daemon, start_engine, start_node
from consumers.demo_prompt import Prompt
from consumers.demo_proofs import Evidence

if TYPE_CHECKING:
    from consumers.demo_log import DemoLog
    from consumers.demo_nodes import LoneEngine, Node, NodePlan
    from consumers.demo_options import DemoOptions
    from consumers.demo_process import Processes
    from consumers.demo_proofs import Killed, Tampered, Uninterrupted
    from consumers.demo_view import DemoView

__all__ = ["Stage"]

_GREETING = "Hello!"
"""Enough to see that a node works. Node B answers as long a prompt as the real one, for its prefill is timed."""

_START = "(20 to 60 s)"


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the acts are played, one after the other."""

    options: DemoOptions
    processes: Processes
    view: DemoView
    log: DemoLog
    plan: NodePlan

    async def play(self) -> tuple[Evidence, str]:
        """All acts. Returns: the evidence, and the session of the first act."""
        view = self.view
        a, b = await (self._node_after_node() if self.plan.engines.in_turn else self._two_nodes())
        prompt = Prompt.make(self.options.question)
        view.question(prompt)
        scene = Scene(options=self.options, log=self.log, view=view, b=b, prompt=prompt)
        scene, killed = await kill_and_go_on(scene, a)
        with view.working("the same take-over by prefill, on node B"):
            reprefill_ms = await prefill_again(scene, killed)
        compared = self._compared_in_turn if self.plan.engines.in_turn else self._compared
        reference, tampered, again = await compared(scene, killed)
        with view.working("node A pauses, node B goes on, node A continues"):
            paused = await pause_and_continue(scene, again, self.plan.log, killed)
        evidence = Evidence(
            killed=killed,
            reprefill_ms=reprefill_ms,
            reference=reference,
            tampered=tampered,
            paused=paused,
            is_exact=self.options.is_exact,
        )
        return evidence, scene.session("main")

    async def _two_nodes(self) -> tuple[Node, Node]:
        with self.view.working("starting node A and node B"):
            async with asyncio.TaskGroup() as tasks:
                a = tasks.create_task(self._warm_node("a", _GREETING))
                b = tasks.create_task(self._warm_node("b", self.options.question))
        for node in (a.result(), b.result()):
            self.view.node(node)
        return a.result(), b.result()

    async def _node_after_node(self) -> tuple[Node, Node]:
        a = await self._shown_node("a", _GREETING)
        return a, await self._shown_node("b", self.options.question)

    async def _shown_node(self, name: str, question: str | None) -> Node:
        began = time.monotonic()
        with self.view.working(f"starting node {name.upper()} {_START}", is_long=True):
            node = await self._warm_node(name, question)
        self.view.node(node, word=self.plan.engines.word, seconds=time.monotonic() - began)
        return node

    async def _warm_node(self, name: str, question: str | None) -> Node:
        node = await start_node(self.processes, name, self.plan)
        await warm_up(node, Prompt.make(question))
        return node

    async def _compared(self, scene: Scene, killed: Killed) -> tuple[Uninterrupted, Tampered, Node]:
        """Nothing is timed here, so all of it is done at once."""
        with self.view.working("an uninterrupted run, a flipped byte, and node A anew"):
            async with asyncio.TaskGroup() as tasks:
                reference = tasks.create_task(self._uninterrupted(scene, killed))
                tampered = tasks.create_task(flip_a_byte(scene, killed))
                again = tasks.create_task(self._warm_node("a2", _GREETING))
        return reference.result(), tampered.result(), again.result()

    async def _uninterrupted(self, scene: Scene, killed: Killed) -> Uninterrupted:
        alone = await start_engine(self.processes, "alone", self.plan)
        return await uninterrupted(scene, alone.engine.client, killed)

    async def _compared_in_turn(self, scene: Scene, killed: Killed) -> tuple[Uninterrupted, Tampered, Node]:
        """One server starts, and answers before it has a daemon; with one it is node A anew."""
        working = self.view.working
        with working("a flipped byte, on node B"):
            tampered = await flip_a_byte(scene, killed)
        with working(f"starting node A anew, alone for now {_START}", is_long=True):
            lone = await start_engine(self.processes, "a2", self.plan)
        with working("an uninterrupted run on it, without a daemon"):
            reference = await uninterrupted(scene, lone.engine.client, killed)
        with working("starting its daemon"):
            again = await self._joined(lone)
        return reference, tampered, again

    async def _joined(self, lone: LoneEngine) -> Node:
        node = await add_daemon(lone, self.plan)
        await warm_up(node, Prompt.make(_GREETING))
        return node
