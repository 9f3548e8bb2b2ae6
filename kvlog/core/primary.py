"""PrimaryCore: a session that this node owns under one epoch. Numbers its records and learns what became of them. Pure.

It projects: a second fold state runs ahead of the log by the records that are on their way, so that a turn's
Truncate says what the session will hold where it is folded, and every record is judged before it is sent as each
reader will judge it.

    OWNED ──(newer claim folded)──▶ FENCED      end the request, do not claim back for it
      ├────(append's outcome unknown)──▶ LOST    never write under this epoch again; claim anew
      ├────(own record Gap or Diverged)─▶ REFUSED  claim anew and rewrite
      ├────(fold state dropped)────────▶ DROPPED   claim anew
      └────(own End folded)────────────▶ ENDED     nothing is left to own

INV-READBACK: it can only be made from a folded state whose claim is its own.
INV-PROJECT: a turn's first position is taken from the projection, never from the lagging fold.
INV-SENT: the projection holds exactly the records that were given out: header bytes are made before it is changed,
since they are refused for what no record can carry.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.checksums import checksum
from kvlog.core.effects import AppendRecord, TurnAcknowledged
from kvlog.core.inputs import EndSession
from kvlog.core.session import SessionState, Standing, fold, judge, next_chain
from kvlog.core.takeover import Claimant
from kvlog.core.verdicts import Verdict
from kvlog.ids import FIRST_POSITION, Position, Seq
from kvlog.records import Delta, End, EndReason, Entry, Truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.core.inputs import EncodedRows
    from kvlog.ids import Digest, Partition, SessionId, Shard, Turn
    from kvlog.limits import Limits
    from kvlog.records import Claim, Record

__all__ = ["TRANSITIONS", "PrimaryCore", "Tenure"]

_NO_PAYLOAD = memoryview(b"")


class Tenure(StrEnum):
    """Whether the epoch may still be written under, and if not, why not. All but OWNED are final."""

    OWNED = "owned"
    FENCED = "fenced"
    LOST = "lost"
    REFUSED = "refused"
    DROPPED = "dropped"
    ENDED = "ended"


TRANSITIONS: dict[Tenure, dict[str, Tenure]] = {
    Tenure.OWNED: {
        "newer claim of another writer": Tenure.FENCED,
        "append failed, or own newer claim": Tenure.LOST,
        "own record Gap, Diverged or Unknown": Tenure.REFUSED,
        "fold state dropped": Tenure.DROPPED,
        "own End folded": Tenure.ENDED,
    },
}
"""tenure → what happens → the next one, which is final. NodeCore carries it out; for docs/fencing.md and the tests."""


@dataclass(slots=True)
class _OpenTurn:
    turn: Turn
    context: Digest
    log_from: Position
    rewrites: bool
    first_seq: Seq | None = None
    acknowledged: Position = FIRST_POSITION


class PrimaryCore:
    """The writing side of one session under one epoch."""

    __slots__ = (
        "_claim",
        "_ending",
        "_header_bytes",
        "_limits",
        "_partition",
        "_projected",
        "_tenure",
        "_turn",
    )

    def __init__(
        self,
        partition: Partition,
        projected: SessionState,
        header_bytes: Callable[[Record], bytes],
        limits: Limits,
    ) -> None:
        """Use `from_claim`."""
        self._partition = partition
        self._projected = projected
        self._claim = projected.claim
        self._header_bytes = header_bytes
        self._limits = limits
        self._tenure = Tenure.OWNED
        self._turn: _OpenTurn | None = None
        self._ending: EndReason | None = None

    @classmethod
    def from_claim(
        cls,
        partition: Partition,
        folded: SessionState,
        *,
        own: Claim,
        header_bytes: Callable[[Record], bytes],
        limits: Limits,
    ) -> PrimaryCore:
        """The bridge from standby to primary: the fold has just admitted our claim.

        Args:
            partition: the session's partition.
            folded: the state right after the claim was folded; copied.
            own: the claim that we appended; must be the one in `folded` (INV-READBACK).
            header_bytes: kvlog.wire's encoder of headers.
            limits: the bounds.
        """
        assert folded.claim.nonce == own.nonce, "INV-READBACK: not primary before the own claim was read back"
        return cls(partition, folded.clone(), header_bytes, limits)

    @property
    def claim(self) -> Claim:
        """The claim that made it primary."""
        return self._claim

    @property
    def session(self) -> SessionId:
        """The session's id."""
        return self._claim.session

    @property
    def tenure(self) -> Tenure:
        """Whether it may still write."""
        return self._tenure

    @property
    def turn(self) -> Turn | None:
        """The turn in progress."""
        return self._turn.turn if self._turn else None

    @property
    def is_rewriting(self) -> bool:
        """Whether the turn in progress only logs again what the session holds."""
        return self._turn is not None and self._turn.rewrites

    @property
    def projected_length(self) -> Position:
        """Positions that every shard will have once all that was sent is folded."""
        return self._projected.length

    def begin(
        self, turn: Turn, tokens: Sequence[int], context: Digest, *, rewrites: bool = False
    ) -> Position:
        """Begin a turn: the first position whose rows are wanted.

        That is the longest prefix that the session will hold when the turn's Truncate is folded and that equals the
        request; 0 for a broken session, whose new epoch then starts over. The Truncate itself goes out with the
        first new row.

        Args:
            rewrites: log everything again, from position 0; the first turn of an epoch only (INV-REWRITE).
        """
        assert self._turn is None, "one turn at a time"
        assert self._tenure is Tenure.OWNED, "only an owner begins turns"
        assert not rewrites or self._projected.next_seq == 0, "INV-REWRITE: a Truncate(0) roots at seq 0 only"
        keeps = self._projected.standing is Standing.WHOLE and not rewrites
        log_from = self._projected.usable(tokens, context, self._claim.identity) if keeps else Position(0)
        self._turn = _OpenTurn(turn, context, log_from, rewrites, acknowledged=log_from)
        return log_from

    def expects(self, shard: Shard) -> Position | None:
        """The position that this shard's next rows must start at; None without a turn or for an unknown shard."""
        if self._turn is None or shard >= self._claim.identity.shards:
            return None
        if self._turn.first_seq is None:
            return self._turn.log_from
        return self._projected.shards[shard].length

    def rows(self, rows: EncodedRows) -> tuple[AppendRecord, ...]:
        """Log rows of the turn in progress; they must start where `expects` says.

        Order: the effects are appended in this order, before those of any later call.

        Raises:
            LocalProtocolError: no record can carry them; nothing was changed (INV-SENT).
        """
        turn = self._turn
        assert turn is not None, "rows belong to a turn"
        assert self._tenure is Tenure.OWNED, "INV-OWNER: nothing is written under an epoch that is lost"
        assert rows.tokens, "no record is made of no rows"
        assert self.expects(rows.shard) == rows.start, "rows must be contiguous"
        claim, seq = self._claim, self._projected.next_seq
        first: tuple[Truncate, ...] = ()
        if turn.first_seq is None:
            assert checksum(rows.payload) == rows.payload_checksum, "rows come with their own checksum"
            first = (Truncate(claim.session, claim.epoch, claim.writer, seq, turn.log_from),)
        delta = Delta(
            session=claim.session,
            epoch=claim.epoch,
            writer=claim.writer,
            seq=Seq(seq + len(first)),
            shard=rows.shard,
            start=rows.start,
            tokens=rows.tokens,
            context=turn.context,
            codec=rows.codec,
            payload_checksum=rows.payload_checksum,
        )
        sent = self._send(*first, delta, payload=rows.payload)
        if first:
            turn.first_seq = seq
        return sent

    def has_room(self, tokens: int, shard: Shard) -> bool:
        """Whether so many more positions stay within the limit of a session."""
        at = self.expects(shard)
        return at is not None and at + tokens <= self._limits.session_tokens

    def close(self, turn: Turn) -> bool:
        """End the turn in progress if it is this one; the session stays ours, idle."""
        if self._turn is None or self._turn.turn != turn:
            return False
        self._turn = None
        return True

    def end(self, reason: EndReason) -> tuple[AppendRecord, ...]:
        """End the session; a Truncate goes first if the epoch has no record yet."""
        assert self._tenure is Tenure.OWNED, "only an owner ends a session"
        claim, seq = self._claim, self._projected.next_seq
        first = (Truncate(claim.session, claim.epoch, claim.writer, seq, Position(0)),) if seq == 0 else ()
        end = End(claim.session, claim.epoch, claim.writer, Seq(seq + len(first)), reason)
        sent = self._send(*first, end, payload=_NO_PAYLOAD)
        self._turn, self._ending = None, reason
        return sent

    @property
    def end_again(self) -> EndSession | None:
        """What is to be done if the End that was sent is lost; None: none was, or only the owner may say it (TTL)."""
        if self._ending is None or self._ending is EndReason.TTL:
            return None
        claim = self._claim
        claimant = Claimant(claim.node, claim.writer, claim.identity, claim.context)
        return EndSession(claim.session, self._ending, claimant)

    @property
    def ended(self) -> bool:
        """Whether the session's End was sent: only a new claim can write it again."""
        return self._projected.standing is Standing.ENDED

    def folded(self, state: SessionState) -> tuple[TurnAcknowledged, ...]:
        """The fold moved on: say what is acknowledged of the turn in progress."""
        turn = self._turn
        if turn is None or turn.first_seq is None or state.claim.nonce != self._claim.nonce:
            return ()
        if state.next_seq <= turn.first_seq or state.length <= turn.acknowledged:
            return ()
        turn.acknowledged = state.length
        return (TurnAcknowledged(turn.turn, self.session, state.length),)

    def is_drained(self, state: SessionState | None) -> bool:
        """Whether everything that was sent has been folded."""
        return (
            state is not None
            and state.claim.nonce == self._claim.nonce
            and state.next_seq == self._projected.next_seq
        )

    def lose(self, tenure: Tenure) -> Turn | None:
        """Stop for good under this epoch, and say which turn was in progress; the first reason stays."""
        assert tenure is not Tenure.OWNED, "a lost epoch does not come back"
        turn = self.turn
        self._turn = None
        if self._tenure is Tenure.OWNED:
            self._tenure = tenure
        return turn

    def _send(self, *records: Delta | Truncate | End, payload: memoryview) -> tuple[AppendRecord, ...]:
        """Project the records; the payload is the last one's. All of them, or with an exception none (INV-SENT)."""
        headers = [self._header_bytes(record) for record in records]
        payloads = [*[_NO_PAYLOAD] * (len(records) - 1), payload]
        return tuple(
            self._projected_record(record, header, rows)
            for record, header, rows in zip(records, headers, payloads, strict=True)
        )

    def _projected_record(
        self, record: Delta | Truncate | End, header: bytes, payload: memoryview
    ) -> AppendRecord:
        chain = next_chain(self._projected, record, header)
        assert chain is not None, "an epoch that starts from no history starts with Truncate(0)"
        entry = Entry(record, header, chain, payload)
        judgement = judge(self._projected, self._projected.last_offset, entry, self._limits)
        assert judgement.verdict is Verdict.ADMITTED, f"every reader would refuse this record: {judgement}"
        fold(self._projected, self._projected.last_offset, entry)
        return AppendRecord(self._partition, record, header, chain, payload)
