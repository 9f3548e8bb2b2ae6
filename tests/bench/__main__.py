"""`make bench`: every benchmark, one table, and the same as JSON in build/bench.json.

    python -m tests.bench [--only publish,consume,...] [--quick] [--kafka HOST:PORT] [--markdown]

Kafka is the broker at --kafka, else one that is started as the tests do (KVLOG_KAFKA_HOME=folder with Kafka's jars);
what is held against Kafka's own tools needs KVLOG_KAFKA_HOME either way. Without a broker those benchmarks are left
out, and the end says so; vLLM's too, where there is none (make venv-vllm, or KVLOG_VLLM_PYTHON). --quick shows that
everything works; its figures are of too little to count.

Exit codes: 0 every goal was met or none was set, 1 a goal was missed, 2 a benchmark failed or was left out.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from tests.bench.codecs import measure_codec
from tests.bench.hook import measure_hook
from tests.bench.latency import measure_latency
from tests.bench.memory import measure_memory
from tests.bench.paged_copy import measure_paged
from tests.bench.report import as_json, as_markdown, show
from tests.bench.resume import measure_resume
from tests.bench.setting import Setting, kafka_at
from tests.bench.takeover import measure_takeover
from tests.bench.throughput import measure_consume, measure_publish
from tests.bench.vllm_serving import measure_vllm
from tests.vllm.servers import why_not

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.bench.report import Row

BENCHMARKS: dict[str, Callable[[Setting], list[Row]]] = {
    "hook": measure_hook,
    "codec": measure_codec,
    "publish": measure_publish,
    "consume": measure_consume,
    "latency": measure_latency,
    "takeover": measure_takeover,
    "resume": measure_resume,
    "memory": measure_memory,
    "paged": lambda setting: measure_paged(quick=setting.quick),
    "vllm": measure_vllm,
}
_NEED_KAFKA_TOOLS = {"publish", "consume"}
_OUT = Path("build/bench.json")


def main() -> int:
    """Run what was asked for. Returns: the exit code."""
    given = _parser().parse_args()
    names = given.only.split(",") if given.only else list(BENCHMARKS)
    unknown = sorted(set(names) - BENCHMARKS.keys())
    if unknown:
        print(f"no such benchmark: {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}", file=sys.stderr)
        return 2
    started, load = time.monotonic(), os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="kvlog-bench-") as folder:
        place = Path(folder)
        with kafka_at(given.kafka, place / "kafka") as kafka:
            setting = Setting(quick=given.quick, folder=place, kafka=kafka)
            rows, left_out = _run(names, setting)
    _write(rows, left_out, load=load, quick=given.quick, seconds=time.monotonic() - started)
    if given.markdown:
        print(as_markdown(rows))
    else:
        show(rows)
    for name, why in left_out.items():
        print(f"NOT MEASURED: {name}: {why}", file=sys.stderr)
    if left_out:
        return 2
    return 1 if any(row.met is False for row in rows) else 0


def _run(names: list[str], setting: Setting) -> tuple[list[Row], dict[str, str]]:
    """One after the other; one that fails does not keep the others from running."""
    rows: list[Row] = []
    left_out: dict[str, str] = {}
    has_tools = setting.kafka is not None and setting.kafka.tools is not None
    for name in names:
        if name in _NEED_KAFKA_TOOLS and not has_tools:
            left_out[name] = "needs a broker and Kafka's tools: set KVLOG_KAFKA_HOME"
            continue
        if name == "vllm" and (reason := why_not()):
            left_out[name] = reason
            continue
        began = time.monotonic()
        try:
            rows += BENCHMARKS[name](setting)
        except Exception as error:  # noqa: BLE001  # a benchmark's top: the others go on, and the exit code tells
            traceback.print_exc()
            left_out[name] = f"{type(error).__name__}: {error}"
        print(f"{name}: {time.monotonic() - began:.0f} s", file=sys.stderr)
    if setting.kafka is None:
        left_out["everything over Kafka"] = "no broker"
    return rows, left_out


def _write(
    rows: list[Row], left_out: dict[str, str], *, load: tuple[float, ...], quick: bool, seconds: float
) -> None:
    _OUT.parent.mkdir(exist_ok=True)
    machine = {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "load at start": load,
        "load at end": os.getloadavg(),
    }
    whole = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "machine": machine,
        "quick": quick,
        "seconds": round(seconds),
        "rows": as_json(rows),
        "left_out": left_out,
    }
    _OUT.write_text(json.dumps(whole, indent=1), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", help=f"some of: {','.join(BENCHMARKS)}")
    parser.add_argument("--quick", action="store_true", help="little of everything, in a few minutes")
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker that is there")
    parser.add_argument("--markdown", action="store_true", help="the table in markdown")
    return parser


if __name__ == "__main__":
    sys.exit(main())
