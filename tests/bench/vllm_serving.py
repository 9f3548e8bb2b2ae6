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
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

from kvlog.engines.models import ensure_model
from tests.nodes import Node, ask, daemon_config
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


def _round(with_it: VllmServer, without: VllmServer, sessions: int, tokens: int) -> tuple[float, float]:
    """Tokens a second of each, in the order A B B A."""
    first = _rate(with_it, sessions, tokens)
    between = [_rate(without, sessions, tokens) for _ in range(2)]
    return (first + _rate(with_it, sessions, tokens)) / 2, sum(between) / 2


def _rate(server: VllmServer, sessions: int, tokens: int) -> float:
    """Tokens a second of so many answers at once."""
    name = time.monotonic_ns()

    def answer(index: int) -> int:
        prompt = [(index * 31 + position * 7) % 400 + 100 for position in range(_PROMPT_TOKENS)]
        *_, last = ask(
            server.url,
            seconds=600.0,
            model="m",
            prompt=prompt,
            max_tokens=tokens,
            temperature=0,
            ignore_eos=True,
            session_id=f"bench-{name}-{index}",
        )
        assert last.error is None, last.error
        return len(last.tokens)

    began = time.monotonic()
    with ThreadPoolExecutor(sessions) as pool:
        count = sum(pool.map(answer, range(sessions)))
    return count / (time.monotonic() - began)


def _hook(server: VllmServer) -> tuple[float, float]:
    """Steps and seconds in the hook since the start."""
    lines = httpx.get(f"{server.url}/metrics", timeout=10).text.splitlines()

    def total(name: str) -> float:
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvlog_{name}_total"))

    return total("steps"), total("hook_seconds")


def _say(
    sessions: int,
    pairs: Sequence[tuple[float, float]],
    before: tuple[float, float],
    after: tuple[float, float],
) -> None:
    ratios = [ours / theirs for ours, theirs in pairs]
    drawn = random.Random(1)
    means = sorted(statistics.fmean(drawn.choices(ratios, k=len(ratios))) for _ in range(2000))
    hook = 1e6 * (after[1] - before[1]) / max(1.0, after[0] - before[0])
    print(
        f"{sessions:2} sessions: {statistics.median(ours for ours, _ in pairs):.1f} tokens/s with, "
        f"{statistics.median(theirs for _, theirs in pairs):.1f} without, ratio {statistics.fmean(ratios):.3f} "
        f"[{means[50]:.3f}, {means[1949]:.3f}], hook {hook:.0f} us a step",
        flush=True,
    )


if __name__ == "__main__":
    main()
