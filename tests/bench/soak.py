"""`make soak`: two daemons under steady load for minutes; their memory must stay flat.

    python -m tests.bench.soak [--minutes 10] [--megabytes-a-second 20] [--kafka HOST:PORT]

Sessions come and go, the pools are filled and evicted from, the log's retention deletes. The first third is for warming
up. Flat: the highest tenth of the last third is at most 5 % and 16 MiB above that of the second. It prints a line a
minute, and JSON into build/soak.json. Exit code 0 only if both daemons stayed flat and everything was logged.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from tests.bench.memory import Sample, load_pace, memory_sections, sample
from tests.bench.pair import Pair
from tests.bench.report import percentile
from tests.bench.setting import KafkaAt, LogPlace, Setting

__all__: list[str] = []

_SAMPLE_SECONDS = 2.0
_SLACK_RATIO = 1.05
_SLACK_MIB = 16.0
_RETENTION_BYTES = 128 << 20
_OUT = Path("build/soak.json")


def main() -> int:
    """Run the load. Returns: the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--megabytes-a-second", type=float, default=20.0)
    parser.add_argument("--kafka", metavar="HOST:PORT", help="a broker; without one a local log")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvlog-soak-") as folder:
        kafka = KafkaAt(given.kafka, None) if given.kafka else None
        setting = Setting(quick=False, folder=Path(folder), kafka=kafka)
        place = setting.kafka_log() or setting.local_log(setting.folder)
        seen, said = _load(
            setting, place, seconds=60 * given.minutes, megabytes_a_second=given.megabytes_a_second
        )
    verdicts = {name: _verdict(samples) for name, samples in seen.items()}
    whole = {
        "log": place.name,
        "minutes": given.minutes,
        "megabytes_a_second": given.megabytes_a_second,
        "engine": said,
        "verdicts": verdicts,
        "samples": {name: [asdict(each) for each in samples] for name, samples in seen.items()},
    }
    _OUT.parent.mkdir(exist_ok=True)
    _OUT.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    print(json.dumps({"engine": said, "verdicts": verdicts}, indent=2))
    flat = all(verdict["flat"] for verdict in verdicts.values())
    return 0 if flat and not said["unlogged"] and said["rows"] else 1


def _load(
    setting: Setting, place: LogPlace, *, seconds: float, megabytes_a_second: float
) -> tuple[dict[str, list[Sample]], dict[str, object]]:
    sections = place.sections | {"log": place.sections["log"] | {"retention_bytes": _RETENTION_BYTES}}
    if "log.kafka" in sections:
        sections["log.kafka"] = sections["log.kafka"] | {"segment_bytes": 32 << 20}
    pair = Pair.start(setting.fresh_folder("soak"), LogPlace(place.name, sections), memory_sections())
    daemons = {"primary": pair.primary, "standby": pair.standby}
    seen: dict[str, list[Sample]] = {name: [] for name in daemons}
    try:
        engine = pair.start_engine(load_pace(pair, megabytes_a_second=megabytes_a_second, seconds=seconds))
        told = time.monotonic()
        while engine.code is None:
            for name, process in daemons.items():
                assert process.code is None, f"{name} ended:\n{process.output[-3000:]}"
                seen[name].append(sample(process))
            if time.monotonic() - told >= 60:
                told = time.monotonic()
                print(", ".join(f"{n} {s[-1].total:.0f} MiB" for n, s in seen.items()), file=sys.stderr)
            time.sleep(_SAMPLE_SECONDS)
        assert engine.code == 0, engine.output
        pair.stop()
    finally:
        pair.kill()
    said: dict[str, object] = json.loads(engine.output.splitlines()[-1])
    del said["made_ns"]
    return seen, said


def _verdict(samples: list[Sample]) -> dict[str, object]:
    """Whether the last third is as high as the second."""
    third = len(samples) // 3
    totals = [each.total for each in samples]
    assert third, "it was too short to say anything"
    second, last = percentile(totals[third : 2 * third], 90), percentile(totals[2 * third :], 90)
    return {
        "second_third_p90_mib": round(second, 1),
        "last_third_p90_mib": round(last, 1),
        "overhead_max_mib": round(max(each.overhead for each in samples), 1),
        "total_max_mib": round(max(totals), 1),
        "flat": last <= second * _SLACK_RATIO + _SLACK_MIB,
    }


if __name__ == "__main__":
    sys.exit(main())
