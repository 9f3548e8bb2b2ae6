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
    (STATE_PLUS_ONE, "SessionClaimable", 0),
    (STATE_PLUS_ONE_NO_WINDOW, "NoTwoOwners", 0),
    (NO_WINDOW, "NoTwoOwners", 5),
    (NO_WINDOW, "NoStaleApplied", 5),
    (NO_CEILING, "NoTwoOwners", 0),
    (LAST_CLAIM_WINS, "MonotonicEpoch", 0),
    (NO_READ_BACK, "AttachOnlyAfterOwnClaim", 0),
    (NO_READ_BACK, "OneWriterPerEpoch", 0),
    (CLAIMS_BACK, "NoClaimBack", 1),
    (NEVER_FENCED, "OneWriterPerEpoch", 0),
    (KEEPS_WRITING, "SilentAfterUnknown", 0),
    (KEEPS_WRITING, "HonestNeverBreaks", 0),
    (OLD_WEIGHTS_CLAIM, "OneLineage", 0),
    # records
    (NO_WRITER, "HonestNeverBreaks", 11),
    (NO_EPOCH, "HonestNeverBreaks", 39),
    (NO_AUTHOR, "HonestNeverBreaks", 0),
    (NO_SEQ, "HonestNeverBreaks", 0),
    (NO_CHAIN, "StandbysAgreeAtOffset", 2),
    (NO_SEQ_NO_CHAIN, "StandbyIsPrefixOfAcked", 15),
    (NO_START_NO_CHAIN, "OneLineage", 1),
    (NO_PAYLOAD_CHECKSUM, "OneLineage", 13),
    (NO_PAYLOAD_CHECKSUM, "ChainsEqualCachesEqual", 13),
    (OWN_PAYLOADS_UNREAD, "AcknowledgedNotLost", 18),
    (LATE_COPY_HEALS, "StandbysAgreeAtOffset", 2),
    (MID_EPOCH_ROOTS, "StandbysAgreeAtOffset", 42),
    # turns
    (NO_TRUNCATE, "HonestNeverBreaks", 0),
    (NO_TRUNCATE_NO_START, "OneLineage", 1),
    (NO_TRUNCATE_AT_ALL, "OneLineage", 0),
    (LAGGING_FOLD, "OneLineage", 108),
    (BROKEN_GOES_ON, "HonestNeverBreaks", 2),
    (REFUSED_GOES_ON, "Converged", 8),
    (RING_ANYTHING, "OneLineage", 13),
    # what was not read
    (HOLE_KEEPS, "NoTwoOwners", 3),
    (REPLACED_KEEPS, "NoTwoOwners", 0),
    (SAME_LOG, "NoTwoOwners", 0),
    (UNREADABLE_SKIPPED, "NoTwoOwners", 3),
    (DROPPED_IS_FORGOTTEN, "NoTwoOwners", 6),
    (DROPPED_IS_FORGOTTEN, "MonotonicEpoch", 6),
    (FULL_NOT_FOLDED, "Converged", 1),
    # what is exposed
    (ANY_TOKENS, "AttachedRight", 0),
    (ANY_CONTEXT, "AttachedRight", 1),
    (ANY_MODEL, "AttachedRight", 7),
    (ANY_WEIGHTS, "AttachedRight", 3),
    (ANY_LAYOUT, "AttachedRight", 2),
    (ANY_SHARDS_ANY_COUNT, "AttachedRight", 1),
    (LONGEST_SHARD, "CoreAssertion", 4),
    (FREED_REUSED, "PinnedBytesImmutable", 2),
    (PINNED_WRITTEN, "PinnedBytesImmutable", 15),
    # what the simulator found in the cores when they were new
    (LOST_CLAIMS_AWAITED, "NoTurnStuck", 0),
    (LOST_CLAIMS_AWAITED, "SessionClaimable", 0),
    (ENDED_KEPT, "BoundedMemory", 1),
    (CLAIMED_PUSHED_OUT, "CoreAssertion", 10),
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
