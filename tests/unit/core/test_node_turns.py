"""NodeCore: turns from the request to their end, one at a time, and what becomes of them when the log disagrees."""

from __future__ import annotations

import pytest

from kvlog.core.effects import (
    AppendRecord,
    DropSession,
    FollowPartition,
    ReadWatermark,
    TurnAcknowledged,
    TurnEnded,
    TurnEndReason,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import (
    AppendFailed,
    CloseTurn,
    Follow,
    HoleRead,
    LogReplacedRead,
    Stop,
    WithdrawRequest,
)
from kvlog.core.myself import Myself
from kvlog.core.node import NodeCore
from kvlog.core.session import Standing
from kvlog.ids import Epoch, NodeId, Offset, Partition, Position, Seq, SessionId, Turn
from kvlog.limits import TINY
from kvlog.records import Claim, Entry, Truncate
from kvlog.wire.header import header_bytes
from tests.unit.core.cluster import Cluster, Machine, partition_of, told
from tests.unit.core.logbook import ONE_SHARD, OTHER_WEIGHTS, seal, truncate, writer

S = SessionId("s")


def opened(
    turn: int, epoch: int, *, usable: int = 0, log_from: int = 0, request: int | None = None
) -> TurnOpened:
    """A turn of the session begins; unless said otherwise, turns and requests count alike."""
    return TurnOpened(request or turn, S, Turn(turn), Epoch(epoch), Position(usable), Position(log_from))


def unlogged(request: int, reason: UnloggedReason, newer: int | None = None) -> TurnUnlogged:
    """A request is served without being logged."""
    return TurnUnlogged(request, S, reason, None if newer is None else Epoch(newer))


def ended(turn: int, reason: TurnEndReason) -> TurnEnded:
    """A turn is over although its request goes on."""
    return TurnEnded(Turn(turn), S, reason)


def test_first_request_asks_claims_reads_back_and_opens(a: Machine) -> None:
    """INV-READBACK: the turn is opened when the fold has admitted the claim, not when it was appended."""
    assert [ReadWatermark(S, Partition(0))] == a.open(1, 2)
    assert ([], 1) == (told(a.answer()), a.core.takeovers_in_flight)
    a.land()
    assert [opened(1, 1)] == told(a.read())
    assert (0, S) == (a.core.takeovers_in_flight, a.core.session_of(Turn(1)))
    assert [S] == [primary.session for primary in a.core.primaries()]


def test_rows_are_appended_and_acknowledged_by_the_fold(a: Machine) -> None:
    """A length is acknowledged when every shard has it."""
    a.own(1, 2)
    assert ([], 3) == (told(a.rows(1, 2)), len(a.sent))
    assert not a.core.is_drained()
    a.land(2)
    assert [] == told(a.read())
    a.land()
    assert [TurnAcknowledged(Turn(1), S, Position(2))] == told(a.read())
    assert a.core.is_drained()


def test_second_request_during_a_turn_is_unlogged(a: Machine) -> None:
    """INV-ONE-TURN: one turn at a time, and the request is served all the same."""
    a.open(1)
    assert [unlogged(2, UnloggedReason.BUSY)] == a.open(1)
    a.answer()
    a.land()
    a.read()
    assert [unlogged(3, UnloggedReason.BUSY)] == a.open(1)


def test_next_turn_of_an_owned_session_needs_no_claim(a: Machine) -> None:
    """The session stays ours, idle, after a turn; its own rows are usable."""
    a.own(1, 2)
    a.write(1, 2)
    a.step(CloseTurn(Turn(1)))
    assert a.core.session_of(Turn(1)) is None
    assert [opened(2, 1, usable=2, log_from=2)] == a.open(1, 2, 3)


def test_next_turn_projects_rows_that_are_not_read_back(a: Machine) -> None:
    """INV-PROJECT: rows on their way need not be logged again, though their bytes cannot be attached yet."""
    a.own(1, 2)
    a.rows(1, 2)
    a.step(CloseTurn(Turn(1)))
    assert [opened(2, 1, usable=0, log_from=2)] == a.open(1, 2, 3)


def test_closing_an_unknown_turn_does_nothing(a: Machine) -> None:
    """It may have ended meanwhile."""
    a.own(1)
    assert [] == a.step(CloseTurn(Turn(9)))
    assert [unlogged(2, UnloggedReason.BUSY)] == a.open(1)


@pytest.mark.parametrize("identity", [OTHER_WEIGHTS, ONE_SHARD])
def test_request_of_other_weights_claims_anew(a: Machine, identity: object) -> None:
    """INV-SAME-WEIGHTS: bytes are known by their claim, so an engine with others needs another claim."""
    a.own(1)
    a.write(1)
    a.step(CloseTurn(Turn(1)))
    assert [ReadWatermark(S, Partition(0))] == a.open(1, identity=identity)  # type: ignore[arg-type]
    a.answer()
    a.land()
    assert [opened(2, 5)] == told(a.read())


def test_request_of_other_weights_replaces_a_takeover_that_nobody_waits_for(a: Machine) -> None:
    """The claim must be the request's own; the older one may land first and is then outdone."""
    a.open(1)
    a.answer()
    a.step(WithdrawRequest(S, 1))
    assert [ReadWatermark(S, Partition(0))] == a.open(1, identity=OTHER_WEIGHTS)
    a.land()
    assert [] == told(a.read())
    a.answer()
    a.land()
    assert [opened(1, 2, request=2)] == told(a.read())
    assert OTHER_WEIGHTS == a.core.primary(S).claim.identity  # type: ignore[union-attr]


def test_request_joins_a_takeover_that_nobody_waits_for(a: Machine) -> None:
    """A claim on its way serves the next request as well."""
    a.open(1)
    a.answer()
    a.step(WithdrawRequest(S, 1))
    assert [] == a.open(1)
    a.land()
    assert [opened(1, 1, request=2)] == told(a.read())


@pytest.mark.parametrize("request_number", [1, 2])
def test_withdrawn_request_gets_no_answer(a: Machine, request_number: int) -> None:
    """Only the request that waits can be withdrawn; the session is then ours and idle."""
    a.open(1)
    a.answer()
    a.step(WithdrawRequest(S, request_number))
    a.land()
    assert ([] if request_number == 1 else [opened(1, 1)]) == told(a.read())
    assert a.core.primary(S) is not None


def test_withdrawing_where_nobody_waits_does_nothing(a: Machine) -> None:
    """It may have been answered meanwhile."""
    assert [] == a.step(WithdrawRequest(S, 1))


def test_request_over_the_limit_of_positions_is_unlogged(a: Machine) -> None:
    """A prompt that no session can hold is not claimed for."""
    assert [unlogged(1, UnloggedReason.TOO_LONG)] == a.open(*range(TINY.session_tokens + 1))
    assert [ReadWatermark(S, Partition(0))] == a.open(*range(TINY.session_tokens))


def test_rows_past_the_limit_end_the_turn(a: Machine) -> None:
    """The rest of the request is not logged; what is logged stays."""
    a.own()
    a.write(*range(TINY.session_tokens))
    assert [ended(1, TurnEndReason.TOO_LONG)] == a.rows(7, shard=0)
    assert [] == a.rows(7, shard=0)


@pytest.mark.parametrize("start", [0, 3])
def test_rows_out_of_order_end_the_turn(a: Machine, start: int) -> None:
    """An engine that skips or repeats positions must open its turn again: nothing is guessed."""
    a.own()
    a.write(1, 2)
    assert [ended(1, TurnEndReason.ROWS_OUT_OF_ORDER)] == a.rows(3, shard=0, start=start)
    assert a.core.session_of(Turn(1)) is None


def test_rows_of_an_unknown_shard_end_the_turn(a: Machine) -> None:
    """The claim says how many shards there are."""
    a.own()
    assert [ended(1, TurnEndReason.ROWS_OUT_OF_ORDER)] == a.rows(1, shard=2)


@pytest.mark.parametrize("wrong", [{"turn": 9}, {"epoch": 9}, {"turn": 0}])
def test_rows_of_another_turn_or_epoch_are_dropped(a: Machine, wrong: dict[str, int]) -> None:
    """INV-TURN: turn numbers begin anew with the daemon, so the epoch must fit as well."""
    a.own()
    assert [] == a.rows(1, **wrong)  # type: ignore[arg-type]
    assert [] == a.sent


def test_rows_of_a_turn_that_is_over_are_dropped(a: Machine) -> None:
    """They were on their way when it ended."""
    a.own()
    a.rows(1)
    a.step(CloseTurn(Turn(1)))
    assert [] == a.rows(2, turn=1)
    a.open(1)
    assert [] == a.rows(2, turn=1)


# What ends a turn


def test_newer_claim_of_another_node_fences_the_turn(cluster: Cluster, a: Machine) -> None:
    """The engine ends the request; what A still sends is stale for all."""
    a.own(1)
    a.rows(1)
    cluster.book.claim("B")
    late = list(a.sent)
    a.land()
    assert [TurnFenced(Turn(1), S, Epoch(1), Epoch(2))] == told(a.read())
    assert a.core.primary(S) is None
    assert [] == a.rows(2, turn=1, epoch=1)
    assert late
    assert cluster.book.state().length == 0


def test_newer_claim_fences_an_idle_owner_without_a_word(cluster: Cluster, a: Machine) -> None:
    """Nobody waits for anything."""
    a.own(1)
    a.step(CloseTurn(Turn(1)))
    cluster.book.claim("B")
    assert [] == told(a.read())
    assert a.core.primary(S) is None


def test_unknown_outcome_ends_the_turn_and_the_next_one_claims_anew(a: Machine) -> None:
    """RULE: never write under that epoch again."""
    a.own(1)
    a.rows(1)
    assert [ended(1, TurnEndReason.OUTCOME_UNKNOWN)] == told(a.lose())
    assert [ReadWatermark(S, Partition(0))] == a.open(1, continues=1)
    a.answer()
    a.land()
    assert [opened(2, 2)] == told(a.read())


def test_failure_of_an_older_epochs_append_is_old_news(a: Machine) -> None:
    """The primary of now has nothing to do with it."""
    a.own(1)
    a.rows(1)
    old = a.sent[0].record
    a.lose()
    assert [] == a.step(AppendFailed(old))
    a.own(1)
    assert [] == a.step(AppendFailed(old))
    assert a.core.primary(S) is not None


def test_failure_of_an_older_claims_append_is_old_news(a: Machine) -> None:
    """Only the newest claim of a take-over counts."""
    a.open(1)
    a.answer()
    first = a.sent.pop().record
    a.step(AppendFailed(first))
    a.answer()
    assert [] == a.step(AppendFailed(first))
    a.land()
    a.read()
    assert [] == a.step(AppendFailed(first))
    assert a.core.primary(S) is not None


def test_own_newer_claim_ends_a_turn_under_the_older_epoch(a: Machine) -> None:
    """A claim of unknown outcome that lands late is ours too, and the epoch it overtakes is lost."""
    a.open(1)
    a.answer()
    lost = a.sent[0]
    a.lose()
    a.answer()
    a.land()
    a.read()
    a.cluster.book.append(Entry(lost.record, lost.header, lost.chain, lost.payload))
    assert [] == told(a.read())  # the older claim is stale
    newer = Claim(S, Epoch(3), a.core.primary(S).claim.writer, *claim_rest(a))  # type: ignore[union-attr, arg-type]
    a.cluster.book.append(seal(None, newer))
    assert [ended(1, TurnEndReason.OUTCOME_UNKNOWN)] == told(a.read())


def claim_rest(a: Machine) -> tuple[object, ...]:
    """The fields of a claim after its writer, with a nonce of its own."""
    mine = a.core.primary(S).claim  # type: ignore[union-attr]
    return mine.nonce[::-1], mine.node, mine.identity, mine.context


def test_own_record_that_does_not_fit_ends_the_turn(cluster: Cluster, a: Machine) -> None:
    """REFUSED: something under our name is in the log that is not what we wrote; claim anew and rewrite."""
    a.own(1)
    a.write(1, 2)
    state = cluster.book.state()
    cluster.book.append(seal(state, truncate(state, 0), chain=1))
    assert [ended(1, TurnEndReason.REFUSED)] == told(a.read())
    assert a.core.primary(S) is None
    a.own(1, 2)
    assert a.state().standing is Standing.BROKEN  # type: ignore[union-attr]
    a.write(1, 2, 3)
    assert a.state().standing is Standing.WHOLE  # type: ignore[union-attr]


def test_owner_whose_first_record_was_lost_ends_the_turn(cluster: Cluster) -> None:
    """Without history and without its Truncate(0) it cannot judge even its own records: claim anew and rewrite."""
    cluster.book.claim("A")
    b = cluster.machine("B", first=1)
    b.own(1)
    b.rows(1)
    b.sent.pop(0)
    b.land()
    assert [ended(1, TurnEndReason.REFUSED)] == told(b.read())
    b.own(1)
    b.write(1)
    assert Standing.WHOLE is b.state().standing  # type: ignore[union-attr]


def test_record_of_a_stranger_under_our_epoch_ends_nothing(cluster: Cluster, a: Machine) -> None:
    """Only our own writer speaks for us, and only what nobody can judge is news."""
    a.own(1)
    a.write(1)
    state = cluster.book.state()
    foreign = truncate(state, 0)._replace(writer=writer("Z"))
    for record in (foreign, truncate(state, 0)._replace(seq=Seq(0)), foreign._replace(epoch=Epoch(9))):
        cluster.book.append(seal(state, record))
    assert [] == told(a.read())
    assert a.core.primary(S) is not None


@pytest.mark.parametrize("disturbance", [HoleRead, LogReplacedRead])
def test_dropped_state_ends_the_turn(a: Machine, disturbance: type[HoleRead | LogReplacedRead]) -> None:
    """What cannot be followed is not owned: the turn is opened again and claims anew."""
    a.own(1)
    a.write(1)
    effects = a.step(disturbance(Partition(0), Offset(4)))
    assert [ended(1, TurnEndReason.DROPPED)] == told(effects)
    assert any(isinstance(effect, DropSession) for effect in effects)
    assert a.core.primary(S) is None


@pytest.mark.parametrize("key", [S, None])
def test_unreadable_record_of_an_owned_session_ends_the_turn(
    cluster: Cluster, a: Machine, key: SessionId | None
) -> None:
    """It may be a newer claim."""
    a.own(1)
    a.write(1)
    cluster.unreadable[cluster.book.truncate(0)] = key
    assert [ended(1, TurnEndReason.DROPPED)] == told(a.read())


def test_unreadable_record_of_another_session_disturbs_nobody(cluster: Cluster, a: Machine) -> None:
    """Its key says whose it is."""
    a.own(1)
    a.write(1)
    cluster.unreadable[cluster.book.truncate(0)] = SessionId("t")
    assert [] == told(a.read())
    assert a.core.primary(S) is not None


def test_owned_session_is_not_pushed_out_by_others(cluster: Cluster, a: Machine) -> None:
    """INV-BOUND-SESSIONS bounds what is idle."""
    a.own(1)
    for number in range(2 * TINY.sessions_a_partition):
        cluster.book.claim("B", session=f"other {number}")
    assert [] == told(a.read())
    assert a.state() is not None
    cluster.book.claim("B")
    cluster.book.claim("B", session="one more")
    a.read()
    for number in range(2 * TINY.sessions_a_partition):
        cluster.book.claim("C", session=f"another {number}")
    a.read()
    assert a.state() is None


def test_partition_that_is_not_followed_is_read_from_the_watermark_on(cluster: Cluster) -> None:
    """A node that follows other partitions takes over all the same: it starts over, with Truncate(0)."""
    b = cluster.machine("B", first=None)
    far = cluster.books[Partition(1)]
    far.claim("A", session="far")
    far.truncate(0, session="far")
    far.rows(1, session="far")
    b.open(1, 2, session="far")
    followed, claimed = b.answer()
    assert FollowPartition(Partition(1), Offset(4)) == followed
    assert isinstance(claimed, AppendRecord)
    b.land()
    (turn,) = told(b.read(partition=1))
    assert TurnOpened(1, SessionId("far"), Turn(1), Epoch(5), Position(0), Position(0)) == turn
    first = b.rows(1, session="far")[0]
    assert isinstance(first, AppendRecord)
    assert isinstance(first.record, Truncate)
    assert (5, 0, 0) == (first.record.epoch, first.record.seq, first.record.length)


def test_partition_is_followed_once(a: Machine) -> None:
    """A programmer error is an assertion."""
    with pytest.raises(AssertionError, match="followed once"):
        a.step(Follow(Partition(0), Offset(0)))


# Stop


def test_stop_answers_who_waits_ends_turns_and_opens_no_more(cluster: Cluster, a: Machine) -> None:
    """What was sent is still drained; a claim on its way leaves an idle owner."""
    a.own(1)
    a.rows(1)
    a.open(1, session="t")
    a.answer()
    effects = a.step(Stop())
    waiting = TurnUnlogged(2, SessionId("t"), UnloggedReason.STOPPING)
    assert [waiting, ended(1, TurnEndReason.STOPPING)] == effects
    assert [unlogged(3, UnloggedReason.STOPPING)] == a.open(1)
    assert not a.core.is_drained()
    a.land()
    assert [] == told(a.read())
    assert a.core.is_drained()
    assert [] == a.step(Stop())


def test_turns_are_numbered_from_where_the_daemon_says(a: Machine) -> None:
    """A daemon that restarts may go on where it was."""
    a.core = NodeCore(Myself(NodeId("node-A"), writer("A"), partition_of, header_bytes), TINY, first_turn=7)
    a.step(Follow(Partition(0), Offset(0)))
    assert [opened(7, 1, request=1)] == told(a.own(1))
