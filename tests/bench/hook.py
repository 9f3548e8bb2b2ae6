"""What an engine's step pays: the ring alone, and the adapter's whole call, each against a memcpy of the same rows.

The whole call is `Replicator.after_step` over a real link to a kvlogd of its own (local log, raw codec), with a cache
of the engine's kind that hands out rows of 128 KiB. Steps are paced so that the daemon keeps up, as an engine's are by
its computing: what is measured is the step's cost, not a full ring. Hook and memcpy take turns, each after a pause (who
wakes up finds cold caches), on rows that neither has just read.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import numpy as np

from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.ids import Shard, parse_session_id
from tests.bench import hook_ring
from tests.bench.paced_engine import RepeatedRows
from tests.bench.report import Row, percentile
from tests.nodes import Node, daemon_config

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.engines.turns import TurnHandle
    from tests.bench.setting import Setting

__all__ = ["measure_hook"]

ROW_BYTES = 128 << 10
_BYTES_A_SECOND = 40e6
_WARM_STEPS = 40
_WARM_STEPS_QUICK = 15
_ADDED_US_MAX = 100
_RATIO_MAX = 2.0
_OPEN_SECONDS = 10.0


def measure_hook(setting: Setting) -> list[Row]:
    """Batch 1 and 16."""
    rounds = 60 if setting.quick else 400
    rows = [_ring(hook_ring.measure(batch=batch, row_bytes=ROW_BYTES, rounds=rounds)) for batch in (1, 16)]
    folder = setting.fresh_folder("hook")
    place = setting.local_log(folder)
    sections: dict[str, dict[str, object]] = {
        **place.sections,
        "link": {"ring_bytes": 256 << 20},
        "sync": {"codec": "raw"},
    }
    node = Node(folder, "a", daemon_config(folder, "a", place.url, **sections))
    node.start_daemon()
    try:
        node.wait_log()
        rows += [_adapter(folder, batch, rounds, warm=_warm(setting)) for batch in (1, 16)]
    finally:
        node.close()
    return rows


def _warm(setting: Setting) -> int:
    return _WARM_STEPS_QUICK if setting.quick else _WARM_STEPS


def _ring(found: hook_ring.HookRow) -> Row:
    return Row(
        measure="hook",
        case=f"ring alone: gather and commit, batch {found.batch}",
        unit="µs",
        values=(found.hook_us,),
        against="memcpy",
        their_values=(found.memcpy_us,),
        ratio=found.ratio,
        goal=found.goal,
        met=found.met,
        also={"p90": found.hook_p90_us},
    )


def _adapter(folder: Path, batch: int, rounds: int, *, warm: int) -> Row:
    model = SyntheticModel(SyntheticOptions(row_bytes=ROW_BYTES))
    replicator = Replicator(ReplicatorOptions(socket=folder / "a.sock"), model.identity, Shard(0))
    replicator.start()
    try:
        assert replicator.wait_connected(_OPEN_SECONDS), replicator.counts.refusal
        engine = _Batch(replicator, batch)
        pairs = [engine.step() for _ in range(warm + rounds)][warm:]
        assert not replicator.counts.ring_full, "the daemon did not keep up: this is another measurement"
        engine.close()
    finally:
        replicator.close()
    return _adapter_row(batch, pairs)


class _Batch:
    """Requests that are logged, one row each a step, and the memcpy of as many other rows."""

    def __init__(self, replicator: Replicator, batch: int) -> None:
        random = np.random.default_rng(3)
        self._replicator = replicator
        self._sources = [random.integers(0, 255, (64, ROW_BYTES), np.uint8) for _ in range(batch)]
        self._caches = [RepeatedRows(source) for source in self._sources]
        self._tokens: list[list[int]] = [[1] for _ in range(batch)]
        self._handles = [self._opened(f"hook-{batch}-{n}", self._tokens[n]) for n in range(batch)]
        self._active = list(zip(self._handles, self._caches, self._tokens, strict=True))
        self._flat = np.ones(256 << 20, np.uint8)
        self._at = 0
        self._pause = batch * ROW_BYTES / _BYTES_A_SECOND

    def step(self) -> tuple[float, float]:
        """µs of the hook and of a memcpy of the same size, to memory going round."""
        for cache, tokens in zip(self._caches, self._tokens, strict=True):
            cache.length += 1
            tokens.append(1)
        started = time.perf_counter()
        self._replicator.after_step(self._active)
        hook = time.perf_counter() - started
        time.sleep(self._pause / 2)
        memcpy = self._memcpy(self._caches[0].length + 31)
        time.sleep(self._pause / 2)
        return hook * 1e6, memcpy * 1e6

    def close(self) -> None:
        """End the turns."""
        for handle, cache, tokens in self._active:
            self._replicator.close_turn(handle, cache, tokens)

    def _opened(self, session: str, tokens: list[int]) -> TurnHandle:
        handle = self._replicator.open_turn(parse_session_id(session), tokens, wait_seconds=_OPEN_SECONDS)
        assert handle.logged, handle.reason
        return handle

    def _memcpy(self, number: int) -> float:
        size, step = ROW_BYTES, ROW_BYTES * len(self._sources)
        self._at = self._at + step if self._at + 2 * step <= len(self._flat) else 0
        started = time.perf_counter()
        target = self._flat.data[self._at :]
        for n, source in enumerate(self._sources):
            target[n * size : (n + 1) * size] = source[number % len(source)].data
        return time.perf_counter() - started


def _adapter_row(batch: int, pairs: list[tuple[float, float]]) -> Row:
    hooks, copies = [hook for hook, _ in pairs], [copy for _, copy in pairs]
    added = statistics.median(hooks) - statistics.median(copies)
    ratio = statistics.median(hooks) / statistics.median(copies)
    goal, met = (
        (f"memcpy + {_ADDED_US_MAX} µs", added <= _ADDED_US_MAX)
        if batch == 1
        else (f"{_RATIO_MAX:.0f} × memcpy", ratio <= _RATIO_MAX)
    )
    return Row(
        measure="hook",
        case=f"whole adapter call (after_step), batch {batch}",
        unit="µs",
        values=(round(statistics.median(hooks), 1),),
        against="memcpy",
        their_values=(round(statistics.median(copies), 1),),
        ratio=ratio,
        goal=goal,
        met=met,
        also={
            "p90": percentile(hooks, 90),
            "p99": percentile(hooks, 99),
            "added µs": added,
            "steps": len(hooks),
        },
    )
