"""One node over a log that is a list: what the scenarios that the simulator found are told with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

from kvlog.checksums import checksum
from kvlog.core.effects import AppendRecord, TurnOpened
from kvlog.core.inputs import (
    CloseTurn,
    EncodedRows,
    EndSession,
    Follow,
    OpenTurn,
    RecordRead,
    WatermarkRead,
)
from kvlog.core.node import Myself, NodeCore
from kvlog.core.takeover import Claimant
from kvlog.ids import NO_EPOCH, Epoch, NodeId, Nonce, Offset, Partition, Position, Shard, Writer
from kvlog.limits import TINY
from kvlog.records import Claim, Codec, EndReason, Entry
from kvlog.wire.header import header_bytes
from tests.sim.rows import CONTEXTS, IDENTITIES, session_id

if TYPE_CHECKING:
    from kvlog.core.effects import Effect
    from kvlog.core.inputs import Input
    from kvlog.ids import SessionId

E = TypeVar("E")
ONE_SHARD = IDENTITIES[4]
PARTITION = Partition(0)
LATE_NS = 1_000


def only(kind: type[E], effects: tuple[Effect, ...]) -> E:
    """The one effect of this kind."""
    (found,) = [effect for effect in effects if isinstance(effect, kind)]
    return found


@dataclass
class OneNode:
    """A core, its writer, and the log that it shares with others."""

    log: list[Entry | None] = field(default_factory=list)
    name: str = "a"
    nonces: int = 0

    def __post_init__(self) -> None:
        """Follow the partition from its beginning."""
        self.writer = Writer(self.name.encode() * 16)
        self.core = NodeCore(Myself(NodeId(self.name), self.writer, lambda _: PARTITION, header_bytes), TINY)
        self.core.step(Follow(PARTITION, Offset(0)))

    def step(self, happened: Input) -> tuple[Effect, ...]:
        """Feed an input; what it appends lands at once."""
        effects = self.core.step(happened)
        for effect in effects:
            if isinstance(effect, AppendRecord):
                self.log.append(Entry(effect.record, effect.header, effect.chain, effect.payload))
        return effects

    def ask(
        self, session: int, tokens: tuple[int, ...] = (1, 2), *, request: int = 1, continues: Epoch = NO_EPOCH
    ) -> tuple[Effect, ...]:
        """A request wants a turn."""
        asked = OpenTurn(request, session_id(session), tokens, CONTEXTS[0], ONE_SHARD, continues, LATE_NS)
        return self.step(asked)

    def watermark(self, session: int, value: int | None = None) -> tuple[Effect, ...]:
        """The leader answers, with the log's end unless another value is given."""
        self.nonces += 1
        nonce = Nonce(self.name.encode() + self.nonces.to_bytes(15, "little"))
        return self.step(
            WatermarkRead(session_id(session), Offset(len(self.log) if value is None else value), nonce)
        )

    def read(self) -> tuple[Effect, ...]:
        """Read to the end of the log."""
        out: list[Effect] = []
        while (at := self.core.partitions[PARTITION].position) < len(self.log):
            entry = self.log[at]
            assert entry is not None, "a scenario says itself what becomes of a missing record"
            out.extend(self.step(RecordRead(PARTITION, at, entry)))
        return tuple(out)

    def own(self, session: int, *, request: int = 1) -> TurnOpened:
        """Ask, claim, read the claim back."""
        self.ask(session, request=request)
        self.watermark(session)
        return only(TurnOpened, self.read())

    def write(self, turn: TurnOpened, *tokens: int, start: int = 0) -> None:
        """Log rows of a turn and read them back."""
        payload = memoryview(bytes(len(tokens)))
        self.step(
            EncodedRows(
                turn.turn,
                turn.epoch,
                Shard(0),
                Position(start),
                tokens,
                Codec.RAW,
                payload,
                checksum(payload),
            )
        )
        self.read()

    def close(self, turn: TurnOpened) -> None:
        """End the turn; the session stays ours, idle."""
        self.step(CloseTurn(turn.turn))

    def end(self, session: int) -> tuple[Effect, ...]:
        """End the session."""
        claimant = Claimant(NodeId(self.name), self.writer, ONE_SHARD, CONTEXTS[0])
        return self.step(EndSession(session_id(session), EndReason.REQUEST, claimant))

    def rival_claim(self, session: int, *, epoch: int | None = None) -> None:
        """Somebody else claims the session, and is the first to do so."""
        self.nonces += 1
        claim = Claim(
            session=session_id(session),
            epoch=Epoch(len(self.log) + 1 if epoch is None else epoch),
            writer=Writer(b"r" * 16),
            nonce=Nonce(b"rival" + self.nonces.to_bytes(11, "little")),
            node=NodeId("rival"),
            identity=ONE_SHARD,
            context=CONTEXTS[0],
        )
        self.log.append(Entry(claim, header_bytes(claim), 0, memoryview(b"")))

    def owns(self, session: int) -> bool:
        """Whether it could write the session now."""
        return self.core.primary(session_id(session)) is not None


def states(node: OneNode) -> list[SessionId]:
    """The sessions that the node's reader holds a state of."""
    return [state.session for state in node.core.partitions[PARTITION].sessions()]
