"""Real node cores over a log that is a list: effects are carried out when a test says so, and not before.

A machine's appends wait in `sent` until they `land` (or are `lost`), its questions for the watermark in `asked` until
they are `answered`, and it reads only when it is told to `read`. So every interleaving is a test's to choose.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.checksums import checksum
from kvlog.core.effects import (
    AppendRecord,
    FollowPartition,
    ReadWatermark,
    TurnAcknowledged,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
)
from kvlog.core.inputs import (
    AppendFailed,
    EncodedRows,
    EndSession,
    Follow,
    OpenTurn,
    RecordRead,
    RewriteSession,
    UnreadableRead,
    WatermarkFailed,
    WatermarkRead,
)
from kvlog.core.myself import Myself
from kvlog.core.node import NodeCore
from kvlog.core.primary import Tenure
from kvlog.core.takeover import Claimant
from kvlog.ids import Epoch, NodeId, Nonce, Offset, Partition, Position, SessionId, Shard, Turn
from kvlog.limits import TINY
from kvlog.records import Claim, Codec, EndReason, Entry
from kvlog.wire.header import header_bytes
from tests.unit.core.logbook import CONTEXT, FEEDS_MAX, IDENTITY, Logbook, payload_of, sixteen, writer

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlog.core.effects import Effect
    from kvlog.core.inputs import Input
    from kvlog.core.session import SessionState
    from kvlog.layout import Identity
    from kvlog.limits import Limits

__all__ = ["FAR_AWAY", "Cluster", "Machine", "claims_in", "owners", "partition_of", "told"]

FAR_AWAY = 1 << 62
"""A deadline that no test's clock reaches."""


def partition_of(session: SessionId) -> Partition:
    """Sessions whose name begins with `far` live in partition 1, all others in partition 0."""
    return Partition(1 if session.startswith("far") else 0)


@dataclass(slots=True)
class Cluster:
    """The log's two partitions, and which of its records cannot be read, by their offset in partition 0."""

    books: dict[Partition, Logbook] = field(default_factory=lambda: {Partition(p): Logbook() for p in (0, 1)})
    unreadable: dict[Offset, SessionId | None] = field(default_factory=dict)

    @property
    def book(self) -> Logbook:
        """Partition 0."""
        return self.books[Partition(0)]

    def machine(self, name: str, *, first: int | None = 0, limits: Limits = TINY) -> Machine:
        """A node that follows partition 0 from this offset on; None: follows nothing."""
        core = NodeCore(Myself(NodeId(f"node-{name}"), writer(name), partition_of, header_bytes), limits)
        machine = Machine(name, self, core)
        if first is not None:
            machine.step(Follow(Partition(0), Offset(first)))
        return machine


@dataclass(slots=True)
class Machine:
    """One node's core, and what it has asked for that is not done yet."""

    name: str
    cluster: Cluster
    core: NodeCore
    sent: list[AppendRecord] = field(default_factory=list)
    asked: list[ReadWatermark] = field(default_factory=list)
    _nonces: int = 0
    _requests: int = 0

    def step(self, happened: Input) -> list[Effect]:
        """Gives the core an input; what it wants of the log waits until the test lets it happen."""
        effects = list(self.core.step(happened))
        self.sent += [effect for effect in effects if isinstance(effect, AppendRecord)]
        self.asked += [effect for effect in effects if isinstance(effect, ReadWatermark)]
        return effects

    def open(
        self,
        *tokens: int,
        session: str = "s",
        identity: Identity = IDENTITY,
        continues: int = 0,
        deadline_ns: int = FAR_AWAY,
    ) -> list[Effect]:
        """A request wants to write the session; requests are numbered from 1."""
        self._requests += 1
        return self.step(
            OpenTurn(
                self._requests,
                SessionId(session),
                tokens,
                CONTEXT,
                identity,
                Epoch(continues),
                deadline_ns,
            )
        )

    def rewrite(self, *, session: str = "s", deadline_ns: int = FAR_AWAY) -> list[Effect]:
        """The node wants a session of its own logged again; numbered as requests are."""
        self._requests += 1
        return self.step(RewriteSession(self._requests, SessionId(session), deadline_ns))

    def end(self, *, session: str = "s", reason: EndReason = EndReason.FORGET) -> list[Effect]:
        """Somebody wants the session forgotten."""
        claimant = Claimant(NodeId(f"node-{self.name}"), writer(self.name), IDENTITY, CONTEXT)
        return self.step(EndSession(SessionId(session), reason, claimant))

    def rows(self, *tokens: int, session: str = "s", shard: int | None = None, **wrong: int) -> list[Effect]:
        """New rows of the turn in progress, of each shard or of one; turn, epoch and start may be given wrong."""
        shards = (0, 1) if shard is None else (shard,)
        return [effect for each in shards for effect in self._rows(tokens, session, Shard(each), wrong)]

    def _rows(
        self, tokens: tuple[int, ...], session: str, shard: Shard, wrong: dict[str, int]
    ) -> list[Effect]:
        primary = self.core.primary(SessionId(session))
        payload = payload_of(tokens)
        turn = (primary and primary.turn) or Turn(0)
        epoch = primary.claim.epoch if primary else Epoch(0)
        start = (primary and primary.expects(shard)) or Position(0)
        return self.step(
            EncodedRows(
                turn=Turn(wrong.get("turn", turn)),
                epoch=Epoch(wrong.get("epoch", epoch)),
                shard=shard,
                start=Position(wrong.get("start", start)),
                tokens=tokens,
                codec=Codec.RAW,
                payload=memoryview(payload),
                payload_checksum=checksum(payload),
            )
        )

    def answer(self) -> list[Effect]:
        """The oldest question for a watermark is answered, as it is now."""
        question = self.asked.pop(0)
        high_watermark = self.cluster.books[question.partition].high_watermark
        return self.answer_with(question.session, high_watermark)

    def answer_with(self, session: SessionId, high_watermark: int) -> list[Effect]:
        """A watermark is said, whatever it is now."""
        self._nonces += 1
        nonce = Nonce(sixteen(f"nonce {self.name} number {self._nonces}"))
        return self.step(WatermarkRead(session, Offset(high_watermark), nonce))

    def no_answer(self) -> list[Effect]:
        """The oldest question for a watermark failed."""
        return self.step(WatermarkFailed(self.asked.pop(0).session))

    def land(self, count: int | None = None) -> None:
        """The log takes the next so many of the appends, or all."""
        for effect in self.sent[:count]:
            entry = Entry(effect.record, effect.header, effect.chain, effect.payload)
            self.cluster.books[effect.partition].append(entry)
        del self.sent[:count]

    def lose(self) -> list[Effect]:
        """The oldest append failed; those after it are not in the log either."""
        failed = [AppendFailed(effect.record) for effect in self.sent]
        self.sent.clear()
        return [effect for each in failed for effect in self.step(each)]

    def read(self, *, until: int | None = None, partition: int = 0) -> list[Effect]:
        """The node reads to the end or to an offset, over again where it asks for that."""
        book = self.cluster.books[Partition(partition)]
        effects: list[Effect] = []
        reader = self.core.partitions[Partition(partition)]
        for _ in range(FEEDS_MAX):
            at = reader.position
            if at >= (book.high_watermark if until is None else until):
                return effects
            if at in self.cluster.unreadable and partition == 0:
                effects += self.step(UnreadableRead(reader.partition, at, self.cluster.unreadable[at]))
            else:
                effects += self.step(RecordRead(reader.partition, at, book.entries[at]))
        raise AssertionError("the node reads again for ever")

    def own_as(self, identity: Identity, *tokens: int) -> list[Effect]:
        """The same by an engine of another identity."""
        return self._claimed(self.open(*tokens, identity=identity), "s")

    def own(self, *tokens: int, session: str = "s") -> list[Effect]:
        """The whole way to a turn: asked, claimed, landed, read back."""
        return self._claimed(self.open(*tokens, session=session), session)

    def _claimed(self, effects: list[Effect], session: str) -> list[Effect]:
        if self.asked:
            self.answer()
            self.land()
            followed = [e.partition for e in effects if isinstance(e, FollowPartition)]
            effects = self.read(partition=followed[0] if followed else partition_of(SessionId(session)))
        return effects

    def disown(self, session: str = "s") -> None:
        """Lose the epoch as after an append of unknown outcome."""
        primary = self.core.primary(SessionId(session))
        assert primary is not None
        self.core._forget(primary, Tenure.LOST)

    def write(self, *tokens: int, session: str = "s") -> list[Effect]:
        """Rows of each shard, landed and read back."""
        self.rows(*tokens, session=session)
        self.land()
        return self.read(partition=partition_of(SessionId(session)))

    def state(self, session: str = "s") -> SessionState | None:
        """What this node's fold knows of the session."""
        core = self.core.partitions.get(partition_of(SessionId(session)))
        return core.session(SessionId(session)) if core else None


TOLD = (TurnOpened, TurnUnlogged, TurnAcknowledged, TurnFenced, TurnEnded)


def told(effects: Iterable[Effect]) -> list[Effect]:
    """What the engine is told."""
    return [effect for effect in effects if isinstance(effect, TOLD)]


def claims_in(machine: Machine) -> list[Claim]:
    """The claims that it has sent and that have not landed."""
    return [effect.record for effect in machine.sent if isinstance(effect.record, Claim)]


def owners(*machines: Machine, session: str = "s") -> list[str]:
    """Which of the machines take themselves for the owner."""
    return [machine.name for machine in machines if machine.core.primary(SessionId(session)) is not None]
