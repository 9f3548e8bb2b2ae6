"""What an admitted record makes of a session, written out for every standing; and what a state answers about itself."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlog import checksums
from kvlog.core.session import SessionState, ShardState, fold, judge, next_chain
from kvlog.core.verdicts import Verdict
from kvlog.ids import Digest, Offset, Position
from kvlog.layout import DType, Identity
from kvlog.limits import TINY
from kvlog.records import Truncate
from tests.unit.core.logbook import (
    CONTEXT,
    IDENTITY,
    LAYOUT,
    ONE_SHARD,
    OTHER_CONTEXT,
    OTHER_WEIGHTS,
    claim,
    delta,
    end,
    seal,
    sixteen,
    snapshot,
    truncate,
)
from tests.unit.core.standings import STANDINGS, with_history

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.records import Record

HERE = Offset(40)

RECORDS: dict[str, Callable[[SessionState], Record]] = {
    "claim": lambda s: claim(30, "B", identity=s.claim.identity),
    "truncate-0": lambda s: truncate(s, 0),
    "truncate-1": lambda s: truncate(s, 1),
    "truncate-2": lambda s: truncate(s, 2),
    "truncate-60": lambda s: truncate(s, 60),
    "delta-0": lambda s: delta(s, (4, 5)),
    "delta-1": lambda s: delta(s, (3,), shard=1),
    "end": end,
    "snapshot": lambda s: snapshot(claim(7, "Z")),
}

FOLDED = """
standing   record       becomes   healable root epoch seq lengths chain
unrooted   claim        unrooted  no       0    30    0   -       none
unrooted   truncate-0   whole     no       20   20    1   0,0     restarts
unrooted   snapshot     unrooted  no       0    20    0   -       same
whole      claim        whole     no       20   30    0   3,2     goes-on
whole      truncate-0   whole     no       20   20    4   0,0     goes-on
whole      truncate-1   whole     no       20   20    4   1,1     goes-on
whole      truncate-2   whole     no       20   20    4   2,2     goes-on
whole      truncate-60  whole     no       20   20    4   3,2     goes-on
whole      delta-0      whole     no       20   20    4   5,2     goes-on
whole      delta-1      whole     no       20   20    4   3,3     goes-on
whole      end          ended     no       20   20    4   -       goes-on
whole      snapshot     whole     no       20   20    3   3,2     same
claimed    claim        whole     no       10   30    0   3,2     goes-on
claimed    truncate-0   whole     no       20   20    1   0,0     restarts
claimed    truncate-1   whole     no       10   20    1   1,1     goes-on
claimed    truncate-2   whole     no       10   20    1   2,2     goes-on
claimed    snapshot     whole     no       10   20    0   3,2     same
broken     claim        broken    yes      20   30    0   3,2     goes-on
broken     snapshot     broken    no       20   20    3   3,2     same
healable   claim        broken    yes      10   30    0   3,2     goes-on
healable   truncate-0   whole     no       20   20    1   0,0     restarts
healable   truncate-1   whole     no       10   20    1   1,1     goes-on
healable   truncate-2   whole     no       10   20    1   2,2     goes-on
healable   snapshot     broken    yes      10   20    0   3,2     same
hopeless   claim        broken    yes      0    30    0   -       none
hopeless   truncate-0   whole     no       20   20    1   0,0     restarts
hopeless   snapshot     broken    yes      0    20    0   -       same
ended      claim        whole     no       20   30    0   -       goes-on
ended      snapshot     ended     no       20   20    4   -       same
reborn     claim        whole     no       10   30    0   -       goes-on
reborn     truncate-0   whole     no       20   20    1   0,0     restarts
reborn     snapshot     whole     no       10   20    0   -       same
resharded  claim        whole     no       10   30    0   3,2     goes-on
resharded  truncate-0   whole     no       20   20    1   0       restarts
resharded  snapshot     whole     no       10   20    0   3,2     same
"""
CELLS = [line.split() for line in FOLDED.strip().splitlines()][1:]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0]}-{cell[1]}")
def test_fold_makes_of_a_session_what_the_table_says(cell: list[str]) -> None:
    """The next state follows from the state and the admitted record alone."""
    standing, name, *expected = cell
    state = STANDINGS[standing]()
    entry = seal(state, RECORDS[name](state))
    assert judge(state, HERE, entry, TINY).verdict is Verdict.ADMITTED
    chains = {
        "none": None,
        "same": state.chain,
        "goes-on": after(state.chain, entry.header, getattr(entry.record, "payload_checksum", 0)),
        "restarts": after(after(0, seal(None, state.claim).header, 0), entry.header, 0),
    }
    fold(state, HERE, entry)
    actual = [
        state.standing.value,
        "yes" if state.healable else "no",
        str(state.root),
        str(state.epoch),
        str(state.next_seq),
        ",".join(str(shard.length) for shard in state.shards) or "-",
    ]
    assert expected[:-1] == actual
    assert chains[expected[-1]] == state.chain
    assert (name != "snapshot") == (state.last_offset == HERE)


def after(chain: int | None, header: bytes, payload_checksum: int) -> int | None:
    """The chain after a record, by the definition in kvlog.checksums."""
    return None if chain is None else checksums.chain(chain, header, payload_checksum)


def test_fold_table_has_every_admitted_pair() -> None:
    """What the verdict table admits has a line here."""
    admitted = set()
    for standing, make in STANDINGS.items():
        for name, record in RECORDS.items():
            state = make()
            if judge(state, HERE, seal(state, record(state)), TINY).verdict is Verdict.ADMITTED:
                admitted.add((standing, name))
    assert admitted == {(cell[0], cell[1]) for cell in CELLS}


@pytest.mark.parametrize("standing", STANDINGS)
def test_clone_is_equal_and_independent(standing: str) -> None:
    """A projection runs ahead of the fold without touching it."""
    state, twin = STANDINGS[standing](), STANDINGS[standing]()
    copy = state.clone()
    assert state == copy
    copy.break_here()
    copy.next_seq, copy.chain, copy.last_offset = 99, 99, 99  # type: ignore[assignment]
    for shard in copy.shards:
        shard.extend((7,), OTHER_WEIGHTS, OTHER_CONTEXT)
        shard.cut(Position(1))
    copy.shards.append(ShardState())
    assert twin == state


def test_next_chain_without_history_is_unknown() -> None:
    """Only a Truncate(0) at seq 0 has a chain that needs no history."""
    state = STANDINGS["unrooted"]()
    assert next_chain(state, truncate(state, 2), b"header") is None
    assert next_chain(state, end(state), b"header") is None
    mid_epoch = truncate(state, 0)._replace(seq=1)  # type: ignore[arg-type]
    assert next_chain(state, mid_epoch, b"header") is None
    assert next_chain(state, truncate(state, 0), b"header") is not None


def test_mid_epoch_truncate_zero_continues_the_chain_and_roots_nobody() -> None:
    """Only seq 0 restarts: a mid-epoch Truncate(0) is for those who know what came before."""
    state = with_history(20)
    chain, root = state.chain, state.root
    entry = seal(state, truncate(state, 0))
    fold(state, HERE, entry)
    assert checksums.chain(chain or 0, entry.header, 0) == state.chain
    assert root == state.root


@pytest.mark.parametrize(
    ("standing", "first_needed", "length", "tokens"),
    [
        ("unrooted", None, 0, []),
        ("whole", 19, 2, [1, 2]),
        ("claimed", 9, 2, [1, 2]),
        ("broken", 19, 2, [1, 2]),
        ("healable", 9, 2, [1, 2]),
        ("hopeless", None, 0, []),
        ("ended", 19, 0, []),
        ("reborn", 9, 0, []),
        ("resharded", 9, 2, [1, 2]),
    ],
)
def test_state_tells_its_length_tokens_and_first_needed_offset(
    standing: str, first_needed: int | None, length: int, tokens: list[int]
) -> None:
    """Length is the least of the shards'; the log is needed from the root's epoch minus one."""
    state = STANDINGS[standing]()
    assert (first_needed, length, tokens) == (state.first_needed_offset, state.length, list(state.tokens))


def filled(*parts: tuple[tuple[int, ...], Identity, Digest]) -> ShardState:
    """A shard with runs."""
    shard = ShardState()
    for tokens, identity, context in parts:
        shard.extend(tokens, identity, context)
    return shard


def runs_of(shard: ShardState) -> list[tuple[int, Identity, Digest]]:
    """Where the runs of a shard begin, and under what."""
    return [(run.start, run.identity, run.context) for run in shard.runs]


def test_shard_begins_a_run_where_identity_or_context_changes() -> None:
    """Bytes are known by what they were written under."""
    shard = filled(
        ((1, 2), IDENTITY, CONTEXT),
        ((3,), IDENTITY, CONTEXT),
        ((4,), IDENTITY, OTHER_CONTEXT),
        ((5,), OTHER_WEIGHTS, OTHER_CONTEXT),
    )
    expected = [(0, IDENTITY, CONTEXT), (3, IDENTITY, OTHER_CONTEXT), (4, OTHER_WEIGHTS, OTHER_CONTEXT)]
    assert expected == runs_of(shard)
    assert [1, 2, 3, 4, 5] == list(shard.tokens)


@pytest.mark.parametrize(
    ("length", "tokens", "starts"),
    [
        (9, [1, 2, 3, 4], [0, 2]),
        (4, [1, 2, 3, 4], [0, 2]),
        (3, [1, 2, 3], [0, 2]),
        (2, [1, 2], [0]),
        (0, [], []),
    ],
)
def test_shard_cut_drops_the_runs_that_begin_at_or_after_it(
    length: int, tokens: list[int], starts: list[int]
) -> None:
    """A cut forgets positions and what they were written under; a cut beyond the end forgets nothing."""
    shard = filled(((1, 2), IDENTITY, CONTEXT), ((3, 4), IDENTITY, OTHER_CONTEXT))
    shard.cut(Position(length))
    assert (tokens, starts) == (list(shard.tokens), [run.start for run in shard.runs])


USABLE = [
    ("all equal", (1, 2, 3, 4), CONTEXT, IDENTITY, 4),
    ("the request is longer", (1, 2, 3, 4, 5), CONTEXT, IDENTITY, 4),
    ("the request is shorter", (1, 2), CONTEXT, IDENTITY, 2),
    ("the request is empty", (), CONTEXT, IDENTITY, 0),
    ("the first token differs", (9, 2, 3, 4), CONTEXT, IDENTITY, 0),
    ("the last token differs", (1, 2, 3, 9), CONTEXT, IDENTITY, 3),
    ("a token of the middle differs", (1, 2, 9, 4), CONTEXT, IDENTITY, 2),
    ("another context", (1, 2, 3, 4), OTHER_CONTEXT, IDENTITY, 0),
    ("other weights", (1, 2, 3, 4), CONTEXT, OTHER_WEIGHTS, 0),
    ("another model", (1, 2, 3, 4), CONTEXT, replace(IDENTITY, model=Digest(sixteen("else"))), 0),
    (
        "another layout",
        (1, 2, 3, 4),
        CONTEXT,
        replace(IDENTITY, layout=replace(LAYOUT, dtype=DType.BFLOAT16)),
        0,
    ),
    ("another number of shards", (1, 2, 3, 4), CONTEXT, ONE_SHARD, 0),
]


@pytest.mark.parametrize(
    ("tokens", "context", "identity", "expected"),
    [case[1:] for case in USABLE],
    ids=[case[0] for case in USABLE],
)
def test_usable_is_the_longest_prefix_that_equals_the_request(
    tokens: tuple[int, ...], context: Digest, identity: Identity, expected: int
) -> None:
    """INV-EXPOSE: token ids, context, model, weights, layout and shards must all be the request's."""
    state = SessionState.from_claim(claim(1), b"", Offset(0))
    state.shards = [filled(((1, 2, 3, 4), IDENTITY, CONTEXT)) for _ in range(2)]
    assert expected == state.usable(tokens, context, identity)


def test_usable_is_the_least_of_the_shards() -> None:
    """A position is usable when every shard has it."""
    state = SessionState.from_claim(claim(1), b"", Offset(0))
    state.shards = [filled(((1, 2, 3), IDENTITY, CONTEXT)), filled(((1, 2), IDENTITY, CONTEXT))]
    assert state.usable((1, 2, 3), CONTEXT, IDENTITY) == 2


def test_usable_ends_where_bytes_of_other_weights_begin() -> None:
    """A prefix under the request's weights stays usable although the rest was written under others."""
    shard = filled(((1, 2), IDENTITY, CONTEXT), ((3, 4), OTHER_WEIGHTS, CONTEXT))
    assert shard.usable(array("I", (1, 2, 3, 4)), CONTEXT, IDENTITY) == 2
    assert shard.usable(array("I", (1, 2, 3, 4)), CONTEXT, OTHER_WEIGHTS) == 0


def test_usable_of_an_unrooted_session_is_nothing() -> None:
    """What is not known is not exposed."""
    assert STANDINGS["unrooted"]().usable((1, 2), CONTEXT, IDENTITY) == 0


def test_usable_finds_each_first_difference() -> None:
    """The search by halving agrees with a loop, at every place of a difference."""
    mine = tuple(range(100))
    shard = filled((mine, IDENTITY, CONTEXT))
    for at in range(101):
        theirs = (*mine[:at], 1 << 31, *mine[at + 1 :])
        assert shard.usable(array("I", theirs), CONTEXT, IDENTITY) == at


@pytest.mark.parametrize(
    ("standing", "expected"),
    [("unrooted", None), ("ended", None), ("whole", ("weights", IDENTITY.weights, OTHER_WEIGHTS.weights))],
)
def test_state_says_in_which_field_an_engine_differs(standing: str, expected: object) -> None:
    """An engine that gets nothing to attach is told why; where there is nothing, there is no difference."""
    state = STANDINGS[standing]()
    assert expected == state.differs(OTHER_WEIGHTS)
    assert state.differs(IDENTITY) is None


def test_session_identity_follows_its_newest_claim() -> None:
    """Session, epoch and writer are the claim's."""
    state = with_history(20)
    assert (claim(20).session, 20, claim(20).writer) == (state.session, state.epoch, state.writer)


def test_shards_extended_under_a_claim_carry_its_identity() -> None:
    """A delta's bytes are known by its epoch's claim and its own context."""
    state = with_history(10)
    for record in (claim(20, "B", identity=OTHER_WEIGHTS), None):
        fold(state, HERE, seal(state, record or truncate(state, 2)))
    fold(state, HERE, seal(state, delta(state, (9,))._replace(context=OTHER_CONTEXT)))
    assert [(0, IDENTITY, CONTEXT), (2, OTHER_WEIGHTS, OTHER_CONTEXT)] == runs_of(state.shards[0])


def test_truncate_is_the_only_record_with_a_length() -> None:
    """A guard for the cases above: the records of the table are what their names say."""
    state = with_history(20)
    made = {name: type(make(state)).__name__.lower() for name, make in RECORDS.items()}
    assert {name: name.split("-", maxsplit=1)[0] for name in RECORDS} == made
    assert isinstance(RECORDS["truncate-60"](state), Truncate)
