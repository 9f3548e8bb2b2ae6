"""The reading shell: what becomes of rows when the pool is full, and what the tail does not wait for."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, cast

import pytest

from daemon.eviction import Evictor
from daemon.standby import LogTail, PoolApplier
from daemon.telemetry import Telemetry
from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
from kvlog.buffers.blocks import Key
from kvlog.buffers.eviction import EvictionMarks
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.buffers.ring import session_hash
from kvlog.checksums import checksum, digest
from kvlog.core.effects import StoreRows
from kvlog.errors import LogUnavailable
from kvlog.ids import Epoch, Partition, Position, Seq, SessionId, Shard, Turn, Writer
from kvlog.layout import DType, Layout
from kvlog.limits import DEFAULT
from kvlog.modes import FULL
from kvlog.records import Codec, Delta

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from daemon.node import NodeShell
    from kvlog.buffers.pool import BlockPool
    from kvlog.link.server import Peer
    from kvlog.log.base import Log

LAYOUT = Layout(layers=1, planes=2, kv_heads=1, head_dim=512, dtype=DType.FLOAT16)
ROW = LAYOUT.row_bytes
BLOCKS = 4


class FakeCore:
    """Nothing is owned or claimed, and one partition has got somewhere."""

    def __init__(self) -> None:
        self.sessions_being_claimed: frozenset[SessionId] = frozenset()
        self.applied = 0

    @property
    def partitions(self) -> dict[Partition, FakeCore]:
        return {Partition(0): self}


class FakeShell:
    """Keeps the handlers, to be called by the test."""

    def __init__(self) -> None:
        self.core = FakeCore()
        self.handlers: dict[type, Callable[[object], None]] = {}
        self.told: list[object] = []

    def handle(self, kind: type, handler: Callable[[object], None]) -> None:
        self.handlers[kind] = handler

    def step(self, happened: object) -> None:
        self.told.append(happened)


class Standby:
    """A pool of four blocks of two rows, and what fills it."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.shell, self.turns = pool, FakeShell(), TurnRegistry()
        shell = cast("NodeShell", self.shell)
        evictor = Evictor(shell, pool, self.turns, EvictionMarks())
        PoolApplier(shell, pool, evictor, Telemetry("a"), DEFAULT)

    def store(self, session: str, start: int, count: int) -> None:
        payload = memoryview(bytes([start + 1]) * (ROW * count))
        delta = Delta(
            SessionId(session),
            Epoch(1),
            Writer(bytes(16)),
            Seq(1),
            Shard(0),
            Position(start),
            tuple(range(count)),
            digest(b""),
            Codec.RAW,
            checksum(payload),
        )
        self.shell.handlers[StoreRows](StoreRows(delta, payload, LAYOUT))

    def present(self, session: str) -> int:
        return self.pool.present_prefix(Key(SessionId(session), Shard(0)))

    def busy(self, session: str) -> None:
        """The session has a turn in progress."""
        hashed = session_hash(session)
        peer = cast("Peer", None)
        self.turns.add(
            OpenTurnEntry((Rank(peer),), SessionId(session), Turn(1), Epoch(1), FULL, LAYOUT, hashed)
        )


@pytest.fixture
def standby() -> Iterator[Standby]:
    """A small pool."""
    pool = open_pool(PoolOptions(bytes_total=BLOCKS * 2 * ROW, block_bytes=2 * ROW))
    yield Standby(pool)
    pool.close()


async def test_full_pool_lets_idle_sessions_go_before_an_active_ones_rows_are_absent(
    standby: Standby,
) -> None:
    """An active session's rows are stored in the room of the least recently written idle one."""
    standby.store("idle", 0, 6)
    standby.store("active", 0, 2)
    standby.store("active", 2, 4)
    assert (standby.present("idle"), standby.present("active")) == (0, 6)


async def test_full_pool_of_sessions_in_use_makes_new_rows_absent(standby: Standby) -> None:
    """What is in use is not evicted: then new rows are absent, and those before them stay."""
    standby.busy("talking")
    standby.store("talking", 0, 8)
    standby.store("other", 0, 2)
    assert (standby.present("talking"), standby.present("other")) == (8, 0)


async def test_full_pool_keeps_a_session_whose_claim_is_on_its_way(standby: Standby) -> None:
    """Its bytes are about to be attached."""
    standby.store("claimed", 0, 6)
    standby.shell.core.sessions_being_claimed = frozenset({SessionId("claimed")})
    standby.store("other", 0, 4)
    assert (standby.present("claimed"), standby.present("other")) == (6, 0)


@pytest.mark.parametrize("count", [1, 2])
async def test_rows_are_held_under_the_checksum_of_each(standby: Standby, count: int) -> None:
    """The payload's own is that of its one row, and of nothing else."""
    standby.store("s", 0, count)
    pinned = standby.pool.pin(Key(SessionId("s"), Shard(0)), Position(count))
    assert [checksum(bytes([1]) * ROW)] * count == pinned.row_checksums.tolist()


class SlowReader:
    """Polls at once; its first commit hangs, its second is refused."""

    def __init__(self) -> None:
        self.polls = 0
        self.commits = 0

    def assign(self, _: object) -> None:
        """Nothing is there."""

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> tuple[()]:
        del bytes_max, timeout_seconds
        self.polls += 1
        await asyncio.sleep(0.001)
        return ()

    async def commit(self, _: object) -> None:
        self.commits += 1
        if self.commits == 1:
            await asyncio.sleep(3600)
        raise LogUnavailable(where="here", problem="no coordinator")


class EmptyLog:
    """A log of one partition that only has a reader."""

    partitions = 1

    def __init__(self, reader: SlowReader) -> None:
        self._reader = reader

    async def reader(self, *, group: str) -> SlowReader:
        del group
        return self._reader


async def test_tail_goes_on_while_a_commit_hangs_or_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Committed offsets are for people: acknowledgements and claims do not wait for them."""
    monkeypatch.setattr("daemon.standby._COMMIT_SECONDS", 0.01)
    monkeypatch.setattr("daemon.standby._COMMIT_SECONDS_MAX", 0.2)
    reader = SlowReader()
    tail = LogTail(cast("NodeShell", FakeShell()), Telemetry("a"), DEFAULT)
    await tail.open(cast("Log", EmptyLog(reader)), "group", [])
    tasks = [asyncio.create_task(each) for each in (tail.run(), tail.run_commits())]
    until = time.monotonic() + 10
    while reader.commits < 3 and time.monotonic() < until:  # noqa: ASYNC110  # with a deadline
        await asyncio.sleep(0.01)
    assert reader.commits >= 3
    assert reader.polls > 20
    assert not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.gather(*tasks)
