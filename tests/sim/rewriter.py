"""The model of a node's rewriter: logs a session again from the rows that the node's own buffer holds, pinned.

Where a row is absent (it was logged by its token ids alone, or evicted) it logs the token ids: the worst that a real
one may do, which would skip an evicted session.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlog.checksums import checksum
from kvlog.core.effects import TurnAcknowledged, TurnEnded, TurnFenced, TurnOpened, TurnUnlogged
from kvlog.core.inputs import CloseTurn, EncodedRows, RewriteSession
from kvlog.ids import NO_EPOCH, Epoch, Offset, Position, Shard
from kvlog.limits import TINY
from kvlog.records import Codec
from tests.sim.buffer import BLOCK

if TYPE_CHECKING:
    from random import Random

    from kvlog.core.inputs import Input
    from kvlog.core.node import NodeCore
    from kvlog.ids import SessionId, Turn
    from tests.sim.buffer import Buffer, Pin

Answer = TurnOpened | TurnUnlogged | TurnAcknowledged | TurnFenced | TurnEnded

PATIENCE_NS = 1_000_000_000


class Daemon(Protocol):
    """What it needs of its node."""

    rng: Random

    @property
    def core(self) -> NodeCore | None: ...

    @property
    def buffer(self) -> Buffer: ...

    @property
    def now_ns(self) -> int: ...

    def feed(self, happened: Input) -> None: ...


@dataclass(slots=True, eq=False)
class Work:
    """A rewrite that has its turn."""

    turn: Turn
    epoch: Epoch
    tokens: list[int]
    pin: Pin
    present: int
    sent: list[int]


class Rewriter:
    """One rewrite at a time."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._asks = 0
        self.ask: int | None = None
        self.continues = NO_EPOCH
        self.began_at = Offset(0)
        self.work: Work | None = None

    def begin(self, session: SessionId, log_end: Offset) -> bool:
        """Want a session of ours rewritten; whether that is done now, or waits for a claim."""
        core = self._daemon.core
        primary = core.primary(session) if core is not None else None
        if primary is None or self._is_at_work():
            return False
        self._asks -= 1  # requests of the engine count upwards
        self.ask, self.continues, self.began_at = self._asks, primary.claim.epoch, log_end
        self._daemon.feed(RewriteSession(self.ask, session, self._daemon.now_ns + PATIENCE_NS))
        return self._is_at_work()

    def _is_at_work(self) -> bool:
        return self.ask is not None or self.work is not None

    def takes(self, effect: Answer) -> bool:
        """Whether the effect is an answer to it; it is dealt with if so."""
        match effect:
            case TurnOpened() if effect.request == self.ask:
                self.ask = None
                self._opened(effect)
            case TurnUnlogged() if effect.request == self.ask:
                self.ask = None
            case TurnEnded() | TurnFenced() if self.work is not None and effect.turn == self.work.turn:
                self._over()
            case TurnAcknowledged():
                return self.work is not None and effect.turn == self.work.turn
            case _:
                return False
        return True

    def step(self) -> bool:
        """Send a few rows, or close the turn; whether there was anything to do."""
        work = self.work
        if work is None or self._daemon.core is None:
            return False
        shards = [shard for shard, sent in enumerate(work.sent) if sent < len(work.tokens)]
        if shards:
            self._send(work, self._daemon.rng.choice(shards))
            return True
        self._over()
        self._daemon.feed(CloseTurn(work.turn))
        return True

    def _opened(self, effect: TurnOpened) -> None:
        assert self._daemon.core is not None, "only a living daemon answers"
        assert effect.log_from == 0, "a rewrite logs everything"
        state = self._daemon.core.state(effect.session)
        tokens = list(state.tokens[: effect.usable]) if state is not None else []
        shards = len(state.shards) if state is not None else 0
        present = min(self._daemon.buffer.present(effect.session, shards), len(tokens)) if shards else 0
        pin = self._hold(effect.session, present, shards)
        self.work = Work(effect.turn, effect.epoch, tokens, pin, present, [0] * shards)

    def _hold(self, session: SessionId, length: int, shards: int) -> Pin:
        return self._daemon.buffer.pin(session, length, shards)

    def _send(self, work: Work, shard: int) -> None:
        start = work.sent[shard]
        has_rows = start < work.present
        most = work.present if has_rows else len(work.tokens)
        end = min(most, start + self._daemon.rng.randint(1, TINY.delta_tokens))
        rows = [self._row(work, shard, at) for at in range(start, end)] if has_rows else []
        payload = b"".join(rows)
        work.sent[shard] = end
        self._daemon.feed(
            EncodedRows(
                turn=work.turn,
                epoch=work.epoch,
                shard=Shard(shard),
                start=Position(start),
                tokens=tuple(work.tokens[start:end]),
                codec=Codec.RAW if has_rows else Codec.IDS,
                payload=memoryview(payload),
                payload_checksum=checksum(payload),
            )
        )

    @staticmethod
    def _row(work: Work, shard: int, position: int) -> bytes:
        found = work.pin.blocks[shard][position // BLOCK].rows[position % BLOCK]
        assert found is not None, "present rows have bytes"
        return found

    def _over(self) -> None:
        assert self.work is not None, "only what was begun is over"
        self._daemon.buffer.release(self.work.pin)
        self.work = None
