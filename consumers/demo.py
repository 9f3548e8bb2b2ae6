"""`kvlog demo`: node A answers, is killed with SIGKILL in the middle of a sentence, and node B goes on with it.

    node A: kvlogd + engine ─┐                    what is proven, all of it in this run:
                             ├─ log                 tokens and KV bytes equal an uninterrupted run's
    node B: kvlogd + engine ─┘                      a flipped byte in the log is noticed, never attached
    an engine alone: the uninterrupted run          a paused node that comes back is fenced

Nodes share the log and the model's files, no process and no memory. Node B starts before the prompt exists, and the
prompt begins with a random nonce. Everything goes through HTTP and the log, as with nodes of one's own. Engines are
ours, or vLLM servers (consumers.demo_vllm): acts, figures and claims are the same.
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
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from consumers.demo_error import DemoError
from consumers.demo_log import DemoLog
from consumers.demo_model import find_model, synthetic_model
from consumers.demo_nodes import NodePlan, OwnEngines
from consumers.demo_options import parse_options
from consumers.demo_place import log_settings_of, passes_setting
from consumers.demo_process import Processes
from consumers.demo_prompt import Prompt
from consumers.demo_proofs import claims
from consumers.demo_report import DemoReport
from consumers.demo_stage import Stage
from consumers.demo_view import DemoView
from consumers.demo_vllm import VllmEngines, VllmServing, installed_vllm
from consumers.exits import ExitCode
from consumers.render import console
from kvlog.log.locate import parse_log_url

if TYPE_CHECKING:
    from collections.abc import Sequence

    from consumers.demo_model import Model
    from consumers.demo_nodes import Engines
    from consumers.demo_options import DemoOptions
    from consumers.demo_proofs import Evidence
    from consumers.vllm_server import VllmInstall
    from kvlog.log.settings import LogSettings

__all__ = ["figures_of", "main"]

_INTERRUPTED = 130
_TERMINATED = 143
_CLAIM_SECONDS = "5"
"""A request waits so long for its claim: longer than a node's default, for machines that do something else as well."""

_PACE = "60"
"""The most tokens a second of an answer: what is faster cannot be read. Only a tiny model would be."""

_POOL_BYTES_MIN = 64 << 20
_POOL_SESSIONS = 5
"""Whole conversations that fit a pool at once; idle ones make room for newer ones."""

_LONGEST_EXTRA = 1024
"""Positions beyond text and answer: the chat template's own, and what the paused node is asked for beside."""


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
        *(["uvicorn"] if options.engine != "vllm" else []),
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
        install = installed_vllm(options.vllm_python, processes) if options.engine == "vllm" else None
        model = await _model(options, processes, view)
        dtype = "bfloat16" if options.engine == "synthetic" else options.dtype
        view.made_of(model=model.name, dtype=dtype, log=log.where, warning=model.warning)
        if install is not None:
            view.engines(f"vLLM {install.version}, {install.python}")
        plan = _plan(options, settings, model, _engines(options, processes, model, install))
        stage = Stage(options, processes, view, log, plan)
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


async def _model(options: DemoOptions, processes: Processes, view: DemoView) -> Model:
    if options.engine == "synthetic":
        return synthetic_model()
    with view.working("looking for the model"):
        return await find_model(processes, options.model, options.dtype, view.progress)


def _engines(
    options: DemoOptions, processes: Processes, model: Model, install: VllmInstall | None
) -> Engines:
    if install is not None:
        serving = VllmServing.of(model, options.dtype, _positions(options) + _LONGEST_EXTRA)
        return VllmEngines(install, processes.packages(), serving)
    return OwnEngines(
        (*model.arguments, "--claim-seconds", _CLAIM_SECONDS, "--tokens-per-second", _PACE),
    )


def _plan(options: DemoOptions, settings: LogSettings, model: Model, engines: Engines) -> NodePlan:
    return NodePlan(
        log=settings,
        prefix=f"demo-{secrets.token_hex(4)}",
        engines=engines,
        pool_bytes=max(_POOL_BYTES_MIN, min(_positions(options), 2048) * model.row_bytes * _POOL_SESSIONS),
    )


def _positions(options: DemoOptions) -> int:
    """Of the longest conversation: a token has a character at least."""
    text = "".join(message["content"] for message in Prompt.make(options.question).messages)
    return len(text) + options.tokens


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
