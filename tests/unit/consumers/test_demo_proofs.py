"""A claim of the demo holds by its evidence alone: each piece that is not as it should be makes it fall."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from consumers.demo import figures_of
from consumers.demo_log import SessionStory
from consumers.demo_proofs import (
    Claimed,
    Evidence,
    Killed,
    Paused,
    TakeOverTimes,
    Tampered,
    Uninterrupted,
    claims,
)
from kvlog.ids import Epoch, Offset

SHOWN, RESUMED = (1, 2, 3), (4, 5)
DIGESTS = {"10": ["a", "b"], "14": ["c", "d"]}
STORY = SessionStory(entries=(), length=10, epoch=Epoch(1), late=(), stale=())
LATE = replace(STORY, late=(Offset(70), Offset(71)), stale=(Offset(70), Offset(71)))
TIMES = TakeOverTimes(detect_ms=50.0, claim_ms=5.0, catch_up_ms=2.5, attach_ms=2.5, first_token_ms=40.0)

EVIDENCE = Evidence(
    killed=Killed(
        shown=SHOWN,
        resumed=RESUMED,
        prompt_tokens=9,
        kvlog={"attached": 10, "recomputed": 2, "kv_digests": DIGESTS},
        story=STORY,
        times=TIMES,
    ),
    reprefill_ms=500.0,
    reference=Uninterrupted(tokens=SHOWN + RESUMED, kvlog={"attached": 0, "kv_digests": DIGESTS}),
    tampered=Tampered(
        whole_attached=11,
        attached=8,
        damaged_start=8,
        damaged_offset=40,
        folded="diverged: payload checksum",
        noticed_offset=40,
        tokens=SHOWN + RESUMED,
    ),
    paused=Paused(
        tokens=SHOWN + RESUMED,
        ending="fenced",
        dropped=1,
        story=LATE,
        stale_at_b=frozenset({70, 71}),
        stale_at_a=frozenset({70, 71}),
    ),
    is_exact=True,
)


def judged(evidence: Evidence) -> dict[str, Claimed]:
    """The claims by name."""
    return {claim.name: claim for claim in claims(evidence)}


def killed(**changed: Any) -> Evidence:
    """The evidence with another first act."""
    return replace(EVIDENCE, killed=replace(EVIDENCE.killed, **changed))


def kvlog(**changed: Any) -> Evidence:
    """The evidence with another report of node B's engine."""
    return killed(kvlog={**EVIDENCE.killed.kvlog, **changed})


def reference(**changed: Any) -> Evidence:
    """The evidence with another uninterrupted run."""
    return replace(EVIDENCE, reference=replace(EVIDENCE.reference, **changed))


def tampered(**changed: Any) -> Evidence:
    """The evidence with another tamper control."""
    return replace(EVIDENCE, tampered=replace(EVIDENCE.tampered, **changed))


def paused(**changed: Any) -> Evidence:
    """The evidence with another zombie control."""
    return replace(EVIDENCE, paused=replace(EVIDENCE.paused, **changed))


def test_claims_of_good_evidence_all_hold_and_all_count():
    """Four claims, each with the figures behind it."""
    assert {"tokens_equal", "kv_equal", "tamper_detected", "zombie_fenced"} == set(judged(EVIDENCE))
    assert all(claim.held and claim.counts and claim.detail for claim in claims(EVIDENCE))


@pytest.mark.parametrize(
    ("name", "evidence"),
    [
        ("tokens_equal", killed(resumed=(4, 6))),
        ("tokens_equal", killed(resumed=(4,))),
        ("tokens_equal", killed(resumed=(4, 5, 6))),
        ("kv_equal", kvlog(attached=0)),
        ("kv_equal", kvlog(attached=9)),
        ("kv_equal", kvlog(kv_digests={**DIGESTS, "10": ["a", "x"]})),
        ("kv_equal", kvlog(kv_digests={**DIGESTS, "10": ["a"]})),
        ("kv_equal", reference(kvlog={"attached": 0, "kv_digests": {}})),
        ("kv_equal", reference(kvlog={"attached": 3, "kv_digests": DIGESTS})),
        ("tamper_detected", tampered(folded="")),
        ("tamper_detected", tampered(noticed_offset=None)),
        ("tamper_detected", tampered(noticed_offset=41)),
        ("tamper_detected", tampered(attached=9)),
        ("tamper_detected", tampered(whole_attached=8)),
        ("tamper_detected", tampered(tokens=(1, 2, 3, 4, 6))),
        ("zombie_fenced", paused(ending="")),
        ("zombie_fenced", paused(ending="connection")),
        ("zombie_fenced", paused(story=STORY)),
        ("zombie_fenced", paused(story=replace(LATE, stale=(Offset(70),)))),
        ("zombie_fenced", paused(stale_at_b=frozenset({70}))),
        ("zombie_fenced", paused(stale_at_a=frozenset())),
        ("zombie_fenced", paused(tokens=(1, 2, 3, 4, 6))),
    ],
)
def test_claim_falls_with_any_piece_of_its_evidence(name, evidence):
    """One thing that is not as claimed is enough; the other claims stand or fall by their own evidence."""
    assert not judged(evidence)[name].held


def test_tokens_in_bfloat16_are_reported_and_do_not_count():
    """Rounding may change a token after a recompute: said, and no failure. What was loaded must still be equal."""
    other = replace(killed(resumed=(4, 6)), is_exact=False)
    assert (False, False) == (judged(other)["tokens_equal"].held, judged(other)["tokens_equal"].counts)
    assert judged(other)["kv_equal"].counts
    assert judged(replace(tampered(tokens=(1,)), is_exact=False))["tamper_detected"].held
    assert judged(replace(paused(tokens=(1,)), is_exact=False))["zombie_fenced"].held
    assert not judged(replace(tampered(attached=9), is_exact=False))["tamper_detected"].held


def test_rows_that_were_computed_later_are_told_apart_from_those_that_were_loaded():
    """A difference beyond what was loaded is shown and breaks no claim."""
    later = kvlog(kv_digests={**DIGESTS, "14": ["c", "x"]})
    assert ((True, True), (True, False)) == (later.layers_equal, later.layers_equal_later)
    assert judged(later)["kv_equal"].held
    assert "of all 14 at the end: 1 of 2" in judged(later)["kv_equal"].detail


def test_figures_are_those_of_the_issue_and_the_parts_add_up():
    """The JSON has these names and no others."""
    figures = figures_of(EVIDENCE, log="file:///log", model="m", dtype="float32")
    assert {
        "tokens_equal": True,
        "kv_equal": True,
        "tamper_detected": True,
        "zombie_fenced": True,
        "tokens_before_kill": 3,
        "tokens_in_log": 10,
        "tokens_recomputed": 2,
        "kill_to_next_token_ms": 100.0,
        "detect_ms": 50.0,
        "claim_ms": 5.0,
        "catch_up_ms": 2.5,
        "attach_ms": 2.5,
        "first_token_ms": 40.0,
        "reprefill_ms": 500.0,
        "ratio": 5.0,
        "log": "file:///log",
        "model": "m",
        "dtype": "float32",
    } == figures
