"""What the connector costs a real vLLM on SmolLM2, what a load moves, and where the time of a take-over goes.

Two servers stand side by side, one with kvlog's connector and a daemon, one with a connector that does nothing, so
that both have vLLM's own cost of having any. One of them computes at a time, in the order A B B A, so that a
disturbance hits both: the shorter a run, the better. Each has one thread (pinned), the daemon shares the other core
with vLLM's engine core, which is never idle. Intervals are of 95 %, by a bootstrap over rounds.

Besides the rate, which whatever else runs on the machine disturbs, processor time is compared: of all processes of a
server, for each token. float32, since a processor without bfloat16 of its own takes a second for a step; blocks of 128.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from kvlog.engines.models import ensure_model
from tests.bench.report import Row, paired, percentile
from tests.bench.vllm_servers import COMPUTE_CORE, ROW_BYTES, launch_timed, processor_seconds, start_daemon
from tests.bench.vllm_takeover import measure_vllm_takeover
from tests.nodes import Answer, ask
from tests.vllm.servers import VllmServer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.bench.setting import Setting

__all__ = ["measure_vllm"]

_CASES: Final = ((1, 40, 15), (16, 60, 6))
"""Sessions at once, tokens of each answer, rounds."""

_PROMPT_TOKENS: Final = 64
_RATIO_MIN: Final = 0.98
_BIG_ROW_BYTES: Final = 128 << 10
_DRAWS: Final = 2000
_numbers = itertools.count()


def measure_vllm(setting: Setting) -> list[Row]:
    """Rates and hooks at 1 and 16 sessions, then take-overs."""
    folder = setting.fresh_folder("vllm")
    model = ensure_model().path
    node = start_daemon(folder, "a")
    ours, theirs = (VllmServer(folder, name, model, cores=COMPUTE_CORE) for name in ("ours", "null"))
    rows: list[Row] = []
    try:
        launch_timed(ours, "TimedKvlog", folder / "a.sock")
        launch_timed(theirs, "TimedNull", None)
        for server in (ours, theirs):
            server.wait_ready()
        for sessions, tokens, rounds in _CASES:
            size = (tokens // 2, 1) if setting.quick else (tokens, rounds)
            rows += _case(ours, theirs, sessions, size)
        theirs.kill()
        rows += measure_vllm_takeover(folder, (node, ours), quick=setting.quick)
    finally:
        for server in (ours, theirs):
            server.kill()
        node.close()
    return rows


@dataclass(frozen=True)
class _Run:
    """All answers of one run: tokens a second, processor ms a token, median ms to the first token."""

    rate: float
    busy_ms: float
    first_ms: float


def _case(ours: VllmServer, theirs: VllmServer, sessions: int, size: tuple[int, int]) -> list[Row]:
    tokens, rounds = size
    for server in (ours, theirs):
        _run(server, sessions, tokens // 2)  # warm
    starts = {server.name: {role: len(_steps(server, role)) for role in _ROLES} for server in (ours, theirs)}
    pairs = [_round(ours, theirs, sessions, tokens) for _ in range(rounds)]
    rows = [_rate_row(sessions, pairs), _busy_row(sessions, pairs)]
    for role in _ROLES:
        mine, null = (_steps(server, role)[starts[server.name][role] :] for server in (ours, theirs))
        rows.append(_hook_row(sessions, role, mine, null))
    return rows


def _round(ours: VllmServer, theirs: VllmServer, sessions: int, tokens: int) -> tuple[_Run, _Run]:
    """Both, in the order A B B A."""
    first = _run(ours, sessions, tokens)
    between = [_run(theirs, sessions, tokens) for _ in range(2)]
    return _mean([first, _run(ours, sessions, tokens)]), _mean(between)


def _mean(runs: Sequence[_Run]) -> _Run:
    return _Run(*(statistics.fmean(values) for values in zip(*map(_values, runs), strict=True)))


def _values(run: _Run) -> tuple[float, float, float]:
    return run.rate, run.busy_ms, run.first_ms


def _run(server: VllmServer, sessions: int, tokens: int) -> _Run:
    """So many answers at once, to prompts that nobody has seen."""
    name = next(_numbers)

    def answer(index: int) -> float:
        asked, first = time.monotonic(), 0.0
        drawn = random.Random(100 * name + index)
        last = Answer()
        for last in ask(  # noqa: B007 - looked at below
            server.url,
            seconds=600.0,
            model="m",
            prompt=[drawn.randrange(1000, 40_000) for _ in range(_PROMPT_TOKENS)],
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            session_id=f"bench-{name}-{index}",
        ):
            first = first or time.monotonic() - asked
        assert last.error is None, last.error
        assert len(last.tokens) == tokens, "an answer was cut short"
        return 1000 * first

    busy, began = processor_seconds(server), time.monotonic()
    with ThreadPoolExecutor(sessions) as pool:
        firsts = list(pool.map(answer, range(sessions)))
    seconds, made = time.monotonic() - began, sessions * tokens
    busy = processor_seconds(server) - busy
    return _Run(made / seconds, 1000 * busy / made, statistics.median(firsts))


_ROLES: Final = ("worker", "scheduler")


def _steps(server: VllmServer, role: str) -> np.ndarray:
    """Seconds of each step so far: wall, processor."""
    path = server.folder / f"{server.name}-steps-{role}"
    data = np.fromfile(path) if path.exists() else np.empty(0)
    return data[: len(data) // 2 * 2].reshape(-1, 2)


def _rate_row(sessions: int, pairs: Sequence[tuple[_Run, _Run]]) -> Row:
    ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
    low, high = _interval(ratios)
    bare = Row(
        measure="vllm",
        case=f"serving SmolLM2, {sessions} sessions",
        unit="tokens/s",
        values=(),
        against="a connector that does nothing",
        goal=f"ratio ≥ {_RATIO_MIN}",
        met=statistics.fmean(ratios) >= _RATIO_MIN,
        also={
            "95 %": f"{low:.3f}-{high:.3f}",
            "first token ms": statistics.median(ours.first_ms for ours, _ in pairs),
            "theirs": statistics.median(theirs.first_ms for _, theirs in pairs),
        },
    )
    row = paired(bare, [(ours.rate, theirs.rate) for ours, theirs in pairs])
    return replace(row, ratio=statistics.fmean(ratios))


def _busy_row(sessions: int, pairs: Sequence[tuple[_Run, _Run]]) -> Row:
    low, high = _interval([ours.busy_ms / theirs.busy_ms for ours, theirs in pairs])
    bare = Row(
        measure="vllm",
        case=f"processor time of the server for a token, {sessions} sessions",
        unit="ms",
        values=(),
        against="a connector that does nothing",
        also={"95 %": f"{low:.3f}-{high:.3f}"},
    )
    return paired(bare, [(ours.busy_ms, theirs.busy_ms) for ours, theirs in pairs])


def _hook_row(sessions: int, role: str, ours: np.ndarray, theirs: np.ndarray) -> Row:
    """µs of a step in the connector; a step of every session has `sessions` rows."""
    p50 = [1e6 * percentile(steps[:, 0].tolist(), 50) for steps in (ours, theirs)]
    also: dict[str, float | str] = {
        "p99": 1e6 * percentile(ours[:, 0].tolist(), 99),
        "p99 theirs": 1e6 * percentile(theirs[:, 0].tolist(), 99),
        "p50 of the processor": 1e6 * percentile(ours[:, 1].tolist(), 50),
        "p99 of the processor": 1e6 * percentile(ours[:, 1].tolist(), 99),
        "steps": len(ours),
    }
    if role == "worker":
        also["p50 by bytes for rows of 128 KiB"] = p50[0] * _BIG_ROW_BYTES / ROW_BYTES
    return Row(
        measure="vllm",
        case=f"calls of the connector in the {role}, a step, {sessions} sessions",
        unit="µs, p50",
        values=(p50[0],),
        against="a connector that does nothing",
        their_values=(p50[1],),
        also=also,
    )


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean."""
    drawn = random.Random(1)
    means = sorted(statistics.fmean(drawn.choices(values, k=len(values))) for _ in range(_DRAWS))
    return means[_DRAWS // 40], means[-_DRAWS // 40]
