"""What one request's turn is at this moment: asked for, logged, or unlogged for a reason; no I/O, time is passed in.

    ┌──────────┐ begin   ┌────────┐ TurnOpened ┌────────┐
    │ Unlogged │────────▶│ Asking │───────────▶│ Logged │
    └──────────┘         └────────┘            └────────┘
         ▲   TurnUnlogged, no answer, link lost     │
         └──────────────────────────────────────────┘   link lost, TurnEnded, TurnFenced
    any ── close ──▶ Closed

A reason that may pass (`reason.passes`) is followed by `begin` again, later each time; a turn that was fenced never is.
Threads: the engine's, the link's reader and the replicator's own call in; transitions are made under one lock, and the
step reads `phase` without it: a phase object belongs to one link for ever, so a late write goes to a dead ring.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.buffers.ring import session_hash
from kvlog.engines.stepwrite import LogCursor
from kvlog.ids import Epoch, Position
from kvlog.link.messages import (
    DIGEST_NONE,
    Acked,
    EndedReason,
    OpenTurn,
    RequestNumber,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    pack_tokens,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.engines.engine_link import EngineLink
    from kvlog.errors import LinkClosed
    from kvlog.ids import Digest, SessionId
    from kvlog.link.client import Answer, LinkEvent
    from kvlog.modes import SyncMode

__all__ = ["Asking", "Closed", "Logged", "Phase", "TurnRequest", "TurnState", "Unlogged", "may_write_later"]

RETRY_SECONDS_MIN = 0.1
RETRY_SECONDS_MAX = 10.0
"""A daemon that says no for a passing reason is asked again after 0.1, 0.2, 0.4 … 10 s."""

RANK_PAUSE_SECONDS_MAX = 0.5
RANK_WAIT_SECONDS_MAX = 10.0
"""Who misses another rank waits for it twice as long each time, up to 10 s, and pauses for 0.5 s at most: so ranks that
ask out of phase meet, whoever of them came late is found at once, most likely, and a rank that stays away costs a
question with all its token ids every 10 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What a request wants of its turn; the same however often it is asked.

    Args:
        session: whose turn.
        context: LoRA, media, salt.
        mode: None: the daemon's setting.
        wait_seconds: how long the daemon may try to become primary.
        take_over: the answer was begun elsewhere; take the session even from a node that is busy with it.
        group: what all ranks of an engine of several processes say of this turn, and of no other; empty: there is one.
    """

    session: SessionId
    context: Digest = DIGEST_NONE
    mode: SyncMode | None = None
    wait_seconds: float = 1.0
    take_over: bool = False
    group: bytes = b""


@dataclass(frozen=True, slots=True)
class Unlogged:
    """Nothing is logged now. `again_at`: when to ask again, monotonic seconds; infinity: never."""

    reason: UnloggedReason | EndedReason
    again_at: float


@dataclass(frozen=True, slots=True)
class Asking:
    """An OpenTurn is on its way; `reason` is what was before it."""

    attempt: int
    give_up_at: float
    reason: UnloggedReason | EndedReason


@dataclass(frozen=True, slots=True)
class Logged:
    """Rows from `cursor.position` on go to `link`'s ring."""

    link: EngineLink
    cursor: LogCursor
    opened: TurnOpened


@dataclass(frozen=True, slots=True)
class Closed:
    """The request is over."""


Phase = Unlogged | Asking | Logged | Closed


def may_write_later(turn: TurnState, phase: Phase) -> bool:
    """In this phase it is not logged, and may soon be, to write what is behind: it is asked for, or was logged.

    Args:
        turn: whose rows.
        phase: as it was read once; it may be another one by now.
    """
    if turn.only_reads or isinstance(phase, Logged | Closed):
        return False
    return isinstance(phase, Asking) or (turn.epoch > 0 and phase.reason.passes)


class TurnState:
    """One turn's phase, and what outlives a phase.

    Args:
        request: what to ask for.
        tokens: ids so far; the engine's own growing list is taken, and replaced by `follow`.
        only_reads: another rank of the engine writes the turn's rows.

    `forget_when_opened`: if it opens after its end, the session ends with it.
    `watcher`, once it is set, is called at every change, under the lock: it must neither block nor raise nor call back.
    """

    def __init__(self, request: TurnRequest, tokens: Sequence[int], *, only_reads: bool = False) -> None:
        self.request = request
        self.tokens = tokens
        self.only_reads = only_reads
        self.phase: Phase = Unlogged(UnloggedReason.NO_LINK, again_at=0.0)
        self.epoch = Epoch(0)
        self.acked_length = Position(0)
        self.attach: Logged | None = None
        self._may_attach = True
        self.fenced = threading.Event()
        self.forget_when_opened = False
        self._changed = threading.Condition()
        self.watcher: Callable[[], None] | None = None
        self._attempts = 0
        self._refusals = 0
        self._misses = 0

    @property
    def reason(self) -> UnloggedReason | EndedReason | None:
        """Why nothing is logged; None while it is, or after the end."""
        phase = self.phase
        return phase.reason if isinstance(phase, Unlogged | Asking) else None

    @property
    def wait_seconds(self) -> float:
        """How long the daemon may take over the next question; longer than the request said after a missing rank.

        Whoever asks again has begun to be computed: nobody stands still for it.
        """
        wanted = self.request.wait_seconds
        return max(wanted, min(wanted * 2.0 ** min(self._misses, 16), RANK_WAIT_SECONDS_MAX))

    def message(self, number: RequestNumber) -> OpenTurn:
        """The OpenTurn for the tokens so far."""
        asked = self.request
        return OpenTurn(
            request=number,
            session=asked.session,
            tokens=pack_tokens(self.tokens),
            context=asked.context,
            continues=self.epoch,
            mode=asked.mode,
            wait_ms=int(1000 * self.wait_seconds),
            take_over=asked.take_over or self.epoch > 0,
            group=asked.group,
        )

    def begin(self, now: float, give_up_at: float) -> int | None:
        """Start to ask if it is time to. Returns: the attempt's number; None: not now."""
        with self._changed:
            if not isinstance(self.phase, Unlogged) or now < self.phase.again_at:
                return None
            self._attempts += 1
            self.phase = Asking(self._attempts, give_up_at, self.phase.reason)
            return self._attempts

    def answered(self, attempt: int, link: EngineLink, answer: Answer | LinkClosed, now: float) -> bool:
        """Take an answer. Returns: False if nobody waits for this attempt any more.

        When it opened the turn and is not in `attach` afterwards, its blocks are not wanted.
        """
        with self._changed:
            if not isinstance(self.phase, Asking) or self.phase.attempt != attempt:
                return False
            if isinstance(answer, TurnOpened):
                self._open(link, answer)
            elif isinstance(answer, TurnUnlogged):
                self._refuse(answer.reason, now)
            else:
                self.phase = Unlogged(UnloggedReason.NO_LINK, again_at=now)
            self._told()
            return True

    def unanswered(self, now: float) -> None:
        """Stop to wait for an answer whose time is over."""
        with self._changed:
            if isinstance(self.phase, Asking) and now >= self.phase.give_up_at:
                self._refuse(UnloggedReason.NO_ANSWER, now)
                self._told()

    def refuse(self, reason: UnloggedReason, now: float) -> None:
        """It cannot even be asked for."""
        with self._changed:
            if not isinstance(self.phase, Closed):
                self._refuse(reason, now)
                self._told()

    def link_lost(self, link: EngineLink, now: float) -> None:
        """The link that it was logged over has ended."""
        with self._changed:
            if isinstance(self.phase, Logged) and self.phase.link is link:
                self.phase = Unlogged(UnloggedReason.NO_LINK, again_at=now)
                self._told()

    def link_event(self, link: EngineLink, event: LinkEvent, now: float) -> None:
        """The daemon says something of the turn; what is said of an older turn of this request is dropped."""
        with self._changed:
            phase = self.phase
            if not isinstance(phase, Logged) or phase.link is not link or phase.cursor.turn != event.turn:
                return
            match event:
                case Acked():
                    self.acked_length = max(self.acked_length, event.length)
                case TurnFenced():
                    self._fence()
                case TurnEnded():
                    again_at = now if event.reason.passes else float("inf")
                    self.phase = Unlogged(event.reason, again_at)
            self._told()

    def close(self) -> Logged | None:
        """End it for good. Returns: what has to be closed at the daemon, if anything."""
        with self._changed:
            phase, self.phase = self.phase, Closed()
            self._told()
        return phase if isinstance(phase, Logged) else None

    def follow(self, tokens: Sequence[int]) -> Phase:
        """Take the ids so far. Returns: the phase."""
        self.tokens = tokens
        return self.phase

    def settle(self) -> Logged | None:
        """Decide what is attached: what has been opened by now, or, from now on, nothing."""
        with self._changed:
            self._may_attach = False
            return self.attach

    def wait_while(self, phase: Phase, timeout_seconds: float) -> Phase:
        """Wait until the phase is another one, at most so long. Returns: the phase."""
        with self._changed:
            self._changed.wait_for(lambda: self.phase is not phase, timeout_seconds)
            return self.phase

    def wait_answer(self, timeout_seconds: float) -> None:
        """Wait while an answer is due, at most so long."""
        with self._changed:
            self._changed.wait_for(lambda: not isinstance(self.phase, Asking), timeout_seconds)

    def _told(self) -> None:
        self._changed.notify_all()
        watcher = self.watcher
        if watcher is not None:
            watcher()

    def _open(self, link: EngineLink, opened: TurnOpened) -> None:
        self.epoch = max(self.epoch, opened.epoch)
        # Also less than before: what is behind log_from is written anew. Below it may be rows that are still on their
        # way; what is handed out is in the log, and the first new row that is acknowledged speaks for all before it.
        self.acked_length = min(opened.log_from, opened.attach_length)
        self._refusals = self._misses = 0
        hashed = session_hash(self.request.session)
        cursor = LogCursor(opened.turn, opened.epoch, hashed, opened.log_from, self.only_reads)
        self.phase = Logged(link, cursor, opened)
        if self._may_attach:
            self.attach = self.phase

    def _refuse(self, reason: UnloggedReason, now: float) -> None:
        if reason is UnloggedReason.FENCED and self.epoch:
            self._fence()
            return
        if reason is UnloggedReason.RANK_MISSING:
            self._misses += 1
            # Shorter than the daemon waits for the others: so each of them waits most of the time, and they meet.
            pause = min(RETRY_SECONDS_MIN * 2 ** min(self._misses - 1, 16), RANK_PAUSE_SECONDS_MAX)
            delay = min(pause, self.wait_seconds / 2)
        else:  # for all ranks at once, so that they pause alike
            self._misses = 0
            delay = min(RETRY_SECONDS_MIN * 2 ** min(self._refusals, 16), RETRY_SECONDS_MAX)
            self._refusals += 1
        self.phase = Unlogged(reason, now + delay if reason.passes else float("inf"))

    def _fence(self) -> None:
        """INV-NO-CLAIM-BACK: what was fenced is never asked for again."""
        self.phase = Unlogged(UnloggedReason.FENCED, again_at=float("inf"))
        self.fenced.set()
