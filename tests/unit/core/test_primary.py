"""PrimaryCore: the numbering of one session under one epoch, and what it learns of its records from the fold."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlog.checksums import checksum
from kvlog.core.effects import AppendRecord, TurnAcknowledged
from kvlog.core.inputs import EncodedRows
from kvlog.core.primary import PrimaryCore, Tenure
from kvlog.core.session import Standing
from kvlog.errors import LocalProtocolError
from kvlog.ids import Position, Seq, SessionId, Shard, Turn
from kvlog.limits import TINY
from kvlog.records import Codec, Delta, End, EndReason, Entry, Record, Truncate
from kvlog.wire.header import header_bytes
from tests.unit.core.logbook import (
    CONTEXT,
    IDENTITY,
    ONE_SHARD,
    OTHER_CONTEXT,
    PARTITION,
    Logbook,
    claim,
    payload_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable

FIRST, SECOND = Turn(1), Turn(2)


def owner(book: Logbook) -> PrimaryCore:
    """The owner of the session by the newest claim in the log, which it has just read back."""
    state = book.state()
    return PrimaryCore.from_claim(PARTITION, state, own=state.claim, header_bytes=header_bytes, limits=TINY)


def owned() -> tuple[Logbook, PrimaryCore]:
    """A new session, claimed and read back."""
    book = Logbook()
    book.claim()
    return book, owner(book)


def encoded(
    primary: PrimaryCore, tokens: tuple[int, ...], *, shard: int = 0, start: int | None = None
) -> EncodedRows:
    """The next rows of the turn in progress."""
    expected = primary.expects(Shard(shard))
    payload = payload_of(tokens)
    return EncodedRows(
        turn=primary.turn or Turn(0),
        epoch=primary.claim.epoch,
        shard=Shard(shard),
        start=Position(start if start is not None else expected or 0),
        tokens=tokens,
        codec=Codec.RAW,
        payload=memoryview(payload),
        payload_checksum=checksum(payload),
    )


def write(primary: PrimaryCore, *tokens: int) -> list[AppendRecord]:
    """The same new rows from both shards."""
    return [effect for shard in (0, 1) for effect in primary.rows(encoded(primary, tokens, shard=shard))]


def land(book: Logbook, effects: list[AppendRecord]) -> None:
    """The log takes the records; a reader of everything admits each of them."""
    for effect in effects:
        entry = Entry(effect.record, effect.header, effect.chain, effect.payload)
        next_seq = book.state().next_seq
        book.append(entry)
        assert next_seq + 1 == book.state().next_seq, f"refused: {effect.record}"


def told(effects: list[AppendRecord]) -> list[str]:
    """Records in short."""
    return [short(effect.record) for effect in effects]


def short(record: Record) -> str:
    """A record in short: its kind, its seq, and what it says."""
    match record:
        case Truncate():
            return f"{record.seq} truncate {record.length}"
        case Delta():
            return f"{record.seq} delta {record.shard}:{record.start} {list(record.tokens)}"
        case End():
            return f"{record.seq} end {record.reason}"
        case _:
            return type(record).__name__


def test_primary_is_made_only_from_its_own_claim() -> None:
    """INV-READBACK: an append is not a claim read back."""
    book = Logbook()
    book.claim("B")
    with pytest.raises(AssertionError, match="INV-READBACK"):
        PrimaryCore.from_claim(PARTITION, book.state(), own=claim(1), header_bytes=header_bytes, limits=TINY)


def test_primary_says_what_it_owns() -> None:
    """Owned, idle, and as long as what was folded."""
    book, primary = owned()
    assert (Tenure.OWNED, None, 0) == (primary.tenure, primary.turn, primary.projected_length)
    assert (SessionId("s"), book.state().claim) == (primary.session, primary.claim)
    assert not primary.ended
    assert primary.expects(Shard(0)) is None


def test_first_turn_begins_with_truncate_zero_written_with_its_first_row() -> None:
    """RULE: seq 0 of every epoch is a Truncate, and nothing is written before there is a row."""
    book, primary = owned()
    assert primary.begin(FIRST, (1, 2, 3), CONTEXT) == 0
    effects = write(primary, 1, 2)
    assert ["0 truncate 0", "1 delta 0:0 [1, 2]", "2 delta 1:0 [1, 2]"] == told(effects)
    assert {PARTITION} == {effect.partition for effect in effects}
    land(book, effects)
    assert [1, 2] == list(book.state().tokens)


def test_rows_go_on_without_another_truncate() -> None:
    """Only the turn's first record cuts."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1))
    assert ["3 delta 0:1 [2]", "4 delta 1:1 [2]"] == told(write(primary, 2))


def test_shards_may_run_ahead_of_each_other() -> None:
    """Each shard's rows come at their own pace; the length is the least."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, list(primary.rows(encoded(primary, (1, 2), shard=1))))
    assert (0, 2) == (primary.expects(Shard(0)), primary.expects(Shard(1)))
    assert (0, 0) == (primary.projected_length, book.state().length)
    land(book, list(primary.rows(encoded(primary, (1,), shard=0))))
    assert (1, 1) == (primary.projected_length, book.state().length)


def test_second_turn_keeps_the_prefix_that_equals_its_request() -> None:
    """Rows below the common prefix are not logged again; what follows it is cut with the first new row."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1, 2, 3))
    assert primary.close(FIRST)
    assert primary.begin(SECOND, (1, 2, 9, 9), CONTEXT) == 2
    effects = write(primary, 9, 9)
    assert ["3 truncate 2", "4 delta 0:2 [9, 9]", "5 delta 1:2 [9, 9]"] == told(effects)
    land(book, effects)
    assert [1, 2, 9, 9] == list(book.state().tokens)


def test_second_turn_takes_its_prefix_from_records_that_are_not_read_back() -> None:
    """INV-PROJECT: the fold lags behind what is on its way; a length from it would be wrong where it is folded."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    first = write(primary, 1, 2, 3)
    primary.close(FIRST)
    assert (0, 3) == (book.state().length, primary.projected_length)
    assert primary.begin(SECOND, (1, 2, 3, 4), CONTEXT) == 3
    second = write(primary, 4)
    assert "3 truncate 3" == told(second)[0]
    land(book, first + second)
    assert [1, 2, 3, 4] == list(book.state().tokens)


def test_second_turn_cuts_shards_that_ran_ahead() -> None:
    """The prefix is what every shard will hold; the rows of a shard beyond it are cut."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1))
    land(book, list(primary.rows(encoded(primary, (2,), shard=1))))
    primary.close(FIRST)
    assert primary.begin(SECOND, (1, 2), CONTEXT) == 1
    land(book, write(primary, 2))
    assert [2, 2] == [shard.length for shard in book.state().shards]


@pytest.mark.parametrize("tokens", [(5, 6), ()])
def test_turn_with_another_context_or_nothing_in_common_starts_over(tokens: tuple[int, ...]) -> None:
    """Bytes of another context are of no use to the request."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1, 2))
    primary.close(FIRST)
    assert primary.begin(SECOND, tokens or (1, 2), CONTEXT if tokens else OTHER_CONTEXT) == 0
    land(book, write(primary, 5))
    assert [5] == list(book.state().tokens)


def test_turn_without_rows_writes_nothing() -> None:
    """A request that only attaches leaves no record."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1, 2))
    primary.close(FIRST)
    primary.begin(SECOND, (1, 2), CONTEXT)
    assert primary.close(SECOND)
    assert (2, 3) == (primary.projected_length, book.state().next_seq)


def test_closing_another_turn_does_nothing() -> None:
    """A late close of a turn that is over must not end the next one."""
    _, primary = owned()
    assert not primary.close(FIRST)
    primary.begin(SECOND, (), CONTEXT)
    assert not primary.close(FIRST)
    assert primary.turn == SECOND


def test_new_epoch_on_a_whole_session_keeps_its_history() -> None:
    """A take-over by another node goes on where the log ends."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1, 2))
    book.claim("B")
    heir = owner(book)
    assert heir.begin(FIRST, (1, 2, 3), CONTEXT) == 2
    effects = write(heir, 3)
    assert ["0 truncate 2", "1 delta 0:2 [3]", "2 delta 1:2 [3]"] == told(effects)
    land(book, effects)


@pytest.mark.parametrize("known", ["broken", "unrooted", "resharded"])
def test_new_epoch_on_what_cannot_be_continued_starts_over(known: str) -> None:
    """A claimer that is broken, has no history, or cannot use the format writes Truncate(0), which roots all."""
    book, primary = owned()
    if known != "unrooted":
        primary.begin(FIRST, (), CONTEXT)
        land(book, write(primary, 1, 2))
    if known == "broken":
        book.state().break_here()
    book.claim("B", identity=ONE_SHARD if known == "resharded" else IDENTITY)
    heir = owner(book)
    assert heir.begin(FIRST, (1, 2, 3), CONTEXT) == 0
    land(book, list(heir.rows(encoded(heir, (1, 2, 3)))))
    state = book.state()
    assert (Standing.WHOLE, state.epoch, 3) == (state.standing, state.root, state.shards[0].length)


# What is acknowledged


def test_rows_are_acknowledged_by_the_fold_alone() -> None:
    """Acknowledged is what our own fold admitted, as a length over all shards, and it is said when it grows."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    effects = write(primary, 1, 2)
    said = []
    for effect in effects:
        said.append(primary.folded(book.state()))
        land(book, [effect])
    said += [primary.folded(book.state()), primary.folded(book.state())]
    assert [(), (), (), (TurnAcknowledged(FIRST, SessionId("s"), Position(2)),), ()] == said


def test_records_of_the_turn_before_acknowledge_nothing_of_this_one() -> None:
    """Before its own Truncate is folded, the session's length says nothing about this turn's rows."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    first = write(primary, 1, 2, 3)
    primary.close(FIRST)
    primary.begin(SECOND, (1,), CONTEXT)
    second = write(primary, 8, 9)
    land(book, first)
    assert () == primary.folded(book.state())
    land(book, second)
    assert (TurnAcknowledged(SECOND, SessionId("s"), Position(3)),) == primary.folded(book.state())


def test_nothing_is_acknowledged_without_a_turn_or_its_rows() -> None:
    """A session that is idle has nobody to tell."""
    book, primary = owned()
    assert () == primary.folded(book.state())
    primary.begin(FIRST, (), CONTEXT)
    assert () == primary.folded(book.state())


def test_nothing_is_acknowledged_under_another_claim() -> None:
    """A newer owner's records are not ours."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1, 2))
    book.claim("B")
    assert () == primary.folded(book.state())


def test_primary_is_drained_when_all_it_sent_was_folded() -> None:
    """At stop it is worth waiting for."""
    book, primary = owned()
    assert primary.is_drained(book.state())
    assert not primary.is_drained(None)
    primary.begin(FIRST, (), CONTEXT)
    effects = write(primary, 1)
    assert not primary.is_drained(book.state())
    land(book, effects)
    assert primary.is_drained(book.state())
    book.claim("B")
    assert not primary.is_drained(book.state())


def test_primary_is_not_drained_by_what_another_owner_did() -> None:
    """An epoch that has sent nothing, and a newer one that has sent nothing, are not the same."""
    book, primary = owned()
    book.claim("B")
    assert primary.claim.epoch < book.state().epoch
    assert not primary.is_drained(book.state())


# Bounds, order, the end


def test_rows_have_room_up_to_the_limit_of_positions() -> None:
    """No record is sent that every reader would refuse as too long."""
    _, primary = owned()
    assert not primary.has_room(1, Shard(0))
    primary.begin(FIRST, (), CONTEXT)
    assert primary.has_room(TINY.session_tokens, Shard(0))
    assert not primary.has_room(TINY.session_tokens + 1, Shard(0))
    assert not primary.has_room(1, Shard(2))
    write(primary, *range(60))
    assert primary.has_room(4, Shard(1))
    assert not primary.has_room(5, Shard(1))


def test_end_follows_what_was_written() -> None:
    """An End takes the next seq, and ends the turn in progress."""
    book, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    land(book, write(primary, 1))
    effects = list(primary.end(EndReason.FORGET))
    assert ["3 end forget"] == told(effects)
    assert (True, None) == (primary.ended, primary.turn)
    land(book, effects)
    assert (Standing.ENDED, 0) == (book.state().standing, book.state().length)


def test_end_of_an_epoch_without_records_puts_a_truncate_first() -> None:
    """RULE: seq 0 of every epoch is a Truncate, also of one that only ends the session."""
    book, primary = owned()
    effects = list(primary.end(EndReason.TTL))
    assert ["0 truncate 0", "1 end ttl"] == told(effects)
    land(book, effects)
    assert Standing.ENDED is book.state().standing


@pytest.mark.parametrize("tenure", [Tenure.FENCED, Tenure.LOST, Tenure.REFUSED, Tenure.DROPPED])
def test_lost_epoch_is_never_written_again(tenure: Tenure) -> None:
    """INV-OWNER: what is lost stays lost for the first reason, and says once which turn it cost."""
    _, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    assert FIRST == primary.lose(tenure)
    assert (tenure, None) == (primary.tenure, primary.turn)
    assert primary.lose(Tenure.LOST) is None
    assert tenure is primary.tenure
    with pytest.raises(AssertionError, match="only an owner begins"):
        primary.begin(SECOND, (), CONTEXT)
    with pytest.raises(AssertionError, match="only an owner ends"):
        primary.end(EndReason.TTL)


def test_primary_refuses_what_its_caller_must_not_ask() -> None:
    """Programmer errors are assertions: the node checks first, and answers in words."""
    _, primary = owned()
    with pytest.raises(AssertionError, match="rows belong to a turn"):
        primary.rows(encoded(primary, (1,)))
    primary.begin(FIRST, (), CONTEXT)
    with pytest.raises(AssertionError, match="one turn at a time"):
        primary.begin(SECOND, (), CONTEXT)
    with pytest.raises(AssertionError, match="contiguous"):
        primary.rows(encoded(primary, (1,), start=1))
    with pytest.raises(AssertionError, match="no rows"):
        primary.rows(encoded(primary, ()))
    with pytest.raises(AssertionError, match="does not come back"):
        primary.lose(Tenure.OWNED)
    wrong = encoded(primary, (1,))
    wrong = replace(wrong, payload_checksum=0)
    with pytest.raises(AssertionError, match="their own checksum"):
        primary.rows(wrong)
    assert primary._projected.next_seq == 0, "nothing was changed"
    write(primary, 1)
    with pytest.raises(AssertionError, match="every reader would refuse"):
        primary.rows(replace(encoded(primary, (2,)), payload_checksum=0))


@pytest.mark.parametrize("tokens", [(1 << 32,), (-1,), tuple(range(TINY.delta_tokens + 1))])
def test_rows_that_no_record_can_carry_change_nothing(tokens: tuple[int, ...]) -> None:
    """INV-SENT: the wire refuses them before the projection has moved, so the turn goes on as if they had not come."""
    book = Logbook()
    book.claim()
    encoder: Callable[[Record], bytes] = lambda record: header_bytes(record, limits=TINY)  # noqa: E731
    state = book.state()
    primary = PrimaryCore.from_claim(PARTITION, state, own=state.claim, header_bytes=encoder, limits=TINY)
    primary.begin(FIRST, (), CONTEXT)
    for _ in ("before the turn's Truncate", "behind it"):
        before = copy.deepcopy(primary._projected)
        with pytest.raises(LocalProtocolError):
            primary.rows(replace(encoded(primary, (1,)), tokens=tokens))
        assert before == primary._projected
        land(book, write(primary, 1, 2))
    assert [1, 2, 1, 2] == list(book.state().tokens)


def test_epoch_without_history_cannot_be_continued() -> None:
    """A projection that lacks history can only begin with Truncate(0): anything else has no chain."""
    _, primary = owned()
    primary._projected.next_seq = 1  # type: ignore[assignment]
    with pytest.raises(AssertionError, match="starts with Truncate"):
        primary._send(
            Truncate(primary.session, primary.claim.epoch, primary.claim.writer, Seq(1), Position(0)),
            payload=memoryview(b""),
        )


def test_projection_leaves_the_folded_state_alone() -> None:
    """The fold belongs to the reader."""
    book, primary = owned()
    before = copy.deepcopy(book.state())
    primary.begin(FIRST, (), CONTEXT)
    write(primary, 1, 2)
    assert before == book.state()


# Interrupted after each step


def two_turns() -> list[AppendRecord]:
    """What an owner sends in two turns and an end."""
    _, primary = owned()
    primary.begin(FIRST, (), CONTEXT)
    sent = write(primary, 1, 2)
    primary.close(FIRST)
    primary.begin(SECOND, (1, 5), CONTEXT)
    sent += write(primary, 5) + write(primary, 6)
    return sent + list(primary.end(EndReason.TTL))


@pytest.mark.parametrize("landed", range(len(two_turns()) + 1))
def test_owner_that_dies_after_any_record_leaves_a_session_that_another_can_go_on_with(landed: int) -> None:
    """Whatever of it reached the log: a newer claim, a turn and its rows are admitted, and late records are stale."""
    book, _ = owned()
    sent = two_turns()
    land(book, sent[:landed])
    left = list(book.state().tokens)
    book.claim("B")
    heir = owner(book)
    log_from = heir.begin(FIRST, (1, 2, 3), CONTEXT)
    assert log_from == len([1 for mine, theirs in zip(left, (1, 2, 3), strict=False) if mine == theirs])
    rest = (1, 2, 3)[log_from:]
    land(book, write(heir, *rest))
    before = copy.deepcopy(book.state())
    for late in sent[landed:]:
        book.append(Entry(late.record, late.header, late.chain, late.payload))
    assert before == book.state()
    assert [1, 2, 3] == list(book.state().tokens)


@pytest.mark.parametrize("landed", range(len(two_turns()) + 1))
def test_writer_that_resumes_under_a_new_claim_after_any_record_rewrites_what_is_missing(landed: int) -> None:
    """An unknown outcome: it claims anew, and its own late records under the old epoch change nothing."""
    book, _ = owned()
    sent = two_turns()
    land(book, sent[:landed])
    book.claim("A")
    before = copy.deepcopy(book.state())
    for late in sent[landed:]:
        book.append(Entry(late.record, late.header, late.chain, late.payload))
    assert before == book.state()
    again = owner(book)
    again.begin(FIRST, (1, 5, 6, 7), CONTEXT)
    at = again.expects(Shard(0)) or 0
    land(book, write(again, *(1, 5, 6, 7)[at:]))
    assert [1, 5, 6, 7] == list(book.state().tokens)
