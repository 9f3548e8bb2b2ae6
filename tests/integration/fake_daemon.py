"""A daemon without a log, for tests of the engine's side: real socket, ring and pool, and sessions in memory.

In a test's own process: `with FakeDaemon.running(path) as daemon`. As a process to kill:
`python -m tests.integration.fake_daemon PATH`, which prints `listening` when engines can connect.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Self

from kvlog.buffers.doorbell import create_doorbell
from kvlog.buffers.memory import create
from kvlog.buffers.ring import RingReader, create_ring
from kvlog.checksums import checksum
from kvlog.ids import Epoch, NodeId, Position, SessionId, Turn
from kvlog.link.messages import (
    PROTOCOL,
    Acked,
    AttachBlock,
    CloseTurn,
    EndedReason,
    Forget,
    Hello,
    OpenTurn,
    Rejected,
    Release,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    Welcome,
    unpack_tokens,
)
from kvlog.link.server import Accepted, LinkServer, Peer, ServerOptions

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlog.buffers.doorbell import Doorbell
    from kvlog.buffers.memory import SealedMemory


@dataclass
class Session:
    """What the log would hold: one row a token."""

    tokens: list[int] = field(default_factory=list)
    rows: list[bytes] = field(default_factory=list)
    epoch: int = 0


@dataclass
class OpenedTurn:
    """A turn in progress."""

    peer: Peer
    session: SessionId
    epoch: int
    closed_at: int | None = None


@dataclass
class Engine:
    """One connected engine's shared memory."""

    ring: SealedMemory
    reader: RingReader
    doorbell: Doorbell


@dataclass
class Knobs:
    """What a test may turn, from its own thread."""

    ring_bytes: int = 1 << 20
    block_bytes: int = 1 << 14
    blocks: int = 256
    paused: bool = False
    refuse: UnloggedReason | None = None
    reject: Rejected | None = None
    answer_after: float = 0.0
    spoil_row: int | None = None
    pool_bytes_said: int | None = None


class FakeDaemon:
    """A LinkHandler; a test looks at `sessions`, `opened` (all OpenTurns) and `turns`."""

    def __init__(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.sessions: dict[str, Session] = {}
        self.turns: dict[int, OpenedTurn] = {}
        self.opened: list[OpenTurn] = []
        self.released: list[int] = []
        self.forgotten: list[str] = []
        self.refused_entries = 0
        self.causes: list[Exception | None] = []
        self.peers: list[Peer] = []
        self._engines: dict[Peer, Engine] = {}
        self._pool = create(
            "fake-pool", knobs.block_bytes * knobs.blocks, setting="t", creator_writes_only=True
        )
        self._pool_fd = self._pool.reader_fd()
        self._turn = 0
        self._epoch = 100

    async def hello(self, peer: Peer, message: Hello) -> Accepted | Rejected:
        if self.knobs.reject is not None:
            return self.knobs.reject
        ring = create_ring(self.knobs.ring_bytes)
        engine = Engine(ring, RingReader(ring), create_doorbell())
        self._engines[peer] = engine
        self.peers.append(peer)
        asyncio.get_running_loop().add_reader(engine.doorbell.fileno(), self.drain, peer)
        welcome = Welcome(
            PROTOCOL,
            bytes(16),
            NodeId("fake"),
            ring.size_bytes,
            self.knobs.pool_bytes_said or self._pool.size_bytes,
            self.knobs.block_bytes,
            self.knobs.blocks,
            "cpu",
        )
        return Accepted(welcome, (ring.fd, self._pool_fd, engine.doorbell.fileno()))

    async def open_turn(self, peer: Peer, message: OpenTurn) -> TurnOpened | TurnUnlogged:
        self.opened.append(message)
        if self.knobs.answer_after:
            await asyncio.sleep(self.knobs.answer_after)
        session = self.sessions.setdefault(message.session, Session())
        if self.knobs.refuse is not None:
            return TurnUnlogged(message.request, self.knobs.refuse, "as the test says")
        if message.continues and session.epoch > message.continues:
            return TurnUnlogged(message.request, UnloggedReason.FENCED, "")
        self._turn += 1
        self._epoch += 1
        session.epoch = self._epoch
        tokens = unpack_tokens(message.tokens)
        length = common_prefix(tokens, session.tokens)
        del session.tokens[length:], session.rows[length:]
        row_bytes = peer.hello.identity.layout.row_bytes
        blocks = self._pin(session.rows, row_bytes)
        sums = b"".join(checksum(row).to_bytes(8, "little") for row in session.rows)
        self.turns[self._turn] = OpenedTurn(peer, message.session, session.epoch)
        place = Position(length)
        return TurnOpened(
            message.request, Turn(self._turn), Epoch(session.epoch), place, place, row_bytes, blocks, sums
        )

    def close_turn(self, peer: Peer, message: CloseTurn) -> None:
        self.drain(peer)
        self.turns[message.turn].closed_at = message.length

    def release(self, peer: Peer, message: Release) -> None:
        self.released.append(message.turn)

    def forget(self, peer: Peer, message: Forget) -> None:
        self.forgotten.append(message.session)

    def closed(self, peer: Peer, cause: Exception | None) -> None:
        self.causes.append(cause)
        engine = self._engines.pop(peer, None)
        if engine is not None:
            asyncio.get_running_loop().remove_reader(engine.doorbell.fileno())
            engine.reader.close()
            engine.ring.close()
            engine.doorbell.close()

    def drain(self, peer: Peer) -> None:
        """Take everything out of a peer's ring."""
        engine = self._engines.get(peer)
        if engine is None:
            return
        engine.doorbell.clear()
        if self.knobs.paused:
            return
        while (entry := engine.reader.peek()) is not None:
            for part in entry.parts():
                self._take(part.row.turn, part.row.epoch, part.row.start, part)
            engine.reader.release()

    def drain_all(self) -> None:
        """After `paused` was taken back."""
        for peer in tuple(self._engines):
            self.drain(peer)

    def spoil_rings(self) -> None:
        """Write nonsense where the reader's position is."""
        for engine in self._engines.values():
            engine.ring.view[256:264] = b"nonsense"

    def fence(self, session: str) -> None:
        """Another node takes a session."""
        self._epoch += 1
        self.sessions[session].epoch = self._epoch
        for number, turn in self.turns.items():
            if turn.session == session and turn.closed_at is None:
                fenced = TurnFenced(turn.session, Turn(number), Epoch(turn.epoch), Epoch(self._epoch))
                turn.peer.send(fenced)

    def end_turns(self, reason: EndedReason) -> None:
        """The daemon gives up all turns."""
        for number, turn in self.turns.items():
            if turn.closed_at is None:
                turn.peer.send(TurnEnded(Turn(number), reason))

    def _take(self, number, epoch, start, part) -> None:
        turn = self.turns.get(number)
        session = self.sessions.get(turn.session) if turn is not None else None
        if turn is None or session is None or epoch != session.epoch or start != len(session.tokens):
            self.refused_entries += 1
            return
        session.tokens += part.tokens
        size = len(part.rows) // part.row.n
        session.rows += [bytes(part.rows[k * size : (k + 1) * size]) for k in range(part.row.n)]
        turn.peer.send(Acked(Turn(number), Position(len(session.tokens))))

    def _pin(self, rows: list[bytes], row_bytes: int) -> tuple[AttachBlock, ...]:
        """Write rows into blocks from 0 on; one attach at a time is enough for a test."""
        a_block = self.knobs.block_bytes // row_bytes
        for k, row in enumerate(rows):
            at = k // a_block * self.knobs.block_bytes + k % a_block * row_bytes
            self._pool.view[at : at + row_bytes] = row
            if k == self.knobs.spoil_row:
                self._pool.view[at] ^= 1
        return tuple(
            AttachBlock(k // a_block, min(a_block, len(rows) - k)) for k in range(0, len(rows), a_block)
        )

    @classmethod
    @contextmanager
    def running(
        cls, path: Path, knobs: Knobs | None = None, options: ServerOptions | None = None
    ) -> Iterator[Running]:
        """A daemon on a thread of its own, until the end of the block."""
        with Running(cls(knobs or Knobs()), path, options) as running:
            yield running


class Running:
    """The thread around a FakeDaemon."""

    def __init__(self, daemon: FakeDaemon, path: Path, options: ServerOptions | None) -> None:
        self.daemon = daemon
        self.server = LinkServer(path, daemon, options)
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name="fake-daemon")

    def __enter__(self) -> Self:
        self.server.listen()
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop serving, as at a restart; may be called twice."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(5)
            assert not self._thread.is_alive(), "the fake daemon does not stop"

    def call(self, what: Callable[[], None]) -> None:
        """Run something on the daemon's loop, and wait for it."""

        async def run() -> None:
            what()

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(5)

    def _cancel(self) -> None:
        assert self._task is not None
        self._task.cancel()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._task = asyncio.create_task(self.server.serve())
        await asyncio.wait([self._task])


def common_prefix(left, right) -> int:
    """How many tokens are equal from the first on."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length


def main() -> None:
    """A process that is to be killed."""
    daemon = FakeDaemon(Knobs(**json.loads(sys.argv[2])))
    server = LinkServer(Path(sys.argv[1]), daemon)
    server.listen()
    print("listening", flush=True)
    asyncio.run(server.serve())


if __name__ == "__main__":
    main()
