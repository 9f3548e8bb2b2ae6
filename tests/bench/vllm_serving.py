"""What the connector costs a real vLLM: tokens a second with it and without, in turns, on SmolLM2.

    python -m tests.bench.vllm_serving [--rounds N] [--tokens N]

Two servers stand side by side, one with the connector and a daemon, one with neither; only one of them computes at a
time, in the order A B B A, so that a disturbance hits both. Each server has one thread (pinned), the daemon shares the
other core. The ratio's interval is a bootstrap over rounds.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from kvlog.engines.models import ensure_model
from tests.nodes import Answer, Node, ask, daemon_config
from tests.vllm.servers import VllmServer, why_not

if TYPE_CHECKING:
    from collections.abc import Sequence

_SESSIONS = (1, 16)
_PROMPT_TOKENS = 64


def main() -> None:
    """Measure, and print a line for each number of sessions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4, help="of A B B A each")
    parser.add_argument("--tokens", type=int, default=150, help="an answer")
    given = parser.parse_args()
    if reason := why_not():
        raise SystemExit(f"not measured: {reason}")
    with tempfile.TemporaryDirectory(prefix="kvlog-bench-vllm-") as name:
        _measure(Path(name), given.rounds, given.tokens)


def _measure(folder: Path, rounds: int, tokens: int) -> None:
    model = ensure_model().path
    node = Node(
        folder, "a", daemon_config(folder, "a", f"file://{folder}/log", link={"ring_bytes": 64 << 20})
    )
    node.start_daemon()
    node.wait_log()
    with_it, without = VllmServer(folder, "with", model), VllmServer(folder, "without", model)
    try:
        with_it.launch(folder / "a.sock", "--max-num-seqs", "16")
        without.launch(None, "--max-num-seqs", "16")
        with_it.wait_ready()
        without.wait_ready()
        for sessions in _SESSIONS:
            for server in (with_it, without):
                _rate(server, sessions, tokens // 3)  # warm
            before = _hook(with_it)
            pairs = [_round(with_it, without, sessions, tokens) for _ in range(rounds)]
            _say(sessions, pairs, before, _hook(with_it))
    finally:
        for server in (with_it, without):
            server.kill()
        node.close()


@dataclass(frozen=True)
class _Served:
    """One run: tokens a second of all answers together, and the median time to an answer's first token."""

    rate: float
    first_ms: float


def _round(with_it: VllmServer, without: VllmServer, sessions: int, tokens: int) -> tuple[_Served, _Served]:
    """Both, in the order A B B A."""
    first = _rate(with_it, sessions, tokens)
    between = [_rate(without, sessions, tokens) for _ in range(2)]
    return _mean([first, _rate(with_it, sessions, tokens)]), _mean(between)


def _mean(runs: Sequence[_Served]) -> _Served:
    return _Served(statistics.fmean(run.rate for run in runs), statistics.fmean(run.first_ms for run in runs))


def _rate(server: VllmServer, sessions: int, tokens: int) -> _Served:
    """So many answers at once."""
    name = time.monotonic_ns()

    def answer(index: int) -> tuple[int, float]:
        asked, first = time.monotonic(), 0.0
        prompt = [(index * 31 + position * 7) % 400 + 100 for position in range(_PROMPT_TOKENS)]
        last = Answer()
        for last in ask(  # noqa: B007 - looked at below
            server.url,
            seconds=600.0,
            model="m",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            session_id=f"bench-{name}-{index}",
        ):
            first = first or time.monotonic() - asked
        assert last.error is None, last.error
        return len(last.tokens), 1000 * first

    began = time.monotonic()
    with ThreadPoolExecutor(sessions) as pool:
        answers = list(pool.map(answer, range(sessions)))
    seconds = time.monotonic() - began
    return _Served(sum(count for count, _ in answers) / seconds, statistics.median(ms for _, ms in answers))


def _hook(server: VllmServer) -> tuple[float, float]:
    """Steps and seconds in the hook since the start."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvlog_{name}_total"))

    return total("steps"), total("hook_seconds")


def _say(
    sessions: int,
    pairs: Sequence[tuple[_Served, _Served]],
    before: tuple[float, float],
    after: tuple[float, float],
) -> None:
    ratios = [ours.rate / theirs.rate for ours, theirs in pairs]
    drawn = random.Random(1)
    means = sorted(statistics.fmean(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    hook = 1e6 * (after[1] - before[1]) / max(1.0, after[0] - before[0])
    print(
        f"{sessions:2} sessions: {statistics.median(ours.rate for ours, _ in pairs):.1f} tokens/s with, "
        f"{statistics.median(theirs.rate for _, theirs in pairs):.1f} without, ratio {statistics.fmean(ratios):.3f} "
        f"[{means[50]:.3f}, {means[1949]:.3f}], hook {hook:.0f} us a step; first token "
        f"{statistics.median(ours.first_ms for ours, _ in pairs):.0f} ms with, "
        f"{statistics.median(theirs.first_ms for _, theirs in pairs):.0f} without",
        flush=True,
    )


if __name__ == "__main__":
    main()
