"""The model shell of a node: carries the real core's effects out against the model log, buffer and engine.

It does what a real shell must do and no more: it feeds what it reads in order, appends in order, says how appends came
out, and never appends under an epoch again whose append it has given up.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from kvlog.core.effects import (
    AppendRecord,
    CutRows,
    DropSession,
    FollowPartition,
    ReadWatermark,
    StoreRows,
    TurnAcknowledged,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
)
from kvlog.core.inputs import (
    AppendFailed,
    Follow,
    HoleRead,
    LogReplacedRead,
    WatermarkFailed,
    WatermarkRead,
)
from kvlog.core.node import Myself, NodeCore
from kvlog.ids import NodeId, Nonce, Offset, Partition, Writer
from kvlog.limits import TINY
from kvlog.records import Claim, Codec, Entry
from kvlog.wire.header import header_bytes
from tests.sim.buffer import Buffer
from tests.sim.engine import Engine
from tests.sim.faults import Fault
from tests.sim.modellog import damage_for
from tests.sim.rewriter import Rewriter
from tests.sim.rows import ROW_BYTES

if TYPE_CHECKING:
    from collections.abc import Sequence
    from random import Random

    from kvlog.core.effects import Effect
    from kvlog.core.inputs import EncodedRows, Input
    from kvlog.ids import Epoch, SessionId
    from kvlog.records import Record
    from tests.sim.engine import Request
    from tests.sim.faults import Profile
    from tests.sim.modellog import Damage, Message, ModelLog


class Watcher(Protocol):
    """The checkers, as the shell sees them."""

    def before(self, shell: Shell, happened: Input) -> None: ...

    def effect(self, shell: Shell, effect: Effect, cause: Message | None) -> None: ...

    def after(self, shell: Shell, happened: Input, cause: Message | None) -> None: ...

    def attached(self, shell: Shell, request: Request, *, shard: int, position: int) -> None: ...

    def damaged_here(self, shell: Shell, partition: Partition, message: Message) -> None: ...


@dataclass(slots=True)
class Surroundings:
    """What all nodes of a run share."""

    rng: Random
    log: ModelLog
    profile: Profile
    watcher: Watcher
    partition_of: dict[SessionId, Partition]
    now_ns: int = 0
    late: list[deque[tuple[Partition, Entry]]] = field(default_factory=list)
    """Appends that were given up and may still land, each queue in its order."""


@dataclass(slots=True)
class Watermark:
    """A watermark that is being read; `value` once the leader has answered."""

    session: SessionId
    partition: Partition
    value: Offset | None = None


class Shell:
    """One node."""

    def __init__(self, around: Surroundings, index: int) -> None:
        self.around, self.rng, self.profile = around, around.rng, around.profile
        self.name = "abc"[index]
        self.blocks = self.rng.choice((10, 16, 400))
        self.pace = self.rng.choice((1.0, 1.0, 0.4, 0.15))
        """The share of its chances to read that it takes."""
        self.paused = False
        self.engine = Engine(self)
        self.core: NodeCore | None = None
        self.boot()

    # What a daemon's life is made of

    def boot(self) -> None:
        """Start a daemon: a new writer, an empty buffer, nothing followed."""
        self.is_stopping = False
        self.writer = Writer(self.rng.randbytes(16))
        self.buffer = Buffer(self.blocks)
        self.rewriter = Rewriter(self)
        self.outbox: dict[Partition, deque[Entry]] = {}
        self.failures: deque[Record] = deque()
        self.given_up: set[tuple[SessionId, Epoch]] = set()
        self.watermarks: list[Watermark] = []
        self.generation: dict[Partition, int] = {}
        self.tips: dict[Partition, int] = {}
        self.bad: dict[int, Damage] = {}
        myself = Myself(NodeId(self.name), self.writer, self.around.partition_of.__getitem__, header_bytes)
        self.core = NodeCore(myself, TINY)

    def follow(self, partition: Partition, first: Offset) -> None:
        """Read a partition from `first` on."""
        self.feed(Follow(partition, first))
        self._note_followed(partition, first)

    def crash_daemon(self) -> None:
        """The daemon is gone; of what it had sent, some may still land."""
        for partition, entries in self.outbox.items():
            self._leave_behind(partition, entries)
        self.outbox = {}
        self.core = None
        self.rewriter = Rewriter(self)
        self.engine.daemon_lost(ring_survives=self.rng.random() < 0.8)

    def crash(self) -> None:
        """The whole node is gone."""
        self.crash_daemon()
        for request in list(self.engine.requests):
            self.engine.abort(request)
        identity = self.engine.identity
        self.engine = Engine(self)
        self.engine.identity = identity

    @property
    def alive(self) -> bool:
        return self.core is not None

    @property
    def now_ns(self) -> int:
        return self.around.now_ns

    # What it does step by step

    def feed(self, happened: Input, cause: Message | None = None) -> None:
        """Tell the core, and carry out what it answers, unless the daemon dies in the middle of that."""
        if self.core is None:
            return
        self.around.watcher.before(self, happened)
        effects = self.core.step(happened)
        self.carry_out(effects, cause)
        if self.core is not None:
            self.around.watcher.after(self, happened, cause)

    def carry_out(self, effects: Sequence[Effect], cause: Message | None) -> None:
        """Perform effects in order."""
        stop = len(effects) + 1
        if len(effects) > 1 and self.profile.hit(Fault.CRASH_BETWEEN_EFFECTS, self.rng):
            stop = self.rng.randrange(len(effects))
        for number, effect in enumerate(effects):
            if number == stop:
                self.crash_daemon()
                return
            self.around.watcher.effect(self, effect, cause)
            self._perform(effect)

    def read(self, partition: Partition) -> bool:
        """Read the next message of a partition; false if there is none."""
        assert self.core is not None, "only a living daemon reads"
        core, log = self.core.partitions[partition], self.around.log.partitions[partition]
        if self.generation[partition] != log.generation:
            another = self.is_another_log(partition)
            self.generation[partition] = log.generation
            if another:
                offset = self.rng.choice((log.log_start, min(core.position, log.end), log.end))
                self.tips[partition] = log.tip(offset)
                self.feed(LogReplacedRead(partition, Offset(max(offset, log.log_start))))
                return True
        if core.position < log.log_start:
            self.tips[partition] = log.tip(log.log_start)
            self.feed(HoleRead(partition, log.log_start))
            return True
        if core.position >= log.end:
            return False
        message = log.messages[core.position]
        if message is None:
            self.feed(HoleRead(partition, Offset(core.position + 1)))
        else:
            self._read_message(partition, core.position, message)
        return True

    def land_next(self, partition: Partition) -> Entry | None:
        """Take the next append of a partition off the queue."""
        queue = self.outbox.get(partition)
        return queue.popleft() if queue else None

    def fail_appends(self, partition: Partition, *, unknown: bool) -> bool:
        """The producer fails: with all that it held, of unknown outcome; or only at one session's records, surely."""
        queue = self.outbox.get(partition)
        if not queue:
            return False
        head = queue[0].record
        failed, kept = list[Entry](), deque[Entry]()
        for entry in queue:
            same = (entry.record.session, entry.record.epoch) == (head.session, head.epoch)
            (failed if unknown or same else kept).append(entry)
        self.outbox[partition] = kept
        if unknown:
            self._leave_behind(partition, failed)
        for entry in failed:
            self._give_up(entry.record)
        return True

    def take_rows(self) -> bool:
        """Take one entry out of the ring; rows of a turn that is another session's are dropped (RULE ring)."""
        if self.core is None or not self.engine.ring:
            return False
        session, rows = self.engine.ring.popleft()
        if self.is_of_session(rows, session):
            self.feed(rows)
        return True

    def is_of_session(self, rows: EncodedRows, session: SessionId) -> bool:
        """Whether the turn is this session's: turn numbers restart with the daemon, and epochs are no session's own."""
        return self.core is not None and self.core.session_of(rows.turn) == session

    def tell_failure(self) -> bool:
        """Tell the core of one failed append."""
        if not self.failures:
            return False
        record = self.failures.popleft()
        if not isinstance(record, Claim):
            self.given_up.discard((record.session, record.epoch))
        self.feed(AppendFailed(record))
        return True

    def watermark(self, *, calm: bool) -> bool:
        """Let one watermark read get on: it is answered by the leader at one step and told to the core at another."""
        if not self.watermarks:
            return False
        waiting = self.rng.choice(self.watermarks)
        if self.profile.hit(Fault.WATERMARK_FAILED, self.rng):
            self.watermarks.remove(waiting)
            self.feed(WatermarkFailed(waiting.session))
            return True
        if waiting.value is None:
            waiting.value = self.around.log.partitions[waiting.partition].end
            if self.profile.hit(Fault.WATERMARK_DELAYED, self.rng) and not calm:
                return True
        self.watermarks.remove(waiting)
        self.feed(WatermarkRead(waiting.session, waiting.value, Nonce(self.rng.randbytes(16))))
        return True

    def attached(self, request: Request, shard: int, position: int, found: bytes | None) -> None:
        """The engine has copied a row out of pinned blocks."""
        self.around.watcher.attached(self, request, shard=shard, position=position)
        assert found is not None, "present rows have bytes"

    def is_another_log(self, partition: Partition) -> bool:
        """Whether the record at the last applied offset is not the one that was applied."""
        assert self.core is not None, "only a living daemon reads"
        applied, log = self.core.partitions[partition].applied, self.around.log.partitions[partition]
        return applied > log.end or log.tip(applied) != self.tips[partition]

    # Private

    def _note_followed(self, partition: Partition, first: Offset) -> None:
        log = self.around.log.partitions[partition]
        # Behind the end: the tail was lost since the watermark was read, and the first fetch will say so.
        self.generation[partition] = log.generation if first <= log.end else -1
        self.tips[partition] = log.tip(min(first, log.end))

    def _read_message(self, partition: Partition, offset: Offset, message: Message) -> None:
        local = self.bad.get(message.uid)
        if local is None and self.profile.hit(Fault.DAMAGE_IN_READING, self.rng):
            local = damage_for(message.entry, self.rng)
        elif local is None and self.profile.hit(Fault.DAMAGE_AT_ONE_READER, self.rng):
            local = self.bad[message.uid] = damage_for(message.entry, self.rng)
        if local is not None:
            self.around.watcher.damaged_here(self, partition, message)
        assert self.core is not None, "only a living daemon reads"
        core = self.core.partitions[partition]
        self.feed(message.as_input(partition, offset, local), message)
        if core.applied == offset + 1:
            self.tips[partition] = message.uid

    def _perform(self, effect: Effect) -> None:
        match effect:
            case StoreRows(delta, payload):
                rows = self._decode(delta.codec, payload, len(delta.tokens))
                self.buffer.store((delta.session, delta.shard), delta.start, rows)
            case CutRows(session, length):
                self.buffer.cut(session, length)
            case DropSession(session):
                self.buffer.drop(session)
            case AppendRecord():
                self._append(effect)
            case ReadWatermark(session, partition):
                self.watermarks.append(Watermark(session, partition))
            case FollowPartition(partition, offset):
                self._note_followed(partition, offset)
            case TurnOpened() | TurnUnlogged() | TurnAcknowledged() | TurnFenced() | TurnEnded():
                if not self.rewriter.takes(effect):
                    self.engine.answer(effect)
            case _:
                pass

    @staticmethod
    def _decode(codec: Codec, payload: memoryview, count: int) -> list[bytes | None]:
        if codec is Codec.IDS:
            return [None] * count
        return [bytes(payload[at * ROW_BYTES : (at + 1) * ROW_BYTES]) for at in range(count)]

    def _append(self, effect: AppendRecord) -> None:
        record = effect.record
        assert isinstance(effect.payload, memoryview), "rows are handed through as they came"
        entry = Entry(record, effect.header, effect.chain, effect.payload)
        if not isinstance(record, Claim) and (record.session, record.epoch) in self.given_up:
            self.failures.append(record)
            return
        self.outbox.setdefault(effect.partition, deque()).append(entry)

    def _give_up(self, record: Record) -> None:
        if not isinstance(record, Claim):
            self.given_up.add((record.session, record.epoch))
        self.failures.append(record)

    def _leave_behind(self, partition: Partition, entries: Sequence[Entry]) -> None:
        """Of what a dead producer held, a first part may land later; the rest never does."""
        landing = deque((partition, entry) for entry in list(entries)[: self.rng.randint(0, len(entries))])
        if landing:
            self.around.late.append(landing)
