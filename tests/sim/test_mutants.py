"""A checker that cannot fail is worth nothing: each rule of the cores is switched off, and its checker must notice.

Only the named checker may speak in a mutant's runs, so that the table says what that checker finds by itself; others
would find most mutants too, and sooner. Where a rule alone is missed by nobody since another covers for it, it is off
together with that one: REDUNDANT says which (DESIGN chapter 4 names seq gap, start and the Truncate at seq 0). Of
a ring's rows that a new daemon reads, session and epoch cover for each other: one alone is missed by hundreds of runs.
"""

from __future__ import annotations

import pytest

from tests.sim.checkers import NAMES
from tests.sim.mutants.exposure import (
    ANY_CONTEXT,
    ANY_COUNT,
    ANY_LAYOUT,
    ANY_MODEL,
    ANY_SHARDS,
    ANY_SHARDS_ANY_COUNT,
    ANY_TOKENS,
    ANY_WEIGHTS,
    FREED_REUSED,
    FULL_NOT_FOLDED,
    LONGEST_SHARD,
    PINNED_WRITTEN,
    RING_ANYTHING,
    RING_SESSION,
    SAME_LOG,
)
from tests.sim.mutants.mutant import Mutant, hunt
from tests.sim.mutants.reading import (
    DROPPED_IS_FORGOTTEN,
    FIRST_ANYTHING,
    HOLE_KEEPS,
    LAST_CLAIM_WINS,
    LATE_COPY_HEALS,
    MID_EPOCH_ROOTS,
    NO_AUTHOR,
    NO_CEILING,
    NO_CHAIN,
    NO_EPOCH,
    NO_PAYLOAD_CHECKSUM,
    NO_SEQ,
    NO_SEQ_NO_CHAIN,
    NO_START,
    NO_START_NO_CHAIN,
    NO_WINDOW,
    NO_WRITER,
    OWN_PAYLOADS_UNREAD,
    REPLACED_KEEPS,
    UNREADABLE_SKIPPED,
)
from tests.sim.mutants.rewriting import MID_EPOCH, STANDS_IN_THE_WAY, TAKES_BACK, UNPINNED
from tests.sim.mutants.writing import (
    ANSWERED_TWICE,
    BROKEN_GOES_ON,
    CLAIMED_PUSHED_OUT,
    CLAIMS_BACK,
    ENDED_KEPT,
    KEEPS_WRITING,
    LAGGING_FOLD,
    LOST_CLAIMS_AWAITED,
    NEVER_FENCED,
    NO_READ_BACK,
    NO_TRUNCATE,
    NO_TRUNCATE_AT_ALL,
    NO_TRUNCATE_NO_START,
    OLD_WEIGHTS_CLAIM,
    REFUSED_GOES_ON,
    RING_EPOCH,
    STATE_PLUS_ONE,
    STATE_PLUS_ONE_NO_WINDOW,
)

SEEDS = 150
"""So many seeds are tried, from the one on at which it was caught when the table was written."""

CAUGHT: list[tuple[Mutant, str, int]] = [
    # claims
    (STATE_PLUS_ONE, "SessionClaimable", 1),
    (STATE_PLUS_ONE_NO_WINDOW, "NoTwoOwners", 0),
    (NO_WINDOW, "NoTwoOwners", 6),
    (NO_WINDOW, "NoStaleApplied", 6),
    (NO_CEILING, "NoTwoOwners", 0),
    (LAST_CLAIM_WINS, "MonotonicEpoch", 0),
    (NO_READ_BACK, "AttachOnlyAfterOwnClaim", 0),
    (NO_READ_BACK, "OneWriterPerEpoch", 0),
    (CLAIMS_BACK, "NoClaimBack", 3),
    (NEVER_FENCED, "OneWriterPerEpoch", 0),
    (KEEPS_WRITING, "SilentAfterUnknown", 1),
    (KEEPS_WRITING, "HonestNeverBreaks", 1),
    (OLD_WEIGHTS_CLAIM, "OneLineage", 0),
    # records
    (NO_WRITER, "HonestNeverBreaks", 8),
    (NO_EPOCH, "HonestNeverBreaks", 69),
    (NO_AUTHOR, "HonestNeverBreaks", 0),
    (NO_SEQ, "HonestNeverBreaks", 1),
    (NO_CHAIN, "StandbysAgreeAtOffset", 7),
    (NO_SEQ_NO_CHAIN, "StandbyIsPrefixOfAcked", 5),
    (NO_START_NO_CHAIN, "OneLineage", 0),
    (NO_PAYLOAD_CHECKSUM, "OneLineage", 0),
    (NO_PAYLOAD_CHECKSUM, "ChainsEqualCachesEqual", 0),
    (OWN_PAYLOADS_UNREAD, "AcknowledgedNotLost", 8),
    (LATE_COPY_HEALS, "StandbysAgreeAtOffset", 3),
    (MID_EPOCH_ROOTS, "StandbysAgreeAtOffset", 16),
    # turns
    (NO_TRUNCATE, "HonestNeverBreaks", 0),
    (NO_TRUNCATE_NO_START, "OneLineage", 0),
    (NO_TRUNCATE_AT_ALL, "OneLineage", 0),
    (LAGGING_FOLD, "OneLineage", 73),
    (BROKEN_GOES_ON, "HonestNeverBreaks", 15),
    (REFUSED_GOES_ON, "Converged", 2),
    (RING_ANYTHING, "OneLineage", 13),
    # what was not read
    (HOLE_KEEPS, "NoTwoOwners", 6),
    (REPLACED_KEEPS, "NoTwoOwners", 0),
    (SAME_LOG, "NoTwoOwners", 0),
    (UNREADABLE_SKIPPED, "NoTwoOwners", 0),
    (DROPPED_IS_FORGOTTEN, "NoTwoOwners", 2),
    (DROPPED_IS_FORGOTTEN, "MonotonicEpoch", 2),
    (FULL_NOT_FOLDED, "Converged", 1),
    # what is exposed
    (ANY_TOKENS, "AttachedRight", 0),
    (ANY_CONTEXT, "AttachedRight", 1),
    (ANY_MODEL, "AttachedRight", 1),
    (ANY_WEIGHTS, "AttachedRight", 0),
    (ANY_LAYOUT, "AttachedRight", 13),
    (ANY_SHARDS_ANY_COUNT, "AttachedRight", 7),
    (LONGEST_SHARD, "CoreAssertion", 2),
    (FREED_REUSED, "PinnedBytesImmutable", 4),
    (PINNED_WRITTEN, "PinnedBytesImmutable", 13),
    # rewriting
    (MID_EPOCH, "RewrittenIsKnown", 0),
    (TAKES_BACK, "NoClaimBack", 39),
    (UNPINNED, "OneLineage", 18),
    (STANDS_IN_THE_WAY, "RequestsFirst", 1),
    # what the simulator found in the cores when they were new
    (LOST_CLAIMS_AWAITED, "NoTurnStuck", 1),
    (LOST_CLAIMS_AWAITED, "SessionClaimable", 1),
    (ENDED_KEPT, "BoundedMemory", 2),
    (CLAIMED_PUSHED_OUT, "CoreAssertion", 3),
    (ANSWERED_TWICE, "OneAnswer", 0),
]
"""mutant, the checker that finds it, and the first seed at which it does."""

REDUNDANT: list[tuple[Mutant, Mutant]] = [
    (NO_START, NO_START_NO_CHAIN),
    (FIRST_ANYTHING, NO_TRUNCATE_AT_ALL),
    (RING_SESSION, RING_ANYTHING),
    (RING_EPOCH, RING_ANYTHING),
    (ANY_SHARDS, ANY_SHARDS_ANY_COUNT),
    (ANY_COUNT, ANY_SHARDS_ANY_COUNT),
]
"""a rule that another covers for, and the mutant in which both are off."""


@pytest.mark.parametrize(
    ("mutant", "checker", "seed"), CAUGHT, ids=[f"{mutant.name}: {checker}" for mutant, checker, _ in CAUGHT]
)
def test_broken_core_is_caught_by_its_checker(mutant: Mutant, checker: str, seed: int) -> None:
    """With one rule off (or with its partner), the checker named for it finds a violation."""
    caught = hunt(mutant, SEEDS, first=seed, checker=checker)
    assert caught is not None, f"{checker} does not find it in {SEEDS} seeds: the simulator is too weak"
    assert caught.checker == checker


@pytest.mark.parametrize(("rule", "pair"), REDUNDANT, ids=[rule.name for rule, _ in REDUNDANT])
def test_redundant_rule_is_caught_with_its_partner(rule: Mutant, pair: Mutant) -> None:
    """A rule that alone nobody misses is part of a mutant that is caught."""
    assert set(rule.changes) <= set(pair.changes) or pair is NO_TRUNCATE_AT_ALL
    assert pair in [mutant for mutant, _, _ in CAUGHT]


def test_every_checker_finds_a_mutant() -> None:
    """No checker is there for show."""
    assert {checker for _, checker, _ in CAUGHT} == {*NAMES, "CoreAssertion"}
