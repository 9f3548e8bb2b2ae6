"""StandbyCore: one partition read in order, with holes, damage, and more sessions than it keeps."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import (
    CutRows,
    DropReason,
    DropSession,
    NoteSnapshot,
    RecordRefused,
    Reread,
    SessionBroken,
    SessionClaimed,
    SessionEnded,
    SessionHealed,
    StoreRows,
)
from kvlog.core.session import Standing
from kvlog.core.standby import StandbyCore
from kvlog.core.verdicts import Judgement, Verdict, Why
from kvlog.ids import Offset, SessionId
from kvlog.limits import TINY
from tests.unit.core.logbook import (
    LAYOUT,
    PARTITION,
    Logbook,
    claim,
    delta,
    end,
    read_to,
    seal,
    snapshot,
    truncate,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlog.core.effects import ReadEffect

S = SessionId("s")


def reader(first: int = 0) -> StandbyCore:
    """A reader of the partition under the tiny limits."""
    return StandbyCore(PARTITION, Offset(first), TINY)


def refusals(effects: Iterable[ReadEffect]) -> list[tuple[int, Why]]:
    """Where something was refused, and by which rule."""
    return [(e.offset, e.judgement.why) for e in effects if isinstance(e, RecordRefused)]


def written(*sessions: str) -> Logbook:
    """A log in which each of the sessions was claimed and holds one token."""
    book = Logbook()
    for session in sessions:
        book.claim(session=session)
        book.truncate(0, session=session)
        book.rows(7, session=session)
    return book


def test_standby_tells_what_it_reads() -> None:
    """Partition, position, applied and the window begin where the reader was told to begin."""
    core = reader(5)
    assert (PARTITION, 5, 5, 5) == (core.partition, core.position, core.applied, core.read_from)
    assert [] == list(core.sessions())


def test_standby_reading_a_conversation_gives_each_effect_once() -> None:
    """Rows are stored, cuts cut what there is, and an End cuts everything."""
    book = Logbook()
    first = claim(1)
    book.append(seal(None, first))
    book.truncate(0)
    state = book.state()
    row = seal(state, delta(state, (1, 2)))
    book.append(row)
    book.delta(1, 2, shard=1)
    book.truncate(1)
    book.truncate(1)
    book.append(seal(None, snapshot(first)))
    book.append(seal(None, claim(8, "B")))
    book.truncate(1)
    book.end()
    effects = read_to(core := reader(), book)
    assert [
        SessionClaimed(first, Offset(0), None),
        StoreRows(row.record, row.payload, LAYOUT),  # type: ignore[arg-type]
        CutRows(S, 1),  # type: ignore[arg-type]
        NoteSnapshot(snapshot(first), Offset(6)),
        SessionClaimed(claim(8, "B"), Offset(7), first),
        CutRows(S, 0),  # type: ignore[arg-type]
        SessionEnded(S, Offset(9)),
    ] == [e for e in effects if not (isinstance(e, StoreRows) and e.delta.shard == 1)]
    assert (10, 10, 0) == (core.position, core.applied, core.read_from)
    assert book.states == {s.session: s for s in core.sessions()}


def test_standby_ignores_offsets_that_were_fed() -> None:
    """A reader that delivers twice does no harm."""
    book = written("s")
    read_to(core := reader(), book)
    before = copy.deepcopy(core.session(S))
    for offset, entry in enumerate(book.entries):
        assert () == core.read(Offset(offset), entry)
        assert () == core.unreadable(Offset(offset), None)
    assert (before, 4) == (core.session(S), core.position)


def test_standby_treats_a_jump_as_a_hole() -> None:
    """INV-HOLE: whatever lies between may be a claim, so every session of the partition is void."""
    book = written("s", "t")
    read_to(core := reader(), book)
    late = seal(None, claim(21, session="u"))
    effects = core.read(Offset(20), late)
    assert [
        DropSession(S, DropReason.HOLE),
        DropSession(SessionId("t"), DropReason.HOLE),
        SessionClaimed(claim(21, session="u"), Offset(20), None),
    ] == list(effects)
    assert (21, 20) == (core.position, core.read_from)


@pytest.mark.parametrize("key", [None, SessionId("s")])
def test_standby_treats_a_jump_to_an_unreadable_record_as_a_hole(key: SessionId | None) -> None:
    """The hole is found before the record at its end is looked at."""
    read_to(core := reader(), written("s"))
    effects = core.unreadable(Offset(20), key)
    assert [DropSession(S, DropReason.HOLE), Reread(PARTITION, Offset(20))] == list(effects)


@pytest.mark.parametrize("where", [0, 3, 9])
def test_hole_drops_every_session_and_moves_the_window(where: int) -> None:
    """A hole may lead back (the log was reset) as well as on; the window begins behind it."""
    read_to(core := reader(), written("s"))
    assert (DropSession(S, DropReason.HOLE),) == core.hole(Offset(where))
    assert [where] * 3 == [core.position, core.applied, core.read_from]
    assert core.session(S) is None


def test_replaced_log_drops_every_session() -> None:
    """Another log says nothing of this one's sessions."""
    read_to(core := reader(), written("s"))
    assert (DropSession(S, DropReason.REPLACED),) == core.replaced(Offset(0))
    assert [0] * 3 == [core.position, core.applied, core.read_from]


def test_claim_after_a_hole_is_admitted_only_from_the_hole_on() -> None:
    """INV-WINDOW: a claim whose epoch points into the hole may have a rival there."""
    core = reader()
    core.hole(Offset(10))
    assert [(10, Why.WINDOW)] == refusals(core.read(Offset(10), seal(None, claim(10, "B"))))
    assert [] == refusals(core.read(Offset(11), seal(None, claim(11, "C"))))


def test_forgotten_session_is_known_again_from_a_claim_that_saw_the_forgetting() -> None:
    """Fold state may be dropped at any time; the session was then read without a hole only from there on."""
    book = written("s")
    read_to(core := reader(), book)
    assert (DropSession(S, DropReason.ASKED),) == core.forget(S)
    assert () == core.forget(S)
    state = book.state()
    assert [(4, Why.NO_SESSION)] == refusals(core.read(Offset(4), seal(state, truncate(state, 0))))
    assert [(5, Why.WINDOW)] == refusals(core.read(Offset(5), seal(None, claim(4, "B"))))
    assert [] == refusals(core.read(Offset(6), seal(None, claim(5, "C"))))
    assert core.session(S) is not None


def test_forgetting_one_session_leaves_the_others_alone() -> None:
    """Only its own window moves."""
    read_to(core := reader(), written("s", "t"))
    core.forget(S)
    assert (["t"], 0) == ([state.session for state in core.sessions()], core.read_from)


def test_sessions_past_the_bound_are_dropped_least_recently_written_first() -> None:
    """INV-BOUND-SESSIONS: the bound holds, and what is busy stays."""
    book = written("a", "b", "c")
    book.rows(8, session="a")
    book.claim(session="d")
    effects = read_to(core := reader(), book)
    assert [DropSession(SessionId("b"), DropReason.LIMIT)] == [
        e for e in effects if isinstance(e, DropSession)
    ]
    assert ["c", "a", "d"] == [state.session for state in core.sessions()]
    assert core.session_count == TINY.sessions_a_partition


def test_held_sessions_are_not_pushed_out() -> None:
    """What this node owns, or is taking over, stays; the next in line goes."""
    book = written("a", "b", "c")
    read_to(core := reader(), book)
    core.hold(SessionId("a"))
    book.claim(session="d")
    read_to(core, book)
    assert ["c", "d", "a"] == [state.session for state in core.sessions()]


def test_more_held_sessions_than_the_bound_all_stay() -> None:
    """A hold is stronger than the bound: its holder has a bound of its own."""
    book = written("a", "b", "c", "d")
    core = reader()
    for session in "abcd":
        core.hold(SessionId(session))
    effects = read_to(core, book)
    assert [] == [e for e in effects if isinstance(e, DropSession)]
    core.unhold(SessionId("b"))
    core.unhold(SessionId("never held"))
    book.append(seal(None, snapshot(claim(1, session="z"))))
    assert [DropSession(SessionId("b"), DropReason.LIMIT)] == [
        e for e in read_to(core, book) if isinstance(e, DropSession)
    ]


def test_memory_of_dropped_sessions_is_bounded() -> None:
    """Past the bound the whole partition's window moves on: more is forgotten, never more is believed."""
    book = written("a")
    core = reader()
    for session in "bcdefgh":
        read_to(core, book)
        core.forget(SessionId(session))
        book.claim(session="x" + session)
        assert len(core._since) <= TINY.sessions_a_partition
    assert core.read_from > 0
    never_seen = seal(None, claim(1, session="never seen"))
    assert [Why.WINDOW] == [why for _, why in refusals(core.read(core.position, never_seen))]


# Reading again


def test_unreadable_record_is_read_again_and_forgotten_if_it_was_transient() -> None:
    """A bit flipped on the way costs one more fetch."""
    book = written("s")
    core = reader()
    read_to(core, book, until=2)
    assert (Reread(PARTITION, Offset(2)),) == core.unreadable(Offset(2), S)
    assert 2 == core.position
    effects = read_to(core, book)
    assert ([], 4) == (refusals(effects), core.applied)
    assert book.state() == core.session(S)
    assert {} == core._doubts


@pytest.mark.parametrize(
    ("key", "left"), [(SessionId("s"), ["t"]), (SessionId("unknown"), ["s", "t"]), (None, [])]
)
def test_unreadable_record_at_rest_drops_its_session_or_all(key: SessionId | None, left: list[str]) -> None:
    """It may be a claim: its key's session is void, and if the key is in doubt every session of the partition."""
    book = written("s", "t")
    read_to(core := reader(), book)
    assert (Reread(PARTITION, Offset(8)),) == core.unreadable(Offset(8), key)
    refused, *dropped = core.unreadable(Offset(8), key)
    assert RecordRefused(Offset(8), None, Judgement(Verdict.UNKNOWN, Why.UNREADABLE)) == refused
    gone = [SessionId(s) for s in ("s", "t") if s not in left]
    assert [DropSession(s, DropReason.UNREADABLE) for s in gone] == dropped
    assert (left, 9) == ([state.session for state in core.sessions()], core.applied)


@pytest.mark.parametrize("key", [None, SessionId("s")])
def test_claim_after_an_unreadable_record_must_have_seen_it(key: SessionId | None) -> None:
    """Like after a hole: the unreadable record may have been a rival claim."""
    core = reader()
    for _ in range(TINY.reread_attempts + 1):
        core.unreadable(Offset(0), key)
    assert [(1, Why.WINDOW)] == refusals(core.read(Offset(1), seal(None, claim(1))))
    assert [] == refusals(core.read(Offset(2), seal(None, claim(2, "B"))))


def test_record_that_does_not_fit_is_read_again_before_it_is_believed() -> None:
    """A payload that was damaged on the way does not break the session."""
    book = written("s")
    state = book.state()
    good = delta(state, (8,))
    core = reader()
    read_to(core, book)
    assert (Reread(PARTITION, Offset(4)),) == core.read(Offset(4), seal(state, good, payload=b"rot!"))
    assert (4, 4) == (core.position, core.applied)
    book.append(seal(state, good))
    read_to(core, book)
    assert book.state() == core.session(S)
    assert {} == core._doubts


def test_record_that_does_not_fit_at_rest_breaks_its_session() -> None:
    """It is read again as often as the limits say; then it breaks the session, which keeps its last good length."""
    book = written("s")
    state = book.state()
    bad = seal(state, delta(state, (8,)), payload=b"rot!")
    core = reader()
    read_to(core, book)
    core.read(Offset(4), bad)
    refused, broken = core.read(Offset(4), bad)
    assert isinstance(refused, RecordRefused)
    assert SessionBroken(S, Offset(4), state.length, refused.judgement) == broken
    assert (Why.PAYLOAD, 5) == (refused.judgement.why, core.applied)
    assert core.session(S).standing is Standing.BROKEN  # type: ignore[union-attr]
    assert {} == core._doubts


def test_broken_session_refuses_without_reading_again_until_a_claim() -> None:
    """One alert a break: what follows under the same epoch is refused and counted."""
    book = written("s")
    state = book.state()
    core = reader()
    read_to(core, book)
    gap = seal(state, truncate(state, 0, seq=9))
    for _ in range(TINY.reread_attempts + 1):
        read_to(core, Logbook([*book.entries, gap]))
    effects = core.read(Offset(5), seal(state, truncate(state, 0)))
    assert [(5, Why.BROKEN)] == refusals(effects)
    assert len(effects) == 1


def test_broken_session_is_healed_by_a_fitting_seq_0_of_a_newer_claim() -> None:
    """What is broken here may be whole elsewhere: the next owner's Truncate fits our last good length and chain."""
    book, core = broken_at_the_reader()
    book.claim("B")
    book.truncate(1)
    effects = read_to(core, book)
    assert SessionHealed(S, Offset(6)) in effects
    assert (Standing.WHOLE, 1) == (core.session(S).standing, core.session(S).length)  # type: ignore[union-attr]


def test_broken_session_is_broken_again_by_a_claim_whose_seq_0_does_not_fit() -> None:
    """A newer epoch has one attempt; a late copy of its first record, even a fitting one, does not heal."""
    book, core = broken_at_the_reader()
    book.claim("B")
    state = book.state()
    wrong = seal(state, truncate(state, 1), chain=1)
    fitting = seal(state, truncate(state, 1))
    entries = [*book.entries, wrong, fitting]
    effects = read_to(core, Logbook(entries))
    assert [(6, Why.CHAIN), (7, Why.BROKEN)] == refusals(effects)
    assert [Offset(6)] == [e.offset for e in effects if isinstance(e, SessionBroken)]
    assert not core.session(S).healable  # type: ignore[union-attr]


def broken_at_the_reader() -> tuple[Logbook, StandbyCore]:
    """A log, and a reader that has found its last record (offset 4) damaged; for all others it was good."""
    book = written("s")
    state = book.state()
    bad = seal(state, truncate(state, 1), chain=1)
    core = reader()
    read_to(core, Logbook([*book.entries, bad]))
    book.truncate(1)
    book.states[S] = core.session(S).clone()  # type: ignore[union-attr]
    return book, core


def test_gap_is_read_again_from_the_last_admitted_record() -> None:
    """The missing record may lie between: from there on everything is fed again, and only its session looks."""
    book = written("s", "t")
    state = book.state("s")
    missing, after_it = seal(state, delta(state, (8,))), None
    book.append(missing)
    book.rows(8, session="t")
    after_it = seal(book.state("s"), delta(book.state("s"), (8,), shard=1))
    core = reader()
    read_to(core, book, until=8)
    other = seal(None, snapshot(claim(1, session="u")))
    core.read(Offset(8), other)  # the missing record was mistaken for another
    read_to(core, book, until=11)
    expected_t = copy.deepcopy(core.session(SessionId("t")))
    effects = core.read(Offset(11), after_it)
    assert (Reread(PARTITION, Offset(4)),) == effects
    effects_again = read_to(core, Logbook([*book.entries, after_it]))
    stored = [e.delta for e in effects_again if isinstance(e, StoreRows)]
    assert [missing.record, after_it.record] == stored
    assert expected_t == core.session(SessionId("t"))
    assert ([], 12, {}) == (refusals(effects_again), core.applied, core._doubts)


def test_gap_at_rest_breaks_the_session_after_bounded_reading() -> None:
    """A record that is missing for good: one bounded look back, then the session is broken."""
    book = written("s")
    state = book.state()
    for _ in range(20):
        book.append(seal(None, snapshot(claim(1, session="t"))))
    gap = seal(state, truncate(state, 0, seq=9))
    core = reader()
    read_to(core, book)
    assert (Reread(PARTITION, Offset(24 - TINY.reread_records)),) == core.read(Offset(24), gap)
    effects = read_to(core, Logbook([*book.entries, gap]))
    assert [(24, Why.SEQ_AHEAD)] == refusals(effects)
    assert [Offset(24)] == [e.offset for e in effects if isinstance(e, SessionBroken)]


def test_reading_again_never_goes_before_the_window() -> None:
    """What lies before the window is not known to be free of holes, and may be gone."""
    book = written("s")
    state = book.state()
    for _ in range(4):
        book.append(seal(None, snapshot(claim(1, session="t"))))
    core = reader()
    read_to(core, book)
    core._read_from = Offset(6)
    assert (Reread(PARTITION, Offset(6)),) == core.read(Offset(8), seal(state, truncate(state, 0, seq=9)))


def test_refusals_are_not_counted_again_when_records_are_read_again() -> None:
    """Each refused record is counted once, however often it is fetched."""
    book = written("s")
    state = book.state()
    stale = seal(state, truncate(state, 0, seq=0))
    gap = seal(state, truncate(state, 0, seq=9))
    effects = read_to(core := reader(), Logbook([*book.entries, stale, gap]))
    assert [(4, Why.SEQ_PASSED), (5, Why.SEQ_AHEAD)] == refusals(effects)
    assert 6 == core.applied


def test_unreadable_record_is_passed_over_when_it_is_read_again() -> None:
    """It was readable, or dealt with, at the first time."""
    book = written("s", "t")
    state = book.state()
    gap = seal(state, truncate(state, 0, seq=9))
    core = reader()
    read_to(core, book)
    assert (Reread(PARTITION, Offset(4)),) == core.read(Offset(8), gap)
    assert () == core.unreadable(Offset(4), None)
    assert (5, ["s", "t"]) == (core.position, [state.session for state in core.sessions()])


@pytest.mark.parametrize("step", ["hole", "replaced", "forget", "jump"])
def test_reading_again_can_be_interrupted(step: str) -> None:
    """A doubt does not outlive the state that it is about, and the reader goes on."""
    book = written("s", "t")
    state = book.state()
    core = reader()
    read_to(core, book)
    core.read(Offset(8), seal(state, truncate(state, 0, seq=9)))
    match step:
        case "hole":
            core.hole(Offset(8))
        case "replaced":
            core.replaced(Offset(8))
        case "forget":
            core.forget(S)
        case _:
            core.read(Offset(30), seal(None, claim(31, session="u")))
    assert {} == core._doubts
    assert core.session(S) is None
    book.claim("B")
    book.truncate(0)
    if step != "jump":
        assert [] == refusals(read_to(core, book))
        assert core.session(S).standing is Standing.WHOLE  # type: ignore[union-attr]


def test_end_of_a_session_that_holds_nothing_is_still_said() -> None:
    """A session that was claimed and ended leaves nothing, and whoever waits for its end hears of it."""
    book = Logbook()
    book.claim()
    book.truncate(0)
    state = book.state()
    book.append(seal(state, end(state)))
    assert SessionEnded(S, Offset(2)) in read_to(reader(), book)
