"""Records, effects and states in words, one line each, for the scenario files."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core import effects as fx
from kvlog.core.verdicts import Why
from kvlog.records import Claim, Delta, End, Record, Snapshot, Truncate
from tests.unit.core.logbook import OTHER_WEIGHTS, writer

if TYPE_CHECKING:
    from kvlog.core.effects import Effect
    from kvlog.core.session import SessionState

__all__ = ["effect_line", "record_words", "state_line"]

NAMES = {writer(name): name for name in "ABCDEFGH"}


def record_words(record: Record | None) -> str:
    """A record: its kind, session and what it says; by whom, under which epoch and seq."""
    match record:
        case None:
            return "unreadable"
        case Claim():
            weights = " of newer weights" if record.identity == OTHER_WEIGHTS else ""
            return f"claim {record.session}{weights} ({NAMES[record.writer]} epoch {record.epoch})"
        case Truncate():
            return f"truncate {record.session} to {record.length} ({_by(record)})"
        case Delta():
            tokens = " ".join(str(token) for token in record.tokens)
            return f"delta {record.session}/{record.shard} at {record.start}: {tokens} ({_by(record)})"
        case End():
            return f"end {record.session} ({_by(record)})"
        case Snapshot():
            return f"snapshot {record.session}"


def _by(record: Truncate | Delta | End) -> str:
    return f"{NAMES[record.writer]} epoch {record.epoch} seq {record.seq}"


def state_line(state: SessionState | None) -> str:
    """What a node knows of a session."""
    if state is None:
        return "unknown"
    tokens = " ".join(str(token) for token in state.tokens) or "nothing"
    needed = "" if state.first_needed_offset is None else f", needed from {state.first_needed_offset}"
    heal = " (a fitting seq 0 heals it)" if state.healable else ""
    return (
        f"{state.standing}{heal}: {NAMES[state.writer]} epoch {state.epoch}, "
        f"next seq {state.next_seq}, holds {tokens}{needed}"
    )


def effect_line(effect: Effect) -> str:
    """What a node wants done."""
    return _read_line(effect) or _write_line(effect)


def _read_line(effect: Effect) -> str:
    match effect:
        case fx.StoreRows(delta):
            return f"store {delta.session}/{delta.shard} [{delta.start}, {delta.start + len(delta.tokens)})"
        case fx.CutRows(session, length):
            return f"cut {session} to {length}"
        case fx.DropSession(session, reason):
            return f"drop {session}: {reason}"
        case fx.RecordRefused(offset, record, judgement):
            has_numbers = judgement.actual is not None and judgement.why not in (Why.CHAIN, Why.PAYLOAD)
            compared = f" ({judgement.actual}, expected {judgement.expected})" if has_numbers else ""
            return f"refuse {offset}, {record_words(record)}: {judgement.verdict}, {judgement.why}{compared}"
        case fx.Reread(_, offset):
            return f"read again from {offset}"
        case fx.SessionClaimed(claim, offset, previous):
            after = f", after epoch {previous.epoch}" if previous else ""
            return f"at {offset} {NAMES[claim.writer]} owns {claim.session} by epoch {claim.epoch}{after}"
        case fx.SessionBroken(session, offset, length, _):
            return f"ALERT {session} is broken at {offset}, keeps {length}"
        case fx.SessionHealed(session, offset):
            return f"{session} is whole again at {offset}"
        case fx.SessionEnded(session, offset):
            return f"{session} has ended at {offset}"
        case fx.NoteSnapshot(snapshot, offset):
            return f"note a snapshot of {snapshot.session} at {offset}"
        case _:
            return ""


def _write_line(effect: Effect) -> str:
    match effect:
        case fx.FollowPartition(partition, offset):
            return f"follow partition {partition} from {offset}"
        case fx.ReadWatermark(session, _):
            return f"ask for the watermark of {session}"
        case fx.AppendRecord(_, record):
            return f"append {record_words(record)}"
        case fx.TurnOpened():
            return (
                f"answer {effect.request}: turn {effect.turn} of {effect.session} under epoch {effect.epoch}, "
                f"attach [0, {effect.usable}), log from {effect.log_from}"
            )
        case fx.TurnUnlogged(request, session, reason, newer):
            by = "" if newer is None else f" by epoch {newer}"
            return f"answer {request}: {session} unlogged, {reason}{by}"
        case fx.TurnAcknowledged(turn, session, length):
            return f"turn {turn} of {session}: {length} acknowledged"
        case fx.TurnFenced(turn, session, epoch, newer):
            return f"turn {turn} of {session} is FENCED: epoch {epoch} by {newer}"
        case fx.TurnEnded(turn, session, reason):
            return f"turn {turn} of {session} is over: {reason}"
        case _:
            raise AssertionError(effect)
