"""The rules one by one: every standing × every kind of record × what may be right or wrong with it.

The two tables are the specification, written out; a cell names the rule that decides, and the rule its verdict.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import NoteSnapshot, RecordRefused, Reread, SessionBroken
from kvlog.core.session import TRANSITIONS, SessionState, Standing, fold, judge, judge_claim_without_state
from kvlog.core.standby import StandbyCore
from kvlog.core.verdicts import ADMITTED, Verdict, Why
from kvlog.ids import Epoch, Offset, Seq
from kvlog.limits import TINY
from kvlog.records import Claim, Delta, End, Record, Truncate
from tests.unit.core.logbook import PARTITION, claim, delta, end, seal, snapshot, truncate, writer
from tests.unit.core.standings import STANDINGS, whole

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.core.effects import ReadEffect
    from kvlog.records import Entry

HERE = Offset(40)
"""Where the record under test stands; the owner's epoch is 20."""

VERDICT_OF = {
    Why.FITS: Verdict.ADMITTED,
    Why.OLDER_EPOCH: Verdict.STALE,
    Why.SAME_NONCE: Verdict.DUPLICATE,
    Why.SEQ_PASSED: Verdict.DUPLICATE,
    Why.SEQ_AHEAD: Verdict.GAP,
    Why.FIRST_NOT_TRUNCATE: Verdict.DIVERGED,
    Why.END_FIRST: Verdict.DIVERGED,
    Why.LENGTH_AHEAD: Verdict.DIVERGED,
    Why.SHARDS_CHANGED: Verdict.DIVERGED,
    Why.SHARD_UNKNOWN: Verdict.DIVERGED,
    Why.START: Verdict.DIVERGED,
    Why.TOO_LONG: Verdict.DIVERGED,
    Why.PAYLOAD: Verdict.DIVERGED,
    Why.CHAIN: Verdict.DIVERGED,
    Why.AFTER_END: Verdict.DIVERGED,
    Why.BROKEN: Verdict.DIVERGED,
    Why.WRITER: Verdict.FOREIGN,
    Why.EPOCH_UNCLAIMED: Verdict.FOREIGN,
    Why.EPOCH_AHEAD: Verdict.FOREIGN,
    Why.WINDOW: Verdict.UNKNOWN,
    Why.NO_ROOT: Verdict.UNKNOWN,
    Why.UNREADABLE: Verdict.UNKNOWN,
    Why.NO_SESSION: Verdict.UNKNOWN,
}

CODES = {
    "fits": Why.FITS,
    "older": Why.OLDER_EPOCH,
    "nonce": Why.SAME_NONCE,
    "passed": Why.SEQ_PASSED,
    "seq": Why.SEQ_AHEAD,
    "first": Why.FIRST_NOT_TRUNCATE,
    "endfirst": Why.END_FIRST,
    "length": Why.LENGTH_AHEAD,
    "shards": Why.SHARDS_CHANGED,
    "shard": Why.SHARD_UNKNOWN,
    "start": Why.START,
    "long": Why.TOO_LONG,
    "payload": Why.PAYLOAD,
    "chain": Why.CHAIN,
    "afterend": Why.AFTER_END,
    "broken": Why.BROKEN,
    "writer": Why.WRITER,
    "unclaimed": Why.EPOCH_UNCLAIMED,
    "epoch": Why.EPOCH_AHEAD,
    "window": Why.WINDOW,
    "root": Why.NO_ROOT,
}

CASES: dict[str, Callable[[SessionState], Entry]] = {
    "claim-older": lambda s: seal(s, claim(19, "B")),
    "claim-equal": lambda s: seal(s, claim(20, "B")),
    "claim-same": lambda s: seal(s, s.claim),
    "claim-same-nonce-newer": lambda s: seal(s, replace(s.claim, epoch=Epoch(30))),
    "claim-newer": lambda s: seal(s, claim(21, "B")),
    "claim-newer-own": lambda s: seal(s, claim(21)),
    "claim-highest": lambda s: seal(s, claim(41, "B")),
    "claim-too-high": lambda s: seal(s, claim(42, "B")),
    "truncate-0": lambda s: seal(s, truncate(s, 0)),
    "truncate-0-seq-0": lambda s: seal(s, truncate(s, 0, seq=0)),
    "truncate-0-chain": lambda s: seal(s, truncate(s, 0), chain=1),
    "truncate-2": lambda s: seal(s, truncate(s, 2)),
    "truncate-2-seq-0": lambda s: seal(s, truncate(s, 2, seq=0)),
    "truncate-2-chain": lambda s: seal(s, truncate(s, 2), chain=1),
    "truncate-3": lambda s: seal(s, truncate(s, 3)),
    "truncate-60": lambda s: seal(s, truncate(s, 60)),
    "delta": lambda s: seal(s, delta(s, (4,))),
    "delta-shard-1": lambda s: seal(s, delta(s, (3, 4), shard=1)),
    "delta-shard-2": lambda s: seal(s, delta(s, (4,), shard=2)),
    "delta-behind": lambda s: seal(s, delta(s, (4,), start=2)),
    "delta-ahead": lambda s: seal(s, delta(s, (4,), start=4)),
    "delta-longest": lambda s: seal(s, delta(s, range(61))),
    "delta-too-long": lambda s: seal(s, delta(s, range(62))),
    "delta-payload": lambda s: seal(s, delta(s, (4,)), payload=b"rot!"),
    "delta-chain": lambda s: seal(s, delta(s, (4,)), chain=1),
    "end": lambda s: seal(s, end(s)),
    "end-seq-0": lambda s: seal(s, end(s, seq=0)),
    "end-chain": lambda s: seal(s, end(s), chain=1),
    "snapshot": lambda s: seal(s, snapshot(claim(7, "Z"))),
}

TABLE = """
case                    unrooted  whole   claimed  broken  healable hopeless ended    reborn   resharded
claim-older             older     older   older    older   older    older    older    older    older
claim-equal             older     older   older    older   older    older    older    older    older
claim-same              nonce     nonce   nonce    nonce   nonce    nonce    nonce    nonce    nonce
claim-same-nonce-newer  nonce     nonce   nonce    nonce   nonce    nonce    nonce    nonce    nonce
claim-newer             fits      fits    fits     fits    fits     fits     fits     fits     fits
claim-newer-own         fits      fits    fits     fits    fits     fits     fits     fits     fits
claim-highest           fits      fits    fits     fits    fits     fits     fits     fits     fits
claim-too-high          epoch     epoch   epoch    epoch   epoch    epoch    epoch    epoch    epoch
truncate-0              fits      fits    fits     broken  fits     fits     afterend fits     fits
truncate-0-seq-0        fits      passed  fits     passed  fits     fits     passed   fits     fits
truncate-0-chain        chain     chain   chain    broken  chain    chain    afterend chain    chain
truncate-2              root      fits    fits     broken  fits     root     afterend shards   shards
truncate-2-seq-0        root      passed  fits     passed  fits     root     passed   shards   shards
truncate-2-chain        root      chain   chain    broken  chain    root     afterend shards   shards
truncate-3              root      fits    length   broken  length   root     afterend shards   shards
truncate-60             root      fits    length   broken  length   root     afterend shards   shards
delta                   root      fits    first    broken  broken   root     afterend first    first
delta-shard-1           root      fits    first    broken  broken   root     afterend first    first
delta-shard-2           root      shard   first    broken  broken   root     afterend first    first
delta-behind            root      start   first    broken  broken   root     afterend first    first
delta-ahead             root      start   first    broken  broken   root     afterend first    first
delta-longest           root      fits    first    broken  broken   root     afterend first    first
delta-too-long          root      long    first    broken  broken   root     afterend first    first
delta-payload           root      payload first    broken  broken   root     afterend first    first
delta-chain             root      chain   first    broken  broken   root     afterend first    first
end                     root      fits    endfirst broken  broken   root     afterend endfirst endfirst
end-seq-0               root      passed  endfirst passed  broken   root     passed   endfirst endfirst
end-chain               root      chain   endfirst broken  broken   root     afterend endfirst endfirst
snapshot                fits      fits    fits     fits    fits     fits     fits     fits     fits
"""

KINDS: dict[str, Callable[[SessionState], Truncate | Delta | End]] = {
    "truncate": lambda s: truncate(s, 0),
    "delta": lambda s: delta(s, (4,)),
    "end": end,
}
AUTHORS_AND_SEQS: dict[str, Callable[[SessionState, Truncate | Delta | End], Record]] = {
    "older-epoch": lambda s, r: r._replace(epoch=Epoch(19)),
    "unclaimed-epoch": lambda s, r: r._replace(epoch=Epoch(21)),
    "other-writer": lambda s, r: r._replace(writer=writer("B")),
    "older-epoch-other-writer": lambda s, r: r._replace(epoch=Epoch(19), writer=writer("B")),
    "seq-passed": lambda s, r: r._replace(seq=Seq(0)),
    "seq-just-passed": lambda s, r: r._replace(seq=Seq(max(0, s.next_seq - 1))),
    "seq-ahead": lambda s, r: r._replace(seq=Seq(s.next_seq + 1)),
    "seq-far-ahead": lambda s, r: r._replace(seq=Seq(1 << 40)),
}

AUTHOR_TABLE = """
case                     unrooted  whole     claimed   broken    healable  hopeless  ended     reborn    resharded
older-epoch              older     older     older     older     older     older     older     older     older
unclaimed-epoch          unclaimed unclaimed unclaimed unclaimed unclaimed unclaimed unclaimed unclaimed unclaimed
other-writer             writer    writer    writer    writer    writer    writer    writer    writer    writer
older-epoch-other-writer older     older     older     older     older     older     older     older     older
seq-passed               -         passed    -         passed    -         -         passed    -         -
seq-just-passed          -         passed    -         passed    -         -         passed    -         -
seq-ahead                root      seq       seq       broken    broken    root      afterend  seq       seq
seq-far-ahead            root      seq       seq       broken    broken    root      afterend  seq       seq
"""


def parse(table: str) -> dict[tuple[str, str], Why]:
    """Reads a table: (case, standing) → the rule that decides; cells of a dash cannot be."""
    head, *rows = [line.split() for line in table.strip().splitlines()]
    return {
        (row[0], standing): CODES[cell]
        for row in rows
        for standing, cell in zip(head[1:], row[1:], strict=True)
        if cell != "-"
    }


def author_entry(case: str, kind: str, state: SessionState) -> Entry:
    """The entry of a cell of AUTHOR_TABLE: otherwise a record that fits."""
    return seal(state, AUTHORS_AND_SEQS[case](state, KINDS[kind](state)))


EXPECTED = parse(TABLE)
EXPECTED_OF_AUTHORS = parse(AUTHOR_TABLE)
ROWS: dict[str, tuple[Callable[[SessionState], Entry], dict[str, Why]]] = {
    case: (make, {standing: why for (row, standing), why in EXPECTED.items() if row == case})
    for case, make in CASES.items()
} | {
    f"{kind}-{case}": (
        partial(author_entry, case, kind),
        {standing: why for (row, standing), why in EXPECTED_OF_AUTHORS.items() if row == case},
    )
    for case in AUTHORS_AND_SEQS
    for kind in KINDS
}
"""One row of the tables: how the record is made in a standing, and the rule expected there."""

every_row = pytest.mark.parametrize(("make_entry", "expected"), ROWS.values(), ids=ROWS)


def standby(state: SessionState | None, *, read_from: int = 0) -> StandbyCore:
    """A reader that stands before the record under test with this state, having read from an offset on."""
    core = StandbyCore(PARTITION, Offset(read_from), TINY)
    core._position = core._frontier = HERE
    if state is not None:
        core._sessions[state.session] = state
    return core


def settle(core: StandbyCore, entry: Entry) -> list[ReadEffect]:
    """Feeds the record, and again whenever the core wants to read it again; what else the core wants."""
    effects = core.read(HERE, entry)
    for _ in range(TINY.reread_attempts):
        if effects and isinstance(effects[-1], Reread):
            core._position = HERE  # the records before it are of no interest here
            effects = core.read(HERE, entry)
    return list(effects)


def test_tables_cover_every_case_and_standing() -> None:
    """A case or standing that is added needs its row or column."""
    assert set(EXPECTED) == {(case, standing) for case in CASES for standing in STANDINGS}
    possible = set(EXPECTED_OF_AUTHORS) | {
        (case, name)
        for case in ("seq-passed", "seq-just-passed")
        for name, make in STANDINGS.items()
        if make().next_seq == 0
    }
    assert possible == {(case, standing) for case in AUTHORS_AND_SEQS for standing in STANDINGS}


def test_every_rule_has_a_verdict() -> None:
    """A rule always gives the same verdict."""
    assert set(VERDICT_OF) == set(Why)


@every_row
def test_judge_gives_the_verdict_of_the_table(
    make_entry: Callable[[SessionState], Entry], expected: dict[str, Why]
) -> None:
    """What a record is follows from the state and the record alone, and to judge changes nothing."""
    actual = {}
    for standing in expected:
        state = STANDINGS[standing]()
        entry, before = make_entry(state), copy.deepcopy(state)
        judgement = judge(state, HERE, entry, TINY)
        assert before == state, f"judged in {standing}"
        assert VERDICT_OF[judgement.why] == judgement.verdict
        actual[standing] = judgement.why
    assert expected == actual


@every_row
def test_standby_refuses_what_the_table_refuses_and_changes_nothing(
    make_entry: Callable[[SessionState], Entry], expected: dict[str, Why]
) -> None:
    """A refusal is said once, with its rule; only a Gap or Diverged breaks, and only what is not broken for good."""
    for standing, why in expected.items():
        state = STANDINGS[standing]()
        entry, before = make_entry(state), copy.deepcopy(state)
        effects = settle(standby(state), entry)
        if VERDICT_OF[why] is Verdict.ADMITTED:
            assert not any(isinstance(effect, RecordRefused) for effect in effects), standing
            continue
        refused, *rest = effects
        assert isinstance(refused, RecordRefused), standing
        assert (HERE, entry.record, why) == (refused.offset, refused.record, refused.judgement.why)
        broken = []
        if VERDICT_OF[why] in (Verdict.GAP, Verdict.DIVERGED) and standing != "broken":
            broken = [SessionBroken(state.session, HERE, before.length, refused.judgement)]
            before.standing, before.healable = Standing.BROKEN, False
        if why is Why.NO_ROOT:
            before.next_seq = Seq(getattr(entry.record, "seq", 0) + 1)  # it notes how far the owner has got
        assert broken == rest, standing
        assert before == state, standing


@every_row
def test_transition_is_one_of_the_diagram(
    make_entry: Callable[[SessionState], Entry], expected: dict[str, Why]
) -> None:
    """What judge, fold and the reader do to a session's standing is what TRANSITIONS says, and nothing else."""
    for standing, why in expected.items():
        state = STANDINGS[standing]()
        entry, before = make_entry(state), state.standing
        event = event_of(state, entry.record, why)
        settle(standby(state), entry)
        assert TRANSITIONS[before].get(event, before) == state.standing, (standing, event)


def event_of(state: SessionState, record: Record, why: Why) -> str:
    """The name that TRANSITIONS has for what is read."""
    if VERDICT_OF[why] in (Verdict.GAP, Verdict.DIVERGED):
        return "Gap, Diverged"
    if VERDICT_OF[why] is not Verdict.ADMITTED:
        return "refused"
    match record:
        case Truncate() if state.standing is Standing.UNROOTED:
            return f"Truncate({record.length}) at seq {record.seq}"
        case Truncate() if state.standing is Standing.BROKEN:
            return f"fitting Truncate at seq {record.seq}"
        case _:
            return type(record).__name__


def test_every_transition_of_the_diagram_happens() -> None:
    """An arrow that no record takes would be a fiction."""
    seen = set()
    cells = [(make, *cell) for make, row in ROWS.values() for cell in row.items()]
    for make_entry, standing, why in cells:
        state = STANDINGS[standing]()
        entry, before = make_entry(state), state.standing
        event = event_of(state, entry.record, why)
        settle(standby(state), entry)
        seen.add((before, event, state.standing))
    assert {
        (here, event, there) for here, arrows in TRANSITIONS.items() for event, there in arrows.items()
    } <= seen


@pytest.mark.parametrize(
    ("epoch", "read_from", "why"),
    [
        (1, 0, Why.FITS),
        (20, 19, Why.FITS),
        (20, 20, Why.WINDOW),
        (20, 40, Why.WINDOW),
        (41, 40, Why.FITS),
        (41, 0, Why.FITS),
        (42, 0, Why.EPOCH_AHEAD),
        (42, 40, Why.EPOCH_AHEAD),
    ],
)
def test_claim_without_state_is_judged_by_its_window(epoch: int, read_from: int, why: Why) -> None:
    """A reader that knows nothing admits a claim only if it has read everything from the claim's epoch minus one on."""
    newest = claim(epoch)
    judgement = judge_claim_without_state(newest, HERE, read_from=Offset(read_from))
    assert (VERDICT_OF[why], why) == (judgement.verdict, judgement.why)
    effects = standby(None, read_from=read_from).read(HERE, seal(None, newest))
    assert (why is Why.FITS) == (not any(isinstance(effect, RecordRefused) for effect in effects))


@pytest.mark.parametrize("kind", KINDS)
def test_record_without_state_is_unknown(kind: str) -> None:
    """A reader without a root answers Unknown, exposes nothing, and says so."""
    state = whole()
    record = KINDS[kind](state)
    core = standby(None)
    effects = core.read(HERE, seal(state, record))
    assert [(record, Verdict.UNKNOWN, Why.NO_SESSION)] == [
        (e.record, e.judgement.verdict, e.judgement.why) for e in effects if isinstance(e, RecordRefused)
    ]
    assert core.session(state.session) is None


def test_reader_without_history_is_not_rooted_by_a_seq_0_that_comes_too_late() -> None:
    """Who has the history broke at the record before it, and does not take the late seq 0 either."""
    state = STANDINGS["unrooted"]()
    root, later = seal(state, truncate(state, 0)), seal(state, truncate(state, 0, seq=1))
    core = standby(state)
    effects = [*core.read(HERE, later), *core.read(Offset(HERE + 1), root)]
    assert [Why.NO_ROOT, Why.SEQ_PASSED] == [e.judgement.why for e in effects if isinstance(e, RecordRefused)]
    assert Standing.UNROOTED is state.standing


def test_snapshot_without_state_is_noted() -> None:
    """Where a snapshot lies is always worth knowing."""
    noted = snapshot(claim(7, "Z"))
    core = standby(None)
    assert (NoteSnapshot(noted, HERE),) == core.read(HERE, seal(None, noted))
    assert core.session(noted.session) is None


def test_fold_of_a_snapshot_changes_nothing() -> None:
    """Snapshots stand outside seq and chain."""
    state = whole()
    before = copy.deepcopy(state)
    fold(state, HERE, seal(state, snapshot(state.claim)))
    assert before == state


def test_admitted_is_one_value() -> None:
    """An admitted record has nothing to compare."""
    state = whole()
    assert judge(state, HERE, seal(state, truncate(state, 0)), TINY) is ADMITTED


def test_claim_of_the_table_is_a_claim() -> None:
    """The first column of cases is about claims: a guard against a table that tests something else."""
    claims = [case for case in CASES if isinstance(CASES[case](whole()).record, Claim)]
    assert [case for case in CASES if case.startswith("claim")] == claims
