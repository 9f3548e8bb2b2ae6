"""Produce and consume through KafkaLog against Kafka's own perf tools: same broker, record size, acks, in turn.

Ours is `KafkaLog.writer().append` and `KafkaLog.reader().poll` in a process of its own (so its CPU time is its own),
with the allocator tuned as the daemon does. Kafka's are ProducerPerformance and ConsumerPerformance.

    python -m tests.bench.kafka_paths --rounds 3 --megabytes 400

needs KVLOG_KAFKA_HOME. MB = 10**6 bytes, GB = 10**9.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.ids import Offset, Partition
from kvlog.log.allocator import tune_allocator
from kvlog.log.base import AppendRequest
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted, records_topic
from tests.kafka.broker import JarCluster, JarTools, jars_in
from tests.kafka.choice import HOME_VARIABLE
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.kafka.broker import Tools

__all__ = ["Figure", "Load", "Row", "consume", "measure", "produce"]

PARTITIONS = 4
POLL_BYTES = 4 << 20
_WARM_RECORDS = 8


@dataclass(frozen=True, slots=True)
class Load:
    """What is measured: so many records of so many bytes."""

    bootstrap: str
    prefix: str
    records: int
    record_bytes: int

    @property
    def megabytes(self) -> float:
        """All values together."""
        return self.records * self.record_bytes / 1e6


@dataclass(frozen=True, slots=True)
class Figure:
    """One run: throughput, and CPU seconds per GB where they are known."""

    mb_per_s: float
    cpu_s_per_gb: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """One path: medians over the rounds, every round, and ours divided by theirs."""

    path: str
    ours_mb_per_s: float
    kafka_mb_per_s: float
    ratio: float
    ours_cpu_s_per_gb: float
    ours: tuple[float, ...]
    kafka: tuple[float, ...]


async def produce(load: Load) -> Figure:
    """Appends everything, and waits until it is durable (acks=all, idempotent)."""
    value = os.urandom(load.record_bytes)
    log = _log(load)
    await log.open()
    writer = await log.writer()
    began, cpu = time.perf_counter(), time.process_time()
    for n in range(load.records):
        await writer.append(AppendRequest(Partition(n % PARTITIONS), b"session", value, 2, n))
    await writer.flush()
    figure = _figure(load, began, cpu)
    await log.close()
    return figure


async def consume(load: Load) -> Figure:
    """Reads everything from offset 0."""
    log = _log(load)
    await log.open()
    reader = await log.reader()
    began, cpu = time.perf_counter(), time.process_time()
    reader.assign({Partition(p): Offset(0) for p in range(PARTITIONS)})
    left = load.records
    while left > 0:
        left -= len(await reader.poll(bytes_max=POLL_BYTES, timeout_seconds=1.0))
    figure = _figure(load, began, cpu)
    await log.close()
    return figure


def kafka_produce(tools: Tools, load: Load) -> Figure:
    """kafka-producer-perf-test with acks=all and 1 MiB batches; its steady state, after a tenth more to warm up."""
    warm = max(_WARM_RECORDS, load.records // 10)
    said = tools.run(
        "producer-perf",
        *("--topic", records_topic(load.prefix), "--num-records", str(load.records + warm)),
        *(
            "--warmup-records",
            str(warm),
            "--record-size",
            str(load.record_bytes),
            "--throughput",
            "-1",
            "--producer-props",
        ),
        *(
            f"bootstrap.servers={load.bootstrap}",
            "acks=all",
            "max.request.size=2000000",
            "batch.size=1048576",
        ),
    )
    return Figure(float(re.findall(r"([\d.]+) MB/sec", said)[-1]) * (1 << 20) / 1e6)


def kafka_consume(tools: Tools, load: Load) -> Figure:
    """kafka-consumer-perf-test, fetch time only."""
    said = tools.run(
        "consumer-perf",
        *("--bootstrap-server", load.bootstrap, "--topic", records_topic(load.prefix)),
        *("--num-records", str(load.records), "--group", uuid.uuid4().hex, "--fetch-size", str(2 << 20)),
    )
    header, row = [line.split(",") for line in said.strip().splitlines() if line.count(",") > 5][-2:]
    at = [cell.strip() for cell in header].index("fetch.MB.sec")
    return Figure(float(row[at]) * (1 << 20) / 1e6)


def measure(home: Path, *, rounds: int, megabytes: int, record_bytes: int = 900 * 1000) -> list[Row]:
    """Measures both paths on a broker of their own, ours and theirs in turn.

    Args:
        home: A folder with Kafka's jars.
        rounds: How often.
        megabytes: Of each run.
        record_bytes: Of each record; 900 KB and its headers fit a broker's defaults.
    """
    jars = jars_in(home)
    assert jars is not None, f"no jars in {home}"
    tools = JarTools(jars, compiler_level=4)
    records = max(1, megabytes * 1_000_000 // record_bytes)
    with tempfile.TemporaryDirectory() as folder:
        cluster = JarCluster(Path(folder), tools)
        cluster.start()
        try:
            figures = [_round(cluster.bootstrap, tools, records, record_bytes) for _ in range(rounds)]
        finally:
            cluster.stop()
    return [_row(path, [round_[path] for round_ in figures]) for path in ("produce", "consume")]


def _round(
    bootstrap: str, tools: JarTools, records: int, record_bytes: int
) -> dict[str, tuple[Figure, Figure]]:
    load = Load(bootstrap, f"bench-{uuid.uuid4().hex[:8]}", records, record_bytes)
    asyncio.run(_make(load))
    theirs = kafka_produce(tools, load)
    ours = _in_a_process("produce", load)
    # Both produced the same amount into the same partitions; each consumer reads as many records as one of them wrote.
    return {
        "produce": (ours, theirs),
        "consume": (_in_a_process("consume", load), kafka_consume(tools, load)),
    }


async def _make(load: Load) -> None:
    log = _log(load)
    await log.open()
    await log.close()


def _in_a_process(path: str, load: Load) -> Figure:
    command = [
        sys.executable,
        "-m",
        "tests.bench.kafka_paths",
        "--run",
        path,
        "--load",
        json.dumps(asdict(load)),
    ]
    said = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=600, preexec_fn=die_with_parent
    ).stdout
    return Figure(**json.loads(said.splitlines()[-1]))


def _log(load: Load) -> KafkaLog:
    records = RecordsWanted(
        partitions=PARTITIONS, replication=1, record_bytes_max=max(900 << 10, load.record_bytes)
    )
    return KafkaLog(KafkaOptions(bootstrap=load.bootstrap, topic_prefix=load.prefix, records=records))


def _figure(load: Load, began: float, cpu: float) -> Figure:
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return Figure(load.megabytes / seconds, cpu_seconds / load.megabytes * 1000)


def _row(path: str, rounds: Sequence[tuple[Figure, Figure]]) -> Row:
    ours, theirs = [a.mb_per_s for a, _ in rounds], [b.mb_per_s for _, b in rounds]
    return Row(
        path=path,
        ours_mb_per_s=statistics.median(ours),
        kafka_mb_per_s=statistics.median(theirs),
        ratio=statistics.median(a / b for a, b in zip(ours, theirs, strict=True)),
        ours_cpu_s_per_gb=statistics.median(a.cpu_s_per_gb or 0.0 for a, _ in rounds),
        ours=tuple(ours),
        kafka=tuple(theirs),
    )


def main() -> None:
    """Runs one path in this process (for `measure`), or measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--megabytes", type=int, default=400)
    parser.add_argument("--run", choices=["produce", "consume"])
    parser.add_argument("--load")
    chosen = parser.parse_args()
    if chosen.run:
        tune_allocator()
        figure = asyncio.run(
            (produce if chosen.run == "produce" else consume)(Load(**json.loads(chosen.load)))
        )
        print(json.dumps(asdict(figure)))
        return
    home = os.environ.get(HOME_VARIABLE)
    if not home:
        sys.exit(f"set {HOME_VARIABLE} to a folder with Kafka's jars")
    for row in measure(Path(home), rounds=chosen.rounds, megabytes=chosen.megabytes):
        print(json.dumps(asdict(row)))


if __name__ == "__main__":
    main()
