"""A daemon's core, pool and rewriter over a log that is a list: what is appended is read back by the next task."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from daemon.codec import CodecChooser
from daemon.eviction import Evictor
from daemon.intake import IntakeParts
from daemon.node import NodeShell
from daemon.pace import Pacer
from daemon.retention import Arrivals, RetentionRule
from daemon.rewrite import Rewriter
from daemon.rewrite_plan import PlannerParts, RewriteRule
from daemon.standby import PoolApplier
from daemon.telemetry import Telemetry
from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
from kvlog.buffers.blocks import Key
from kvlog.buffers.eviction import EvictionMarks
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.buffers.ring import session_hash
from kvlog.checksums import checksum, digest
from kvlog.core import effects as fx
from kvlog.core.inputs import CloseTurn, EncodedRows, Follow, OpenTurn, RecordRead, WatermarkRead
from kvlog.core.node import Myself, NodeCore
from kvlog.core.standby import StandbyCore
from kvlog.ids import NO_EPOCH, Epoch, NodeId, Nonce, Offset, Partition, Position, SessionId, Shard, Writer
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.modes import FULL
from kvlog.records import Claim, Codec, Entry
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daemon.index import NodeIndex
    from daemon.primary import Publisher
    from kvlog.core.session import SessionState
    from kvlog.link.server import Peer

P = Partition(0)
LAYOUT = Layout(1, 2, 1, 32, DType.UINT8)
ROW = LAYOUT.row_bytes
SHARDS = 2
IDENTITY = Identity(digest(b"model"), digest(b"weights"), LAYOUT, SHARDS)
CONTEXT = digest(b"plain")
S = SessionId("s")
RETENTION_SECONDS = 1000.0
LONG_AGO = -RETENTION_SECONDS


class FakePublisher:
    """Always has room, unless a test says otherwise."""

    def __init__(self) -> None:
        self.is_calm = asyncio.Event()
        self.is_calm.set()
        self.waiting = asyncio.Event()

    async def room(self) -> None:
        """At once."""

    async def calm(self) -> None:
        """When the test says so."""
        self.waiting.set()
        await self.is_calm.wait()

    def throughput(self) -> None:
        """Not known."""


class Bench:
    """One node. `answers` is what its engine was told."""

    identity = IDENTITY

    def __init__(self, *, blocks: int = 64, when_left: float = 0.25, size_bytes: int | None = None) -> None:
        self.log: list[Entry] = []
        self.answers: list[Any] = []
        self.noted: list[Claim] = []
        self.publisher = FakePublisher()
        self.moved = asyncio.Event()
        self.telemetry = Telemetry("a")
        self.turns, self.arrivals = TurnRegistry(), Arrivals()
        self.pool = open_pool(PoolOptions(bytes_total=blocks * 4096, block_bytes=4096))
        core = NodeCore(Myself(NodeId("a"), Writer(b"a" * 16), lambda _: P, header_bytes), DEFAULT)
        self.shell = NodeShell(core)
        evictor = Evictor(self.shell, self.pool, self.turns, EvictionMarks())
        applier = PoolApplier(self.shell, self.pool, evictor, self.telemetry, DEFAULT)
        self._handle_the_rest()
        publisher = cast("Publisher", self.publisher)
        parts = self.parts = IntakeParts(
            shell=self.shell,
            publisher=publisher,
            turns=self.turns,
            telemetry=self.telemetry,
            limits=DEFAULT,
            writer=Writer(b"a" * 16),
            codec=CodecChooser("raw", 0, publisher, self.telemetry),
            pacer=Pacer(None),
        )
        rule = RewriteRule(RetentionRule(RETENTION_SECONDS, size_bytes), when_left, 3600.0, 50)
        looked_at = PlannerParts(
            self.shell, self.pool, evictor, self.turns, self.arrivals, applier.ids_from, lambda _: P
        )
        index = cast("NodeIndex", SimpleNamespace(note=self.noted.append))
        self.rewriter = Rewriter(parts, looked_at, rule, index)
        self.shell.step(Follow(P, Offset(0)))

    def _handle_the_rest(self) -> None:
        self.shell.handle(fx.AppendRecord, self._append)
        self.shell.handle(fx.ReadWatermark, self._watermark)
        self._handle_told()
        for said in (
            fx.SessionClaimed,
            fx.RecordRefused,
            fx.SessionBroken,
            fx.SessionHealed,
            fx.SessionEnded,
        ):
            self.shell.handle(said, lambda effect: None)

    def _handle_told(self) -> None:
        for told in (fx.TurnOpened, fx.TurnUnlogged, fx.TurnAcknowledged, fx.TurnEnded, fx.TurnFenced):
            self.shell.handle(told, self.answers.append)

    def _watermark(self, effect: fx.ReadWatermark) -> None:
        nonce = Nonce(len(self.log).to_bytes(16, "big"))
        self.shell.step(WatermarkRead(effect.session, Offset(len(self.log)), nonce))

    def _append(self, effect: fx.AppendRecord) -> None:
        payload = memoryview(bytes(effect.payload))
        self.land(Entry(effect.record, effect.header, effect.chain, payload))

    def land(self, entry: Entry) -> None:
        """The log takes it; it is read back a moment later."""
        self.log.append(entry)
        asyncio.get_running_loop().call_soon(self._read, Offset(len(self.log) - 1), entry)

    def _read(self, offset: Offset, entry: Entry) -> None:
        self.arrivals.note(P, offset, self.now_ms, len(entry.header) + len(entry.payload))
        self.shell.step(RecordRead(P, offset, entry))
        self.moved.set()

    now_ms = time.time_ns() // 1_000_000
    """When records come, as the log says it."""

    async def turn(
        self, tokens: Sequence[int], *, rows_to: int | None = None, start: int = 0
    ) -> fx.TurnOpened:
        """A whole turn of the session by an engine; rows from `rows_to` on are logged by their token ids alone."""
        opened = await self.open(tokens)
        entry = self._entry(opened)
        self.turns.add(entry)
        last = len(tokens) if rows_to is None else rows_to
        for codec, first, end in ((Codec.RAW, start, last), (Codec.IDS, max(start, last), len(tokens))):
            for shard in range(SHARDS if first < end else 0):
                self.shell.step(encoded(opened, shard, first, tokens[first:end], codec))
        await self.settled()
        self.turns.pop(opened.turn)
        self.shell.step(CloseTurn(opened.turn))
        return opened

    async def open(self, tokens: Sequence[int]) -> fx.TurnOpened:
        """The engine's request."""
        number = len(self.answers) + 1000
        self.shell.step(OpenTurn(number, S, tuple(tokens), CONTEXT, IDENTITY, NO_EPOCH, 1 << 62))
        await self.settled()
        (opened,) = [a for a in self.answers if isinstance(a, fx.TurnOpened) and a.request == number]
        return opened

    @staticmethod
    def _entry(opened: fx.TurnOpened) -> OpenTurnEntry:
        peer = cast("Peer", object())
        return OpenTurnEntry((Rank(peer),), S, opened.turn, opened.epoch, FULL, LAYOUT, session_hash(S))

    async def settled(self) -> None:
        """What was appended has been read back."""
        while self.shell.core.partitions[P].position < len(self.log):
            self.moved.clear()
            await self.moved.wait()

    def rival_claim(self) -> Claim:
        """Another node claims the session, and is the first to do so."""
        writer, nonce = Writer(b"b" * 16), Nonce(b"n" * 16)
        rival = Claim(S, Epoch(len(self.log) + 1), writer, nonce, NodeId("b"), self.identity, CONTEXT)
        self.land(Entry(rival, header_bytes(rival), 0, memoryview(b"")))
        return rival

    def age(self, seconds: float) -> None:
        """All that was logged so far is so much older, and its last use is a while ago."""
        self.arrivals.forget(P)
        then = time.time_ns() // 1_000_000 - int(seconds * 1000)
        for offset, entry in enumerate(self.log):
            self.arrivals.note(P, Offset(offset), then, len(entry.header) + len(entry.payload))
        self.turns._used[S] = time.monotonic() - 60

    @property
    def state(self) -> SessionState:
        """The session as folded."""
        state = self.shell.core.state(S)
        assert state is not None
        return state

    def read_from(self, first: int) -> SessionState | None:
        """What a reader knows of the session that begins there."""
        reader = StandbyCore(P, Offset(first), DEFAULT)
        for offset in range(first, len(self.log)):
            reader.read(Offset(offset), self.log[offset])
        return reader.session(S)

    def held(self, shard: int) -> bytes:
        """The rows that the pool holds."""
        key = Key(S, Shard(shard))
        return self.pool.read(key, Position(0), self.pool.present_prefix(key))

    def figure(self, name: str, **labels: str) -> float:
        """A metric; 0: it has never been counted."""
        return self.telemetry.metrics.registry.get_sample_value(name, labels) or 0.0


def row(shard: int, position: int) -> bytes:
    """The bytes of a position."""
    return bytes([shard + 1, position % 256]) * (ROW // 2)


def rows(shard: int, first: int, end: int) -> bytes:
    """The bytes of some positions."""
    return b"".join(row(shard, position) for position in range(first, end))


def encoded(
    opened: fx.TurnOpened, shard: int, first: int, tokens: Sequence[int], codec: Codec = Codec.RAW
) -> EncodedRows:
    """An engine's rows."""
    payload = rows(shard, first, first + len(tokens)) if codec is Codec.RAW else b""
    return EncodedRows(
        turn=opened.turn,
        epoch=Epoch(opened.epoch),
        shard=Shard(shard),
        start=Position(first),
        tokens=tuple(tokens),
        codec=codec,
        payload=memoryview(payload),
        payload_checksum=checksum(payload),
    )
