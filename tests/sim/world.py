"""One simulated run: three nodes, two or more sessions, a log, users, and everything that can go wrong.

Here is what happens by itself: nodes read, compute, append and are asked. Faults are in `tests.sim.mishaps`, the order
of it all in `tests.sim.schedule`.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from kvlog.ids import Offset, Partition
from tests.sim.checkers import Checkers
from tests.sim.engine import ALPHABET, Conversation, Request
from tests.sim.faults import Fault
from tests.sim.modellog import ModelLog, damage_for
from tests.sim.rows import CONTEXTS, session_id
from tests.sim.shell import Shell, Surroundings

if TYPE_CHECKING:
    from collections.abc import Callable
    from random import Random

    from kvlog.records import Entry
    from tests.sim.faults import Profile

NODES = 3
SESSIONS = 5


class World:
    """A run."""

    def __init__(self, rng: Random, profile: Profile) -> None:
        self.rng = rng
        self.profile = profile
        partitions = self.rng.choice((1, 2, 2))
        self.log = ModelLog(partitions)
        self.checkers = Checkers(self.log)
        ids = [session_id(number) for number in range(SESSIONS)]
        self.around = Surroundings(
            rng=self.rng,
            log=self.log,
            profile=self.profile,
            watcher=self.checkers,
            partition_of={session: Partition(n % partitions) for n, session in enumerate(ids)},
        )
        self.conversations = [Conversation(session) for session in ids]
        self.busy = self.rng.choice((1, 2, SESSIONS))
        """How many sessions most requests go to."""
        self.tokens_max = self.rng.choice((40, 40, 40, 80))
        """About the longest request; below or above limits.TINY.session_tokens."""
        self.nodes = [Shell(self.around, index) for index in range(NODES)]
        self.requests = 0
        self.held_up: dict[tuple[int, Partition], int] = {}
        for node in self.nodes:
            for partition in range(partitions):
                node.follow(Partition(partition), Offset(0))

    def ordinary(self) -> list[tuple[float, Callable[[], None]]]:
        """What happens in a run without faults: weights, and actions that do nothing where there is nothing to do."""
        return [
            (24, self.read),
            (9, self.take_ring),
            (15, self.run_engine),
            (4, self.run_rewriter),
            (12, self.send),
            (4, self.tell_failure),
            (6, self.watermark),
            (8, self.user),
            (2, self.restart),
            (2, self.resume),
            (1, self.land_late),
        ]

    # Ordinary things

    def read(self) -> None:
        """A reader reads a few messages of one partition."""
        behind = [
            (node, partition)
            for node in self.nodes
            if node.core is not None and not node.paused
            for partition, core in node.core.partitions.items()
            if core.position != self.log.partitions[partition].end
        ]
        if not behind:
            return
        node, partition = self.rng.choice(behind)
        if node.pace < 1.0 and self.rng.random() > node.pace:
            return
        for _ in range(self.rng.choice((1, 2, 4, 12))):
            if node.core is None or not node.read(partition):
                return

    def take_ring(self) -> None:
        """A daemon takes rows out of its ring."""
        node = self._working(lambda node: bool(node.engine.ring))
        if node is None or node.engine.is_ring_held():
            return
        for _ in range(self.rng.randint(1, 6)):
            node.take_rows()

    def run_engine(self) -> None:
        """An engine computes: one step for each of its requests."""
        node = self._working(lambda node: bool(node.engine.requests))
        if node is not None:
            for request in list(node.engine.requests):
                node.engine.step(request)

    def run_rewriter(self) -> None:
        """A rewrite logs a few rows more."""
        node = self._working(lambda node: node.rewriter.work is not None)
        if node is not None:
            node.rewriter.step()

    def send(self) -> None:
        """A daemon's appends land, a few of one partition; those of a paused one too, they are on their way."""
        full = [
            (number, partition, node)
            for number, node in enumerate(self.nodes)
            for partition, queue in node.outbox.items()
            if queue
        ]
        if not full:
            return
        number, partition, node = self.rng.choice(full)
        held_up = self.held_up.get((number, partition), 0)
        if held_up:
            self.held_up[number, partition] = held_up - 1
            return
        if self.profile.hit(Fault.APPEND_DELAYED, self.rng):
            self.held_up[number, partition] = self.rng.randint(1, 6)
            return
        for _ in range(self.rng.randint(1, 8)):
            entry = node.land_next(partition)
            if entry is not None:
                self.land(partition, entry)

    def tell_failure(self) -> None:
        """A daemon learns of a failed append."""
        node = self._working(lambda node: bool(node.failures))
        if node is not None:
            node.tell_failure()

    def watermark(self) -> None:
        """A watermark read gets on."""
        node = self._working(lambda node: bool(node.watermarks))
        if node is not None:
            node.watermark(calm=self.profile.calm)

    def user(self) -> None:
        """A user goes on with a conversation, or a router moves an answer whose node is gone."""
        conversation = self._conversation()
        if conversation.live is not None:
            return
        if len(conversation.seen) >= conversation.target:
            self._next_prompt(conversation)
            if self.rng.random() < 0.6:  # a router keeps a session where its cache is
                self.ask(self.nodes[conversation.home], conversation)
                return
        self.ask(self.rng.choice(self.nodes), conversation)

    def ask(self, node: Shell, conversation: Conversation) -> None:
        """Send what the user has seen to a node."""
        conversation.home = self.nodes.index(node)
        request = self.request(node, conversation, list(conversation.seen))
        request.conversation, conversation.live = conversation, request
        node.engine.begin(request)

    def request(self, node: Shell, conversation: Conversation, tokens: list[int]) -> Request:
        """A request for a conversation on a node."""
        self.requests += 1
        return Request(
            number=self.requests,
            session=conversation.session,
            tokens=tokens,
            target=max(conversation.target, len(tokens) + 1),
            identity=node.engine.identity,
            context=conversation.context,
            ids_only=self.rng.random() < 0.1,
        )

    def restart(self) -> None:
        """A daemon that is dead, or has stopped and sent all, is started again, and reads from anywhere."""
        for node in self.nodes:
            if node.is_stopping and not any(node.outbox.values()):
                node.crash()
            if node.core is None:
                node.boot()
                cold = self.profile.hit(Fault.COLD_START, self.rng)
                for number, log in enumerate(self.log.partitions):
                    first = self.rng.randint(log.log_start, log.end) if cold else log.log_start
                    if not cold or self.rng.random() < 0.8:
                        node.follow(Partition(number), Offset(first))
                return

    def resume(self) -> None:
        """A paused node goes on, and believes that no time has passed."""
        for node in self.nodes:
            node.paused = False

    def land_late(self) -> None:
        """An append that was given up lands after all."""
        if not self.around.late:
            return
        queue = self.rng.choice(self.around.late)
        partition, entry = queue.popleft()
        if not queue:
            self.around.late.remove(queue)
        if not self.profile.calm:
            self.profile.count(Fault.LANDED_LATE)
        self.land(partition, entry)

    def land(self, partition: Partition, entry: Entry) -> None:
        """The log takes a message."""
        damage = None
        if self.profile.hit(Fault.DAMAGE_AT_REST, self.rng):
            damage = damage_for(entry, self.rng)
            self.checkers.damaged.add((entry.record.session, entry.record.epoch))
        offset = self.log.partitions[partition].end
        self.checkers.landed(partition, offset, self.log.append(partition, entry, damage))
        if self.profile.hit(Fault.DUPLICATE, self.rng):
            self.around.late.append(deque([(partition, entry)]))

    # Private

    def _working(self, has_work: Callable[[Shell], bool]) -> Shell | None:
        ready = [node for node in self.nodes if node.alive and not node.paused and has_work(node)]
        return self.rng.choice(ready) if ready else None

    def _conversation(self) -> Conversation:
        among = self.busy if self.rng.random() < 0.8 else SESSIONS
        return self.conversations[self.rng.randrange(among)]

    def _next_prompt(self, conversation: Conversation) -> None:
        seen = conversation.seen
        if len(seen) > self.tokens_max - 14 or self.rng.random() < 0.3:
            del seen[self.rng.randint(0, len(seen)) // 2 :]
        seen += [self.rng.randrange(ALPHABET) for _ in range(self.rng.randint(1, 6))]
        conversation.target = len(seen) + self.rng.randint(1, 8)
        if self.profile.hit(Fault.CONTEXT, self.rng):
            conversation.context = self.rng.randrange(len(CONTEXTS))
