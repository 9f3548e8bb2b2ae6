"""StandbyCore: one partition as one reader sees it. Offsets in, effects out; holds every session's state. Pure.

It is fed each message once, in offset order: `read` for a decoded record, `unreadable` for one whose header cannot be
trusted, `hole` when the reader had to jump, `replaced` when the log is another one. A record that would break a
session is read again first, a bounded number of times: the core then asks for a `Reread`, expects exactly the
offsets from there on, and lets only the sessions in question look at offsets that were folded before.

INV-HOLE: an offset that was not fed drops every session of the partition, since any of them may have been claimed in
it. INV-REFUSED: a refused record leaves every state unchanged, except that the owner's own misfit breaks its session,
and that a reader without history notes how far the owner has got (SessionState.pass_by).
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, assert_never

from kvlog.core.effects import (
    CutRows,
    DropReason,
    DropSession,
    NoteSnapshot,
    RecordRefused,
    Reread,
    SessionBroken,
    SessionClaimed,
    SessionEnded,
    SessionHealed,
    StoreRows,
)
from kvlog.core.inputs import HoleRead, LogReplacedRead, UnreadableRead
from kvlog.core.session import SessionState, Standing, fold, judge, judge_claim_without_state
from kvlog.core.verdicts import Judgement, Verdict, Why
from kvlog.ids import Offset, Position
from kvlog.records import Claim, Delta, End, Snapshot, Truncate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlog.core.effects import ReadEffect
    from kvlog.ids import Partition, SessionId
    from kvlog.limits import Limits
    from kvlog.records import Entry

__all__ = ["StandbyCore"]

_BREAKING = (Verdict.GAP, Verdict.DIVERGED)


@dataclass(slots=True)
class _Doubt:
    """A place that is being read again: how often so far, and up to which offset it matters."""

    attempts: int
    until: Offset


class StandbyCore:
    """The fold of one partition."""

    __slots__ = (
        "_doubts",
        "_frontier",
        "_held",
        "_limits",
        "_partition",
        "_position",
        "_read_from",
        "_sessions",
        "_since",
    )

    def __init__(self, partition: Partition, first: Offset, limits: Limits) -> None:
        """Begin to read at `first`; sessions claimed before it stay Unknown until they are claimed again."""
        self._partition = partition
        self._limits = limits
        self._position = first
        self._frontier = first
        self._read_from = first
        self._sessions: OrderedDict[SessionId, SessionState] = OrderedDict()
        self._since: dict[SessionId, Offset] = {}
        self._held: set[SessionId] = set()
        self._doubts: dict[SessionId | Offset, _Doubt] = {}

    @property
    def partition(self) -> Partition:
        """Which partition this is."""
        return self._partition

    @property
    def position(self) -> Offset:
        """The next offset to feed."""
        return self._position

    @property
    def applied(self) -> Offset:
        """Every offset below was folded; what is committed for lag tools."""
        return self._frontier

    @property
    def read_from(self) -> Offset:
        """From here on the partition was read without a hole."""
        return self._read_from

    def session(self, session: SessionId) -> SessionState | None:
        """The session's state, which the caller must not change; None if this reader knows nothing of it."""
        return self._sessions.get(session)

    @property
    def session_count(self) -> int:
        """States held."""
        return len(self._sessions)

    def sessions(self) -> Iterator[SessionState]:
        """Every state held, least recently written first."""
        return iter(self._sessions.values())

    def hold(self, session: SessionId) -> None:
        """Keep this session's state although others would push it out."""
        self._held.add(session)

    def unhold(self, session: SessionId) -> None:
        """Undo `hold`."""
        self._held.discard(session)

    def read(self, offset: Offset, entry: Entry) -> tuple[ReadEffect, ...]:
        """Feed the record at `offset`.

        Args:
            offset: must be `position`; a higher one is a hole, a lower one is ignored.
            entry: the record; its payload is referenced by effects, not copied.
        """
        if offset < self._position:
            return ()
        jumped = self._jump(offset)
        if offset < self._frontier and entry.record.session not in self._doubts:
            self._position = Offset(offset + 1)
            return jumped
        effects = self._judge_and_fold(offset, entry)
        if effects and isinstance(effects[-1], Reread):
            return jumped + effects
        return jumped + effects + self._passed(offset)

    def unreadable(self, offset: Offset, key: SessionId | None) -> tuple[ReadEffect, ...]:
        """Feed a message whose header could not be read: it may be a claim, so its session cannot be trusted any more.

        Args:
            offset: its offset.
            key: its session if the message's key says so beyond doubt; None drops every session of the partition.
        """
        if offset < self._position:
            return ()
        jumped = self._jump(offset)
        if offset < self._frontier:
            self._position = Offset(offset + 1)
            return jumped
        doubt = self._doubts.setdefault(offset, _Doubt(0, offset))
        if doubt.attempts < self._limits.reread_attempts:
            doubt.attempts += 1
            return (*jumped, Reread(self._partition, offset))
        refused = RecordRefused(offset, None, Judgement(Verdict.UNKNOWN, Why.UNREADABLE))
        after = Offset(offset + 1)
        dropped = (
            self._drop_all(DropReason.UNREADABLE, after)
            if key is None
            else self._drop(key, DropReason.UNREADABLE, after)
        )
        return (*jumped, refused, *dropped, *self._passed(offset))

    def disturbed(self, happened: UnreadableRead | HoleRead | LogReplacedRead) -> tuple[ReadEffect, ...]:
        """Feed what is no record."""
        match happened:
            case UnreadableRead():
                return self.unreadable(happened.offset, happened.key)
            case HoleRead():
                return self.hole(happened.offset)
            case LogReplacedRead():
                return self.replaced(happened.offset)
            case _:
                assert_never(happened)

    def hole(self, offset: Offset) -> tuple[ReadEffect, ...]:
        """The reader could not go on where it was, and continues at `offset`, further on or further back."""
        self._position = self._frontier = offset
        return self._drop_all(DropReason.HOLE, offset)

    def replaced(self, offset: Offset) -> tuple[ReadEffect, ...]:
        """The log is another one than before; read it from `offset`."""
        self._position = self._frontier = offset
        return self._drop_all(DropReason.REPLACED, offset)

    def forget(self, session: SessionId) -> tuple[ReadEffect, ...]:
        """Drop one session's state; it is known again from its next claim with a Truncate(0)."""
        return self._drop(session, DropReason.ASKED, self._frontier)

    def _jump(self, offset: Offset) -> tuple[ReadEffect, ...]:
        return self.hole(offset) if offset > self._position else ()

    def _passed(self, offset: Offset) -> tuple[ReadEffect, ...]:
        self._position = Offset(offset + 1)
        self._frontier = max(self._frontier, self._position)
        if self._doubts:
            self._doubts = {
                what: doubt for what, doubt in self._doubts.items() if doubt.until >= self._position
            }
        return self._evict()

    def _judge_and_fold(self, offset: Offset, entry: Entry) -> tuple[ReadEffect, ...]:
        record = entry.record
        state = self._sessions.get(record.session)
        if state is None:
            return self._without_state(offset, entry)
        judgement = judge(state, offset, entry, self._limits)
        if judgement.verdict is Verdict.ADMITTED:
            return self._admitted(state, offset, entry)
        if judgement.verdict in _BREAKING and not self._is_broken_for_good(state):
            return self._doubted(state, offset, entry, judgement)
        if judgement.why is Why.NO_ROOT and isinstance(record, Delta | Truncate | End):
            state.pass_by(record.seq)
        if offset < self._frontier:
            return ()  # read again for another record's sake, and counted at the first time
        return (RecordRefused(offset, record, judgement),)

    def _without_state(self, offset: Offset, entry: Entry) -> tuple[ReadEffect, ...]:
        record = entry.record
        match record:
            case Claim():
                since = max(self._read_from, self._since.get(record.session, Offset(0)))
                judgement = judge_claim_without_state(record, offset, read_from=since)
                if judgement.verdict is Verdict.ADMITTED:
                    self._since.pop(record.session, None)
                    self._sessions[record.session] = SessionState.from_claim(record, entry.header, offset)
                    return (SessionClaimed(record, offset, None),)
                return (RecordRefused(offset, record, judgement),)
            case Snapshot():
                return (NoteSnapshot(record, offset),)
            case _:
                return (RecordRefused(offset, record, Judgement(Verdict.UNKNOWN, Why.NO_SESSION)),)

    def _admitted(self, state: SessionState, offset: Offset, entry: Entry) -> tuple[ReadEffect, ...]:
        record, before, previous = entry.record, state.standing, state.claim
        cuts = isinstance(record, Truncate) and any(shard.length > record.length for shard in state.shards)
        fold(state, offset, entry)
        self._sessions.move_to_end(state.session)
        match record:
            case Delta():
                return (StoreRows(record, entry.payload, state.claim.identity.layout),)
            case Claim():
                return (SessionClaimed(record, offset, previous),)
            case Snapshot():
                return (NoteSnapshot(record, offset),)
            case Truncate():
                cut = (CutRows(record.session, record.length),) if cuts else ()
                healed = (SessionHealed(record.session, offset),) if before is Standing.BROKEN else ()
                return (*cut, *healed)
            case End():
                return (CutRows(record.session, Position(0)), SessionEnded(record.session, offset))
            case _:
                assert_never(record)

    @staticmethod
    def _is_broken_for_good(state: SessionState) -> bool:
        return state.standing is Standing.BROKEN and not state.healable

    def _doubted(
        self, state: SessionState, offset: Offset, entry: Entry, judgement: Judgement
    ) -> tuple[ReadEffect, ...]:
        """Read it again before it is believed; then break the session."""
        doubt = self._doubts.setdefault(state.session, _Doubt(0, offset))
        doubt.until = max(doubt.until, offset)
        if doubt.attempts < self._limits.reread_attempts:
            doubt.attempts += 1
            first = Offset(state.last_offset + 1) if judgement.verdict is Verdict.GAP else offset
            self._position = max(first, self._read_from, Offset(offset - self._limits.reread_records))
            return (Reread(self._partition, self._position),)
        del self._doubts[state.session]
        state.break_here()
        broken = SessionBroken(state.session, offset, state.length, judgement)
        return (RecordRefused(offset, entry.record, judgement), broken)

    def _evict(self) -> tuple[ReadEffect, ...]:
        """INV-BOUND-SESSIONS: the least recently written idle state goes when there are too many."""
        effects: list[ReadEffect] = []
        for _ in range(len(self._sessions)):
            if len(self._sessions) <= self._limits.sessions_a_partition:
                break
            oldest = next(iter(self._sessions))
            if oldest in self._held:  # in use: at the end of the order it is not met again at the next record
                self._sessions.move_to_end(oldest)
            else:
                effects.extend(self._drop(oldest, DropReason.LIMIT, self._frontier))
        return tuple(effects)

    def _drop(self, session: SessionId, reason: DropReason, since: Offset) -> tuple[ReadEffect, ...]:
        known = self._sessions.pop(session, None)
        self._doubts.pop(session, None)
        self._since[session] = since
        if len(self._since) > self._limits.sessions_a_partition:
            self._read_from = max(self._read_from, *self._since.values())
            self._since.clear()
        return () if known is None else (DropSession(session, reason),)

    def _drop_all(self, reason: DropReason, since: Offset) -> tuple[ReadEffect, ...]:
        effects = tuple(DropSession(session, reason) for session in self._sessions)
        self._sessions.clear()
        self._since.clear()
        self._doubts.clear()
        self._read_from = since
        return effects
