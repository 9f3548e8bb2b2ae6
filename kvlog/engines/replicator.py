"""The engine's adapter to its daemon: turns, rows out, rows in; generation never waits for it and never fails by it.

One thread connects, connects again (bounded backoff), and opens turns anew that lost their link or were refused for a
passing reason: a request that began without a daemon is logged from its first row as soon as there is one, because its
rows are still in the engine's own cache. What the engine calls on its step (`after_step`) copies rows into the ring and
counts; a full ring, a dead daemon and a fenced turn all mean that it copies less.

`open_turn`, `TurnHandle.load_into` and `close_turn` may take a bounded time and belong on a request's own thread; an
engine that has no such thread begins with `begin_turn`, which does not wait.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.engines.engine_link import EngineLink
from kvlog.engines.step_pace import StepPace
from kvlog.engines.stepwrite import StepBudget, rows_behind
from kvlog.engines.turn_state import Closed, Logged, TurnState, Unlogged, may_write_later
from kvlog.engines.turns import LoadCounts, PendingTurn, TurnHandle
from kvlog.errors import ConfigError, LinkClosed, LocalProtocolError
from kvlog.ids import NO_EPOCH, Position
from kvlog.link.client import ClientOptions, LinkClient, connect
from kvlog.link.messages import (
    ONLY_RANK,
    PROTOCOL,
    Acked,
    CloseTurn,
    Forget,
    Hello,
    Release,
    TurnFenced,
    TurnOpened,
    UnloggedReason,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvlog.engines.base import RowCache
    from kvlog.engines.stepwrite import RowSource
    from kvlog.engines.turn_state import TurnRequest
    from kvlog.ids import Epoch, SessionId
    from kvlog.layout import Identity
    from kvlog.link.client import Answer, LinkEvent
    from kvlog.link.messages import EngineRank

__all__ = ["ReplicationCounts", "Replicator", "ReplicatorOptions"]

_SHORT_LIFE_SECONDS = 1.0
"""A link that lived for less does not reset the backoff: a daemon that dies at each welcome is not called in a loop."""

_IDLE_SECONDS = 0.25
"""The replicator's thread looks at its turns at least so often; it is woken for everything that matters."""

_JOIN_SECONDS = 5.0
"""A link's threads end in milliseconds once its socket is shut; this is for a machine that stands still."""

_RING_POLL_SECONDS = 0.002
"""A reader does not ring back, so who waits for room looks again: a few entries' time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicatorOptions:
    """How one engine process talks to its daemon.

    Args:
        socket: the daemon's unix socket.
        engine: kind and version, for people.
        step_bytes: rows that one step writes at most; what is behind that catches up over several steps.
        step_seconds: processor time that one step's rows may take, beside one row of each turn; see StepPace.
        close_bytes: rows that `close_turn` writes at a time, holding the ring's lock against the step.
        close_seconds: how long a finished request's cache is held to write what is behind.
        answer_seconds: what a daemon may take to answer beyond the time it was given for the claim.
        backoff_seconds_min: the first pause between two attempts to connect; doubled each time.
        backoff_seconds_max: the longest one.
        client: deadlines of the link.
    """

    socket: Path
    engine: str = "kvlog"
    step_bytes: int = 8 << 20
    step_seconds: float = 0.002
    close_bytes: int = 1 << 20
    close_seconds: float = 2.0
    answer_seconds: float = 1.0
    backoff_seconds_min: float = 0.05
    backoff_seconds_max: float = 2.0
    client: ClientOptions = field(default_factory=ClientOptions)


@dataclass(slots=True)
class ReplicationCounts:
    """What a replicator has done since its start.

    `hook`: seconds in `after_step`. `turns_cut`: closed with rows that the ring had not taken. `failures`: errors that
    nobody foresaw; each ended a link, or an attempt to connect. `refusal`: the last reason why there is no link.
    """

    steps: int = 0
    rows: int = 0
    bytes: int = 0
    ring_full: int = 0
    hook_seconds: float = 0.0
    hook_seconds_max: float = 0.0
    turns_opened: int = 0
    turns_reopened: int = 0
    turns_fenced: int = 0
    turns_cut: int = 0
    connects: int = 0
    failures: int = 0
    refusal: str = ""


class Replicator:
    """Replicates the caches of one engine process (one shard) through its daemon.

    Args:
        options: how it talks to the daemon.
        identity: what the cache's bytes are.
        rank: which of the engine's processes this is. Where all have the same rows (one shard for several ranks), the
            first one writes them, and the others only read.
    """

    def __init__(self, options: ReplicatorOptions, identity: Identity, rank: EngineRank = ONLY_RANK) -> None:
        self._options = options
        self._hello = Hello(PROTOCOL, options.engine, os.getpid(), identity, rank)
        self._shard = self._hello.shard
        self._row_bytes = identity.layout.row_bytes
        self._link: EngineLink | None = None
        self._live: set[TurnState] = set()
        self._wake = threading.Event()
        self._linked = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._supervise, name="kvlog-replicator", daemon=True)
        self._step = 0
        self._pace = StepPace(options.step_seconds, options.step_bytes)
        self.counts = ReplicationCounts()
        self.loads = LoadCounts()

    @property
    def connected(self) -> bool:
        """There is a daemon now."""
        return self._link is not None

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of this engine's layout."""
        return self._row_bytes

    @property
    def close_seconds(self) -> float:
        """How long a finished request's cache may be held to write what is behind."""
        return self._options.close_seconds

    def start(self) -> None:
        """Start the thread; returns at once."""
        self._thread.start()

    def wait_connected(self, timeout_seconds: float) -> bool:
        """Wait for a daemon, at most so long. Returns: whether there is one."""
        return self._linked.wait(timeout_seconds)

    def close(self) -> None:
        """Leave the daemon once it has what was sent, or after `close_seconds`; open turns end there with the link."""
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(self._options.client.connect_seconds + self.close_seconds + _JOIN_SECONDS)

    def open_turn(self, request: TurnRequest, tokens: Sequence[int]) -> TurnHandle:
        """Ask for a turn and wait for the answer, `wait_seconds` and `answer_seconds`; never raises.

        Args:
            request: whose turn, and how.
            tokens: all ids known so far; a list that the engine appends to is welcome, it is read again when the turn
                has to be opened anew.

        Returns: a handle, logged or not; see its `reason`.
        """
        turn = self._begin(request, tokens, NO_EPOCH)
        turn.wait_answer(request.wait_seconds + self._options.answer_seconds)
        turn.unanswered(time.monotonic())
        return TurnHandle(turn, self.row_bytes, self.loads)

    def begin_turn(
        self, request: TurnRequest, tokens: Sequence[int], *, continues: Epoch = NO_EPOCH
    ) -> PendingTurn:
        """Ask for a turn and return at once; never raises. Its answer, or the lack of one, is asked for.

        Args:
            request: whose turn, and how.
            tokens: as in `open_turn`.
            continues: the epoch under which an earlier turn of the same request was logged: a session that somebody
                else has taken since is not claimed back.
        """
        return PendingTurn(self._begin(request, tokens, continues), self.row_bytes, self.loads)

    def after_step(self, active: Sequence[tuple[TurnHandle, RowCache, Sequence[int]]]) -> None:
        """Write the rows that all these turns' caches have beyond their cursors, as one ring entry.

        Never waits and never raises: whatever goes wrong with the rows is counted, and ends the link instead of a step.

        Args:
            active: handle, cache and ids so far of every request in the step; ids at least as many as rows.
        """
        started = time.perf_counter()
        self._step += 1
        try:
            self._copy_step(active)
        except Exception as error:  # noqa: BLE001  # the adapter's top: generation never fails by it
            self._failed(error)
        seconds = time.perf_counter() - started
        counts = self.counts
        counts.steps += 1
        counts.hook_seconds += seconds
        counts.hook_seconds_max = max(counts.hook_seconds_max, seconds)

    def close_turn(
        self,
        handle: TurnHandle,
        cache: RowCache,
        tokens: Sequence[int],
        *,
        until: float | None = None,
        forget: bool = False,
    ) -> None:
        """Write what is behind the cursor as long as there is time, then end the turn; the cache is free after it.

        A turn that was logged before and has lost its link waits for the next one within the same time. What was not
        written in time is not in the log: a shorter prefix, counted.

        Args:
            handle: whose turn.
            cache: its rows.
            tokens: its ids, at least as many as rows.
            until: monotonic seconds; in the past: end at the cursor, without waiting. None: `close_seconds` from now.
            forget: the session ends with its turn, also where that opens later only: nobody can name it. Another
                node's session is left alone.
        """
        turn = handle.turn
        turn.forget_when_opened = forget
        turn.follow(tokens)
        try:
            self._drain(turn, cache, time.monotonic() + self.close_seconds if until is None else until)
        except Exception as error:  # noqa: BLE001  # the adapter's top: the turn must be closed whatever happens
            self._failed(error)
        handle.release()
        self._live.discard(turn)
        logged = turn.close()
        if logged is not None:
            self.counts.turns_cut += rows_behind((logged.cursor, cache, tokens)) > 0
            logged.link.turns.pop(logged.cursor.turn, None)
            logged.link.client.send(CloseTurn(logged.cursor.turn, Position(logged.cursor.position)))
        if forget and handle.was_logged and not handle.fenced.is_set():
            self.forget(turn.request.session)

    def forget(self, session: SessionId) -> None:
        """End a session everywhere, if there is a daemon to tell; else it ends by its time to live."""
        link = self._link
        if link is not None:
            link.client.send(Forget(session))

    def _begin(self, request: TurnRequest, tokens: Sequence[int], continues: Epoch) -> TurnState:
        turn = TurnState(request, tokens, only_reads=self._hello.only_reads)
        turn.epoch = continues
        self._live.add(turn)
        link = self._link
        if link is not None:
            self._ask(link, turn)
        return turn

    def _copy_step(self, active: Sequence[tuple[TurnHandle, RowCache, Sequence[int]]]) -> None:
        link = self._link
        sources = []
        for handle, cache, tokens in active:
            phase = handle.turn.follow(tokens)
            if isinstance(phase, Logged) and phase.link is link:
                sources.append((phase.cursor, cache, tokens))
        if link is not None:
            began = time.thread_time()
            rows = self._write(link, sources, self._pace.bytes_now)
            self._pace.took(rows * self._row_bytes, time.thread_time() - began)

    def _failed(self, error: Exception) -> None:
        """An error that no one foresaw: count it, and begin anew with another link."""
        self.counts.failures += 1
        self.counts.refusal = f"{type(error).__name__}: {error}"
        link = self._link
        if link is not None:
            link.client.close(self.counts.refusal)

    def _write(self, link: EngineLink, sources: Sequence[RowSource], step_bytes: int) -> int:
        budget = StepBudget(step_bytes, self._step)
        written = link.write(sources, self._row_bytes, self._shard, budget)
        counts = self.counts
        counts.rows += written.rows
        counts.bytes += written.rows * self._row_bytes
        counts.ring_full += written.full
        return written.rows

    def _drain(self, turn: TurnState, cache: RowCache, deadline: float) -> None:
        """Write a finished request's last rows."""
        while time.monotonic() < deadline:
            phase = turn.phase
            left = deadline - time.monotonic()
            if isinstance(phase, Logged):
                source = (phase.cursor, cache, turn.tokens)
                if not rows_behind(source):
                    return
                if not self._write(phase.link, [source], self._options.close_bytes):
                    turn.wait_while(phase, min(_RING_POLL_SECONDS, left))
            elif may_write_later(turn, phase):
                turn.wait_while(phase, left)
            else:
                return

    # The replicator's thread, and what the link's reader calls.

    def _supervise(self) -> None:
        backoff = self._options.backoff_seconds_min
        while not self._stopping:
            try:
                lived = self._attempt()
            except Exception as error:  # noqa: BLE001  # the thread's top: an engine must not stay unlogged for good
                self._failed(error)
                lived = False
            if lived:
                backoff = self._options.backoff_seconds_min
            self._pause(backoff)
            if not lived:
                backoff = min(2 * backoff, self._options.backoff_seconds_max)

    def _attempt(self) -> bool:
        """Connect, and serve until the link has ended. Returns: whether it lived long enough to believe in the next."""
        link = self._connect()
        if link is None:
            return False
        began = time.monotonic()
        self._serve(link)
        return time.monotonic() - began >= _SHORT_LIFE_SECONDS

    def _pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._stopping and (left := deadline - time.monotonic()) > 0:
            self._wake.wait(left)
            self._wake.clear()

    def _connect(self) -> EngineLink | None:
        options = self._options
        try:
            link = EngineLink.open(connect(options.socket, self._hello, options.client))
        except (LinkClosed, ConfigError) as error:
            self.counts.refusal = str(error)
            return None
        try:
            link.client.start(self)
        except RuntimeError:
            link.close()
            raise
        self.counts.refusal = ""
        self.counts.connects += 1
        return link

    def _serve(self, link: EngineLink) -> None:
        """Look after the turns until the link has ended."""
        self._link = link
        self._linked.set()
        try:
            while not self._stopping and not link.client.closed:
                self._open_anew(link)
                self._wake.wait(_IDLE_SECONDS)
                self._wake.clear()
        finally:
            self._leave(link)

    def _leave(self, link: EngineLink) -> None:
        """Give a link up, and tell its turns."""
        if self._stopping:
            link.client.leave(self.close_seconds)
        else:
            link.client.close()
        link.client.join(
            _JOIN_SECONDS
        )  # an answer that is being read now would open a turn on a dead link for good
        self._link = None
        self._linked.clear()
        now = time.monotonic()
        for turn in tuple(self._live):
            turn.link_lost(link, now)
        link.close()

    def _open_anew(self, link: EngineLink) -> None:
        now = time.monotonic()
        for turn in tuple(self._live):
            turn.unanswered(now)
            if isinstance(turn.phase, Unlogged) and link.client.has_room:
                self._ask(link, turn)

    def _ask(self, link: EngineLink, turn: TurnState) -> None:
        """Ask for a turn if it is time to."""
        now = time.monotonic()
        patience = turn.wait_seconds + self._options.answer_seconds
        attempt = turn.begin(now, now + patience)
        if attempt is None:
            return
        if len(turn.tokens) > self._options.client.limits.session_tokens:
            turn.refuse(UnloggedReason.NOT_SUPPORTED, now)
            return
        try:
            link.client.ask(turn.message, lambda answer: self._answered(link, turn, attempt, answer))
        except LocalProtocolError:  # a session's id or length that cannot be said
            turn.refuse(UnloggedReason.NOT_SUPPORTED, now)

    def _answered(self, link: EngineLink, turn: TurnState, attempt: int, answer: Answer | LinkClosed) -> bool:
        wanted = turn.answered(attempt, link, answer, time.monotonic())
        if wanted and isinstance(answer, TurnOpened):
            link.turns[answer.turn] = turn
            if isinstance(
                turn.phase, Closed
            ):  # by its request, since the answer was taken: nobody else pops it
                link.turns.pop(answer.turn, None)
            self.counts.turns_opened += 1
            if (
                turn.attach is None or turn.attach.opened is not answer
            ):  # it goes on without: its cache has rows already
                self.counts.turns_reopened += 1
                link.client.send(Release(answer.turn))
        elif turn.forget_when_opened and isinstance(answer, TurnOpened):  # its CloseTurn follows
            link.client.send(Forget(turn.request.session))
        self.counts.turns_fenced += wanted and turn.fenced.is_set()
        return wanted

    def link_event(self, client: LinkClient, event: LinkEvent) -> None:
        """LinkEvents: called on the link's reader thread."""
        link = self._link
        if link is None or link.client is not client:
            return
        turn = link.turns.get(event.turn)
        if turn is not None:
            if not isinstance(event, Acked):  # the daemon has no such turn any more
                link.turns.pop(event.turn, None)
            turn.link_event(link, event, time.monotonic())
            self.counts.turns_fenced += isinstance(event, TurnFenced)
            self._wake.set()

    def link_closed(self, client: LinkClient, cause: LinkClosed) -> None:
        """LinkEvents: called on the link's reader thread."""
        link = self._link
        if link is not None and link.client is client:
            self.counts.refusal = str(cause)
        self._wake.set()
