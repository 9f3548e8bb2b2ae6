"""From a ring to the core: whose rows they are, what is held back, and what never shares a delta."""

from __future__ import annotations

import asyncio
import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

from daemon import intake
from daemon.codec import CodecChooser
from daemon.intake import IntakeParts, RowIntake
from daemon.pace import Pacer
from daemon.telemetry import Telemetry
from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
from kvlog.buffers.doorbell import Doorbell
from kvlog.buffers.memory import attach
from kvlog.buffers.ring import RingWriter, TableRow, create_ring, session_hash
from kvlog.core.inputs import CloseTurn, EncodedRows
from kvlog.ids import Epoch, Position, SessionId, Shard, Turn, Writer
from kvlog.layout import DType, Layout
from kvlog.limits import DEFAULT
from kvlog.modes import FULL, SyncMode, parse_sync_mode

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    import pytest

    from daemon.node import NodeShell
    from daemon.primary import Publisher
    from kvlog.errors import DecodeError
    from kvlog.link.server import Peer

LAYOUT = Layout(layers=1, planes=2, kv_heads=1, head_dim=16, dtype=DType.FLOAT16)
ROW = LAYOUT.row_bytes
SESSION = SessionId("s")


class FakeShell:
    """Notes what the core is told."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def step(self, happened: object) -> None:
        if isinstance(happened, EncodedRows):  # its payload may be the ring's own bytes
            rows = bytes(happened.payload)
            self.told.append((happened.turn, happened.start, happened.tokens, rows))
        else:
            self.told.append(happened)


class FakePublisher:
    """Always has room."""

    async def room(self) -> None:
        """At once."""

    def throughput(self) -> None:
        """Not known."""


class Bench:
    """One engine's ring from both ends."""

    def __init__(self) -> None:
        self.shell, self.turns = FakeShell(), TurnRegistry()
        telemetry, publisher = Telemetry("a"), cast("Publisher", FakePublisher())
        self.parts = IntakeParts(
            shell=cast("NodeShell", self.shell),
            publisher=publisher,
            turns=self.turns,
            telemetry=telemetry,
            limits=DEFAULT,
            writer=Writer(bytes(16)),
            codec=CodecChooser("raw", 0, publisher, telemetry),
            pacer=Pacer(None),
        )
        self.peer, self.other = cast("Peer", object()), cast("Peer", object())
        self.intake = RowIntake(self.parts, create_ring(1 << 16))
        self.memory = attach(self.intake.fds[0], writable=True)
        self.writer = RingWriter(self.memory)
        self.corrupt: list[DecodeError] = []

    def open(self, turn: int, mode: SyncMode = FULL, peer: Peer | None = None) -> OpenTurnEntry:
        """A turn of an engine, this one's if no other is named."""
        hashed = session_hash(SESSION)
        entry = OpenTurnEntry((Rank(peer or self.peer),), SESSION, Turn(turn), Epoch(3), mode, LAYOUT, hashed)
        self.turns.add(entry)
        return entry

    def write(
        self,
        turn: int,
        start: int,
        tokens: Sequence[int],
        *,
        row_bytes: int = ROW,
        written_for: tuple[int, int] = (3, 0),
    ) -> None:
        """One step of the engine, for an epoch and shard; a row's bytes are its token's."""
        epoch, shard = written_for
        row = TableRow(
            Turn(turn), Epoch(epoch), session_hash(SESSION), Shard(shard), Position(start), len(tokens)
        )
        reservation = self.writer.reserve([row], tokens, row_bytes)
        if row_bytes:
            reservation.rows[:] = b"".join(bytes([token]) * row_bytes for token in tokens)
        self.writer.commit(reservation)
        self.intake.wake()

    async def told(self, count: int) -> list[object]:
        """What the core was told, once it is so much."""
        async with asyncio.timeout(10):
            while len(self.shell.told) < count:  # noqa: ASYNC110  # with a deadline
                await asyncio.sleep(0.001)
        return self.shell.told


@asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    """An intake that runs."""
    bench = Bench()
    task = asyncio.create_task(bench.intake.run(bench.peer, bench.corrupt.append))  # type: ignore[arg-type]
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])
        bench.writer.close()
        bench.memory.close()
        bench.intake.close()


def logged(turn: int, start: int, *tokens: int, rows: bool = True) -> tuple[object, ...]:
    """What the core is told of these rows."""
    data = b"".join(bytes([token]) * ROW for token in tokens) if rows else b""
    return (Turn(turn), Position(start), tokens, data)


async def test_intake_gives_each_step_to_the_core() -> None:
    """In full mode every entry is a delta of its own, with the rows of its tokens."""
    async with running() as bench:
        bench.open(1)
        bench.write(1, 0, [5, 6])
        bench.write(1, 2, [7])
        assert [logged(1, 0, 5, 6), logged(1, 2, 7)] == await bench.told(2)


async def test_intake_drops_rows_of_other_turns_epochs_engines_and_shards() -> None:
    """RULE ring: numbers restart with the daemon, and an engine's ring speaks for its own turns only."""
    async with running() as bench:
        bench.open(1)
        bench.open(2, peer=bench.other)
        bench.write(9, 0, [1])
        bench.write(1, 0, [2], written_for=(4, 0))
        bench.write(2, 0, [3])
        bench.write(1, 0, [3], written_for=(3, 1))
        bench.write(1, 0, [4])
        assert [logged(1, 0, 4)] == await bench.told(1)
        dropped = bench.parts.telemetry.metrics.rows_dropped._value.get()
        assert dropped == 4


async def test_intake_holds_rows_back_until_there_are_enough() -> None:
    """every:3: three tokens make one delta."""
    async with running() as bench:
        bench.open(1, parse_sync_mode("every:3,60000ms"))
        for at, token in enumerate((5, 6, 7)):
            bench.write(1, at, [token])
        assert [logged(1, 0, 5, 6, 7)] == await bench.told(1)


async def test_intake_holds_rows_back_no_longer_than_it_may() -> None:
    """every:100,20ms: what has waited for 20 ms goes out, however little it is."""
    async with running() as bench:
        bench.open(1, parse_sync_mode("every:100,20ms"))
        bench.write(1, 0, [5])
        assert [logged(1, 0, 5)] == await bench.told(1)


async def test_intake_never_mixes_rows_and_bare_token_ids_in_a_delta() -> None:
    """A delta whose rows were those of other positions would carry a checksum that fits them."""
    async with running() as bench:
        bench.open(1, parse_sync_mode("every:4,60000ms"))
        bench.write(1, 0, [5, 6], row_bytes=0)
        bench.write(1, 2, [7, 8, 9, 10])
        assert [logged(1, 0, 5, 6, rows=False), logged(1, 2, 7, 8, 9, 10)] == await bench.told(2)


async def test_intake_of_a_closed_turn_flushes_what_was_held_back_then_ends_it() -> None:
    """Nothing that the engine had written when it closed is lost."""
    async with running() as bench:
        entry = bench.open(1, parse_sync_mode("every:100,60000ms"))
        bench.write(1, 0, [5, 6])
        bench.intake.close_turn(entry.ranks[0])
        assert [logged(1, 0, 5, 6), CloseTurn(Turn(1))] == await bench.told(2)
        assert bench.turns.get(Turn(1)) is None


async def test_intake_of_rows_of_another_size_gives_the_engine_up() -> None:
    """Their layout is not the one that the engine said hello with."""
    async with running() as bench:
        bench.open(1)
        bench.write(1, 0, [5], row_bytes=2 * ROW)
        async with asyncio.timeout(10):
            while not bench.corrupt:  # noqa: ASYNC110  # with a deadline
                await asyncio.sleep(0.001)
        assert f"rows of {2 * ROW} bytes" in str(bench.corrupt[0])
        assert bench.shell.told == []


async def test_intake_looks_at_the_ring_once_for_each_time_its_bell_rings(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step wakes the daemon once, not a second time for nothing."""
    monkeypatch.setattr(intake, "_IDLE_SECONDS", 60.0)
    async with running() as bench:
        bench.open(7)
        looks: list[float] = []
        flush_due = bench.intake._flush_due

        async def counted(peer: Peer, now: float) -> None:
            looks.append(now)
            await flush_due(peer, now)

        bench.intake._flush_due = counted  # type: ignore[method-assign]
        doorbell = Doorbell(os.dup(bench.intake.fds[1]))
        await asyncio.sleep(0.02)  # it waits now
        for step in range(3):
            reservation = bench.writer.reserve(
                [(Turn(7), Epoch(3), session_hash(SESSION), Shard(0), Position(step), 1)], [step], 0
            )
            bench.writer.commit(reservation)
            doorbell.ring()
            await bench.told(step + 1)
            await asyncio.sleep(0.02)
        doorbell.close()
        assert 3 == len(looks)
