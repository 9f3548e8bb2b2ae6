"""What the demo does, act by act: kill and go on, prefill again, the uninterrupted run. Each gives its evidence."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from consumers.demo_client import Answer, Asked, Broken, Finished, Piece, whole_answer
from consumers.demo_error import DemoError
from consumers.demo_options import LEFT_MIN
from consumers.demo_process import until
from consumers.demo_prompt import Prompt
from consumers.demo_proofs import Killed, TakeOverTimes, Uninterrupted
from consumers.exits import ExitCode
from kvlog.ids import SessionId

if TYPE_CHECKING:
    from consumers.demo_client import Client
    from consumers.demo_log import DemoLog
    from consumers.demo_nodes import Node
    from consumers.demo_options import DemoOptions
    from consumers.demo_view import DemoView

__all__ = [
    "Scene",
    "finished",
    "is_time_to_cut",
    "kill_and_go_on",
    "prefill_again",
    "uninterrupted",
    "warm_up",
]

_ATTEMPTS_MAX = 3
"""An answer may be over before it can be cut; then another nonce may give another answer."""

_WARM_SECONDS = 60.0
_EVENT_SECONDS = 15.0
_CUT_SHARE_MIN, _CUT_SHARE_MAX = 0.4, 0.7
"""Where in the answer a sentence is cut: from the first place on that is in the middle of one."""

_FRAGMENT_WORDS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """What the acts have in common. `b`: the node that takes over, warm since before the prompt existed."""

    options: DemoOptions
    log: DemoLog
    view: DemoView
    b: Node
    prompt: Prompt

    def session(self, act: str) -> SessionId:
        """A session of this conversation."""
        return SessionId(f"demo-{self.prompt.nonce}-{act}")

    def asked(self, act: str, resumed: tuple[int, ...] = (), *, tokens_max: int | None = None) -> Asked:
        """The demo's request, in a session of its own."""
        return Asked(
            prompt=self.prompt,
            session=self.session(act),
            tokens_max=tokens_max or self.options.tokens,
            resumed=resumed,
        )


def is_time_to_cut(options: DemoOptions, answer: Answer) -> bool:
    """Whether node A has said enough: as many tokens as asked for, or the middle of a sentence."""
    said = len(answer.tokens)
    if options.kill_at is not None:
        return said >= options.kill_at
    fragment = re.split(r"[.!?\n]", answer.text)[-1]
    inside = len(fragment.split()) >= _FRAGMENT_WORDS
    latest = min(_CUT_SHARE_MAX * options.tokens, options.tokens - LEFT_MIN)
    return said >= latest or (inside and said >= _CUT_SHARE_MIN * options.tokens)


def finished(answer: Answer, node: str) -> Finished:
    """The end of an answer that nobody disturbed. DemoError: it has another one."""
    if isinstance(answer.end, Finished):
        return answer.end
    assert answer.end is not None, "a stream ends with its end"
    code = ExitCode.USAGE if answer.end.kind == "invalid_request" else ExitCode.BROKEN
    raise DemoError(f"The answer of {node} broke off ({answer.end.kind}): {answer.end.message}", code=code)


async def warm_up(node: Node, prompt: Prompt) -> None:
    """Have a node answer something else first: what comes later is not its first prefill, step or claim.

    Args:
        node: linked.
        prompt: not the demo's.

    DemoError: it does not answer, or does not log what it answers.
    """
    deadline = time.monotonic() + _WARM_SECONDS
    while True:
        asked = Asked(prompt=prompt, session=f"demo-{prompt.nonce}-warm-{node.name}", tokens_max=2)
        end = finished(await whole_answer(node.client, asked), f"node {node.name.upper()}")
        if end.kvlog["logged"]:
            return
        if time.monotonic() > deadline:
            words = f"{node.daemon.name}: {node.daemon.last_words()}"
            raise DemoError(f"Node {node.name.upper()} logs nothing: {end.kvlog['reason']}. {words}")


async def kill_and_go_on(scene: Scene, a: Node) -> tuple[Scene, Killed]:
    """Node A answers, is killed in the middle of it, and node B goes on.

    Returns: the scene with the prompt that it came to, and the evidence.
    DemoError: the answer was over too soon, or node B does not answer.
    """
    for _ in range(_ATTEMPTS_MAX):
        began = await _until_cut(scene, a)
        if began is not None:
            return scene, await _go_on(scene, began)
        scene = replace(scene, prompt=Prompt.make(scene.options.question))
    raise _too_short()


@dataclass(frozen=True, slots=True)
class _Begun:
    """Node A is dead. Monotonic seconds."""

    answer: Answer
    killed_at: float
    detected_at: float


async def _until_cut(scene: Scene, a: Node) -> _Begun | None:
    """Let node A answer, and kill it. None: the answer was over first."""
    view, killed_at = scene.view, None
    view.begin_answer()
    answer = Answer(time.monotonic())
    async for part in a.client.stream(scene.asked("main")):
        answer.take(part)
        if isinstance(part, Piece):
            view.piece("A", part.text)
            if killed_at is None and is_time_to_cut(scene.options, answer):
                killed_at = time.monotonic()
                a.group.kill()
    if killed_at is None:
        view.cancel_answer()
        finished(answer, "node A")
        return None
    if not isinstance(answer.end, Broken):
        raise _too_short()  # what was left of it was on its way already
    view.killed(len(answer.tokens), (a.daemon.pid, a.engine.program.pid))
    return _Begun(answer, killed_at, answer.end.at)


def _too_short() -> DemoError:
    return DemoError(
        "The answer was over before node A could be killed.",
        fix="Ask something that needs a longer answer (--prompt), or kill it earlier (--kill-at).",
        code=ExitCode.USAGE,
    )


async def _go_on(scene: Scene, begun: _Begun) -> Killed:
    shown = tuple(begun.answer.tokens)
    asked = replace(scene.asked("main", shown), digests_at=())
    answer = Answer(time.monotonic())
    async for part in scene.b.client.stream(asked):
        answer.take(part)
        if isinstance(part, Piece):
            scene.view.piece("B", part.text)
    scene.view.end_answer()
    end = finished(answer, "node B")
    assert answer.first_at is not None, "an answer that is not over gets a token"
    return Killed(
        shown=shown,
        resumed=tuple(answer.tokens),
        prompt_tokens=end.prompt_tokens,
        kvlog=end.kvlog,
        story=await scene.log.story(scene.session("main")),
        times=await _times(scene, begun, end, answer.first_at),
    )


async def _times(scene: Scene, begun: _Begun, end: Finished, first_at: float) -> TakeOverTimes:
    """Our own clock for the whole and the break; B's engine and daemon for what they did in between."""
    session, daemon = scene.session("main"), scene.b.daemon
    if not end.kvlog["logged"] and not end.kvlog["attached"]:
        raise DemoError(f"Node B did not become the session's owner: {end.kvlog['reason']}.")
    await until(
        lambda: bool(daemon.events("takeover_completed", session)),
        seconds=_EVENT_SECONDS,
        what="node B's report of its take-over",
    )
    opened, attach = end.kvlog["open_turn_ms"], end.kvlog["attach_ms"]
    claim = min(opened, daemon.events("takeover_completed", session)[0]["claim_ms"])
    detect = 1000 * (begun.detected_at - begun.killed_at)
    return TakeOverTimes(
        detect_ms=detect,
        claim_ms=claim,
        catch_up_ms=opened - claim,
        attach_ms=attach,
        first_token_ms=1000 * (first_at - begun.detected_at) - opened - attach,
    )


async def prefill_again(scene: Scene, killed: Killed) -> float:
    """The same take-over in a session of which nobody has a row. Returns: milliseconds, detection included.

    Without kvlog there would be no claim either, so what node B's daemon took is left out: the prefill is all of it.
    """
    asked = scene.asked("prefill", killed.shown, tokens_max=len(killed.shown) + 1)
    answer = await whole_answer(scene.b.client, asked)
    end = finished(answer, "node B")
    if end.kvlog["attached"]:
        raise DemoError("Node B attached rows of a session that nobody has logged.")
    seconds = answer.first_token_seconds
    assert seconds is not None, "an answer of one token has one"
    return killed.times.detect_ms + 1000 * seconds - float(end.kvlog["open_turn_ms"])


async def uninterrupted(scene: Scene, client: Client, killed: Killed) -> Uninterrupted:
    """The same conversation from its beginning to its end, on an engine without a daemon."""
    attached = killed.kvlog["attached"]
    asked = replace(scene.asked("uninterrupted"), digests_at=(attached,) if attached else ())
    answer = await whole_answer(client, asked)
    end = finished(answer, "the uninterrupted run")
    return Uninterrupted(tokens=tuple(answer.tokens), kvlog=end.kvlog)
