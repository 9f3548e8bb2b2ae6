"""The faults that happen by themselves, one method each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.checksums import checksum
from kvlog.core.inputs import EndSession, HoleRead, Stop
from kvlog.core.rewriting import is_rewritable
from kvlog.core.takeover import Claimant
from kvlog.ids import Epoch, NodeId, Nonce, Offset, Partition, Position, Seq, Shard, Writer
from kvlog.records import Claim, Codec, Delta, EndReason, Entry, Snapshot, Truncate
from kvlog.wire.header import header_bytes
from tests.sim.engine import ALPHABET, Phase
from tests.sim.faults import Fault
from tests.sim.rows import CONTEXTS, IDENTITIES

if TYPE_CHECKING:
    from collections import deque
    from collections.abc import Callable

    from kvlog.ids import SessionId
    from kvlog.records import Record
    from tests.sim.modellog import PartitionLog
    from tests.sim.world import World

NOTHING = memoryview(b"")
CLOCK_STEP_NS = 20_000_000


class Mishaps:
    """What can befall a world."""

    def __init__(self, world: World) -> None:
        self._world, self._rng = world, world.rng
        self._around, self._log = world.around, world.log

    def of(self, fault: Fault) -> Callable[[], None]:
        """The action that injects it, counted when it does."""
        action: Callable[[], bool] = getattr(self, fault.name.lower())

        def inject() -> None:
            if action():
                self._world.profile.count(fault)

        return inject

    # Nodes

    def node_crash(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        if not node.alive:
            return False
        node.crash()
        return True

    def daemon_crash(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        if not node.alive:
            return False
        node.crash_daemon()
        return True

    def stopped(self) -> bool:
        """A rolling restart: no more turns, what was sent lands, and then a new daemon."""
        node = self._rng.choice(self._world.nodes)
        if not node.alive or node.paused or node.is_stopping:
            return False
        node.feed(Stop())
        node.is_stopping = True
        return True

    def pause(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        was = node.paused
        node.paused = True
        return not was

    def rewind(self) -> bool:
        """A reader goes back to an older offset, to know a session again."""
        return self._seek(ahead=False)

    def jump(self) -> bool:
        """A reader that is too far behind continues further on."""
        return self._seek(ahead=True)

    def weights(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        identity = self._rng.choice((0, 0, *range(len(IDENTITIES))))
        if identity == node.engine.identity:
            return False
        node.engine.load_weights(identity)
        return True

    def rewrite(self) -> bool:
        """A node wants a session of its own logged again, as retention comes near."""
        owned = [
            (node, primary.session)
            for node in self._world.nodes
            if node.core is not None and not node.paused
            for primary in node.core.primaries()
            if is_rewritable(primary, node.core.state(primary.session))
        ]
        if not owned:
            return False
        node, session = self._rng.choice(owned)
        return node.rewriter.begin(session, self._log.partitions[self._around.partition_of[session]].end)

    def evicted(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        if not node.buffer.sessions:
            return False
        node.buffer.evict(self._rng.choice(sorted(node.buffer.sessions)))
        return True

    # Appends

    def append_failed(self) -> bool:
        return self._fail(unknown=False)

    def append_unknown(self) -> bool:
        return self._fail(unknown=True)

    def landed_late(self) -> bool:
        self._world.land_late()
        return False  # it counts itself

    def silent_loss(self) -> bool:
        """A producer that says it has appended and has not: a bug, which the chain must find."""
        queue = self._queue(1)
        if queue is None:
            return False
        record = queue.popleft().record
        self._blame(record)
        return True

    def swap(self) -> bool:
        """Two appends of one session change places: a producer with several requests in flight."""
        queue = self._queue(2)
        if queue is None or queue[0].record.session != queue[1].record.session:
            return False
        first, second = queue.popleft(), queue.popleft()
        queue.extendleft((first, second))
        self._blame(first.record)
        self._blame(second.record)
        return True

    # The log

    def retention(self) -> bool:
        number, log = self._partition()
        before = log.log_start
        self._log.retain(number, Offset(self._rng.randint(log.log_start, log.end)))
        return log.log_start > before

    def tail_lost(self) -> bool:
        number, log = self._partition()
        end = max(log.log_start, log.end - self._rng.randint(1, 8))
        if end >= log.end:
            return False
        self._log.lose_tail(number, Offset(end))
        self._world.checkers.tail_lost(number)
        return True

    def offset_skipped(self) -> bool:
        number, log = self._partition()
        offset = log.end
        self._log.skip(number)
        self._world.checkers.landed(number, offset, None)
        return True

    def junk(self) -> bool:
        """A record that no honest primary wrote."""
        session = self._rng.choice(list(self._around.partition_of))
        partition = self._around.partition_of[session]
        record = self._junk_record(session, partition)
        payload = memoryview(b"junk") if isinstance(record, Delta) else NOTHING
        chain = 0 if isinstance(record, Claim | Snapshot) else self._rng.getrandbits(64)
        self._world.land(partition, Entry(record, header_bytes(record), chain, payload))
        return True

    # Users

    def concurrent(self) -> bool:
        world = self._world
        conversation = world._conversation()
        near = self._rng.random() < 0.6
        node = world.nodes[conversation.home] if near else self._rng.choice(world.nodes)
        if len(node.engine.requests) >= 4:
            return False
        kept = conversation.seen[: self._rng.randint(0, len(conversation.seen))]
        tokens = kept + [self._rng.randrange(ALPHABET) for _ in range(self._rng.randint(1, 4))]
        request = world.request(node, conversation, tokens)
        request.target = len(tokens) + self._rng.randint(1, 4)
        if world.profile.hit(Fault.CONTEXT, self._rng):
            request.context = self._rng.randrange(len(CONTEXTS))
        node.engine.begin(request)
        return True

    def preempted(self) -> bool:
        running = [
            (node, request)
            for node in self._world.nodes
            for request in node.engine.requests
            if request.phase in (Phase.RUNNING, Phase.ATTACHING) and not node.paused
        ]
        if not running:
            return False
        node, request = self._rng.choice(running)
        node.engine.preempt(request)
        return True

    def aborted(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        if not node.engine.requests or node.paused:
            return False
        node.engine.abort(self._rng.choice(node.engine.requests))
        return True

    def moved(self) -> bool:
        """The router sends a conversation elsewhere although its node may live: the old one becomes a zombie."""
        conversation = self._world._conversation()
        if conversation.live is None:
            return False
        conversation.live.conversation = None
        conversation.live = None
        self._world.ask(self._rng.choice(self._world.nodes), conversation)
        return True

    def deadline(self) -> bool:
        """Time passes; some requests have waited too long."""
        self._around.now_ns += CLOCK_STEP_NS
        for node in self._world.nodes:
            if node.core is not None and not node.paused:
                node.carry_out(node.core.tick(self._around.now_ns), None)
        return True

    def session_ended(self) -> bool:
        node = self._rng.choice(self._world.nodes)
        if not node.alive or node.paused:
            return False
        session = self._world._conversation().session
        identity = IDENTITIES[node.engine.identity]
        claimant = Claimant(NodeId(node.name), node.writer, identity, CONTEXTS[0])
        node.feed(EndSession(session, self._rng.choice(list(EndReason)), claimant))
        return True

    # Private

    def _seek(self, *, ahead: bool) -> bool:
        node = self._rng.choice(self._world.nodes)
        if node.core is None or node.paused or not node.core.partitions:
            return False
        partition = self._rng.choice(list(node.core.partitions))
        log, at = self._log.partitions[partition], node.core.partitions[partition].position
        low, high = (at + 1, log.end) if ahead else (log.log_start, at - 1)
        if low > high or node.generation[partition] != log.generation:
            return False
        offset = Offset(self._rng.randint(low, high))
        node.tips[partition] = log.tip(offset)
        node.feed(HoleRead(partition, offset))
        return True

    def _fail(self, *, unknown: bool) -> bool:
        node = self._rng.choice(self._world.nodes)
        full = [partition for partition, queue in node.outbox.items() if queue]
        return bool(full) and node.fail_appends(self._rng.choice(full), unknown=unknown)

    def _queue(self, least: int) -> deque[Entry] | None:
        queues = [q for node in self._world.nodes for q in node.outbox.values() if len(q) >= least]
        return self._rng.choice(queues) if queues else None

    def _blame(self, record: Record) -> None:
        self._world.checkers.damaged.add((record.session, record.epoch))

    def _partition(self) -> tuple[Partition, PartitionLog]:
        number = Partition(self._rng.randrange(len(self._log.partitions)))
        return number, self._log.partitions[number]

    def _junk_record(self, session: SessionId, partition: Partition) -> Record:
        log = self._log.partitions[partition]
        writer = Writer(self._rng.randbytes(16))
        known = self._world.checkers.references[partition].known.get(session)
        epoch = Epoch(self._rng.choice((1, log.end + 1, known.claim.epoch if known else 2)))
        claim = Claim(
            session,
            Epoch(log.end + self._rng.randint(2, 9)),
            writer,
            Nonce(self._rng.randbytes(16)),
            NodeId("x"),
            self._rng.choice(IDENTITIES),
            CONTEXTS[0],
        )
        truncate = Truncate(session, epoch, writer, Seq(0), Position(0))
        delta = Delta(
            session,
            epoch,
            writer,
            Seq(1),
            Shard(0),
            Position(0),
            (1,),
            CONTEXTS[0],
            Codec.RAW,
            checksum(b"junk"),
        )
        snapshot = Snapshot(
            claim,
            Seq(1),
            1,
            (Position(0),) * claim.identity.shards,
            Offset(0),
            "file:///nowhere",
            CONTEXTS[0],
        )
        return self._rng.choice((claim, truncate, delta, snapshot))
