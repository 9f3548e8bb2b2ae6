"""The model engine of a node: requests that attach, recompute, sample, and hand their new rows to the daemon's ring.

Two nodes that compute the same position sample different tokens, and rows say who computed them: the worst case that
the daemons must keep apart.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from kvlog.checksums import checksum
from kvlog.core.effects import (
    TurnAcknowledged,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import CloseTurn, EncodedRows, OpenTurn, WithdrawRequest
from kvlog.ids import NO_EPOCH, Epoch, Position, Shard
from kvlog.limits import TINY
from kvlog.records import Codec
from tests.sim.buffer import BLOCK
from tests.sim.faults import Fault
from tests.sim.rows import CONTEXTS, IDENTITIES, lineage_next, lineage_start, row

if TYPE_CHECKING:
    from random import Random

    from kvlog.core.inputs import Input
    from kvlog.ids import SessionId, Turn
    from tests.sim.buffer import Buffer, Pin
    from tests.sim.faults import Profile

ALPHABET = 3
"""Few tokens, so that histories which differ agree at many positions."""
RING_ENTRIES = 16
OPENED_AGAIN_MAX = 5

FOR_GOOD = (UnloggedReason.STOPPING, UnloggedReason.TOO_LONG)
"""Answers after which a request does not ask again."""

Answer = TurnOpened | TurnUnlogged | TurnAcknowledged | TurnFenced | TurnEnded


class Phase(StrEnum):
    """Where a request stands with its daemon."""

    WAITING = "waiting"
    ATTACHING = "attaching"
    RUNNING = "running"
    UNLOGGED = "unlogged"
    DONE = "done"


@dataclass(slots=True, eq=False)
class Conversation:
    """What a user has seen, and the request that answers now."""

    session: SessionId
    seen: list[int] = field(default_factory=list)
    target: int = 0
    context: int = 0
    home: int = 0
    live: Request | None = None


@dataclass(slots=True, eq=False)
class Request:
    """One request on one engine."""

    number: int
    session: SessionId
    tokens: list[int]
    target: int
    identity: int
    context: int
    conversation: Conversation | None = None
    ids_only: bool = False
    phase: Phase = Phase.UNLOGGED
    may_open: bool = True
    rows: list[list[bytes]] = field(default_factory=list)
    lineage: list[int] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    ask: int = 0
    turn: Turn | None = None
    epoch: Epoch = NO_EPOCH
    pin: Pin | None = None
    attach_to: int = 0
    opened_again: int = 0

    @property
    def made_under(self) -> int:
        return self.identity * 16 + self.context

    @property
    def held(self) -> int:
        """Positions whose rows it has."""
        return len(self.rows[0])

    def lineage_at(self, position: int) -> int:
        while len(self.lineage) <= position:
            at = len(self.lineage)
            before = self.lineage[-1] if at else lineage_start(self.session, self.identity, self.context)
            self.lineage.append(lineage_next(before, self.tokens[at]))
        return self.lineage[position]

    def forget_rows(self) -> None:
        """The engine's cache of this request is gone."""
        self.rows = [[] for _ in range(IDENTITIES[self.identity].shards)]


class Daemon(Protocol):
    """What the engine needs of its node."""

    rng: Random
    profile: Profile

    @property
    def buffer(self) -> Buffer: ...

    @property
    def now_ns(self) -> int: ...

    @property
    def alive(self) -> bool: ...

    def feed(self, happened: Input) -> None: ...

    def attached(self, request: Request, shard: int, position: int, found: bytes | None) -> None: ...


class Engine:
    """All requests of one node."""

    def __init__(self, daemon: Daemon) -> None:
        self._daemon = daemon
        self._rng = daemon.rng
        self.identity = 0
        self.requests: list[Request] = []
        self.ring: deque[tuple[SessionId, EncodedRows]] = deque()
        self.asks: dict[int, Request] = {}
        self.turns: dict[Turn, Request] = {}
        self.ring_held = 0
        """So many times at most the ring is not read, until the daemon has opened a turn of the first row's number."""
        self._asked = 0

    def begin(self, request: Request) -> None:
        """A client's request arrives."""
        request.forget_rows()
        self.requests.append(request)
        self.open(request)

    def open(self, request: Request) -> None:
        """Ask the daemon for a turn, if there is one."""
        if not self._daemon.alive:
            return
        self._asked += 1
        request.ask = self._asked
        request.phase = Phase.WAITING
        self.asks[request.ask] = request
        patience = self._rng.choice((10, 1000)) * 1_000_000
        self._daemon.feed(
            OpenTurn(
                request=request.ask,
                session=request.session,
                tokens=tuple(request.tokens),
                context=CONTEXTS[request.context],
                identity=IDENTITIES[request.identity],
                continues=request.epoch,
                deadline_ns=self._daemon.now_ns + patience,
            )
        )

    def answer(self, effect: Answer) -> None:
        """The daemon says something of a turn."""
        match effect:
            case TurnOpened():
                self._opened(effect)
            case TurnUnlogged():
                request = self.asks.pop(effect.request)
                request.phase = Phase.UNLOGGED
                fenced = effect.reason is UnloggedReason.FENCED
                if fenced and request.epoch:
                    self._over(request)
                request.may_open = not fenced and effect.reason not in FOR_GOOD
            case TurnFenced():
                fenced_request = self.turns.pop(effect.turn, None)
                if fenced_request is not None:
                    self._over(fenced_request)
            case TurnEnded():
                ended = self.turns.pop(effect.turn, None)
                if ended is not None:
                    self._without_turn(ended)
            case TurnAcknowledged():
                pass

    def step(self, request: Request) -> None:
        """One step of the engine for one request."""
        match request.phase:
            case Phase.WAITING:
                if self._rng.random() < 0.2:
                    self._compute(request)
            case Phase.ATTACHING:
                self._attach(request)
            case Phase.RUNNING:
                for _ in range(self._rng.randint(1, 4)):
                    self._compute(request)
                self._push(request)
                self._maybe_finish(request)
            case Phase.UNLOGGED:
                if request.may_open and self._opens_again(request):
                    self.open(request)
                    return
                self._compute(request)
                self._maybe_finish(request)
            case Phase.DONE:
                pass

    def preempt(self, request: Request) -> None:
        """The scheduler takes the request's blocks; it resumes as a new turn."""
        if request.phase not in (Phase.RUNNING, Phase.ATTACHING):
            return
        self._close(request)
        request.forget_rows()
        self._without_turn(request)

    def abort(self, request: Request) -> None:
        """The request is over, wherever it stands."""
        if request.phase is Phase.WAITING:
            del self.asks[request.ask]
            self._daemon.feed(WithdrawRequest(request.session, request.ask))
        self._close(request)
        self._over(request)

    def load_weights(self, identity: int) -> None:
        """Other weights: rows of the older ones stay out of the log for good."""
        for request in list(self.requests):
            if request.phase is Phase.WAITING:
                del self.asks[request.ask]
                self._daemon.feed(WithdrawRequest(request.session, request.ask))
            self._close(request)
            self._without_turn(request)
            request.may_open = False
        self.identity = identity

    def daemon_lost(self, *, ring_survives: bool) -> None:
        """The daemon died: turns are void, so is an attach in progress; rows may stay in the old ring."""
        self.asks.clear()
        self.turns.clear()
        if ring_survives:
            self.ring_held = self._rng.choice((0, 10, 20))
        else:
            self.ring.clear()
        for request in self.requests:
            if request.phase is Phase.ATTACHING:
                request.forget_rows()
            request.pin = None
            self._without_turn(request)

    def is_ring_held(self) -> bool:
        """Whether an old ring's rows still wait for a new daemon to come to their turn's number."""
        if not self.ring_held or not self.ring or self.ring[0][1].turn in self.turns:
            self.ring_held = 0
            return False
        self.ring_held -= 1
        return True

    def _opens_again(self, request: Request) -> bool:
        """At the end of a run at once, though not for ever: it may be busy behind one that waits for its deadline."""
        if self._daemon.profile.calm:
            request.opened_again += 1
            return request.opened_again <= OPENED_AGAIN_MAX
        return self._rng.random() < 0.3

    def _opened(self, effect: TurnOpened) -> None:
        request = self.asks.pop(effect.request)
        request.turn, request.epoch = effect.turn, effect.epoch
        self.turns[effect.turn] = request
        shards = len(request.rows)
        request.sent = [effect.log_from] * shards
        present = self._daemon.buffer.present(request.session, shards)
        request.attach_to = min(effect.usable, present)
        request.phase = Phase.RUNNING
        if request.attach_to > request.held:
            request.pin = self._daemon.buffer.pin(request.session, request.attach_to, shards)
            request.phase = Phase.ATTACHING

    def _attach(self, request: Request) -> None:
        pin = request.pin
        assert pin is not None, "attaching needs a pin"
        first = request.held
        for position in range(first, min(request.attach_to, first + BLOCK)):
            for shard, rows in enumerate(request.rows):
                found = pin.blocks[shard][position // BLOCK].rows[position % BLOCK]
                self._daemon.attached(request, shard, position, found)
                rows.append(found or b"")
        if request.held >= request.attach_to:
            self._daemon.buffer.release(pin)
            request.pin = None
            request.phase = Phase.RUNNING

    def _compute(self, request: Request) -> None:
        missing = len(request.tokens) - request.held
        if missing > 0:
            first = request.held
            for position in range(first, first + min(missing, self._rng.randint(1, 12))):
                lineage = request.lineage_at(position)
                for shard, rows in enumerate(request.rows):
                    rows.append(
                        row(lineage, request.number, position, shard=shard, made_under=request.made_under)
                    )
        elif len(request.tokens) < request.target:
            token = self._rng.randrange(ALPHABET)
            request.tokens.append(token)
            if request.conversation is not None:
                request.conversation.seen.append(token)

    def _push(self, request: Request) -> None:
        """Hand rows to the ring; what finds no room is sent at a later step, from the cache."""
        if self._daemon.profile.hit(Fault.RING_BEHIND, self._rng):
            return
        for shard in self._rng.sample(range(len(request.rows)), len(request.rows)):
            start = request.sent[shard]
            end = min(request.held, start + TINY.delta_tokens - self._rng.choice((0, 0, 1, 2)))
            if start >= end or len(self.ring) >= RING_ENTRIES or request.turn is None:
                continue
            payload = b"" if request.ids_only else b"".join(request.rows[shard][start:end])
            self.ring.append(
                (
                    request.session,
                    EncodedRows(
                        turn=request.turn,
                        epoch=request.epoch,
                        shard=Shard(shard),
                        start=Position(start),
                        tokens=tuple(request.tokens[start:end]),
                        codec=Codec.IDS if request.ids_only else Codec.RAW,
                        payload=memoryview(payload),
                        payload_checksum=checksum(payload),
                    ),
                )
            )
            request.sent[shard] = end

    def _maybe_finish(self, request: Request) -> None:
        if len(request.tokens) < request.target or request.held < len(request.tokens):
            return
        if request.phase is Phase.RUNNING:
            if min(request.sent) < request.held:
                return
            waiting = any(rows.turn == request.turn for _, rows in self.ring)
            if waiting and (self._daemon.profile.calm or self._rng.random() < 0.8):
                return
        self._close(request)
        self._over(request)

    def _close(self, request: Request) -> None:
        if request.turn is not None:
            self.turns.pop(request.turn, None)
            self._daemon.feed(CloseTurn(request.turn))
        self._unpin(request)

    def _without_turn(self, request: Request) -> None:
        self._unpin(request)
        request.turn = None
        request.phase = Phase.UNLOGGED

    def _over(self, request: Request) -> None:
        self._unpin(request)
        request.turn = None
        request.phase = Phase.DONE
        if request in self.requests:
            self.requests.remove(request)
        conversation = request.conversation
        if conversation is not None and conversation.live is request:
            conversation.live = None

    def _unpin(self, request: Request) -> None:
        if request.pin is not None:
            self._daemon.buffer.release(request.pin)
            request.pin = None
