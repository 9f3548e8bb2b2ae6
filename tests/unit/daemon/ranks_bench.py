"""A daemon's control, core and pool with engines of two ranks, over a log that is a list (see rewriting_bench)."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from daemon.control import ControlOptions, EngineControl
from kvlog.buffers.memory import attach
from kvlog.buffers.ring import RingWriter, TableRow, session_hash
from kvlog.ids import Epoch, NodeId, Position, Shard
from kvlog.link import messages as link
from kvlog.link.server import Accepted
from kvlog.modes import FULL
from tests.unit.daemon.rewriting_bench import CONTEXT, IDENTITY, ROW, Bench, S, rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from kvlog.layout import Identity
    from kvlog.link.server import Peer

TOKENS = tuple(range(100, 120))
WAIT_MS = 300
RANKS = 2
REPLICATED = replace(IDENTITY, shards=1)
"""Of an engine whose ranks all have the same rows: the first one logs them."""


class RankLink:
    """One rank's link: what it was told, and its ring from the engine's end."""

    def __init__(self, bench: RanksBench, rank: int) -> None:
        self.hello = link.Hello(link.PROTOCOL, "test", 1, bench.identity, link.EngineRank(rank, RANKS))
        self.credentials = SimpleNamespace(pid=1)
        self.told: list[Any] = []
        self.shard = self.hello.shard
        self._bench = bench
        self._asks: set[asyncio.Task[None]] = set()
        self._requests = 0
        self._closed = False

    @property
    def peer(self) -> Peer:
        """As the daemon has it."""
        return cast("Peer", self)

    async def connect(self) -> None:
        """Say hello, and map the ring."""
        accepted = await self._bench.control.hello(self.peer, self.hello)
        assert isinstance(accepted, Accepted)
        self._memory = attach(accepted.fds[0], writable=True)
        self._ring = RingWriter(self._memory)
        self._doorbell = accepted.fds[2]

    def send(self, message: object) -> None:
        """As a Peer has it."""
        if not self._closed:
            self.told.append(message)

    def close(self, problem: str) -> None:
        """As a Peer has it."""
        raise AssertionError(problem)

    def ask(self, tokens: Sequence[int], group: bytes = b"g", **fields: Any) -> None:
        """Ask as the server does: what open_turn gives is sent."""
        self._requests += 1
        given = {"continues": Epoch(0), "mode": None, "wait_ms": WAIT_MS, "take_over": False, **fields}
        message = link.OpenTurn(
            link.RequestNumber(self._requests), S, link.pack_tokens(tokens), CONTEXT, group=group, **given
        )

        async def answer() -> None:
            said = await self._bench.control.open_turn(self.peer, message)
            if said is not None:
                self.send(said)

        self._asks.add(asyncio.create_task(answer()))

    async def answer(self, count: int = 1) -> Any:  # of two kinds
        """The count-th answer."""
        await until(lambda: len(self.answers) >= count)
        return self.answers[count - 1]

    @property
    def answers(self) -> list[Any]:
        """What its questions were answered."""
        return [one for one in self.told if isinstance(one, link.TurnOpened | link.TurnUnlogged)]

    def said(self, kind: type) -> list[Any]:
        """What it was told of this kind."""
        return [one for one in self.told if isinstance(one, kind)]

    def write(
        self, opened: link.TurnOpened, start: int, tokens: Sequence[int], shard: int | None = None
    ) -> None:
        """One step's rows."""
        of = self.shard if shard is None else Shard(shard)
        row = TableRow(opened.turn, opened.epoch, session_hash(S), of, Position(start), len(tokens))
        reservation = self._ring.reserve([row], tokens, ROW)
        reservation.rows[:] = rows(of, start, start + len(tokens))
        self._ring.commit(reservation)
        self._bench.wake(self)

    def close_turn(self, opened: link.TurnOpened, length: int = 0) -> None:
        """The request is over."""
        self._bench.control.close_turn(self.peer, link.CloseTurn(opened.turn, Position(length)))

    def attached(self, opened: link.TurnOpened) -> bytes:
        """The rows that it may copy."""
        pool, view = self._bench.pool, self._bench.pool.memory.view
        at = [(block.index * pool.geometry.block_bytes, block.rows * ROW) for block in opened.blocks]
        return b"".join(bytes(view[begin : begin + size]) for begin, size in at)

    async def die(self) -> None:
        """Its link ends, as the server ends it: first its questions, then itself."""
        if self._closed:
            return
        self._closed = True
        for task in self._asks:
            task.cancel()
        if self._asks:
            await asyncio.wait(self._asks)
        self._bench.control.closed(self.peer, None)
        self._ring.close()
        self._memory.close()


class RanksBench(Bench):
    """One node. `held` entries of the log are read back when `let_go` says so."""

    def __init__(self, identity: Identity = IDENTITY) -> None:
        super().__init__()
        self.identity = identity
        options = ControlOptions(
            node=NodeId("a"), incarnation=bytes(16), ring_bytes=1 << 16, claim_wait_ms_max=10_000, mode=FULL
        )
        neighbours: Any = SimpleNamespace(is_busy=lambda *_: False)
        self.control = EngineControl(self.parts, self.pool, neighbours, options)
        self.links: list[RankLink] = []
        self.holds_back = False
        self._held: list[tuple[Any, ...]] = []

    def _handle_told(self) -> None:
        """The control does."""

    def _read(self, *record: Any) -> None:
        if self.holds_back:
            self._held.append(record)
        else:
            super()._read(*record)

    def let_go(self) -> None:
        """Read what was held back, and hold back no more."""
        self.holds_back = False
        held, self._held = self._held, []
        for record in held:
            super()._read(*record)

    def wake(self, rank: RankLink) -> None:
        """Ring the doorbell."""
        self.control._engines[rank.peer].intake.wake()

    async def rank(self, number: int) -> RankLink:
        """Another rank, connected."""
        rank = RankLink(self, number)
        await rank.connect()
        self.links.append(rank)
        return rank

    async def opened(
        self, ranks: Sequence[RankLink], tokens: Sequence[int], group: bytes, *, apart: float = 0.0
    ) -> list[link.TurnOpened]:
        """A turn of these ranks, which ask in this order, so many seconds apart."""
        counts = [len(rank.answers) + 1 for rank in ranks]
        for rank in ranks:
            rank.ask(tokens, group)
            if apart:
                await asyncio.sleep(apart)
        return [await rank.answer(count) for rank, count in zip(ranks, counts, strict=True)]

    @property
    def length(self) -> int:
        """Positions that every shard of the session has."""
        return self.state.length

    @property
    def pinned(self) -> int:
        """Blocks that attaches hold."""
        return self.pool.blocks.ledger.counts.pinned


@asynccontextmanager
async def running(identity: Identity = IDENTITY) -> AsyncIterator[tuple[RanksBench, list[RankLink]]]:
    """A node, and an engine of two ranks; of REPLICATED, both have the same rows."""
    bench = RanksBench(identity)
    task = asyncio.create_task(bench.control.run())
    await asyncio.sleep(0)
    try:
        yield bench, [await bench.rank(number) for number in range(RANKS)]
    finally:
        for rank in bench.links:
            await rank.die()
        await until(lambda: not bench.control._tasks._tasks)  # type: ignore[union-attr]
        task.cancel()
        await asyncio.wait([task])
        bench.pool.close()


async def logged_turn(
    bench: RanksBench, ranks: Sequence[RankLink], upto: Sequence[int], group: bytes
) -> None:
    """A whole turn; each rank comes as far as is said."""
    opened = await bench.opened(ranks, TOKENS, group)
    for rank, one, length in zip(ranks, opened, upto, strict=True):
        if one.log_from < length:
            rank.write(one, one.log_from, TOKENS[one.log_from : length])
        rank.close_turn(one)
    await until(lambda: not len(bench.turns))
    await bench.settled()


async def until(condition: Callable[[], bool]) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110  # with a deadline
            await asyncio.sleep(0.001)
