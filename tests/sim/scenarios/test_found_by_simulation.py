"""Faults of the cores that the simulator found, each as the shortest run that shows it."""

from __future__ import annotations

import pytest

from kvlog.checksums import checksum
from kvlog.core.effects import (
    AppendRecord,
    ReadWatermark,
    TurnEnded,
    TurnEndReason,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import (
    AppendFailed,
    EncodedRows,
    HoleRead,
    LogReplacedRead,
    Stop,
    UnreadableRead,
    WithdrawRequest,
)
from kvlog.core.session import Standing
from kvlog.ids import Offset, Position, Seq, Shard
from kvlog.limits import TINY
from kvlog.records import Claim, Codec, End, Truncate
from tests.sim.rows import session_id
from tests.sim.scenarios.onenode import LATE_NS, PARTITION, OneNode, only, states


def test_claim_read_back_when_every_state_is_held_opens_its_turn() -> None:
    """A session that is being claimed is not pushed out by the bound on states: its owner must find it."""
    node = OneNode()
    for session in range(TINY.sessions_a_partition):
        node.close(node.own(session))
    opened = node.own(TINY.sessions_a_partition)
    assert opened.session == session_id(TINY.sessions_a_partition)
    assert len(states(node)) == TINY.sessions_a_partition + 1


def test_session_ended_by_its_owner_is_owned_by_nobody() -> None:
    """Nothing is kept of a session that has ended, or a daemon would grow by every session it ever served."""
    node = OneNode()
    turn = node.own(0)
    node.write(turn, 1, 2)
    node.end(0)
    node.read()
    assert isinstance(node.log[-1].record, End)  # type: ignore[union-attr]
    assert not node.owns(0)
    for session in range(1, TINY.sessions_a_partition + 1):
        node.close(node.own(session))
    assert session_id(0) not in states(node)


def test_ended_session_ended_again_writes_nothing() -> None:
    """An End of what has ended would cost a claim and say nothing."""
    node = OneNode()
    node.write(node.own(0), 1, 2)
    node.end(0)
    assert node.end(0) == ()
    node.read()
    assert node.end(0) == ()


@pytest.mark.parametrize("kind", ["hole", "replaced", "unreadable", "unreadable without key"])
def test_own_claim_that_cannot_be_read_is_claimed_anew(kind: str) -> None:
    """A claim that stood in a hole, a lost tail or a damaged record is not waited for in vain."""
    node = OneNode()
    node.ask(0)
    node.watermark(0)
    at = node.core.partitions[PARTITION].position
    node.log[-1] = None
    match kind:
        case "hole":
            effects = node.step(HoleRead(PARTITION, Offset(at + 1)))
        case "replaced":
            effects = node.step(LogReplacedRead(PARTITION, Offset(at + 1)))
        case _:
            key = session_id(0) if kind == "unreadable" else None
            for _ in range(TINY.reread_attempts):
                assert not [
                    e for e in node.step(UnreadableRead(PARTITION, at, key)) if isinstance(e, ReadWatermark)
                ]
            effects = node.step(UnreadableRead(PARTITION, at, key))
    assert only(ReadWatermark, effects).session == session_id(0)
    node.watermark(0)
    assert only(TurnOpened, node.read()).session == session_id(0)


def test_claim_that_is_lost_without_a_word_is_given_up_in_time() -> None:
    """A take-over that nobody waits for is forgotten after limits.claim_ns; the next request claims anew."""
    node = OneNode()
    node.ask(0)
    node.watermark(0)
    node.log.pop()
    late = only(TurnUnlogged, node.core.tick(LATE_NS))
    assert late.reason is UnloggedReason.CLAIM_TIMEOUT
    assert node.core.takeovers_in_flight == 1
    node.core.tick(LATE_NS + TINY.claim_ns)
    assert node.core.takeovers_in_flight == 0
    assert node.own(0).session == session_id(0)


@pytest.mark.parametrize("what", ["withdrawn", "fenced"])
def test_end_asked_while_a_claim_catches_up_is_written(what: str) -> None:
    """A request that goes away, or is fenced, does not take a pending End with it."""
    node = OneNode()
    turn = node.own(0)
    node.write(turn, 1, 2)
    node.step(AppendFailed(Truncate(session_id(0), turn.epoch, node.writer, Seq(9), Position(0))))
    node.ask(0, request=2, continues=turn.epoch)
    assert node.end(0) == ()
    node.rival_claim(0 if what == "fenced" else 1)
    node.watermark(0)
    if what == "withdrawn":
        node.step(WithdrawRequest(session_id(0), 2))
    answers = [effect.reason for effect in node.read() if isinstance(effect, TurnUnlogged)]
    assert answers == ([UnloggedReason.FENCED] if what == "fenced" else [])
    assert isinstance(node.log[-1].record, End)  # type: ignore[union-attr]


def test_request_fenced_while_it_was_away_does_not_go_on_under_a_newer_claim_of_its_node() -> None:
    """A request that another node took over is over, though this node claimed the session again for another request."""
    node = OneNode()
    old = node.own(0)
    node.close(old)
    node.rival_claim(0)
    node.read()
    node.close(node.own(0, request=2))
    answer = only(TurnUnlogged, node.ask(0, request=3, continues=old.epoch))
    assert answer.reason is UnloggedReason.FENCED


def test_request_that_goes_on_under_a_newer_claim_of_its_own_node_opens() -> None:
    """Claims of the same daemon fence nobody."""
    node = OneNode()
    old = node.own(0)
    node.close(old)
    again = only(TurnOpened, node.ask(0, request=2, continues=old.epoch))
    assert again.epoch == old.epoch


def test_stopped_node_opens_no_turn() -> None:
    """After Stop, every request is served unlogged, also of sessions that this node owns."""
    node = OneNode()
    node.close(node.own(0))
    node.step(Stop())
    for session in (0, 1):
        answer = only(TurnUnlogged, node.ask(session, request=7 + session))
        assert answer.reason is UnloggedReason.STOPPING


def test_claims_are_the_only_records_of_a_session_that_is_only_opened() -> None:
    """A turn without a row costs its claim and nothing else."""
    node = OneNode()
    node.close(node.own(0))
    assert [type(entry.record) for entry in node.log if entry] == [Claim]
    assert not [e for e in node.ask(0, request=2) if isinstance(e, AppendRecord)]


def test_owner_whose_first_record_is_lost_without_a_word_claims_anew() -> None:
    """An owner that cannot judge its own records, since the one that roots the session is missing, is told so."""
    node = OneNode()
    turn = node.own(0)
    payload = memoryview(b"rows")
    rows = EncodedRows(
        turn.turn, turn.epoch, Shard(0), Position(0), (1, 2), Codec.RAW, payload, checksum(payload)
    )
    node.step(rows)
    del node.log[-2]
    assert only(TurnEnded, node.read()).reason is TurnEndReason.REFUSED
    assert not node.owns(0)


def test_first_record_that_comes_after_the_second_roots_nobody() -> None:
    """Who knew the session is broken by such an epoch: who did not may not be made whole by it."""
    node = OneNode()
    turn = node.own(0)
    payload = memoryview(b"rows")
    rows = EncodedRows(
        turn.turn, turn.epoch, Shard(0), Position(0), (1, 2), Codec.RAW, payload, checksum(payload)
    )
    node.step(rows)
    node.log[-2:] = reversed(node.log[-2:])
    other = OneNode(log=node.log, name="b")
    other.read()
    state = other.core.partitions[PARTITION].session(session_id(0))
    assert state is not None
    assert state.standing is Standing.UNROOTED


def catching_up(node: OneNode) -> None:
    """A request that goes on, whose claim waits until everything below watermark 9 was read."""
    turn = node.own(0)
    node.write(turn, 1, 2)
    node.step(AppendFailed(Truncate(session_id(0), turn.epoch, node.writer, Seq(9), Position(0))))
    node.ask(0, request=2, continues=turn.epoch)
    node.watermark(0, 9)


def test_watermark_of_a_log_that_was_replaced_is_read_again() -> None:
    """A log that lost its tail may never come to the watermark that a claim waits for."""
    node = OneNode()
    catching_up(node)
    assert only(ReadWatermark, node.step(LogReplacedRead(PARTITION, Offset(1)))).session == session_id(0)
    del node.log[1:]
    node.watermark(0)
    assert only(TurnOpened, node.read()).request == 2


def test_take_over_given_up_while_it_catches_up_leaves_nothing() -> None:
    """What a take-over waited with goes with it, or a daemon would grow by it."""
    node = OneNode()
    catching_up(node)
    node.core.tick(LATE_NS)
    node.core.tick(LATE_NS + TINY.claim_ns)
    assert node.core.takeovers_in_flight == 0


def test_claim_of_unknown_outcome_that_lands_while_the_next_one_catches_up_opens_its_turn_once() -> None:
    """A claim that was won is waited for no more, whatever was asked for it meanwhile."""
    node = OneNode()
    old = node.own(0)
    node.step(AppendFailed(Truncate(session_id(0), old.epoch, node.writer, Seq(9), Position(0))))
    node.ask(0, request=2, continues=old.epoch)
    claim = only(AppendRecord, node.watermark(0)).record
    assert only(ReadWatermark, node.step(AppendFailed(claim))).session == session_id(0)
    node.watermark(0, len(node.log) + 1)
    assert only(TurnOpened, node.read()).request == 2
    node.rival_claim(1)
    assert node.read()
    assert node.core.takeovers_in_flight == 0
