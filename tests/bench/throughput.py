"""Publish and consume in MB/s against Kafka's own perf tools: same broker, record size and acks, in turn.

Both sides produce into topics of the same settings; both consumers read the same one. Kafka's own figures are those
that the tools print (producer: steady state; consumer: fetch time only). MB = 10**6 bytes of rows, GB = 10**9.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from tests.bench import kafka_paths
from tests.bench.node_paths import Load, Run, make_topic
from tests.bench.report import Row, paired, single
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from tests.bench.setting import KafkaAt, Setting

__all__ = ["measure_consume", "measure_publish"]

_RUN_SECONDS = 600
_RATIO_MIN = 0.9
_WARM_RECORDS = 8
_CONSUMED_FACTOR = 2
"""Reading is quicker than writing, and the consumer's tool has no warm-up to leave out."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """One record size. `rows` of `row_bytes` make up a record."""

    name: str
    rows: int
    row_bytes: int

    def load(self, kafka: KafkaAt, megabytes: int) -> Load:
        """A load on topics of its own."""
        records = max(_WARM_RECORDS, megabytes * 1_000_000 // (self.rows * self.row_bytes))
        return Load(kafka.bootstrap, f"bench-{uuid.uuid4().hex[:8]}", records, self.rows, self.row_bytes)


_SHAPES = (_Shape("900 KiB records (7 rows of 128 KiB)", 7, 128 << 10), _Shape("64 KiB records", 1, 64 << 10))


def measure_publish(setting: Setting) -> list[Row]:
    """Rows until durable, and until read back, folded and in the own pool."""
    assert setting.kafka is not None, "it needs a broker"
    rounds, megabytes = _amount(setting)
    return [
        row for shape in _SHAPES for row in _publish(setting.kafka, shape, rounds=rounds, megabytes=megabytes)
    ]


def measure_consume(setting: Setting) -> list[Row]:
    """From the broker into the pool."""
    assert setting.kafka is not None, "it needs a broker"
    rounds, megabytes = _amount(setting)
    more = _CONSUMED_FACTOR * megabytes
    return [_consume(setting.kafka, shape, rounds=rounds, megabytes=more) for shape in _SHAPES]


def _amount(setting: Setting) -> tuple[int, int]:
    return (1, 60) if setting.quick else (5, 400)


def _publish(kafka: KafkaAt, shape: _Shape, *, rounds: int, megabytes: int) -> list[Row]:
    pairs: list[tuple[float, float]] = []
    ours: list[Run] = []
    acknowledged: list[Run] = []
    for _ in range(rounds):
        load = shape.load(kafka, megabytes)
        theirs = _theirs(kafka, load)
        ours.append(_in_a_process("publish", _with_topic(load)))
        acknowledged.append(_in_a_process("acknowledged", _with_topic(shape.load(kafka, megabytes))))
        pairs.append((ours[-1].mb_per_s, theirs))
    cpu = {"client CPU-s/GB": statistics.median(run.cpu_s_per_gb for run in ours)}
    row = _row("publish", f"{shape.name}, durable", "kafka-producer-perf-test", pairs, cpu)
    cpu = {"client CPU-s/GB": statistics.median(run.cpu_s_per_gb for run in acknowledged)}
    values = [run.mb_per_s for run in acknowledged]
    case = f"{shape.name}, read back and in the own pool too"
    return [row, replace(single("publish", case, "MB/s", values), also=dict(cpu))]


def _theirs(kafka: KafkaAt, load: Load) -> float:
    """Into a topic of its own: what it writes is no record of ours."""
    assert kafka.tools is not None, "it is held against Kafka's tools: set KVLOG_KAFKA_HOME"
    other = replace(load, prefix=f"{load.prefix}-theirs")
    asyncio.run(make_topic(other))
    return kafka_paths.kafka_produce(kafka.tools, _for_tools(other)).mb_per_s


def _consume(kafka: KafkaAt, shape: _Shape, *, rounds: int, megabytes: int) -> Row:
    assert kafka.tools is not None, "it is held against Kafka's tools: set KVLOG_KAFKA_HOME"
    load = _with_topic(shape.load(kafka, megabytes))
    _in_a_process("publish", load)
    pairs: list[tuple[float, float]] = []
    runs: list[Run] = []
    for _ in range(rounds):
        theirs = kafka_paths.kafka_consume(kafka.tools, _for_tools(load)).mb_per_s
        runs.append(_in_a_process("consume", load))
        pairs.append((runs[-1].mb_per_s, theirs))
    cpu = {"client CPU-s/GB": statistics.median(run.cpu_s_per_gb for run in runs)}
    return _row("consume", f"{shape.name}, in the pool", "kafka-consumer-perf-test", pairs, cpu)


def _row(
    measure: str, case: str, against: str, pairs: list[tuple[float, float]], also: dict[str, float]
) -> Row:
    bare = Row(measure=measure, case=case, unit="MB/s", values=(), against=against, also=dict(also))
    row = paired(bare, pairs)
    assert row.ratio is not None, "it was paired"
    return replace(row, goal=f"ratio ≥ {_RATIO_MIN}", met=row.ratio >= _RATIO_MIN)


def _for_tools(load: Load) -> kafka_paths.Load:
    return kafka_paths.Load(load.bootstrap, load.prefix, load.records, load.record_bytes)


def _with_topic(load: Load) -> Load:
    asyncio.run(make_topic(load))
    return load


def _in_a_process(path: str, load: Load) -> Run:
    command = [sys.executable, "-m", "tests.bench.node_paths", path, json.dumps(asdict(load))]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=_RUN_SECONDS, preexec_fn=die_with_parent
    )
    assert done.returncode == 0, f"{path} failed:\n{done.stderr[-3000:]}"
    return Run(**json.loads(done.stdout.splitlines()[-1]))
