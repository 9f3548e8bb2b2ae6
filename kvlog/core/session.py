"""One session as the log tells it: `judge` says what a record is, `fold` carries an admitted one out. Pure.

A session stands in one of four ways (the diagram in docs/fencing.md is generated from TRANSITIONS):

    UNROOTED   a claim is known, what the session holds is not; nothing is exposed
    WHOLE      every record since the root was folded
    BROKEN     a record of the owner did not fit; the last good length stays usable, a claim and a fitting seq 0 heal
    ENDED      length 0; only a claim follows

Source of the rules: DESIGN chapter 4; the argument why they are safe is in docs/fencing.md.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, assert_never

from kvlog import checksums
from kvlog.core.verdicts import ADMITTED, Judgement, Verdict, Why
from kvlog.ids import FIRST_OFFSET, FIRST_SEQ, NO_EPOCH, Offset, Position, Seq
from kvlog.records import Claim, Delta, End, Snapshot, Truncate

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.ids import Digest, Epoch, SessionId, Writer
    from kvlog.layout import Identity
    from kvlog.limits import Limits
    from kvlog.records import Entry, Record

__all__ = [
    "TRANSITIONS",
    "Run",
    "SessionState",
    "ShardState",
    "Standing",
    "fold",
    "judge",
    "judge_claim_without_state",
]


class Standing(StrEnum):
    """How much a reader knows of a session, and whether it trusts it."""

    UNROOTED = "unrooted"
    WHOLE = "whole"
    BROKEN = "broken"
    ENDED = "ended"


TRANSITIONS: dict[Standing, dict[str, Standing]] = {
    Standing.UNROOTED: {
        "Claim": Standing.UNROOTED,
        "Truncate(0) at seq 0": Standing.WHOLE,
        "Gap, Diverged": Standing.BROKEN,
    },
    Standing.WHOLE: {
        "Claim": Standing.WHOLE,
        "Truncate": Standing.WHOLE,
        "Delta": Standing.WHOLE,
        "End": Standing.ENDED,
        "Gap, Diverged": Standing.BROKEN,
    },
    Standing.BROKEN: {
        "Claim": Standing.BROKEN,
        "fitting Truncate at seq 0": Standing.WHOLE,
    },
    Standing.ENDED: {
        "Claim": Standing.WHOLE,
        "Gap, Diverged": Standing.BROKEN,
    },
}
"""standing → what is read → the next standing; whatever is not listed leaves the session as it is."""


@dataclass(frozen=True, slots=True)
class Run:
    """From `start` on (to the next run), bytes were written under this identity and context."""

    start: Position
    identity: Identity
    context: Digest


@dataclass(slots=True)
class ShardState:
    """One shard's positions: their token ids, and under what their bytes were written."""

    tokens: array[int] = field(default_factory=lambda: array("I"))
    runs: list[Run] = field(default_factory=list)

    @property
    def length(self) -> Position:
        """Positions folded, from 0 without a hole."""
        return Position(len(self.tokens))

    def extend(self, tokens: Sequence[int], identity: Identity, context: Digest) -> None:
        """Append positions that were written under this identity and context."""
        last = self.runs[-1] if self.runs else None
        if last is None or (last.identity, last.context) != (identity, context):
            self.runs.append(Run(self.length, identity, context))
        self.tokens.extend(tokens)

    def cut(self, length: Position) -> None:
        """Keep at most `length` positions."""
        if length < len(self.tokens):
            del self.tokens[length:]
            while self.runs and self.runs[-1].start >= length:
                self.runs.pop()

    def usable(self, tokens: array[int], context: Digest, identity: Identity) -> Position:
        """The longest prefix that equals the request in token ids, context and identity."""
        fitting = self.length
        for run in self.runs:
            if run.identity != identity or run.context != context:
                fitting = run.start
                break
        return Position(_common_prefix(self.tokens, tokens, fitting))


@dataclass(slots=True)
class SessionState:
    """What the records of one session, folded in log order, come to.

    Args:
        claim: the admitted claim with the highest epoch: who owns the session.
        claim_offset: where that claim stands in the log.
        claim_chain: the chain of that claim alone, chain(0, Claim): what a Truncate(0) at seq 0 restarts from.
        standing: see the module.
        root: the epoch of the claim from which this reader knows the session; 0 while UNROOTED.
        next_seq: the seq that the owner's next record must have.
        chain: the running checksum; None while no history is known.
        shards: one state a shard; empty while UNROOTED.
        rival_epoch: the newest epoch, before the owner's own, that another writer had claimed; 0 if none is known.
        healable: in BROKEN: the current claim is newer than the break, and nothing of it has been refused yet.
        last_offset: the offset of the newest admitted record.
    """

    claim: Claim
    claim_offset: Offset
    claim_chain: int
    standing: Standing = Standing.UNROOTED
    root: Epoch = NO_EPOCH
    next_seq: Seq = FIRST_SEQ
    chain: int | None = None
    shards: list[ShardState] = field(default_factory=list)
    rival_epoch: Epoch = NO_EPOCH
    healable: bool = False
    last_offset: Offset = FIRST_OFFSET

    @property
    def session(self) -> SessionId:
        """The session's id."""
        return self.claim.session

    @property
    def epoch(self) -> Epoch:
        """The owner's epoch."""
        return self.claim.epoch

    @property
    def writer(self) -> Writer:
        """The owner's incarnation."""
        return self.claim.writer

    @property
    def length(self) -> Position:
        """Positions that every shard has; 0 while nothing is known."""
        return Position(min((shard.length for shard in self.shards), default=0))

    @property
    def tokens(self) -> array[int]:
        """The token ids of [0, length)."""
        return self.shards[0].tokens[: self.length] if self.shards else array("I")

    @property
    def first_needed_offset(self) -> Offset | None:
        """From where the log must be read to know the session: its root's epoch − 1; None while UNROOTED."""
        return Offset(self.root - 1) if self.root else None

    def usable(self, tokens: Sequence[int], context: Digest, identity: Identity) -> Position:
        """The longest prefix, whole over all shards, that a request with these tokens may use.

        INV-EXPOSE: token ids, context and the identity under which the bytes were written all equal the request's.
        """
        if not self.shards or len(self.shards) != identity.shards:
            return Position(0)
        wanted = array("I", tokens)
        return Position(min(shard.usable(wanted, context, identity) for shard in self.shards))

    def differs(self, identity: Identity) -> tuple[str, object, object] | None:
        """Why an engine of this identity cannot use the session's bytes: field, theirs, its own; None if it can."""
        runs = self.shards[0].runs if self.shards else []
        return runs[0].identity.difference(identity) if runs else None

    def clone(self) -> SessionState:
        """An independent copy, for projecting records that are not folded yet."""
        return SessionState(
            claim=self.claim,
            claim_offset=self.claim_offset,
            claim_chain=self.claim_chain,
            standing=self.standing,
            root=self.root,
            next_seq=self.next_seq,
            chain=self.chain,
            shards=[ShardState(s.tokens[:], s.runs[:]) for s in self.shards],
            rival_epoch=self.rival_epoch,
            healable=self.healable,
            last_offset=self.last_offset,
        )

    def break_here(self) -> None:
        """A record of the owner was refused for good: keep what was folded, trust nothing more of this epoch."""
        self.standing = Standing.BROKEN
        self.healable = False

    def pass_by(self, seq: Seq) -> None:
        """The owner's record cannot be folded for want of history: no record before it can root this reader any more.

        Who has the history broke at a record that came before its seq 0; without this, one who has none would be rooted
        by that seq 0, and the two would differ at one offset.
        """
        self.next_seq = Seq(seq + 1)

    @classmethod
    def from_claim(cls, claim: Claim, header: bytes, offset: Offset) -> SessionState:
        """The state of a reader that knows the claim and no history."""
        return cls(claim, offset, checksums.chain(checksums.CHAIN_START, header, 0), last_offset=offset)


def judge_claim_without_state(claim: Claim, offset: Offset, *, read_from: Offset) -> Judgement:
    """Judge a claim of a session that this reader holds no state of.

    INV-WINDOW: it may be admitted only if every offset from its epoch − 1 on was read: a rival claim with an equal
    or higher epoch can only stand there, since no admitted epoch exceeds its own offset plus one.

    Args:
        claim: the claim.
        offset: where it stands.
        read_from: the offset from which on this session was read without a hole.
    """
    if claim.epoch > offset + 1:
        return Judgement(Verdict.FOREIGN, Why.EPOCH_AHEAD, offset + 1, claim.epoch)
    if read_from > claim.epoch - 1:
        return Judgement(Verdict.UNKNOWN, Why.WINDOW, claim.epoch - 1, read_from)
    return ADMITTED


def judge(state: SessionState, offset: Offset, entry: Entry, limits: Limits) -> Judgement:
    """Say what the record at this offset is; the state stays as it is.

    Args:
        state: the session as folded from every record before this one.
        offset: the record's offset.
        entry: the record with its bytes.
        limits: only `session_tokens` is looked at, which is the same for every reader.
    """
    record = entry.record
    match record:
        case Delta() | Truncate() | End():
            return (
                _judge_author(state, record)
                or _judge_standing(state, record)
                or _judge_seq(state, record)
                or _judge_body(state, record, entry.payload, limits)
                or _judge_chain(state, entry)
                or ADMITTED
            )
        case Claim():
            return _judge_claim(state, record, offset)
        case Snapshot():
            return ADMITTED
        case _:
            assert_never(record)


def fold(state: SessionState, offset: Offset, entry: Entry) -> None:
    """Carry out a record that `judge` admitted."""
    record = entry.record
    match record:
        case Delta():
            state.shards[record.shard].extend(record.tokens, state.claim.identity, record.context)
        case Claim():
            _fold_claim(state, record, entry.header)
        case Snapshot():
            return
        case Truncate():
            _fold_truncate(state, record)
        case End():
            state.shards = []
            state.standing = Standing.ENDED
        case _:
            assert_never(record)
    state.last_offset = offset
    if not isinstance(record, Claim):
        state.next_seq = Seq(record.seq + 1)
        state.chain = entry.chain


def next_chain(state: SessionState, record: Record, header: bytes) -> int | None:
    """The chain after this record; None where the reader lacks the history to tell."""
    if isinstance(record, Truncate) and record.seq == 0 and record.length == 0:
        return checksums.chain(state.claim_chain, header, 0)
    if state.chain is None:
        return None
    payload_checksum = record.payload_checksum if isinstance(record, Delta) else 0
    return checksums.chain(state.chain, header, payload_checksum)


def _judge_claim(state: SessionState, claim: Claim, offset: Offset) -> Judgement:
    if claim.nonce == state.claim.nonce:
        return Judgement(Verdict.DUPLICATE, Why.SAME_NONCE)
    if claim.epoch <= state.epoch:
        return Judgement(Verdict.STALE, Why.OLDER_EPOCH, state.epoch, claim.epoch)
    if claim.epoch > offset + 1:
        return Judgement(Verdict.FOREIGN, Why.EPOCH_AHEAD, offset + 1, claim.epoch)
    return ADMITTED


def _judge_author(state: SessionState, record: Delta | Truncate | End) -> Judgement | None:
    """INV-OWNER: only a record of the current epoch and writer can go further than this."""
    claim = state.claim
    if record.epoch < claim.epoch:
        return Judgement(Verdict.STALE, Why.OLDER_EPOCH, claim.epoch, record.epoch)
    if record.epoch > claim.epoch:
        return Judgement(Verdict.FOREIGN, Why.EPOCH_UNCLAIMED, claim.epoch, record.epoch)
    if record.writer != claim.writer:
        return Judgement(Verdict.FOREIGN, Why.WRITER)
    return None


def _judge_standing(state: SessionState, record: Delta | Truncate | End) -> Judgement | None:
    if record.seq < state.next_seq:
        return Judgement(Verdict.DUPLICATE, Why.SEQ_PASSED, state.next_seq, record.seq)
    if state.standing is Standing.WHOLE:
        return None
    restarts = isinstance(record, Truncate) and record.seq == 0 and record.length == 0
    match state.standing:
        case Standing.UNROOTED:
            return None if restarts else Judgement(Verdict.UNKNOWN, Why.NO_ROOT)
        case Standing.ENDED:
            return Judgement(Verdict.DIVERGED, Why.AFTER_END)
        case Standing.BROKEN:
            knows_history = state.chain is not None
            heals = isinstance(record, Truncate) and record.seq == 0 and (restarts or knows_history)
            if state.healable and heals:
                return None
            return (
                Judgement(Verdict.DIVERGED, Why.BROKEN)
                if knows_history
                else Judgement(Verdict.UNKNOWN, Why.NO_ROOT)
            )
        case _:
            assert_never(state.standing)


def _judge_seq(state: SessionState, record: Delta | Truncate | End) -> Judgement | None:
    if record.seq != state.next_seq:
        return Judgement(Verdict.GAP, Why.SEQ_AHEAD, state.next_seq, record.seq)
    return None


def _judge_body(
    state: SessionState, record: Delta | Truncate | End, payload: memoryview, limits: Limits
) -> Judgement | None:
    match record:
        case Delta():
            return _judge_delta(state, record, payload, limits)
        case Truncate():
            return _judge_truncate(state, record)
        case End():
            return Judgement(Verdict.DIVERGED, Why.END_FIRST) if record.seq == 0 else None
        case _:
            assert_never(record)


def _judge_truncate(state: SessionState, record: Truncate) -> Judgement | None:
    if record.seq != 0 or record.length == 0:
        return None
    if len(state.shards) != state.claim.identity.shards:
        return Judgement(Verdict.DIVERGED, Why.SHARDS_CHANGED, len(state.shards), state.claim.identity.shards)
    if record.length > state.length:
        return Judgement(Verdict.DIVERGED, Why.LENGTH_AHEAD, state.length, record.length)
    return None


def _judge_delta(state: SessionState, record: Delta, payload: memoryview, limits: Limits) -> Judgement | None:
    if record.seq == 0:
        return Judgement(Verdict.DIVERGED, Why.FIRST_NOT_TRUNCATE)
    if record.shard >= len(state.shards):
        return Judgement(Verdict.DIVERGED, Why.SHARD_UNKNOWN, len(state.shards), record.shard)
    length = state.shards[record.shard].length
    if record.start != length:
        return Judgement(Verdict.DIVERGED, Why.START, length, record.start)
    if length + len(record.tokens) > limits.session_tokens:
        return Judgement(Verdict.DIVERGED, Why.TOO_LONG, limits.session_tokens, length + len(record.tokens))
    actual = checksums.checksum(payload)
    if actual != record.payload_checksum:
        return Judgement(Verdict.DIVERGED, Why.PAYLOAD, record.payload_checksum, actual)
    return None


def _judge_chain(state: SessionState, entry: Entry) -> Judgement | None:
    """INV-CHAIN: what was folded before this record is what its writer had written before it."""
    expected = next_chain(state, entry.record, entry.header)
    if expected != entry.chain:
        return Judgement(Verdict.DIVERGED, Why.CHAIN, expected, entry.chain)
    return None


def _fold_claim(state: SessionState, claim: Claim, header: bytes) -> None:
    if claim.writer != state.writer:
        state.rival_epoch = state.epoch
    state.claim = claim
    state.claim_chain = checksums.chain(checksums.CHAIN_START, header, 0)
    state.next_seq = FIRST_SEQ
    if state.chain is not None:
        state.chain = checksums.chain(state.chain, header, 0)
    match state.standing:
        case Standing.ENDED:
            state.standing = Standing.WHOLE
        case Standing.BROKEN:
            state.healable = True
        case Standing.WHOLE | Standing.UNROOTED:
            pass
        case _:
            assert_never(state.standing)


def _fold_truncate(state: SessionState, record: Truncate) -> None:
    if record.seq == 0 and record.length == 0:
        state.root = state.claim.epoch
        state.shards = [ShardState() for _ in range(state.claim.identity.shards)]
    for shard in state.shards:
        shard.cut(record.length)
    state.standing = Standing.WHOLE
    state.healable = False


def _common_prefix(left: array[int], right: array[int], at_most: int) -> int:
    """The length of the longest common prefix, by halving: a few memcmp instead of a loop over tokens."""
    low, high = 0, min(at_most, len(left), len(right))
    size = left.itemsize
    mine, theirs = memoryview(left).cast("B"), memoryview(right).cast("B")
    same: Callable[[int, int], bool] = lambda a, b: mine[a * size : b * size] == theirs[a * size : b * size]  # noqa: E731
    while low < high:
        middle = (low + high + 1) // 2
        if same(low, middle):
            low = middle
        else:
            high = middle - 1
    return low
