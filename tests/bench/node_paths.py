"""A node's two paths with all that is between rows and log, each in a process of its own so that its CPU time is too.

    publish   rows ─▶ raw codec, checksum ─▶ NodeCore (seq, chain) ─▶ Publisher (frame, queues) ─▶ KafkaLog, acks=all
    consume   KafkaLog ─▶ LogTail (decode) ─▶ NodeCore (admit, fold) ─▶ PoolApplier (verify, decompress) ─▶ BlockPool

They are the daemon's own objects, wired as the daemon wires them; only engine and link are not there. `acknowledged`
is publish with the node's own tail running: each row is also read back, folded and written to the node's own pool, as
in a daemon, and the clock stops when the last one is.

    python -m tests.bench.node_paths publish|acknowledged|consume JSON      (a Load)
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import numpy as np

from daemon.eviction import Evictor
from daemon.node import NodeShell
from daemon.primary import Publisher
from daemon.standby import LogTail, PoolApplier
from daemon.telemetry import Telemetry, configure_diagnostics
from daemon.turns import TurnRegistry
from kvlog.buffers.eviction import EvictionMarks
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.checksums import checksum, digest, partition_of
from kvlog.core import effects as fx
from kvlog.core import inputs
from kvlog.core.node import Myself, NodeCore
from kvlog.ids import NO_EPOCH, NodeId, Nonce, Partition, Position, Shard, Writer, parse_session_id
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.log.allocator import tune_allocator
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted
from kvlog.records import Codec
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from kvlog.buffers.pool import BlockPool
    from kvlog.ids import SessionId

__all__ = ["PARTITIONS", "Load", "Run", "make_topic"]

PARTITIONS = 4
_SOURCE_BYTES = 128 << 20
"""More than a cache holds: rows come cold, as out of a ring that an engine has written."""
_POOL_SPARE = 1.25
_BLOCK_BYTES = 1 << 20
_WAIT_SECONDS = 300.0
_FOREVER_NS = 1 << 62


@dataclass(frozen=True, slots=True)
class Load:
    """So many records of so many rows, dealt out to one session a partition."""

    bootstrap: str
    prefix: str
    records: int
    rows_a_record: int
    row_bytes: int

    @property
    def record_bytes(self) -> int:
        """The rows of one record."""
        return self.rows_a_record * self.row_bytes

    @property
    def megabytes(self) -> float:
        """All rows together."""
        return self.records * self.record_bytes / 1e6


@dataclass(frozen=True, slots=True)
class Run:
    """What one process measured."""

    mb_per_s: float
    cpu_s_per_gb: float


class _Node:
    """A daemon's writing and reading side without its link."""

    def __init__(self, load: Load, name: str, *, pool_bytes: int) -> None:
        configure_diagnostics("error", "json")
        self.load = load
        self.log = _log(load)
        self.identity = Identity(digest(b"bench"), digest(b"1"), _layout(load.row_bytes), shards=1)
        myself = Myself(
            NodeId(name),
            Writer(os.urandom(16)),
            lambda session: Partition(partition_of(session, PARTITIONS)),
            lambda record: header_bytes(record, limits=DEFAULT),
        )
        self.telemetry = Telemetry(name)
        self.shell = NodeShell(NodeCore(myself, DEFAULT))
        self.publisher = Publisher(
            self.shell, self.telemetry, queue_bytes=DEFAULT.publish_queue_bytes, format_version=1
        )
        self.pool = open_pool(PoolOptions(bytes_total=pool_bytes, block_bytes=_BLOCK_BYTES))
        evictor = Evictor(self.shell, self.pool, TurnRegistry(), EvictionMarks())
        PoolApplier(self.shell, self.pool, evictor, self.telemetry, DEFAULT)
        self.tail = LogTail(self.shell, self.telemetry, DEFAULT)
        self.opened: dict[SessionId, fx.TurnOpened] = {}
        self.problems: list[object] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._listen()

    @property
    def rows_stored(self) -> float:
        """Rows that are in the pool."""
        return float(self.telemetry.metrics.rows_stored._value.get())  # the client has no getter

    def _listen(self) -> None:
        shell = self.shell
        shell.handle(fx.ReadWatermark, self._watermark)
        shell.handle(fx.TurnOpened, lambda effect: self.opened.__setitem__(effect.session, effect))
        for kind in (fx.SessionClaimed, fx.TurnAcknowledged, fx.SessionHealed, fx.NoteSnapshot):
            shell.handle(kind, lambda effect: None)
        troubles = (fx.RecordRefused, fx.SessionBroken, fx.TurnUnlogged, fx.TurnFenced, fx.TurnEnded)
        for trouble in (*troubles, fx.SessionEnded):
            shell.handle(trouble, self.problems.append)

    def _watermark(self, effect: fx.ReadWatermark) -> None:
        async def read() -> None:
            bounds = await self.log.bounds(effect.partition)
            nonce = Nonce(os.urandom(16))
            self.shell.step(inputs.WatermarkRead(effect.session, bounds.high_watermark, nonce))

        task = asyncio.get_running_loop().create_task(read())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def own_sessions(self, sessions: list[SessionId]) -> None:
        """Become primary of each, as ever: claim, read the claim back."""
        for request, session in enumerate(sessions):
            self.shell.step(
                inputs.OpenTurn(
                    request=request,
                    session=session,
                    tokens=(),
                    context=digest(b""),
                    identity=self.identity,
                    continues=NO_EPOCH,
                    deadline_ns=_FOREVER_NS,
                )
            )
        await self.until(lambda: len(self.opened) == len(sessions))

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait, and fail loudly where it does not come true."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not condition():
            assert not self.problems, f"the core complains: {self.problems[:3]}"
            assert time.monotonic() < deadline, "it takes too long"
            await asyncio.sleep(0.001)

    async def send_rows(self, sessions: list[SessionId]) -> None:
        """Hand all rows to the core as an intake does."""
        load, source = self.load, _source()
        size, tokens = load.record_bytes, tuple(range(load.rows_a_record))
        places = itertools.cycle(range(0, _SOURCE_BYTES - size, size))
        for number in range(load.records):
            opened = self.opened[sessions[number % PARTITIONS]]
            await self.publisher.room()
            at = next(places)
            payload = source[at : at + size]  # the raw codec is the rows themselves
            self.shell.step(
                inputs.EncodedRows(
                    turn=opened.turn,
                    epoch=opened.epoch,
                    shard=Shard(0),
                    start=Position(number // PARTITIONS * load.rows_a_record),
                    tokens=tokens,
                    codec=Codec.RAW,
                    payload=payload,
                    payload_checksum=checksum(payload),
                )
            )
            await asyncio.sleep(0)


async def publish(load: Load, *, read_back: bool) -> Run:
    """Claims first, then the clock: rows until durable, or with `read_back` until folded and in the own pool too."""
    pool_bytes = int(load.megabytes * 1e6 * _POOL_SPARE) if read_back else _BLOCK_BYTES
    node = _Node(load, "writer", pool_bytes=pool_bytes + 8 * _BLOCK_BYTES)
    await node.log.open()
    await node.tail.open(node.log, "bench", [Partition(p) for p in range(PARTITIONS)])
    writer = await node.log.writer()
    sessions = _sessions()
    async with asyncio.TaskGroup() as tasks:
        publishing = tasks.create_task(node.publisher.run(writer))
        tailing = tasks.create_task(node.tail.run())
        await node.own_sessions(sessions)
        if read_back:
            _touch(node.pool)
        else:
            tailing.cancel()
        _source()
        began, cpu = time.perf_counter(), time.process_time()
        await node.send_rows(sessions)
        assert await node.publisher.flush(_WAIT_SECONDS), "the log does not take the rows"
        if read_back:
            await node.until(node.shell.core.is_drained)
        run = _run(load, began, cpu)
        tailing.cancel()
        publishing.cancel()
    assert not node.problems, f"the core complains: {node.problems[:3]}"
    assert not read_back or node.rows_stored == load.records * load.rows_a_record, "rows are missing"
    await node.log.close()
    return run


async def consume(load: Load) -> Run:
    """Reads everything that `publish` wrote, from offset 0, until the last row is in the pool; checks that all are."""
    node = _Node(load, "reader", pool_bytes=int(load.megabytes * 1e6 * _POOL_SPARE) + 8 * _BLOCK_BYTES)
    await node.log.open()
    _touch(node.pool)
    rows = load.records * load.rows_a_record
    began, cpu = time.perf_counter(), time.process_time()
    await node.tail.open(node.log, "bench", [Partition(p) for p in range(PARTITIONS)])
    async with asyncio.TaskGroup() as tasks:
        tailing = tasks.create_task(node.tail.run())
        await node.until(lambda: node.rows_stored >= rows)
        run = _run(load, began, cpu)
        tailing.cancel()
    assert not node.problems, f"the core complains: {node.problems[:3]}"
    await node.log.close()
    return run


async def make_topic(load: Load) -> None:
    """Make the topics, so that Kafka's own tools do not make them with other settings."""
    log = _log(load)
    await log.open()
    await log.close()


def _log(load: Load) -> KafkaLog:
    records = RecordsWanted(partitions=PARTITIONS, replication=1)
    return KafkaLog(KafkaOptions(bootstrap=load.bootstrap, topic_prefix=load.prefix, records=records))


def _layout(row_bytes: int) -> Layout:
    return Layout(layers=1, planes=2, kv_heads=1, head_dim=row_bytes // 4, dtype=DType.BFLOAT16)


def _sessions() -> list[SessionId]:
    """One session for each partition, in order."""
    found: dict[int, SessionId] = {}
    for number in itertools.count():
        session = parse_session_id(f"session-{number}")
        found.setdefault(partition_of(session, PARTITIONS), session)
        if len(found) == PARTITIONS:
            return [found[partition] for partition in range(PARTITIONS)]
    raise AssertionError("there is always one more number")


_made: list[memoryview] = []


def _source() -> memoryview:
    if not _made:
        _made.append(memoryview(np.random.default_rng(5).bytes(_SOURCE_BYTES)))
    return _made[0]


def _touch(pool: BlockPool) -> None:
    """Map every page, as in a daemon that has run for a while; the kernel's work of the first time is not ours."""
    view = np.frombuffer(pool.memory.view, np.uint8)
    view[::4096] = 0


def _run(load: Load, began: float, cpu: float) -> Run:
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu
    return Run(load.megabytes / seconds, 1000 * cpu_seconds / load.megabytes)


def main() -> None:
    """Runs one path and prints a Run as JSON."""
    path, given = sys.argv[1], Load(**json.loads(sys.argv[2]))
    tune_allocator()
    work: Awaitable[Run] = {
        "publish": lambda: publish(given, read_back=False),
        "acknowledged": lambda: publish(given, read_back=True),
        "consume": lambda: consume(given),
    }[path]()

    async def wait() -> Run:
        return await work

    print(json.dumps(asdict(asyncio.run(wait()))))


if __name__ == "__main__":
    main()
