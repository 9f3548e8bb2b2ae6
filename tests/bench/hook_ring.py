"""What a step's hook costs: gather the rows into the ring and commit, against a plain memcpy of the same bytes.

Hook and memcpy take turns, so that noise of the machine hits both alike. Each takes rows that neither has just read:
the second to copy the same row would find it in the cache. Both write to memory of the same size going round, because a
ring is colder than a buffer that is written again and again (that one is shown too: `memcpy, same place`). The reader's
side is emptied outside of the clock.

    python -m tests.bench.hook_ring [--row-bytes N] [--rounds N] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from kvlog.buffers.doorbell import create_doorbell
from kvlog.buffers.memory import attach
from kvlog.buffers.ring import RingWriter, TableRow, create_ring
from kvlog.buffers.ring_layout import RingArea
from kvlog.ids import Epoch, Position, Shard, Turn

RING_BYTES = 64 << 20
_VERDICTS = {True: ": met", False: ": MISSED", None: ""}
SOURCE_ROWS = 64  # for batch 16 128 MiB, more than a cache holds


@dataclass(frozen=True, slots=True)
class HookRow:
    """Medians in µs of one batch size; `met` is None where no goal was set (they are for batch 1 and 16)."""

    batch: int
    row_bytes: int
    hook_us: float
    hook_p90_us: float
    memcpy_us: float
    memcpy_same_place_us: float
    ratio: float
    added_us: float
    goal: str
    met: bool | None


class _Step:
    """One batch size's hook and memcpy over the same source rows."""

    def __init__(self, batch: int, row_bytes: int, rng: np.random.Generator) -> None:
        self.batch, self.row_bytes = batch, row_bytes
        self.sources = [rng.integers(0, 255, (SOURCE_ROWS, row_bytes), np.uint8) for _ in range(batch)]
        self.memory = create_ring(max(RING_BYTES, 4 * batch * (row_bytes + 128)))
        self.theirs = attach(self.memory.fd, writable=True)
        self.area = RingArea(self.memory)
        self.bell = create_doorbell()
        self.writer = RingWriter(self.theirs, self.bell)
        self.flat = np.zeros(self.area.data_bytes, np.uint8)
        self.flat[:] = 1
        self.at = 0

    def hook(self, number: int) -> float:
        """Gather and commit; the seconds it took."""
        started = time.perf_counter()
        table = [TableRow(Turn(n), Epoch(1), n, Shard(0), Position(number), 1) for n in range(self.batch)]
        reservation = self.writer.reserve(table, [number] * self.batch, self.row_bytes)
        rows, size = reservation.rows, self.row_bytes
        for n, source in enumerate(self.sources):
            rows[n * size : (n + 1) * size] = source[number % SOURCE_ROWS].data
        self.writer.commit(reservation)
        took = time.perf_counter() - started
        self.area.store_tail(self.area.load_head())
        self.bell.clear()
        return took

    def memcpy(self, number: int, *, moving: bool) -> float:
        """Copy the same rows to memory that nobody shares; the seconds it took."""
        step_bytes, size = self.batch * self.row_bytes, self.row_bytes
        if moving:
            self.at = self.at + step_bytes if self.at + 2 * step_bytes <= len(self.flat) else 0
        started = time.perf_counter()
        target = self.flat.data[self.at if moving else 0 :]
        for n, source in enumerate(self.sources):
            target[n * size : (n + 1) * size] = source[number % SOURCE_ROWS].data
        return time.perf_counter() - started

    def close(self) -> None:
        """Give the memory back."""
        self.writer.close()
        self.area.close()
        self.theirs.close()
        self.memory.close()
        self.bell.close()


def measure(*, batch: int, row_bytes: int = 128 << 10, rounds: int = 400) -> HookRow:
    """Interleaved rounds of one batch size, after one lap around the ring to warm it up."""
    step = _Step(batch, row_bytes, np.random.default_rng(1))
    warm = step.area.data_bytes // (batch * row_bytes) + 2
    hook: list[float] = []
    moving: list[float] = []
    same: list[float] = []
    for number in range(warm + rounds):
        figures = (
            step.hook(3 * number),
            step.memcpy(3 * number + 1, moving=True),
            step.memcpy(3 * number + 2, moving=False),
        )
        if number >= warm:
            for figure, taken in zip(figures, (hook, moving, same), strict=True):
                taken.append(figure * 1e6)
    step.close()
    hook_us, memcpy_us = statistics.median(hook), statistics.median(moving)
    added_us, ratio = hook_us - memcpy_us, hook_us / memcpy_us
    return HookRow(
        batch=batch,
        row_bytes=row_bytes,
        hook_us=round(hook_us, 1),
        hook_p90_us=round(statistics.quantiles(hook, n=10)[-1], 1),
        memcpy_us=round(memcpy_us, 1),
        memcpy_same_place_us=round(statistics.median(same), 1),
        ratio=round(ratio, 2),
        added_us=round(added_us, 1),
        goal={1: "memcpy + 100 µs", 16: "2 × memcpy"}.get(batch, ""),
        met={1: added_us <= 100, 16: ratio <= 2}.get(batch),
    )


def table(*, row_bytes: int = 128 << 10, rounds: int = 400) -> list[HookRow]:
    """The figures for batch 1 and 16, and what is between and beyond."""
    return [measure(batch=batch, row_bytes=row_bytes, rounds=rounds) for batch in (1, 4, 16, 32)]


def main() -> None:
    """Print the table, or JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--row-bytes", type=int, default=128 << 10)
    parser.add_argument("--rounds", type=int, default=400)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = table(row_bytes=options.row_bytes, rounds=options.rounds)
    if options.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return
    print(f"rows of {options.row_bytes} bytes, {options.rounds} interleaved rounds, medians in µs")
    print("batch     hook (p90)     memcpy   memcpy, same place   ratio   added   goal")
    for row in rows:
        print(
            f"{row.batch:5} {row.hook_us:8} ({row.hook_p90_us:8}) {row.memcpy_us:8} {row.memcpy_same_place_us:14}"
            f" {row.ratio:10} {row.added_us:8}   {row.goal}{_VERDICTS[row.met]}"
        )


if __name__ == "__main__":
    main()
