"""Engine row → applied at the standby, at a steady rate, against Kafka's own e2e-latency of the same broker.

Engine, primary and standby are three processes: a paced engine over the real adapter, link and ring; a kvlogd; and a
kvlogd with a probe where rows have just been written to the pool. Both ends take CLOCK_MONOTONIC. Rows of the first
second are left out. Kafka's tool sends one record of a row's size at a time and waits for it, on an idle broker.
"""

from __future__ import annotations

import json
import re
import statistics
import time
import uuid
from typing import TYPE_CHECKING

from tests.bench.paced_engine import Pace
from tests.bench.pair import Pair
from tests.bench.report import Row, percentile

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.setting import KafkaAt, LogPlace, Setting

__all__ = ["measure_latency"]

_ROW_BYTES = 128 << 10
_SESSIONS = 16
_RATES_MB = (20, 50)
_WARM_SECONDS = 1.0
_SETTLE_SECONDS = 2.0
_POOL_BYTES = 768 << 20


def measure_latency(setting: Setting) -> list[Row]:
    """Both rates, local log and Kafka."""
    theirs = _kafka_latency(setting.kafka, 200 if setting.quick else 2000) if setting.kafka else None
    rows: list[Row] = []
    for megabytes in _RATES_MB:
        for place in setting.logs(setting.fresh_folder("latency")):
            seconds = 3.0 if setting.quick else 12.0
            found = _latencies(setting.fresh_folder("latency"), place, megabytes, seconds)
            rows += _rows(place, megabytes, found, theirs if place.name == "Kafka" else None)
    return rows


def _latencies(folder: Path, place: LogPlace, megabytes: int, seconds: float) -> list[float]:
    """Milliseconds of each row."""
    out = folder / "applied"
    steps = megabytes * 1e6 / (_SESSIONS * _ROW_BYTES)
    pair = Pair.start(
        folder,
        place,
        {
            "link": {"ring_bytes": 64 << 20},
            "pool": {"bytes": _POOL_BYTES, "block_bytes": 1 << 20, "high_percent": 99, "low_percent": 98},
            "sync": {"codec": "raw"},
            "diagnostics": {"level": "info", "format": "json"},
        },
        probe=out,
    )
    try:
        pace = Pace(
            socket=pair.socket,
            name="engine",
            row_bytes=_ROW_BYTES,
            sessions=_SESSIONS,
            steps_a_second=steps,
            seconds=seconds,
        )
        said = pair.run_engine(pace)
        time.sleep(_SETTLE_SECONDS)
        pair.stop()
    finally:
        pair.kill()
    applied = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return _differences(said["made_ns"], applied)


def _differences(made: dict[str, list[int]], applied: list[tuple[str, int, int, int]]) -> list[float]:
    """Made to applied, of the rows after the warm-up; every row must have arrived."""
    first = min(times[0] for times in made.values()) + int(_WARM_SECONDS * 1e9)
    seen: dict[tuple[str, int], float] = {}
    for session, start, count, at in applied:
        for position in range(start, start + count):
            seen[session, position] = (at - made[session][position]) / 1e6
    missing = sum(len(times) for times in made.values()) - len(seen)
    assert not missing, f"{missing} rows never arrived"
    return [late for (session, position), late in seen.items() if made[session][position] >= first]


def _kafka_latency(kafka: KafkaAt, records: int) -> dict[int, float] | None:
    """Milliseconds by percent, of records of a row's size."""
    if kafka.tools is None:
        return None
    topic = f"e2e-{uuid.uuid4().hex[:8]}"
    said = kafka.tools.run("e2e-latency", kafka.bootstrap, topic, str(records), "all", str(_ROW_BYTES))
    return {int(at): float(ms) for at, ms in re.findall(r"(\d+)th = (\d+)", said)}


def _rows(place: LogPlace, megabytes: int, found: list[float], theirs: dict[int, float] | None) -> list[Row]:
    rows = []
    for percent in (50, 99):
        value = percentile(found, percent)
        other = theirs.get(percent) if theirs else None
        rows.append(
            Row(
                measure="latency",
                case=f"engine row to applied at the standby, {place.name}, {megabytes} MB/s, p{percent}",
                unit="ms",
                values=(round(value, 2),),
                against="" if other is None else "kafka e2e-latency, one record at a time",
                their_values=() if other is None else (other,),
                ratio=value / other if other else None,
                also={
                    "rows": len(found),
                    "mean": round(statistics.fmean(found), 2),
                    "max": round(max(found), 1),
                },
            )
        )
    return rows
