"""The heartbeat: that it begins although the log is lost just before, and that the goodbye is the last word."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from daemon.index import NodeIndex
from daemon.telemetry import Telemetry
from kvlog.core.myself import Myself
from kvlog.errors import LogUnavailable
from kvlog.ids import NodeId, Partition, Writer
from kvlog.wire.tables import NODES, decode_node

if TYPE_CHECKING:
    from daemon.node import NodeShell
    from daemon.turns import TurnRegistry
    from kvlog.buffers.pool import BlockPool
    from kvlog.log.base import Log, Table, TableRow


class FlakyLog:
    """Gives each table at the second time only."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.handed_out: list[str] = []
        self.rows: dict[bytes, bytes | None] = {}
        self.written = asyncio.Event()

    async def table(self, name: str) -> Table:
        if name not in self.asked:
            self.asked.add(name)
            raise LogUnavailable(where="here", problem="just lost")
        self.handed_out.append(name)
        return cast("Table", self)

    async def refresh(self) -> list[TableRow]:
        return []

    async def put(self, key: bytes, value: bytes | None) -> None:
        self.rows[key] = value
        self.written.set()


def make_index() -> NodeIndex:
    """The index of a node that has nothing."""
    counts = SimpleNamespace(free=1)
    pool = SimpleNamespace(
        geometry=SimpleNamespace(size_bytes=8, block_bytes=4),
        blocks=SimpleNamespace(ledger=SimpleNamespace(counts=counts)),
    )
    core = SimpleNamespace(primaries=lambda: iter(()), partitions={})
    return NodeIndex(
        cast("NodeShell", SimpleNamespace(core=core)),
        cast("BlockPool", pool),
        cast("TurnRegistry", SimpleNamespace(busy_hashes=lambda _most: ())),
        Telemetry("a"),
        Myself(NodeId("a"), Writer(bytes(16)), lambda _: Partition(0), lambda _: b""),
    )


async def beat_once(index: NodeIndex, log: FlakyLog) -> None:
    """Runs until the next row is written."""
    running = asyncio.create_task(index.run(cast("Log", log)))
    async with asyncio.timeout(5):
        await log.written.wait()
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running


async def test_log_lost_between_its_opening_and_the_first_heartbeat_does_not_end_the_daemon() -> None:
    """The tables are asked for again, and what was given already is not asked for twice."""
    index = make_index()
    index.needed, index.truncated = {3: 40}, 2
    log = FlakyLog()
    await beat_once(index, log)
    assert [NODES, "sessions"] == log.handed_out
    row = decode_node(log.rows[b"a"] or b"")
    assert (1, {3: 40}, 2) == (row.beat, row.needed, row.truncated)


async def test_beat_after_the_goodbye_does_not_take_it_back() -> None:
    """The log is closed a while after the goodbye, and who reads the last row must not wait for a node that is gone."""
    index, log = make_index(), FlakyLog()
    log.asked = {NODES, "sessions"}
    await index.say_goodbye(cast("Log", log))
    log.written.clear()
    await beat_once(index, log)
    row = decode_node(log.rows[b"a"] or b"")
    assert (2, True) == (row.beat, row.leaving)
