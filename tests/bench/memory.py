"""What a kvlogd takes: its pool and its rings, which it says at start, and everything else, which is to have a bound.

Total = resident set. Of that, the shared part is pool and rings (memfd pages that the daemon has touched). The rest,
private memory and the programs' own pages, is the overhead. Two daemons under load, sessions coming and going until the
standby's pool has been filled and evicted from.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.paced_engine import Pace
from tests.bench.pair import Pair
from tests.bench.report import Row

if TYPE_CHECKING:
    from tests.bench.setting import LogPlace, Setting
    from tests.nodes import Process

__all__ = ["OVERHEAD_MIB_MAX", "Sample", "load_pace", "measure_memory", "memory_sections", "sample"]

OVERHEAD_MIB_MAX = 256
"""What we state: 64 MiB of programs and idle memory, up to 64 MiB of appends on their way, as much again of the Kafka
client's own copies, 24 MiB of what was fetched and is not applied, and what the allocator keeps between."""

POOL_MIB = 256
RING_MIB = 64
_ROW_BYTES = 128 << 10
_SAMPLE_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Sample:
    """One process's memory, MiB: what is shared (pool and rings), and the rest."""

    shared: float
    overhead: float

    @property
    def total(self) -> float:
        """The resident set."""
        return self.shared + self.overhead


def sample(process: Process) -> Sample:
    """Look at a process."""
    lines = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8").splitlines()
    kib = {
        line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("VmRSS", "RssShmem"))
    }
    shared = kib["RssShmem"] / 1024
    return Sample(shared, kib["VmRSS"] / 1024 - shared)


def memory_sections() -> dict[str, dict[str, object]]:
    """Settings of both daemons."""
    return {
        "link": {"ring_bytes": RING_MIB << 20},
        "pool": {"bytes": POOL_MIB << 20, "block_bytes": 1 << 20},
        "sync": {"codec": "raw"},
        "diagnostics": {"level": "info", "format": "json"},
    }


def load_pace(pair: Pair, *, megabytes_a_second: float, seconds: float) -> Pace:
    """8 sessions of 64 rows each, one after the other."""
    steps = megabytes_a_second * 1e6 / (8 * _ROW_BYTES)
    return Pace(
        socket=pair.socket,
        name="load",
        row_bytes=_ROW_BYTES,
        sessions=8,
        steps_a_second=steps,
        seconds=seconds,
        turn_rows=64,
    )


def measure_memory(setting: Setting) -> list[Row]:
    """Local log and Kafka."""
    seconds = 15.0 if setting.quick else 60.0
    return [
        row for place in setting.logs(setting.fresh_folder("memory")) for row in _on(setting, place, seconds)
    ]


def _on(setting: Setting, place: LogPlace, seconds: float) -> list[Row]:
    pair = Pair.start(setting.fresh_folder("memory"), place, memory_sections())
    try:
        idle = {name: sample(process) for name, process in _both(pair)}
        engine = pair.start_engine(load_pace(pair, megabytes_a_second=40, seconds=seconds))
        samples: dict[str, list[Sample]] = {name: [] for name, _ in _both(pair)}
        while engine.code is None:
            for name, process in _both(pair):
                samples[name].append(sample(process))
            time.sleep(_SAMPLE_SECONDS)
        assert engine.code == 0, engine.output
        pair.stop()
    finally:
        pair.kill()
    return [_row(place, name, idle[name], samples[name]) for name in samples]


def _both(pair: Pair) -> tuple[tuple[str, Process], tuple[str, Process]]:
    return ("primary", pair.primary), ("standby", pair.standby)


def _row(place: LogPlace, name: str, idle: Sample, samples: list[Sample]) -> Row:
    overheads = [each.overhead for each in samples]
    rings = RING_MIB if name == "primary" else 0
    return Row(
        measure="memory",
        case=f"kvlogd {name} under 40 MB/s, {place.name}: overhead beyond pool {POOL_MIB} and ring {rings} MiB",
        unit="MiB",
        values=tuple(round(value, 1) for value in overheads),
        goal=f"≤ {OVERHEAD_MIB_MAX} MiB",
        met=max(overheads) <= OVERHEAD_MIB_MAX,
        also={
            "idle": idle.overhead,
            "shared now": samples[-1].shared,
            "total at most": max(each.total for each in samples),
            "total median": statistics.median(each.total for each in samples),
        },
    )
