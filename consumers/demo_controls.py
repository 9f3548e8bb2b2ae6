"""The two controls: a flipped byte in the log, and a node that was only paused."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from consumers.demo_acts import finished
from consumers.demo_client import Answer, Asked, Broken, Piece, whole_answer
from consumers.demo_error import DemoError
from consumers.demo_options import LEFT_MIN
from consumers.demo_process import until
from consumers.demo_proofs import Paused, Tampered
from consumers.exits import ExitCode
from kvlog.records import Codec, Delta

if TYPE_CHECKING:
    from consumers.demo_acts import Scene
    from consumers.demo_log import SessionStory
    from consumers.demo_nodes import Node
    from consumers.demo_proofs import Killed
    from kvlog.ids import SessionId
    from kvlog.log.settings import LogSettings

__all__ = ["flip_a_byte", "pause_and_continue"]

_BACK_POSITIONS = 8
"""How far before the end of what the log has the flipped record stands: rows before it are attached, and those from it
on are so few that the engine computes them one by one, as they were the first time, so that tokens must be equal."""

_EVENT_SECONDS = 15.0
_ATTEMPTS_MAX = 4
"""A node that continues may learn that it is fenced before it has written anything, and then nothing is stale."""

_AHEAD_TOKENS = 3
"""Tokens that node A's engine computes after its daemon was stopped: their rows wait in the ring, and become late."""

_LONGER_TOKENS = 256
_ANSWER_SECONDS = 180.0
_GOES_ON_TOKENS = 3
"""Of node B's answer, before node A is continued."""

_ENDING_SECONDS = 60.0
_QUIET_SECONDS = 0.5
_POLL_SECONDS = 0.05


async def flip_a_byte(scene: Scene, killed: Killed) -> Tampered:
    """Take over two copies of the session on node B, of which one has a flipped byte.

    DemoError: the log holds no rows that could be flipped.
    """
    index = _victim(killed.story)
    await scene.log.copy(killed.story, scene.session("copy"), damaged=None)
    damaged = await scene.log.copy(killed.story, scene.session("flipped"), damaged=index)
    assert damaged.damaged is not None, "a record was named"
    offset, start = damaged.damaged
    control = await whole_answer(
        scene.b.client, scene.asked("copy", killed.shown, tokens_max=len(killed.shown) + 1)
    )
    answer = await whole_answer(scene.b.client, scene.asked("flipped", killed.shown))
    refusal = await scene.log.refusal_at(damaged.session, offset)
    return Tampered(
        whole_attached=finished(control, "node B").kvlog["attached"],
        attached=finished(answer, "node B").kvlog["attached"],
        damaged_start=start,
        damaged_offset=offset,
        folded="" if refusal is None else f"{refusal.judgement.verdict.value}: {refusal.judgement.why.value}",
        noticed_offset=await _broken_at(scene.b, damaged.session),
        tokens=killed.shown + tuple(answer.tokens),
    )


def _victim(story: SessionStory) -> int:
    """The index of the record whose byte is flipped."""
    wanted = max(0, story.length - _BACK_POSITIONS)
    rows = [
        (index, entry.record.start)
        for index, entry in enumerate(story.entries)
        if isinstance(entry.record, Delta) and entry.record.codec is not Codec.IDS
    ]
    if not rows:
        raise DemoError("The log holds no rows of the session, so none can be damaged.")
    behind = [index for index, start in rows if start >= wanted]
    return behind[0] if behind else rows[-1][0]


async def _broken_at(node: Node, session: SessionId) -> int | None:
    """Where the node's daemon says that the session broke."""
    deadline = time.monotonic() + _EVENT_SECONDS
    while True:
        events = node.daemon.events("session_broken", session)
        if events or time.monotonic() > deadline:
            return int(events[0]["offset"]) if events else None
        await asyncio.sleep(_POLL_SECONDS)


async def pause_and_continue(scene: Scene, a: Node, log: LogSettings, killed: Killed) -> Paused:
    """Pause node A in the middle of the answer, let node B go on, continue node A, and see what becomes of it.

    Repeated while node A was fenced before it had written anything late, a few times.

    Args:
        scene: with node B.
        a: another node A than the one that was killed.
        log: of both.
        killed: the first act, whose answer is given again; so it is known how long it is.
    """
    left = max(1, len(killed.shown) + len(killed.resumed) - LEFT_MIN)
    pause_at = min(len(killed.shown), left)
    for attempt in range(1, _ATTEMPTS_MAX + 1):
        paused = await _Pause(scene, a, log, pause_at).once(f"paused-{attempt}")
        if paused.story.late:
            break
    return paused


@dataclass(frozen=True, slots=True)
class _Pause:
    """The zombie control. `pause_at`: tokens of the answer after which node A's daemon is stopped."""

    scene: Scene
    a: Node
    log: LogSettings
    pause_at: int

    async def once(self, act: str) -> Paused:
        """Play it in a session of its own."""
        scene, a, session = self.scene, self.a, self.scene.session(act)
        at_a, at_b = Answer(time.monotonic()), Answer(time.monotonic())
        async with asyncio.TaskGroup() as tasks:
            reading = tasks.create_task(_read(a, self._endless(act), at_a))
            await self._stop(at_a)
            shown = tuple(at_a.tokens)
            async for part in scene.b.client.stream(scene.asked(act, shown)):
                at_b.take(part)
                if isinstance(part, Piece) and len(at_b.tokens) == _GOES_ON_TOKENS:
                    a.group.go_on()
            a.group.go_on()  # also if B's answer was over before that
            await asyncio.wait([reading], timeout=_ENDING_SECONDS)
            reading.cancel()
        finished(at_b, "node B")
        story = await _ended_story(scene, session)
        late = frozenset(map(int, story.late))
        return Paused(
            tokens=shown + tuple(at_b.tokens),
            ending=at_a.end.kind if isinstance(at_a.end, Broken) else "",
            dropped=len(at_a.tokens) - len(shown),
            story=story,
            stale_at_b=await _stale_at(scene.b, session, late),
            stale_at_a=await _stale_at(a, session, late),
        )

    def _endless(self, act: str) -> Asked:
        """Node A is asked for more than node B: it must not be done before it can have learnt that it is fenced."""
        return self.scene.asked(act, tokens_max=self.scene.options.tokens + _LONGER_TOKENS)

    async def _stop(self, answer: Answer) -> None:
        """Stop the whole node in the middle of its answer: its daemon first, its engine a few tokens later.

        DemoError: its answer is over already, or does not come.
        """
        await self._has_said(answer, self.pause_at)
        await self.a.stop_daemon(self.log)
        await self._has_said(answer, len(answer.tokens) + _AHEAD_TOKENS)
        self.a.group.stop()

    async def _has_said(self, answer: Answer, tokens: int) -> None:
        what = f"the answer of node {self.a.name.upper()}"
        await until(
            lambda: len(answer.tokens) >= tokens or answer.end is not None, seconds=_ANSWER_SECONDS, what=what
        )
        if answer.end is not None:
            finished(answer, what)
            raise DemoError(
                "The answer was over before node A could be paused.",
                fix="Raise --tokens, or lower --kill-at.",
                code=ExitCode.USAGE,
            )


async def _read(node: Node, asked: Asked, answer: Answer) -> None:
    async for part in node.client.stream(asked):
        answer.take(part)


async def _ended_story(scene: Scene, session: SessionId) -> SessionStory:
    """The story once nothing is added to it any more."""
    story = await scene.log.story(session)
    deadline = time.monotonic() + _EVENT_SECONDS
    while time.monotonic() < deadline:
        await asyncio.sleep(_QUIET_SECONDS)
        again = await scene.log.story(session)
        if again.late == story.late:
            break
        story = again
    return story


async def _stale_at(node: Node, session: SessionId, late: frozenset[int]) -> frozenset[int]:
    """Offsets that the node's daemon refused as stale; waits until it has seen those that are known to be late."""
    deadline = time.monotonic() + _EVENT_SECONDS
    while True:
        refused = node.daemon.events("record_refused", session)
        stale = frozenset(int(event["offset"]) for event in refused if event["verdict"] == "stale")
        if late <= stale or time.monotonic() > deadline:
            return stale
        await asyncio.sleep(_POLL_SECONDS)
