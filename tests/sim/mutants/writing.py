"""Mutants of claiming and writing: who becomes primary, when, and what a turn begins with.

They keep the core's own assertions out of the way where these would stop the fault before it gets into the log.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest import mock

from kvlog.core import session
from kvlog.core.effects import AppendRecord, TurnUnlogged, UnloggedReason
from kvlog.core.node import NodeCore
from kvlog.core.primary import PrimaryCore, Tenure
from kvlog.core.session import SessionState, Standing, fold, next_chain
from kvlog.core.takeover import TakeOver
from kvlog.ids import Offset
from kvlog.records import Claim, Entry
from tests.sim.faults import Fault
from tests.sim.mutants.mutant import Change, Mutant, together
from tests.sim.mutants.reading import FIRST_ANYTHING_NO_START, NO_START, NO_WINDOW

if TYPE_CHECKING:
    from kvlog.core.inputs import EncodedRows, OpenTurn, WatermarkRead
    from kvlog.ids import SessionId
    from kvlog.records import Record

_watermark_read = NodeCore._watermark_read
_append_failed = NodeCore._append_failed
_begin = NodeCore._begin
_won = NodeCore._won
_rows = PrimaryCore.rows
_begin_turn = PrimaryCore.begin

# Claims


def _epoch_from_state(self: NodeCore, happened: WatermarkRead) -> Any:
    state = self.state(happened.session)
    return _watermark_read(self, replace(happened, high_watermark=Offset(state.epoch if state else 0)))


def _primary_at_append(self: NodeCore, happened: WatermarkRead) -> Any:
    out: list[Any] = []
    for effect in _watermark_read(self, happened):
        out.append(effect)
        if isinstance(effect, AppendRecord) and isinstance(effect.record, Claim):
            out.extend(_won_before(self, effect.record, effect.header))
    return tuple(out)


def _won_before(self: NodeCore, claim: Claim, header: bytes) -> Any:
    """Become primary by a claim that is only on its way."""
    state = self.state(claim.session)
    ahead = state.clone() if state else SessionState.from_claim(claim, header, Offset(0))
    if state:
        session._fold_claim(ahead, claim, header)
    waited = self._claims.pop(claim.session)
    self._owned.add(
        PrimaryCore.from_claim(
            self._self.partition_of(claim.session),
            ahead,
            own=claim,
            header_bytes=self._self.header_bytes,
            limits=self._limits,
        )
    )
    return self._open_turn(waited.asked) if waited.asked else ()


def _never_fenced(self: NodeCore, core: PrimaryCore, newer: object) -> tuple[()]:
    return ()


def _outcome_ignored(self: NodeCore, record: Record) -> Any:
    return _append_failed(self, record) if isinstance(record, Claim) else ()


def _any_weights(self: NodeCore, core: PrimaryCore, asked: OpenTurn) -> bool:
    return core.tenure is Tenure.OWNED and not core.ended


STATE_PLUS_ONE = Mutant(
    "epoch = state + 1", ((NodeCore, "_watermark_read", _epoch_from_state),), (Fault.JUMP, Fault.NODE_CRASH)
)
STATE_PLUS_ONE_NO_WINDOW = together("epoch = state + 1, no window clause", STATE_PLUS_ONE, NO_WINDOW)
NO_READ_BACK = Mutant("no read-back", ((NodeCore, "_watermark_read", _primary_at_append),), (Fault.MOVED,))
CLAIMS_BACK = Mutant(
    "claims back after a fence",
    ((NodeCore, "_refusal", lambda *_: None),),
    (Fault.MOVED, Fault.PREEMPTED, Fault.APPEND_UNKNOWN),
)
NEVER_FENCED = Mutant(
    "writes on when fenced", ((NodeCore, "_fence", _never_fenced),), (Fault.MOVED, Fault.CONCURRENT)
)
KEEPS_WRITING = Mutant(
    "unknown outcome keeps writing",
    ((NodeCore, "_append_failed", _outcome_ignored),),
    (Fault.APPEND_UNKNOWN,),
)
OLD_WEIGHTS_CLAIM = Mutant(
    "other weights without claiming anew", ((NodeCore, "_may_begin", _any_weights),), (Fault.WEIGHTS,)
)

# Turns


def _send_unjudged(self: PrimaryCore, record: Any, header: bytes, payload: memoryview) -> AppendRecord:
    chain = next_chain(self._projected, record, header) or 0
    fold(self._projected, self._projected.last_offset, Entry(record, header, chain, payload))
    return AppendRecord(self._partition, record, header, chain, payload)


def _rows_without_truncate(self: PrimaryCore, rows: EncodedRows) -> Any:
    turn = self._turn
    assert turn is not None, "rows belong to a turn"
    if turn.first_seq is None and self._projected.next_seq > 0:
        turn.first_seq = self._projected.next_seq
        with mock.patch.object(PrimaryCore, "expects", return_value=rows.start):
            return _rows(self, rows)
    with mock.patch.object(PrimaryCore, "expects", return_value=rows.start):
        return _rows(self, rows)


def _in_sequence(self: NodeCore, rows: EncodedRows) -> Any:
    """Takes rows in the order of their turn, whatever the projection says."""
    core = self._owned.of_turn(rows.turn)
    if core is None or core.claim.epoch != rows.epoch:
        return ()
    return core.rows(rows)


def _begin_from_the_fold(self: NodeCore, core: PrimaryCore, asked: OpenTurn) -> Any:
    state = self.state(asked.session)
    if (
        state is None
        or state.standing is not Standing.WHOLE
        or core._projected.standing is not Standing.WHOLE
    ):
        return _begin(self, core, asked)
    lagging = state.usable(asked.tokens, asked.context, asked.identity)
    with mock.patch.object(SessionState, "usable", return_value=lagging):
        return _begin(self, core, asked)


def _begin_when_broken(self: PrimaryCore, turn: Any, tokens: Any, context: Any, *, rewrites: bool) -> Any:
    if self._projected.standing is not Standing.BROKEN:
        return _begin_turn(self, turn, tokens, context, rewrites=rewrites)
    self._projected.standing = Standing.WHOLE
    try:
        return _begin_turn(self, turn, tokens, context, rewrites=rewrites)
    finally:
        self._projected.standing = Standing.BROKEN


def _rows_of_any_epoch(self: NodeCore, rows: EncodedRows) -> Any:
    name = self._owned.session_of(rows.turn)
    core = self._owned.get(name) if name is not None else None
    epoch = core.claim.epoch if core is not None else rows.epoch
    return _node_rows(self, replace(rows, epoch=epoch))


_node_rows = NodeCore._rows
UNJUDGED: Change = (PrimaryCore, "_projected_record", _send_unjudged)
NO_TRUNCATE = Mutant(
    "no Truncate at a turn's start",
    ((PrimaryCore, "rows", _rows_without_truncate), (NodeCore, "_rows", _in_sequence), UNJUDGED),
    (Fault.CONCURRENT,),
)
NO_TRUNCATE_NO_START = together("no Truncate at a turn's start, no start check", NO_TRUNCATE, NO_START)
LAGGING_FOLD = Mutant(
    "length from the lagging fold",
    ((NodeCore, "_begin", _begin_from_the_fold), UNJUDGED),
    (Fault.APPEND_DELAYED, Fault.CONCURRENT),
)
BROKEN_GOES_ON = Mutant(
    "a broken claimer goes on from its last good length",
    ((PrimaryCore, "begin", _begin_when_broken), UNJUDGED),
    (Fault.DAMAGE_AT_ONE_READER, Fault.MOVED),
)
RING_EPOCH = Mutant(
    "rows of any epoch taken from the ring",
    ((NodeCore, "_rows", _rows_of_any_epoch),),
    (Fault.DAEMON_CRASH, Fault.CONCURRENT),
)


def _truncate_to_root_only(self: PrimaryCore, rows: EncodedRows) -> Any:
    turn = self._turn
    assert turn is not None, "rows belong to a turn"
    if turn.first_seq is None and self._projected.standing is Standing.WHOLE and self._projected.shards:
        turn.first_seq = self._projected.next_seq
    with mock.patch.object(PrimaryCore, "expects", return_value=rows.start):
        return _rows(self, rows)


NO_TRUNCATE_AT_ALL = together(
    "no Truncate but to root, seq 0 need not be one, no start check",
    Mutant("", ((PrimaryCore, "rows", _truncate_to_root_only), (NodeCore, "_rows", _in_sequence), UNJUDGED)),
    FIRST_ANYTHING_NO_START,
)

# What the simulator found in the cores when it was new


def _hold_what_is_owned(self: NodeCore, name: SessionId) -> None:
    core = self._partitions.get(self._self.partition_of(name))
    if core is not None:
        (core.hold if name in self._owned else core.unhold)(name)


def _won_and_held(self: NodeCore, claim: Claim) -> Any:
    self._partitions[self._self.partition_of(claim.session)].hold(claim.session)
    return _won(self, claim)


def _answered_and_kept(self: NodeCore, now_ns: int) -> Any:
    waiting = [claim.asked for _, claim in self._claims if claim.asked is not None]
    late = [asked for asked in waiting if asked.deadline_ns <= now_ns]
    return tuple(TurnUnlogged(asked.request, asked.session, UnloggedReason.CLAIM_TIMEOUT) for asked in late)


LOST_CLAIMS_AWAITED = Mutant(
    "a claim that cannot be read any more is waited for",
    ((NodeCore, "_claims_unseen", lambda *_: ()), (TakeOver, "is_overdue", lambda *_: False)),
    (Fault.TAIL_LOST, Fault.JUMP),
)
ENDED_KEPT = Mutant(
    "ended sessions are kept", ((NodeCore, "_ended", lambda *_: None),), (Fault.SESSION_ENDED,)
)
CLAIMED_PUSHED_OUT = Mutant(
    "what is being claimed is not held",
    ((NodeCore, "_hold_or_not", _hold_what_is_owned), (NodeCore, "_won", _won_and_held)),
    (Fault.MOVED,),
)
ANSWERED_TWICE = Mutant(
    "a request that waited too long is answered again",
    ((NodeCore, "tick", _answered_and_kept),),
    (Fault.DEADLINE,),
)
REFUSED_GOES_ON = Mutant(
    "writes on when its own record was refused",
    ((NodeCore, "_lost_here", lambda *_: ()),),
    (Fault.DAMAGE_AT_REST, Fault.SILENT_LOSS),
)
