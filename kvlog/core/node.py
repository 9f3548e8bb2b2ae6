"""NodeCore: everything that one daemon decides. Primary for some sessions and standby for others at once. Pure.

It owns one StandbyCore a partition, one TakeOver a session that is being claimed and one PrimaryCore a session that it
owns, and keeps this order: a record goes through the fold first, then to whoever waits for it.

The verbs are the whole protocol: `step(input)` gives the effects of one input (kvlog.core.inputs), `tick(now_ns)`
those of time; the shell carries effects out in order.

INV-ONE-TURN: a session has at most one turn in progress on this node; a second request is served unlogged.
INV-NO-CLAIM-BACK: a request that was logged before claims only after everything below the watermark was folded, and not
at all if another writer has claimed since. INV-STAYS-ENDED: nor if its session has ended since (kvlog.core.going_on).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, assert_never

from kvlog.core.claims import ClaimsInFlight
from kvlog.core.effects import (
    DropSession,
    FollowPartition,
    RecordRefused,
    SessionBroken,
    SessionClaimed,
    SessionEnded,
    StoreRows,
    TurnEnded,
    TurnEndReason,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.going_on import refusal
from kvlog.core.inputs import (
    AppendFailed,
    CloseTurn,
    EncodedRows,
    EndSession,
    Follow,
    HoleRead,
    LogReplacedRead,
    OpenTurn,
    RecordRead,
    RewriteSession,
    Stop,
    UnreadableRead,
    WatermarkFailed,
    WatermarkRead,
    WithdrawRequest,
)
from kvlog.core.myself import Myself
from kvlog.core.owned import OwnedSessions
from kvlog.core.primary import PrimaryCore, Tenure
from kvlog.core.rewriting import give_way, turn_of
from kvlog.core.session import Standing
from kvlog.core.standby import StandbyCore
from kvlog.core.takeover import Claimant, Phase, TakeOver
from kvlog.core.verdicts import Verdict
from kvlog.ids import Offset
from kvlog.records import Claim, Delta, End, Truncate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from kvlog.core.effects import Effect, ReadEffect
    from kvlog.core.inputs import Input
    from kvlog.core.session import SessionState
    from kvlog.ids import Epoch, Partition, SessionId, Turn
    from kvlog.limits import Limits
    from kvlog.records import EndReason, Record

__all__ = ["Myself", "NodeCore"]


class NodeCore:
    """The decisions of one daemon."""

    __slots__ = (
        "_claims",
        "_limits",
        "_owned",
        "_partitions",
        "_self",
        "_stopping",
    )

    def __init__(self, myself: Myself, limits: Limits, *, first_turn: int = 1) -> None:
        """A node that follows nothing yet."""
        self._self = myself
        self._limits = limits
        self._owned = OwnedSessions(limits, first_turn=first_turn)
        self._stopping = False
        self._partitions: dict[Partition, StandbyCore] = {}
        self._claims = ClaimsInFlight()

    # What it knows

    @property
    def partitions(self) -> Mapping[Partition, StandbyCore]:
        """The partitions that are followed; read only."""
        return self._partitions

    def primary(self, session: SessionId) -> PrimaryCore | None:
        """The writing side of a session that this node owns."""
        return self._owned.get(session)

    def primaries(self) -> Iterator[PrimaryCore]:
        """Every session that this node owns."""
        return iter(self._owned)

    def session_of(self, turn: Turn) -> SessionId | None:
        """The session of a turn in progress."""
        return self._owned.session_of(turn)

    @property
    def takeovers_in_flight(self) -> int:
        """Claims on their way."""
        return len(self._claims)

    @property
    def sessions_being_claimed(self) -> frozenset[SessionId]:
        """Sessions whose take-over is in flight."""
        return frozenset(session for session, _ in self._claims)

    def is_drained(self) -> bool:
        """Whether everything that was sent has been folded."""
        return all(p.is_drained(self.state(p.session)) for p in self._owned)

    def step(self, happened: Input) -> tuple[Effect, ...]:
        """What is to be done now that this has happened, in this order."""
        match happened:
            case RecordRead():
                return self._read(happened)
            case EncodedRows():
                return self._rows(happened)
            case OpenTurn():
                return self._give_way(happened.session) + self._open_turn(happened)
            case EndSession():
                return self._give_way(happened.session) + self._end_session(happened)
            case RewriteSession():
                return self._rewrite(happened)
            case WatermarkRead():
                return self._watermark_read(happened)
            case AppendFailed():
                return self._append_failed(happened.record)
            case WatermarkFailed():
                claim = self._claims.get(happened.session)
                return self._settled(happened.session, claim.takeover.failed()) if claim else ()
            case Stop():
                return self._stop()
            case CloseTurn() | WithdrawRequest() | Follow():
                self._note(happened)
                return ()
            case UnreadableRead() | HoleRead() | LogReplacedRead():
                disturbed = self._partitions[happened.partition].disturbed(happened)
                effects = self._react(disturbed, None) + self._claims_unseen(happened)
                return effects + self._caught_up(happened.partition)
            case _:
                assert_never(happened)

    def tick(self, now_ns: int) -> tuple[Effect, ...]:
        """The only way time enters: answers requests whose deadline has passed.

        Args:
            now_ns: a monotonic clock's reading, in nanoseconds.
        """
        late: list[Effect] = []
        for session, claim in self._claims:
            if (asked := claim.asked) is not None and asked.deadline_ns <= now_ns:
                claim.asked = None
                late.append(TurnUnlogged(asked.request, session, UnloggedReason.CLAIM_TIMEOUT))
            if claim.takeover.is_overdue(now_ns) and claim.asked is None:
                self._give_up_claim(session)
        return tuple(late)

    # One handler an input

    def _note(self, happened: CloseTurn | WithdrawRequest | Follow) -> None:
        match happened:
            case CloseTurn(turn):
                self._owned.close(turn)
            case WithdrawRequest(session, request):
                claim = self._claims.get(session)
                if claim is not None and claim.asked is not None and claim.asked.request == request:
                    claim.asked = None
            case Follow(partition, first):
                assert partition not in self._partitions, "a partition is followed once"
                self._partitions[partition] = StandbyCore(partition, first, self._limits)
            case _:
                assert_never(happened)

    def _read(self, happened: RecordRead) -> tuple[Effect, ...]:
        core = self._partitions[happened.partition]
        effects = self._react(core.read(happened.offset, happened.entry), happened.entry.record.session)
        return effects + self._caught_up(happened.partition)

    def _claims_unseen(self, happened: UnreadableRead | HoleRead | LogReplacedRead) -> tuple[Effect, ...]:
        """A claim of ours may have stood where nothing could be read, or its watermark in a lost tail: ask again."""
        if (
            isinstance(happened, UnreadableRead)
            and self._partitions[happened.partition].position <= happened.offset
        ):
            return ()  # it is being read again
        unseen = self._claims.unseen(happened, self._self.partition_of)
        return tuple(e for session, claim in unseen for e in self._settled(session, claim.takeover.failed()))

    def _open_turn(self, asked: OpenTurn) -> tuple[Effect, ...]:
        session = asked.session
        if self._stopping:
            return (TurnUnlogged(asked.request, session, UnloggedReason.STOPPING),)
        primary, claim = self._owned.get(session), self._claims.get(session)
        is_asked_for = claim is not None and claim.asked is not None
        if is_asked_for or (primary is not None and primary.turn is not None):
            return (TurnUnlogged(asked.request, session, UnloggedReason.BUSY),)
        if len(asked.tokens) > self._limits.session_tokens:
            return (TurnUnlogged(asked.request, session, UnloggedReason.TOO_LONG),)
        if (refused := self._refusal(asked)) is not None:
            return (refused,)
        if primary is not None and self._may_begin(primary, asked):
            return (self._begin(primary, asked),)
        assert not asked.rewrites, "a rewrite is opened by the claim that was made for it, or not at all"
        if claim is not None and claim.takeover.claimant.identity == asked.identity:
            claim.asked = asked
            return ()
        if claim is None and self._is_overloaded():
            return (TurnUnlogged(asked.request, session, UnloggedReason.OVERLOADED),)
        return self._take_over(asked)

    def _rewrite(self, happened: RewriteSession) -> tuple[Effect, ...]:
        """INV-REWRITE: under a claim of its own, and only while nothing else goes on with the session."""
        session = happened.session
        turn = turn_of(happened, self._owned.get(session), self.state(session))
        if turn is None or self._stopping or session in self._claims or self._claims.rewrites:
            return (TurnUnlogged(happened.request, session, UnloggedReason.BUSY),)
        return self._take_over(turn)

    def _give_way(self, session: SessionId) -> tuple[Effect, ...]:
        ended = give_way(session, self._claims, self._owned)
        self._hold_or_not(session)
        return ended

    def _rows(self, rows: EncodedRows) -> tuple[Effect, ...]:
        """INV-TURN: rows of another turn or epoch are dropped; their sender counts them by the empty answer."""
        primary = self._owned.of_turn(rows.turn)
        if primary is None or primary.claim.epoch != rows.epoch:
            return ()
        if primary.expects(rows.shard) != rows.start:
            return self._end_turn(primary, TurnEndReason.ROWS_OUT_OF_ORDER)
        if not primary.has_room(len(rows.tokens), rows.shard):
            return self._end_turn(primary, TurnEndReason.TOO_LONG)
        return primary.rows(rows)

    def _end_session(self, happened: EndSession) -> tuple[Effect, ...]:
        primary, state = self._owned.get(happened.session), self.state(happened.session)
        if (primary is not None and primary.ended) or (
            state is not None and state.standing is Standing.ENDED
        ):
            return ()
        claim = self._claims.get(happened.session)
        if claim is not None and (primary is None or claim.takeover.phase is Phase.CLAIMED):
            # Also of what we own: behind a newer claim of ours, an End would be stale.
            claim.ending = happened.reason
        if primary is not None:
            return self._end(primary, happened.reason)
        if claim is not None or self._stopping or self._is_overloaded():
            return ()
        return self._take_over(happened)

    def _watermark_read(self, happened: WatermarkRead) -> tuple[Effect, ...]:
        claim = self._claims.get(happened.session)
        if claim is None:
            return ()
        partition, asked = self._self.partition_of(happened.session), claim.asked
        followed: tuple[Effect, ...] = ()
        if partition not in self._partitions:
            # A request that was logged before must see every claim since then, or it could claim back.
            logged_at = asked.continues - 1 if asked and asked.continues else happened.high_watermark
            first = Offset(min(logged_at, happened.high_watermark))
            self._note(Follow(partition, first))
            followed = (FollowPartition(partition, first),)
        self._hold_or_not(happened.session)
        is_behind = self._partitions[partition].position < happened.high_watermark
        if asked and asked.continues and is_behind:
            claim.watermark = happened
            return followed
        return followed + claim.takeover.watermark_read(happened.high_watermark, happened.nonce)

    def _caught_up(self, partition: Partition) -> tuple[Effect, ...]:
        """Claims that waited until all below their watermark was folded go on, or find that they are fenced."""
        position = self._partitions[partition].position
        out: list[Effect] = []
        for session, claim in self._claims:
            waited_with = claim.watermark
            if waited_with is None or self._self.partition_of(session) != partition:
                continue
            if waited_with.high_watermark > position:
                continue
            claim.watermark = None
            asked = claim.asked
            if asked is not None and (refused := self._refusal(asked)) is not None:
                claim.asked = None
                out.append(refused)
            if claim.is_wanted:
                out.extend(claim.takeover.watermark_read(waited_with.high_watermark, waited_with.nonce))
            else:
                self._give_up_claim(session)
        return tuple(out)

    def _append_failed(self, record: Record) -> tuple[Effect, ...]:
        session = record.session
        if isinstance(record, Claim):
            claim = self._claims.get(session)
            if claim is None or claim.takeover.claim != record:
                return ()
            return self._settled(session, claim.takeover.failed())
        primary = self._owned.get(session)
        if primary is None or primary.claim.epoch != record.epoch:
            return ()
        return self._lose(primary, Tenure.LOST, TurnEndReason.OUTCOME_UNKNOWN)

    def _stop(self) -> tuple[Effect, ...]:
        self._stopping = True
        out: list[Effect] = []
        for session, claim in self._claims:
            if claim.asked is not None:
                out.append(TurnUnlogged(claim.asked.request, session, UnloggedReason.STOPPING))
                claim.asked = None
        out.extend(e for p in self._owned for e in self._end_turn(p, TurnEndReason.STOPPING))
        return tuple(out)

    def state(self, session: SessionId) -> SessionState | None:
        """The session as folded; to be read only. None if this node knows nothing of it."""
        core = self._partitions.get(self._self.partition_of(session))
        return core.session(session) if core else None

    def _hold_or_not(self, session: SessionId) -> None:
        """A session's state is kept while it is owned, or being claimed: a claim that is read back must find it."""
        if (core := self._partitions.get(self._self.partition_of(session))) is not None:
            is_ours = session in self._owned or session in self._claims
            (core.hold if is_ours else core.unhold)(session)

    def _is_overloaded(self) -> bool:
        """A rewrite's claim takes nobody's place."""
        return len(self._claims) - self._claims.rewrites >= self._limits.takeovers_in_flight

    def _may_begin(self, primary: PrimaryCore, asked: OpenTurn) -> bool:
        """INV-SAME-WEIGHTS: other weights, or another layout, on the same node claim anew."""
        return (
            primary.tenure is Tenure.OWNED and not primary.ended and primary.claim.identity == asked.identity
        )

    def _take_over(self, wanted: OpenTurn | EndSession) -> tuple[Effect, ...]:
        session, me = wanted.session, self._self
        if isinstance(wanted, OpenTurn):
            claimant = Claimant(me.node, me.writer, wanted.identity, wanted.context)
        else:
            claimant = wanted.claimant
        takeover = TakeOver(session, me.partition_of(session), claimant, me.header_bytes, self._limits)
        claim = self._claims.start(session, takeover)
        if isinstance(wanted, OpenTurn):
            claim.asked = wanted
        else:
            claim.ending = wanted.reason
        return takeover.start()

    def _begin(self, primary: PrimaryCore, asked: OpenTurn) -> TurnOpened:
        turn, log_from = self._owned.begin(primary, asked)
        state = self.state(asked.session)
        usable = state.usable(asked.tokens, asked.context, asked.identity) if state else log_from
        return TurnOpened(asked.request, asked.session, turn, primary.claim.epoch, usable, log_from)

    def _react(self, effects: tuple[ReadEffect, ...], session: SessionId | None) -> tuple[Effect, ...]:
        out: list[Effect] = []
        for effect in effects:
            out.append(effect)
            match effect:
                case StoreRows():
                    pass  # nearly all of them
                case SessionClaimed():
                    out.extend(self._claimed(effect))
                case SessionBroken():
                    out.extend(self._lost_here(effect.session, Tenure.REFUSED, TurnEndReason.REFUSED))
                case DropSession():
                    out.extend(self._lost_here(effect.session, Tenure.DROPPED, TurnEndReason.DROPPED))
                case RecordRefused(record=Claim() as claim):
                    out.extend(self._claim_refused(claim))
                case RecordRefused(record=Delta() | Truncate() | End() as record):
                    out.extend(self._own_refused(record, effect.judgement.verdict))
                case SessionEnded():
                    self._ended(effect.session)
                case _:
                    pass
        if session is not None and (primary := self._owned.get(session)) is not None:
            state = self.state(session)
            out.extend(primary.folded(state) if state else ())
        return tuple(out)

    def _own_refused(self, record: Delta | Truncate | End, verdict: Verdict) -> tuple[Effect, ...]:
        """Our own record cannot be judged even by us: the one that would have rooted the session is not in the log."""
        primary = self._owned.get(record.session)
        if verdict is not Verdict.UNKNOWN or primary is None or primary.claim.epoch != record.epoch:
            return ()
        return self._lose(primary, Tenure.REFUSED, TurnEndReason.REFUSED)

    def _ended(self, session: SessionId) -> None:
        """Only a new claim can write it again: there is nothing left to own."""
        primary = self._owned.get(session)
        if primary is not None and primary.ended:
            self._forget(primary, Tenure.ENDED)

    def _refusal(self, asked: OpenTurn) -> TurnUnlogged | None:
        session = asked.session
        return refusal(asked, self.state(session), self._owned.get(session), self._self.writer)

    def _claimed(self, effect: SessionClaimed) -> tuple[Effect, ...]:
        claim = effect.claim
        out: tuple[Effect, ...] = ()
        primary = self._owned.get(claim.session)
        if primary is not None and primary.claim.nonce != claim.nonce:
            own = claim.writer == self._self.writer
            out = (
                self._fence(primary, claim.epoch)
                if not own
                else self._lose(primary, Tenure.LOST, TurnEndReason.OUTCOME_UNKNOWN)
            )
        in_flight = self._claims.get(claim.session)
        if in_flight is None or not in_flight.takeover.admitted(claim):
            return out
        return out + self._won(claim)

    def _won(self, claim: Claim) -> tuple[Effect, ...]:
        session = claim.session
        waited = self._claims.pop(session)
        state = self.state(session)
        assert state is not None, "a claim that was folded has a state"
        partition = self._self.partition_of(session)
        primary = PrimaryCore.from_claim(
            partition, state, own=claim, header_bytes=self._self.header_bytes, limits=self._limits
        )
        self._owned.add(primary)
        ended = self._end(primary, waited.ending) if waited.ending is not None else ()
        opened = self._open_turn(waited.asked) if waited.asked is not None else ()
        if (surplus := self._owned.surplus(self.state)) is not None:
            self._forget(surplus, Tenure.DROPPED)
        return ended + opened

    def _claim_refused(self, claim: Claim) -> tuple[Effect, ...]:
        in_flight, state = self._claims.get(claim.session), self.state(claim.session)
        if in_flight is None:
            return ()
        refused = in_flight.takeover.refused(claim, state.epoch if state else None)
        return self._settled(claim.session, refused)

    def _settled(self, session: SessionId, effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
        """After a step of a take-over: if it has given up, answer who waits for it."""
        claim = self._claims.get(session)
        if claim is None or claim.takeover.phase not in (Phase.FENCED, Phase.UNAVAILABLE):
            return effects
        self._give_up_claim(session)
        if (asked := claim.asked) is None:
            return effects
        fenced = claim.takeover.phase is Phase.FENCED
        reason = UnloggedReason.FENCED if fenced else UnloggedReason.LOG_UNAVAILABLE
        return (*effects, TurnUnlogged(asked.request, session, reason, claim.takeover.newer_epoch))

    def _give_up_claim(self, session: SessionId) -> None:
        self._claims.pop(session)
        self._hold_or_not(session)

    def _lost_here(self, session: SessionId, tenure: Tenure, reason: TurnEndReason) -> tuple[Effect, ...]:
        primary = self._owned.get(session)
        return self._lose(primary, tenure, reason) if primary else ()

    def _lose(self, primary: PrimaryCore, tenure: Tenure, reason: TurnEndReason) -> tuple[Effect, ...]:
        """An End that may be lost is said again, under a new claim: who forgets a session says so once."""
        turn = self._forget(primary, tenure)
        ended = (TurnEnded(turn, primary.session, reason),) if turn is not None else ()
        again = primary.end_again if tenure in (Tenure.LOST, Tenure.REFUSED) else None
        return ended + (self._end_session(again) if again is not None else ())

    def _fence(self, primary: PrimaryCore, newer: Epoch) -> tuple[Effect, ...]:
        turn = self._forget(primary, Tenure.FENCED)
        return (TurnFenced(turn, primary.session, primary.claim.epoch, newer),) if turn is not None else ()

    def _forget(self, primary: PrimaryCore, tenure: Tenure) -> Turn | None:
        turn = self._owned.remove(primary, tenure)
        self._hold_or_not(primary.session)
        return turn

    def _end_turn(self, primary: PrimaryCore, reason: TurnEndReason) -> tuple[Effect, ...]:
        turn = primary.turn
        if turn is None:
            return ()
        self._owned.close(turn)
        return (TurnEnded(turn, primary.session, reason),)

    def _end(self, primary: PrimaryCore, reason: EndReason) -> tuple[Effect, ...]:
        return self._end_turn(primary, TurnEndReason.SESSION_ENDED) + primary.end(reason)
