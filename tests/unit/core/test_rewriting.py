"""Rewriting: a session of ours is logged again under a new claim, gives way to requests, and takes nothing back."""

from __future__ import annotations

import pytest

from kvlog.core.effects import (
    AppendRecord,
    ReadWatermark,
    SessionEnded,
    TurnAcknowledged,
    TurnEnded,
    TurnEndReason,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.core.inputs import CloseTurn, HoleRead, Stop
from kvlog.core.rewriting import is_rewritable
from kvlog.core.session import Standing
from kvlog.ids import Epoch, Offset, Partition, Position, SessionId, Turn
from kvlog.records import Claim, Truncate
from tests.unit.core.cluster import Cluster, Machine, claims_in, owners, told
from tests.unit.core.logbook import OTHER_WEIGHTS

S = SessionId("s")
TOKENS = (1, 2, 3)
FIRST_EPOCH, NEW_EPOCH = Epoch(1), Epoch(5)
"""The first claim stands at offset 0, Truncate and two deltas follow, and the rewrite's claim is at offset 4."""


def unlogged(request: int, reason: UnloggedReason, newer: int | None = None) -> TurnUnlogged:
    """A request, or a rewrite, gets no turn."""
    return TurnUnlogged(request, S, reason, None if newer is None else Epoch(newer))


BUSY_2 = unlogged(2, UnloggedReason.BUSY)


@pytest.fixture
def idle(a: Machine) -> Machine:
    """A node that owns a session of three positions, idle and drained; its next request has number 2."""
    a.own(*TOKENS)
    a.write(*TOKENS)
    a.step(CloseTurn(Turn(1)))
    return a


@pytest.fixture
def claiming(idle: Machine) -> Machine:
    """The same while the rewrite's claim is on its way."""
    idle.rewrite()
    idle.answer()
    assert [NEW_EPOCH] == [claim.epoch for claim in claims_in(idle)]
    return idle


@pytest.fixture
def rewriting(claiming: Machine) -> Machine:
    """The same while the rewrite's turn is in progress."""
    claiming.land()
    claiming.read()
    return claiming


def test_rewrite_claims_anew_and_logs_everything_from_position_zero(claiming: Machine) -> None:
    """INV-REWRITE: a turn under an epoch of its own, whose log begins at 0 though all of it is there."""
    claiming.land()
    assert [TurnOpened(2, S, Turn(2), NEW_EPOCH, Position(3), Position(0))] == told(claiming.read())
    sent = [effect.record for effect in claiming.rows(*TOKENS) if isinstance(effect, AppendRecord)]
    assert isinstance(sent[0], Truncate)
    assert (NEW_EPOCH, 0, 0) == (sent[0].epoch, sent[0].seq, sent[0].length)


def test_rewritten_session_is_whole_for_who_begins_at_its_new_claim(
    cluster: Cluster, rewriting: Machine
) -> None:
    """What was logged before the claim is not needed any more, and the first needed offset says so."""
    rewriting.rows(*TOKENS)
    rewriting.land()
    assert TurnAcknowledged(Turn(2), S, Position(3)) == told(rewriting.read())[-1]
    rewriting.step(CloseTurn(Turn(2)))
    late = cluster.machine("B", first=NEW_EPOCH - 1)
    late.read()
    for machine in (rewriting, late):
        state = machine.state()
        assert state is not None
        assert (list(TOKENS), NEW_EPOCH - 1) == (list(state.tokens), state.first_needed_offset)
    assert [TurnOpened(1, S, Turn(1), Epoch(9), Position(3), Position(3))] == told(late.own(*TOKENS, 4))


def test_late_reader_without_a_rewrite_knows_nothing(cluster: Cluster, idle: Machine) -> None:
    """The control: this is what a rewrite is there for."""
    idle.open(*TOKENS)
    idle.rows(4)
    idle.land()
    late = cluster.machine("B", first=NEW_EPOCH - 1)
    late.read()
    assert late.state() is None


def test_rewritten_session_goes_on_with_its_next_request(rewriting: Machine) -> None:
    """It is as it was, under another epoch."""
    rewriting.write(*TOKENS)
    rewriting.step(CloseTurn(Turn(2)))
    assert [TurnOpened(3, S, Turn(3), NEW_EPOCH, Position(3), Position(3))] == told(
        rewriting.open(*TOKENS, 4)
    )


# What is not rewritten


def test_session_of_another_is_not_rewritten(idle: Machine, b: Machine) -> None:
    """Only an owner rewrites."""
    b.read()
    assert [unlogged(1, UnloggedReason.BUSY)] == b.rewrite()
    assert [unlogged(2, UnloggedReason.BUSY)] == [
        TurnUnlogged(2, S, e.reason)
        for e in idle.rewrite(session="unheard-of")
        if isinstance(e, TurnUnlogged)
    ]


def test_session_in_use_is_not_rewritten(idle: Machine) -> None:
    """Not during a turn, and not before all of it was read back."""
    idle.open(*TOKENS, 4)
    assert [unlogged(3, UnloggedReason.BUSY)] == idle.rewrite()
    idle.rows(4)
    idle.step(CloseTurn(Turn(2)))
    assert [unlogged(4, UnloggedReason.BUSY)] == idle.rewrite()
    idle.land()
    idle.read()
    assert [ReadWatermark(S, Partition(0))] == idle.rewrite()


def test_session_without_a_position_is_not_rewritten(a: Machine) -> None:
    """There is nothing to keep."""
    a.own(1)
    a.step(CloseTurn(Turn(1)))
    assert [BUSY_2] == a.rewrite()


def test_session_that_has_ended_is_not_rewritten(idle: Machine) -> None:
    """Its End was sent."""
    idle.end()
    assert [BUSY_2] == idle.rewrite()


def test_session_that_is_broken_is_not_rewritten(idle: Machine) -> None:
    """Its owner claims anew when it is asked for."""
    state, primary = idle.state(), idle.core.primary(S)
    assert state is not None
    assert primary is not None
    assert is_rewritable(primary, state)
    state.break_here()
    assert not is_rewritable(primary, state)
    assert not is_rewritable(primary, None)


def test_session_of_other_weights_is_not_rewritten(idle: Machine) -> None:
    """A claim says whose bytes follow: those of older weights cannot be logged under it."""
    idle.own_as(OTHER_WEIGHTS, *TOKENS)
    idle.step(CloseTurn(Turn(2)))
    assert [unlogged(3, UnloggedReason.BUSY)] == idle.rewrite()


def test_stopping_node_rewrites_nothing(idle: Machine) -> None:
    """It opens no more turns."""
    idle.step(Stop())
    assert [BUSY_2] == idle.rewrite()


def test_one_rewrite_at_a_time_waits_for_its_claim(idle: Machine) -> None:
    """The bound on claims in flight is exceeded by one at most."""
    idle.own(7, session="t")
    idle.write(7, session="t")
    idle.step(CloseTurn(Turn(2)))
    idle.rewrite()
    busy = TurnUnlogged(4, SessionId("t"), UnloggedReason.BUSY)
    assert [busy] == idle.rewrite(session="t")
    assert [unlogged(5, UnloggedReason.BUSY)] == idle.rewrite()


def test_rewrite_that_waits_takes_no_claim_from_a_request(idle: Machine) -> None:
    """INV-REWRITE: as many sessions as ever may be claimed beside it (limits.TINY: two)."""
    idle.rewrite()
    for number, session in enumerate(("t", "u"), 3):
        assert [ReadWatermark(SessionId(session), Partition(0))] == idle.open(1, session=session), number
    overloaded = TurnUnlogged(5, SessionId("v"), UnloggedReason.OVERLOADED)
    assert [overloaded] == idle.open(1, session="v")


# A request comes


def test_request_before_the_claim_was_sent_begins_at_once_and_nothing_is_claimed(idle: Machine) -> None:
    """INV-REWRITE: it goes on under the epoch that it would have had."""
    idle.rewrite()
    assert [BUSY_2, TurnOpened(3, S, Turn(2), FIRST_EPOCH, Position(3), Position(3))] == idle.open(*TOKENS, 4)
    assert ([], 0) == (idle.answer(), idle.core.takeovers_in_flight)


def test_request_while_the_claim_is_on_its_way_begins_at_once_and_goes_on_under_it(claiming: Machine) -> None:
    """It attaches now; when the claim is read back its turn is opened again, and nothing of it is lost."""
    assert [BUSY_2, TurnOpened(3, S, Turn(2), FIRST_EPOCH, Position(3), Position(3))] == claiming.open(
        *TOKENS, 4
    )
    claiming.rows(4)
    claiming.land()
    assert [TurnEnded(Turn(2), S, TurnEndReason.OUTCOME_UNKNOWN)] == told(claiming.read())
    again = claiming.open(*TOKENS, 4, continues=FIRST_EPOCH)
    assert [TurnOpened(4, S, Turn(3), NEW_EPOCH, Position(3), Position(3))] == told(again)


def test_request_during_a_rewrite_ends_it_and_keeps_what_is_there(rewriting: Machine) -> None:
    """INV-REWRITE: what was logged again stands; the request logs from where that ends, and attaches what is folded."""
    rewriting.rows(1)
    rewriting.land()
    rewriting.read()
    rewriting.rows(2)
    assert [
        TurnEnded(Turn(2), S, TurnEndReason.GAVE_WAY),
        TurnOpened(3, S, Turn(3), NEW_EPOCH, Position(1), Position(2)),
    ] == rewriting.open(*TOKENS, 4)
    assert [] == rewriting.rows(3, turn=2), "rows of the rewrite that come late are dropped"
    rewriting.write(3, 4)
    state = rewriting.state()
    assert state is not None
    assert [1, 2, 3, 4] == list(state.tokens)


def test_request_before_a_rewrites_first_row_finds_everything(rewriting: Machine) -> None:
    """The Truncate goes out with the first row, so a rewrite that has sent none has cut nothing."""
    assert TurnOpened(3, S, Turn(3), NEW_EPOCH, Position(3), Position(3)) == rewriting.open(*TOKENS, 4)[-1]


def test_request_of_another_session_ends_no_rewrite(rewriting: Machine) -> None:
    """They have nothing to do with each other."""
    rewriting.open(7, session="t")
    assert S == rewriting.core.session_of(Turn(2))


def test_stop_ends_a_rewrite(rewriting: Machine, b: Machine) -> None:
    """An orderly stop waits for no rewrite, whose claim is on its way or not."""
    assert [TurnEnded(Turn(2), S, TurnEndReason.STOPPING)] == rewriting.step(Stop())
    b.own(7, session="t")
    b.write(7, session="t")
    b.step(CloseTurn(Turn(1)))
    b.rewrite(session="t")
    assert [TurnUnlogged(2, SessionId("t"), UnloggedReason.STOPPING)] == b.step(Stop())


def test_session_is_ended_although_a_rewrites_claim_is_on_its_way(claiming: Machine) -> None:
    """An End under the old epoch would stand behind the new claim and be stale, and the session live on."""
    assert [BUSY_2] == told(claiming.end())
    claiming.land()
    assert Standing.WHOLE is claiming.state().standing  # type: ignore[union-attr]
    claiming.read()
    claiming.land()
    assert any(isinstance(effect, SessionEnded) for effect in claiming.read())
    assert [] == owners(claiming)


def test_session_is_ended_before_a_rewrites_claim_was_sent(idle: Machine) -> None:
    """Nothing is claimed for it any more."""
    idle.rewrite()
    assert [BUSY_2] == told(idle.end())
    assert ([], 0) == (idle.answer(), idle.core.takeovers_in_flight)


def test_session_is_ended_during_its_rewrite(rewriting: Machine) -> None:
    """The turn is over, and the End follows."""
    assert [TurnEnded(Turn(2), S, TurnEndReason.GAVE_WAY)] == told(rewriting.end())
    rewriting.land()
    assert any(isinstance(effect, SessionEnded) for effect in rewriting.read())


def test_end_that_waits_is_not_forgotten_when_a_request_comes(claiming: Machine) -> None:
    """Both wait for the claim: the session ends, and the request begins it anew."""
    claiming.end()
    claiming.rewrite()
    claiming.open(8)
    claiming.land()
    claiming.read()
    claiming.land()
    assert any(isinstance(effect, SessionEnded) for effect in claiming.read())


# Others, and time


def test_rewrite_does_not_take_back_what_another_has_claimed(idle: Machine, b: Machine) -> None:
    """INV-NO-CLAIM-BACK: it claims only when all below the watermark was folded, and then not."""
    b.own(*TOKENS, 4)
    idle.rewrite()
    assert ([], []) == (idle.answer(), claims_in(idle))
    assert [unlogged(2, UnloggedReason.FENCED, 5)] == told(idle.read())
    assert (["B"], []) == (owners(idle, b), claims_in(idle))


def test_rewrite_whose_claim_wins_over_another_writes_nothing(idle: Machine, b: Machine) -> None:
    """The other claimed behind the watermark that the rewrite had read, so the log gives it to us; we leave it idle."""
    b.open(*TOKENS, 4)
    b.answer()
    idle.own(7, session="t")
    idle.rewrite()
    idle.answer()
    b.land()
    idle.land()
    effects = told(idle.read())
    assert [unlogged(3, UnloggedReason.FENCED, 5)] == effects
    assert (["A"], []) == (owners(idle), idle.sent)
    b.read()
    assert [] == owners(b)


def test_rewrite_is_fenced_by_a_newer_claim(rewriting: Machine, b: Machine) -> None:
    """Another node takes the session over in the middle of it: the new owner goes on from the shorter prefix."""
    rewriting.rows(1)
    rewriting.land()
    b.own(*TOKENS, 4)
    assert TurnFenced(Turn(2), S, NEW_EPOCH, Epoch(9)) == told(rewriting.read())[-1]
    assert Position(1) == b.core.primary(S).projected_length  # type: ignore[union-attr]


def test_rewrite_whose_claim_is_late_leaves_the_session_as_it_is(claiming: Machine) -> None:
    """It has cost a claim; the session is ours and idle under it."""
    assert [unlogged(2, UnloggedReason.CLAIM_TIMEOUT)] == list(claiming.core.tick(1 << 62))
    claiming.land()
    assert [] == told(claiming.read())
    assert TurnOpened(3, S, Turn(2), NEW_EPOCH, Position(3), Position(3)) in claiming.open(*TOKENS)


def test_rewrite_after_the_fold_was_lost_has_nothing_to_log(claiming: Machine) -> None:
    """A hole in what was read: nothing is usable, so the turn is closed without a row."""
    claiming.step(HoleRead(Partition(0), Offset(4)))
    claiming.land()
    claiming.answer()
    claiming.land()
    opened = [effect for effect in told(claiming.read()) if isinstance(effect, TurnOpened)]
    assert [(0, 0)] == [(effect.usable, effect.log_from) for effect in opened]


@pytest.mark.parametrize("landed", range(6))
def test_rewrite_that_is_interrupted_anywhere_leaves_a_session_that_another_goes_on_with(
    cluster: Cluster, claiming: Machine, b: Machine, landed: int
) -> None:
    """Whatever of it has reached the log, a prefix is there, and a zombie's late records are stale."""
    claiming.land()
    claiming.read()
    claiming.rows(1, 2)
    claiming.rows(3)
    late = claiming.sent[landed:]
    del claiming.sent[landed:]
    claiming.land()
    effects = b.own(*TOKENS, 4)
    opened = [effect for effect in told(effects) if isinstance(effect, TurnOpened)]
    # Truncate, two shards with two rows, two shards with one more
    expected = {0: 3, 1: 0, 2: 0, 3: 2, 4: 2, 5: 3}[landed]
    assert [(expected, expected)] == [(effect.usable, effect.log_from) for effect in opened]
    b.rows(*(*TOKENS, 4)[expected:])
    b.land()
    claiming.sent = late
    claiming.land()
    b.read()
    for machine in (b, claiming):
        machine.read()
        assert [1, 2, 3, 4] == list(machine.state().tokens)  # type: ignore[union-attr]
    assert ["B"] == owners(b, claiming)
    assert isinstance(cluster.book.entries[4].record, Claim)
