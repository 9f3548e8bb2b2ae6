"""`kvlog demo`: node A answers, is killed with SIGKILL in the middle of a sentence, and node B goes on with it.

    node A: kvlogd + engine ─┐                    what is proven, all of it in this run:
                             ├─ log                 tokens and KV bytes equal an uninterrupted run's
    node B: kvlogd + engine ─┘                      a flipped byte in the log is noticed, never attached
    an engine alone: the uninterrupted run          a paused node that comes back is fenced

Nodes share the log and the model's files, no process and no memory. Node B starts before the prompt exists, and the
prompt begins with a random nonce. Everything goes through HTTP and the log, as with nodes of one's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import secrets
import signal
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from consumers.demo_acts import Scene, kill_and_go_on, prefill_again, uninterrupted, warm_up
from consumers.demo_controls import flip_a_byte, pause_and_continue
from consumers.demo_error import DemoError
from consumers.demo_log import DemoLog
from consumers.demo_model import find_model, synthetic_model
from consumers.demo_nodes import NodePlan, start_engine, start_node
from consumers.demo_options import parse_options
from consumers.demo_place import log_settings_of, passes_setting
from consumers.demo_process import Processes
from consumers.demo_prompt import Prompt
from consumers.demo_proofs import Evidence, claims
from consumers.demo_report import DemoReport
from consumers.demo_view import DemoView
from consumers.exits import ExitCode
from consumers.render import console
from kvlog.log.locate import parse_log_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumers.demo_model import Model
    from consumers.demo_nodes import Node
    from consumers.demo_options import DemoOptions
    from consumers.demo_proofs import Killed, Tampered, Uninterrupted
    from kvlog.log.settings import LogSettings

__all__ = ["figures_of", "main"]

_INTERRUPTED = 130
_TERMINATED = 143
_CLAIM_SECONDS = "5"
"""A request waits so long for its claim: longer than a node's default, for machines that do something else as well."""

_PACE = "60"
"""The most tokens a second of an answer: what is faster cannot be read. Only a tiny model would be."""

_GREETING = "Hello!"
"""Enough to see that a node works. Node B answers as long a prompt as the real one, for its prefill is timed."""

_POOL_BYTES_MIN = 64 << 20
_POOL_SESSIONS = 5
"""Whole conversations that fit a pool at once; idle ones make room for newer ones."""


def main(arguments: Sequence[str]) -> int:
    """Run the demo; returns the exit code."""
    as_json = "--json" in arguments
    try:
        return asyncio.run(_until_signalled(parse_options(arguments)))
    except KeyboardInterrupt:
        return _INTERRUPTED
    except asyncio.CancelledError:
        return _TERMINATED
    except DemoError as error:
        return _fail(error, as_json=as_json)
    except BaseExceptionGroup as group:
        found = _demo_error(group)
        if found is None:
            raise
        return _fail(found, as_json=as_json)


def figures_of(evidence: Evidence, *, log: str, model: str, dtype: str) -> dict[str, object]:
    """What `--json` prints."""
    killed, times = evidence.killed, evidence.killed.times
    parts = {
        "detect_ms": times.detect_ms,
        "claim_ms": times.claim_ms,
        "catch_up_ms": times.catch_up_ms,
        "attach_ms": times.attach_ms,
        "first_token_ms": times.first_token_ms,
    }
    return {
        **{claim.name: claim.held for claim in claims(evidence)},
        "tokens_before_kill": len(killed.shown),
        "tokens_in_log": killed.story.length,
        "tokens_recomputed": killed.kvlog["recomputed"],
        "kill_to_next_token_ms": round(times.total_ms, 3),
        **{name: round(value, 3) for name, value in parts.items()},
        "reprefill_ms": round(evidence.reprefill_ms, 3),
        "ratio": round(evidence.ratio, 3),
        "log": log,
        "model": model,
        "dtype": dtype,
    }


async def _until_signalled(options: DemoOptions) -> int:
    """A signal that ends a program ends the demo in order: with all its processes and its folder."""
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None, "run by asyncio.run"
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, task.cancel)
    _refuse_missing(options)
    with (
        tempfile.TemporaryDirectory(prefix="kvlog-demo-", ignore_cleanup_errors=True) as folder,
        contextlib.closing(Processes(Path(folder), passes_setting)) as processes,
    ):
        return await _shown(options, processes)


def _refuse_missing(options: DemoOptions) -> None:
    """The demo starts daemons and engines, which need more than the tools do."""
    needed = [
        "structlog",
        "uvicorn",
        *(["transformers", "torch"] if options.engine == "transformers" else []),
    ]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise DemoError(
            f"These packages are not installed: {', '.join(missing)}.",
            fix="pip install 'kvlog[daemon,transformers,tools]'",
            code=ExitCode.USAGE,
        )


async def _shown(options: DemoOptions, processes: Processes) -> int:
    out = _console(options)
    view = DemoView(out)
    settings = await log_settings_of(options.log, processes.folder)
    log = await DemoLog.open(settings)
    try:
        view.opening()
        model = await _model(options, processes, view)
        dtype = options.dtype if options.engine == "transformers" else "bfloat16"
        view.made_of(model=model.name, dtype=dtype, log=log.where, warning=model.warning)
        stage = _Stage(options, processes, view, log, _plan(options, settings, model))
        evidence, session = await stage.play()
        where = log.where
    finally:
        view.end_answer()  # an error or Ctrl-C in the middle of it
        await log.close()
    report, judged = DemoReport(out), claims(evidence)
    report.figures(evidence)
    report.claims(judged)
    held = all(claim.held or not claim.counts for claim in judged)
    prefix = "" if parse_log_url(settings.url).directory else f" --prefix {settings.topic_prefix}"
    look = f"kvlog show {session} --log {where}{prefix}" if options.log else ""
    report.verdict(held=held, look=look)
    if options.as_json:
        print(json.dumps(figures_of(evidence, log=where, model=model.name, dtype=dtype)), flush=True)
    return int(ExitCode.WHOLE if held else ExitCode.BROKEN)


@dataclass(frozen=True, slots=True)
class _Stage:
    """Where the acts are played, one after the other."""

    options: DemoOptions
    processes: Processes
    view: DemoView
    log: DemoLog
    plan: NodePlan

    async def play(self) -> tuple[Evidence, str]:
        """All acts. Returns: the evidence, and the session of the first act."""
        view = self.view
        with view.working("starting node A and node B"):
            a, b = await self._two_nodes()
        view.nodes((a, b))
        prompt = Prompt.make(self.options.question)
        view.question(prompt)
        scene = Scene(options=self.options, log=self.log, view=view, b=b, prompt=prompt)
        scene, killed = await kill_and_go_on(scene, a)
        with view.working("the same take-over by prefill, on node B"):
            reprefill_ms = await prefill_again(scene, killed)
        with view.working("an uninterrupted run, a flipped byte, and node A anew"):
            reference, tampered, again = await self._compared(scene, killed)
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
        async with asyncio.TaskGroup() as tasks:
            a = tasks.create_task(self._warm_node("a", _GREETING))
            b = tasks.create_task(self._warm_node("b", self.options.question))
        return a.result(), b.result()

    async def _warm_node(self, name: str, question: str | None) -> Node:
        node = await start_node(self.processes, name, self.plan)
        await warm_up(node, Prompt.make(question))
        return node

    async def _compared(self, scene: Scene, killed: Killed) -> tuple[Uninterrupted, Tampered, Node]:
        """Nothing is timed here, so all of it is done at once."""
        async with asyncio.TaskGroup() as tasks:
            reference = tasks.create_task(self._uninterrupted(scene, killed))
            tampered = tasks.create_task(flip_a_byte(scene, killed))
            again = tasks.create_task(self._warm_node("a2", _GREETING))
        return reference.result(), tampered.result(), again.result()

    async def _uninterrupted(self, scene: Scene, killed: Killed) -> Uninterrupted:
        engine = await start_engine(self.processes, "alone", self.plan)
        return await uninterrupted(scene, engine.url, killed)


async def _model(options: DemoOptions, processes: Processes, view: DemoView) -> Model:
    if options.engine == "synthetic":
        return synthetic_model()
    with view.working("looking for the model"):
        return await find_model(processes, options.model, options.dtype, view.progress)


def _plan(options: DemoOptions, settings: LogSettings, model: Model) -> NodePlan:
    text = "".join(message["content"] for message in Prompt.make(options.question).messages)
    positions = len(text) + options.tokens  # a token has a character at least
    return NodePlan(
        log=settings,
        prefix=f"demo-{secrets.token_hex(4)}",
        engine=(*model.arguments, "--claim-seconds", _CLAIM_SECONDS, "--tokens-per-second", _PACE),
        pool_bytes=max(_POOL_BYTES_MIN, min(positions, 2048) * model.row_bytes * _POOL_SESSIONS),
    )


def _console(options: DemoOptions) -> Console:
    """JSON has standard output for itself."""
    if not options.as_json:
        return console()
    return console(stderr=True) if sys.stderr.isatty() else Console(quiet=True)


def _demo_error(group: BaseExceptionGroup[BaseException]) -> DemoError | None:
    """The first one that tells a person something; None: all are faults of ours."""
    for error in group.exceptions:
        found = _demo_error(error) if isinstance(error, BaseExceptionGroup) else error
        if isinstance(found, DemoError):
            return found
    return None


def _fail(error: DemoError, *, as_json: bool) -> int:
    if as_json:
        said = {"error": error.sentence, "hint": error.fix, "exit_code": int(error.code)}
        print(json.dumps(said), flush=True)
    else:
        console(stderr=True).print(f"kvlog demo: {error}", style="bold red", markup=False)
    return int(error.code)
