"""Mutants of judge, fold and reader: who owns a session, which records fit, what a hole means."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvlog import checksums
from kvlog.core import session, standby
from kvlog.core.session import SessionState, ShardState, Standing, fold
from kvlog.core.standby import StandbyCore
from kvlog.ids import Epoch, Offset, Seq
from kvlog.records import Claim, Delta, Entry, Truncate
from tests.sim.faults import Fault
from tests.sim.mutants.mutant import Mutant, together

if TYPE_CHECKING:
    from kvlog.core.verdicts import Judgement

# The real ones, which the mutants call
_judge_claim = session._judge_claim
_judge_claim_without_state = session.judge_claim_without_state
_judge_author = session._judge_author
_judge_standing = session._judge_standing
_judge_seq = session._judge_seq
_judge_delta = session._judge_delta
_judge_chain = session._judge_chain
_fold_truncate = session._fold_truncate
_drop = StandbyCore._drop
_judge_and_fold = StandbyCore._judge_and_fold


def _nothing(*_: object, **__: object) -> None:
    """No objection."""


# Claims


def _no_window(claim: Claim, offset: Offset, *, read_from: Offset) -> Judgement:
    return _judge_claim_without_state(claim, offset, read_from=min(read_from, Offset(claim.epoch - 1)))


def _far_claims(state: SessionState, claim: Claim, offset: Offset) -> Judgement:
    return _judge_claim(state, claim, max(offset, Offset(claim.epoch)))


def _far_claims_without_state(claim: Claim, offset: Offset, *, read_from: Offset) -> Judgement:
    return _judge_claim_without_state(claim, max(offset, Offset(claim.epoch)), read_from=read_from)


def _last_claim_wins(state: SessionState, claim: Claim, offset: Offset) -> Judgement:
    """An equal epoch is admitted too."""
    equal = claim.epoch == state.epoch and claim.nonce != state.claim.nonce
    return _judge_claim(
        state, replace(claim, epoch=Epoch(claim.epoch + 1)) if equal else claim, Offset(offset + 1)
    )


NO_WINDOW = Mutant(
    "no window clause",
    ((standby, "judge_claim_without_state", _no_window),),
    (Fault.JUMP, Fault.WATERMARK_DELAYED, Fault.MOVED),
)
NO_CEILING = Mutant(
    "no epoch <= offset + 1",
    (
        (session, "_judge_claim", _far_claims),
        (standby, "judge_claim_without_state", _far_claims_without_state),
    ),
    (Fault.TAIL_LOST, Fault.JUNK, Fault.NODE_CRASH),
)
LAST_CLAIM_WINS = Mutant(
    "an equal epoch is admitted too",
    ((session, "_judge_claim", _last_claim_wins),),
    (Fault.MOVED, Fault.WATERMARK_DELAYED),
)

# Authors


def _any_writer(state: SessionState, record: Any) -> Judgement | None:
    return _judge_author(state, record._replace(writer=state.writer))


def _any_epoch(state: SessionState, record: Any) -> Judgement | None:
    return _judge_author(state, record._replace(epoch=state.epoch))


NO_WRITER = Mutant(
    "no writer check", ((session, "_judge_author", _any_writer),), (Fault.JUNK, Fault.TAIL_LOST)
)
NO_EPOCH = Mutant(
    "no epoch check", ((session, "_judge_author", _any_epoch),), (Fault.MOVED, Fault.APPEND_DELAYED)
)
NO_AUTHOR = Mutant("no epoch, no writer", ((session, "_judge_author", _nothing),), (Fault.MOVED,))

# Order and content


def _no_duplicates(state: SessionState, record: Any) -> Judgement | None:
    return _judge_standing(state, record._replace(seq=Seq(max(record.seq, state.next_seq))))


def _any_start(state: SessionState, record: Delta, payload: memoryview, limits: Any) -> Judgement | None:
    length = state.shards[record.shard].length if record.shard < len(state.shards) else record.start
    return _judge_delta(state, record._replace(start=length), payload, limits)


def _first_delta(state: SessionState, record: Delta, payload: memoryview, limits: Any) -> Judgement | None:
    return _judge_delta(state, record._replace(seq=Seq(record.seq + 1)), payload, limits)


def _first_delta_anywhere(
    state: SessionState, record: Delta, payload: memoryview, limits: Any
) -> Judgement | None:
    return _any_start(state, record._replace(seq=Seq(record.seq + 1)), payload, limits)


def _any_payload(state: SessionState, record: Delta, payload: memoryview, limits: Any) -> Judgement | None:
    actual = checksums.checksum(payload)
    return _judge_delta(state, record._replace(payload_checksum=actual), payload, limits)


def _own_payloads_unread(self: StandbyCore, offset: Offset, entry: Entry) -> Any:
    with mock.patch.object(
        session, "_judge_delta", _any_payload if entry.record.session in self._held else session._judge_delta
    ):
        return _judge_and_fold(self, offset, entry)


NO_SEQ = Mutant(
    "no seq check",
    ((session, "_judge_seq", _nothing), (session, "_judge_standing", _no_duplicates)),
    (Fault.DUPLICATE, Fault.SILENT_LOSS, Fault.SWAP),
)
NO_CHAIN = Mutant(
    "no chain check",
    ((session, "_judge_chain", _nothing),),
    (Fault.DAMAGE_AT_ONE_READER, Fault.DAMAGE_AT_REST, Fault.TAIL_LOST),
)
NO_START = Mutant("no start check", ((session, "_judge_delta", _any_start),), (Fault.SILENT_LOSS, Fault.SWAP))
FIRST_ANYTHING = Mutant(
    "seq 0 need not be a Truncate", ((session, "_judge_delta", _first_delta),), (Fault.MOVED,)
)
FIRST_ANYTHING_NO_START = Mutant(
    "seq 0 need not be a Truncate, no start check",
    ((session, "_judge_delta", _first_delta_anywhere),),
    (Fault.MOVED,),
)
NO_PAYLOAD_CHECKSUM = Mutant(
    "no payload checksum", ((session, "_judge_delta", _any_payload),), (Fault.DAMAGE_AT_REST,)
)
OWN_PAYLOADS_UNREAD = Mutant(
    "the primary's tail leaves payloads out",
    ((StandbyCore, "_judge_and_fold", _own_payloads_unread),),
    (Fault.DAMAGE_AT_REST,),
)
NO_SEQ_NO_CHAIN = together("no seq, no chain", NO_SEQ, NO_CHAIN)
NO_START_NO_CHAIN = together("no seq, no start, no chain", NO_SEQ, NO_START, NO_CHAIN)

# Broken and unrooted


def _late_copies(state: SessionState, record: Any) -> Judgement | None:
    return (
        None
        if state.standing is Standing.BROKEN and record.seq >= state.next_seq
        else _judge_standing(state, record)
    )


def _fold_and_heal(state: SessionState, offset: Offset, entry: Entry) -> None:
    fold(state, offset, entry)
    if state.standing is Standing.BROKEN and not isinstance(entry.record, Claim):
        state.standing = Standing.WHOLE


def _roots(state: SessionState, record: Any) -> bool:
    return state.standing is Standing.UNROOTED and isinstance(record, Truncate) and record.length == 0


def _standing_mid_epoch(state: SessionState, record: Any) -> Judgement | None:
    return None if _roots(state, record) else _judge_standing(state, record)


def _seq_mid_epoch(state: SessionState, record: Any) -> Judgement | None:
    return None if _roots(state, record) else _judge_seq(state, record)


def _chain_mid_epoch(state: SessionState, entry: Entry) -> Judgement | None:
    return None if _roots(state, entry.record) else _judge_chain(state, entry)


def _root_mid_epoch(state: SessionState, record: Truncate) -> None:
    if _roots(state, record):
        state.root = state.claim.epoch
        state.shards = [ShardState() for _ in range(state.claim.identity.shards)]
    _fold_truncate(state, record)


LATE_COPY_HEALS = Mutant(
    "late copy heals",
    ((session, "_judge_standing", _late_copies), (standby, "fold", _fold_and_heal)),
    (Fault.DAMAGE_AT_ONE_READER, Fault.DUPLICATE, Fault.SWAP),
)
MID_EPOCH_ROOTS = Mutant(
    "mid-epoch Truncate(0) roots",
    (
        (session, "_judge_standing", _standing_mid_epoch),
        (session, "_judge_seq", _seq_mid_epoch),
        (session, "_judge_chain", _chain_mid_epoch),
        (session, "_fold_truncate", _root_mid_epoch),
    ),
    (Fault.CONTEXT, Fault.CONCURRENT, Fault.DUPLICATE, Fault.JUMP),
)

# Holes


def _hole_keeps(self: StandbyCore, offset: Offset) -> tuple[()]:
    self._position = self._frontier = offset
    return ()


def _unreadable_is_skipped(self: StandbyCore, offset: Offset, _: object) -> Any:
    return () if offset < self._position else (*self._jump(offset), *self._passed(offset))


def _drop_without_since(self: StandbyCore, name: Any, reason: Any, since: Offset) -> Any:
    effects = _drop(self, name, reason, since)
    self._since.pop(name, None)
    return effects


HOLE_KEEPS = Mutant("hole keeps state", ((StandbyCore, "hole", _hole_keeps),), (Fault.JUMP, Fault.MOVED))
REPLACED_KEEPS = Mutant(
    "another log keeps state", ((StandbyCore, "replaced", _hole_keeps),), (Fault.TAIL_LOST, Fault.MOVED)
)
UNREADABLE_SKIPPED = Mutant(
    "unreadable header skipped",
    ((StandbyCore, "unreadable", _unreadable_is_skipped),),
    (Fault.DAMAGE_AT_ONE_READER, Fault.MOVED),
)
DROPPED_IS_FORGOTTEN = Mutant(
    "a dropped session may be known from any older claim",
    ((StandbyCore, "_drop", _drop_without_since),),
    (Fault.DAMAGE_AT_ONE_READER, Fault.MOVED, Fault.WATERMARK_DELAYED),
)
