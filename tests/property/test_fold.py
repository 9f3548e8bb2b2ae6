"""The fold under any order of any records, right and wrong: it never raises, and says the same however it is fed.

A log is drawn as a list of small decisions; each is carried out by an honest writer, or by one that gets an epoch, a
writer, a seq, a start, a chain or a payload wrong. Every reader of the tests is the real StandbyCore.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvlog.core.effects import RecordRefused, Reread
from kvlog.core.session import SessionState, fold, judge
from kvlog.core.standby import StandbyCore
from kvlog.core.verdicts import Verdict
from kvlog.ids import Epoch, Offset, Position, Seq, SessionId, Shard
from kvlog.limits import TINY
from kvlog.records import Claim, Delta, Entry, Snapshot, Truncate
from tests.unit.core.logbook import (
    FEEDS_MAX,
    IDENTITY,
    ONE_SHARD,
    PARTITION,
    Logbook,
    claim,
    delta,
    end,
    read_to,
    seal,
    snapshot,
    truncate,
    writer,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlog.core.effects import ReadEffect
    from kvlog.records import Record

SESSIONS = ("s", "t")
RECORDS_MIN, RECORDS_MAX = 12, 24
"""Left to itself, hypothesis draws logs of six records, in which nothing has had the time to go wrong."""


small = st.integers(0, 5)
choices = st.tuples(
    st.sampled_from(
        ("delta", "delta", "delta", "delta", "truncate", "claim", "claim", "wrong", "copy", "end", "snapshot")
    ),
    st.sampled_from(SESSIONS),
    small,
    small,
)


def written(drawn: Iterable[tuple[str, str, int, int]]) -> Logbook:
    """Carries the decisions out."""
    book = Logbook()
    for what, session, one, two in drawn:
        state = book.states.get(SessionId(session))
        if state is None or what == "claim":
            identity = ONE_SHARD if (one, two) == (5, 5) else IDENTITY
            # mostly the epoch that follows from the watermark; now and then too low, or too high
            epoch = max(1, book.high_watermark + 1 - (one if two == 0 else 0) + (one if two == 1 else 0))
            book.append(seal(None, claim(epoch, "ABC"[one % 3], session=session, identity=identity)))
        elif what == "copy":
            book.append(book.entries[(one * 7 + two) % len(book.entries)])
        else:
            book.append(spoilt(state, one, two) if what == "wrong" else honest(state, what, one, two))
    return book


unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A log is some milliseconds of hashing to draw; on a busy machine that is no news."""

logs = st.lists(choices, min_size=RECORDS_MIN, max_size=RECORDS_MAX).map(written)


def honest(state: SessionState, what: str, one: int, two: int) -> Entry:
    """What the owner might write next, as every reader with its history would admit it, if it can be admitted."""
    if state.next_seq == 0 and what != "snapshot":
        return seal(state, truncate(state, min(one, state.length)))
    record: Record = snapshot(state.claim)
    if what == "truncate":
        record = truncate(state, one)
    elif what == "delta":
        record = delta(state, range(one + 1), shard=two % max(1, len(state.shards)))
    elif what == "end":
        record = end(state)
    return seal(state, record)


def spoilt(state: SessionState, one: int, two: int) -> Entry:
    """The same with something wrong."""
    entry = honest(state, ("truncate", "delta", "end")[two % 3], one, two)
    record = entry.record
    if isinstance(record, Claim | Snapshot):
        return entry
    match one:
        case 0:
            return seal(state, record._replace(epoch=Epoch(max(1, record.epoch - 1 + 2 * (two % 2)))))
        case 1:
            return seal(state, record._replace(writer=writer("Z")))
        case 2:
            return seal(state, record._replace(seq=Seq(max(0, record.seq - 1 + 2 * (two % 2)))))
        case 3:
            return entry._replace(chain=two)
        case 4 if isinstance(record, Delta):
            return seal(state, record._replace(start=Position(record.start + 1), shard=Shard(two)))
        case 4 if isinstance(record, Truncate):
            return seal(state, record._replace(length=Position(record.length + 9)))
        case _:
            return entry._replace(payload=memoryview(b"rot!"))


def reader(first: int = 0) -> StandbyCore:
    """A reader that begins at this offset."""
    return StandbyCore(PARTITION, Offset(first), TINY)


def states(core: StandbyCore) -> dict[SessionId, SessionState]:
    """Everything that a reader knows."""
    return {state.session: state for state in core.sessions()}


def lasting(effects: Iterable[ReadEffect]) -> list[ReadEffect]:
    """Effects without those of reading again, which depend on where a reader was told to stop."""
    return [effect for effect in effects if not isinstance(effect, Reread)]


@unhurried
@given(logs)
def test_fold_of_any_records_never_raises_and_is_deterministic(book: Logbook) -> None:
    """Whatever lies in the log, a reader gets to its end, and two readers say the same all the way."""
    one, two = reader(), reader()
    assert read_to(one, book) == read_to(two, book)
    assert states(one) == states(two)
    assert book.high_watermark == one.position == one.applied


@unhurried
@given(logs, st.integers(0, RECORDS_MAX))
def test_fold_of_a_prefix_and_then_the_rest_is_the_fold_of_all(book: Logbook, cut: int) -> None:
    """Where a reader pauses makes no difference: fold(prefix) + fold(rest) = fold(all)."""
    whole, parts = reader(), reader()
    expected = lasting(read_to(whole, book))
    actual = lasting(read_to(parts, book, until=min(cut, book.high_watermark)))
    paused = copy.deepcopy(parts)
    actual += lasting(read_to(parts, book))
    assert expected == actual
    assert states(whole) == states(parts)
    read_to(paused, book)  # and a copy of the reader, as a restart from memory would be, is as good
    assert states(whole) == states(paused)


@unhurried
@given(logs, st.integers(0, RECORDS_MAX), st.integers(0, RECORDS_MAX))
def test_fold_of_any_window_again_changes_nothing(book: Logbook, begin: int, count: int) -> None:
    """A reader that delivers twice does no harm, whatever it delivers."""
    core = reader()
    read_to(core, book)
    before = {session: state.clone() for session, state in states(core).items()}
    for offset in range(begin, min(begin + count, book.high_watermark)):
        assert () == core.read(Offset(offset), book.entries[offset])
    assert before == states(core)


@unhurried
@given(logs)
def test_refused_record_leaves_its_session_as_it_was(book: Logbook) -> None:
    """INV-REFUSED: only the owner's own misfit changes anything, and only that the session is broken."""
    core = reader()
    for offset, entry in enumerate(book.entries):
        session = entry.record.session
        known = core.session(session)
        before = known.clone() if known else None
        for _ in range(FEEDS_MAX):
            if core.position > offset:
                break
            effects = core.read(core.position, book.entries[core.position])
        refused = [e for e in effects if isinstance(e, RecordRefused) and e.offset == offset]
        if not refused or before is None:
            continue
        after = core.session(session)
        assert after is not None
        if refused[0].judgement.verdict in (Verdict.GAP, Verdict.DIVERGED):
            before.break_here()
        before.next_seq = after.next_seq  # what has no history notes how far the owner has got
        assert before == after


@unhurried
@given(logs, st.lists(st.integers(0, RECORDS_MAX), min_size=3, max_size=3))
def test_equal_chains_mean_equal_caches(book: Logbook, begins: list[int]) -> None:
    """Readers that began anywhere and have equal chains hold the same tokens, shard by shard, under the same claim."""
    cores = [reader(first % book.high_watermark) for first in (0, *begins)]
    seen: dict[tuple[SessionId, int], list[list[int]]] = {}
    owners: dict[tuple[SessionId, int], Epoch] = {}
    for end_at in range(1, book.high_watermark + 1):
        for core in cores:
            if core.position < end_at:
                read_to(core, book, until=end_at)
            for session, state in states(core).items():
                if core.position == end_at:
                    assert owners.setdefault((session, end_at), state.epoch) == state.epoch
                if state.chain is not None:
                    tokens = [list(shard.tokens) for shard in state.shards]
                    assert seen.setdefault((session, state.chain), tokens) == tokens


@unhurried
@given(logs, logs)
def test_clone_is_independent(book: Logbook, other: Logbook) -> None:
    """What is folded into a copy, the original does not see, nor the other way round."""
    for session, state in book.states.items():
        before, clone = copy.deepcopy(state), state.clone()  # deepcopy: clone is what is being tested
        for entry in other.entries:
            if entry.record.session == session:
                at = Offset(clone.last_offset + 100)
                if judge(clone, at, entry, TINY).verdict is Verdict.ADMITTED:
                    fold(clone, at, entry)
        assert before == state
        after = copy.deepcopy(clone)
        for shard in state.shards:
            shard.cut(Position(0))
        state.break_here()
        assert after == clone


@unhurried
@given(logs, st.sets(st.integers(0, RECORDS_MAX), max_size=4))
def test_fold_with_holes_and_unreadable_records_never_raises(book: Logbook, damaged: set[int]) -> None:
    """A reader that loses records knows less, never something else: what it holds, a reader of everything held."""
    core, everything = reader(), reader()
    held: dict[SessionId, list[tuple[int | None, list[list[int]]]]] = {}
    for offset, entry in enumerate(book.entries):
        read_to(everything, book, until=offset + 1)
        for session, state in states(everything).items():
            held.setdefault(session, []).append((state.chain, [list(shard.tokens) for shard in state.shards]))
        for _ in range(FEEDS_MAX):
            if core.position > offset:
                break
            at = core.position
            if at in damaged:
                core.unreadable(at, book.entries[at].record.session if at % 2 else None)
            else:
                core.read(at, book.entries[at])
        assert entry is book.entries[offset]
    for session, state in states(core).items():
        if state.chain is not None:
            assert (state.chain, [list(shard.tokens) for shard in state.shards]) in held[session]
