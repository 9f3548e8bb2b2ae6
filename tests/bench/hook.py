"""What an engine's step pays: the ring alone, and the adapter's whole call, each against a memcpy of the same rows.

The whole call is `Replicator.after_step` over a real link to a kvlogd of its own (local log, raw codec), with a cache
of the engine's kind that hands out rows of 128 KiB, twice: its own work, in bursts that fit the ring with the daemon
held still (SIGSTOP), which is what the goals are for; and with the daemon at work on the same cores, at a pace it
keeps up with, each try after a pause. Hook and memcpy take turns, on rows that neither has just read.
"""

from __future__ import annotations

import signal
import statistics
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import parse_session_id
from tests.bench import hook_ring
from tests.bench.paced_engine import RepeatedRows
from tests.bench.report import Row, percentile
from tests.nodes import Node, daemon_config, until

if TYPE_CHECKING:
    from collections.abc import Iterator

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
_BURST_STEPS = 90
"""Of batch 16: 180 MiB, which fit the ring."""
_BURST_WARM_STEPS = 10
_CATCH_UP_SECONDS = 60.0


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
        for batch in (1, 16):
            rows.append(_adapter_row(batch, _own_work(node, batch, rounds), alone=True))
            rows.append(_adapter_row(batch, _at_work(node, batch, rounds, warm=_warm(setting)), alone=False))
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


def _own_work(node: Node, batch: int, rounds: int) -> list[tuple[float, float]]:
    """µs of (hook, memcpy) while the daemon is held still; it catches up between bursts."""
    pairs: list[tuple[float, float]] = []
    daemon = node.daemon
    assert daemon is not None, "it was started"
    with _engine(node, f"alone-{batch}", batch) as engine:
        while len(pairs) < rounds:
            daemon.send(signal.SIGSTOP)
            try:
                burst = [engine.step() for _ in range(_BURST_STEPS)]
            finally:
                daemon.send(signal.SIGCONT)
            pairs += burst[_BURST_WARM_STEPS:]
            until(engine.is_acknowledged, seconds=_CATCH_UP_SECONDS, what="the burst in the log")
    return pairs[:rounds]


def _at_work(node: Node, batch: int, rounds: int, *, warm: int) -> list[tuple[float, float]]:
    """µs of (hook, memcpy) at a steady pace."""
    with _engine(node, f"beside-{batch}", batch) as engine:
        pause = batch * ROW_BYTES / _BYTES_A_SECOND
        return [engine.step(pause_seconds=pause) for _ in range(warm + rounds)][warm:]


@contextmanager
def _engine(node: Node, name: str, batch: int) -> Iterator[_Batch]:
    model = SyntheticModel(SyntheticOptions(row_bytes=ROW_BYTES))
    options = ReplicatorOptions(socket=node.folder / f"{node.name}.sock")
    replicator = Replicator(options, model.identity)
    replicator.start()
    try:
        assert replicator.wait_connected(_OPEN_SECONDS), replicator.counts.refusal
        engine = _Batch(replicator, name, batch)
        yield engine
        assert not replicator.counts.ring_full, "the daemon did not keep up: this is another measurement"
        engine.close()
    finally:
        replicator.close()


class _Batch:
    """Requests that are logged, one row each a step, and the memcpy of as many other rows."""

    def __init__(self, replicator: Replicator, name: str, batch: int) -> None:
        random = np.random.default_rng(3)
        self._replicator = replicator
        self._sources = [random.integers(0, 255, (64, ROW_BYTES), np.uint8) for _ in range(batch)]
        self._caches = [RepeatedRows(source) for source in self._sources]
        self._tokens: list[list[int]] = [[1] for _ in range(batch)]
        self._handles = [self._opened(f"{name}-{n}", self._tokens[n]) for n in range(batch)]
        self._active = list(zip(self._handles, self._caches, self._tokens, strict=True))
        self._flat = np.ones(256 << 20, np.uint8)
        self._at = 0

    def is_acknowledged(self) -> bool:
        """Whether the log has all rows."""
        return all(
            handle.acked_length >= cache.length
            for handle, cache in zip(self._handles, self._caches, strict=True)
        )

    def step(self, *, pause_seconds: float = 0.0) -> tuple[float, float]:
        """µs of the hook and of a memcpy of the same size, to memory going round."""
        for cache, tokens in zip(self._caches, self._tokens, strict=True):
            cache.length += 1
            tokens.append(1)
        started = time.perf_counter()
        self._replicator.after_step(self._active)
        hook = time.perf_counter() - started
        time.sleep(pause_seconds / 2)
        memcpy = self._memcpy(self._caches[0].length + 31)
        time.sleep(pause_seconds / 2)
        return hook * 1e6, memcpy * 1e6

    def close(self) -> None:
        """End the turns."""
        for handle, cache, tokens in self._active:
            self._replicator.close_turn(handle, cache, tokens)

    def _opened(self, session: str, tokens: list[int]) -> TurnHandle:
        request = TurnRequest(session=parse_session_id(session), wait_seconds=_OPEN_SECONDS)
        handle = self._replicator.open_turn(request, tokens)
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


def _adapter_row(batch: int, pairs: list[tuple[float, float]], *, alone: bool) -> Row:
    hooks, copies = [hook for hook, _ in pairs], [copy for _, copy in pairs]
    added = statistics.median(hooks) - statistics.median(copies)
    ratio = statistics.median(hooks) / statistics.median(copies)
    goal: str
    met: bool | None
    goal, met = (
        (f"memcpy + {_ADDED_US_MAX} µs", added <= _ADDED_US_MAX)
        if batch == 1
        else (f"{_RATIO_MAX:.0f} × memcpy", ratio <= _RATIO_MAX)
    )
    if not alone:
        goal, met = "", None
    beside = "its own work" if alone else "the daemon at work beside it"
    return Row(
        measure="hook",
        case=f"whole adapter call (after_step), {beside}, batch {batch}",
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
