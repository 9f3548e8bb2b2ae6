"""The simulator over the real cores: seeds that must pass, and that its own runs are what they claim to be."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from kvlog.core.effects import RecordRefused, TurnEnded, TurnUnlogged, UnloggedReason
from tests.sim.checkers import Checkers
from tests.sim.faults import Fault, Profile
from tests.sim.schedule import run, simulate
from tests.sim.world import World

SEEDS = 240
BATCH = 20


@pytest.mark.parametrize("first", range(0, SEEDS, BATCH))
def test_cores_under_drawn_faults_violate_nothing(first: int) -> None:
    """No seed violates an invariant, and after the faults every session can be claimed and logged by every node."""
    injected = Counter[Fault]()
    for seed in range(first, first + BATCH):
        injected += simulate(seed).counts
    assert injected.total() > 20 * BATCH, "a run without faults proves little"


def test_seed_replayed_is_the_same_run() -> None:
    """A seed is the whole run: nothing else decides."""
    assert simulate(11).counts == simulate(11).counts


def test_every_kind_of_fault_is_injected() -> None:
    """A kind that never happens would be a claim without a test."""
    assert [fault for fault in Fault if not _happens(fault)] == []


def _happens(fault: Fault) -> bool:
    """Whether one of a few runs that do not leave it out has it; all kinds at once would leave nothing to happen to."""
    return any(simulate(seed, always=frozenset({fault})).counts[fault] for seed in range(40))


@pytest.mark.parametrize("seed", range(10))
def test_run_without_faults_refuses_only_what_lost_a_race(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without faults nothing breaks and no turn is ended; claims may still race, and nodes may be busy."""
    ended, reasons, broken = [], set(), []
    effect = Checkers.effect

    def watched(self, shell, happened, cause) -> None:
        match happened:
            case TurnEnded():
                ended.append(happened)
            case TurnUnlogged(reason=reason):
                reasons.add(reason)
            case RecordRefused(judgement=judgement):
                broken.append(judgement.verdict in ("gap", "diverged", "duplicate"))
            case _:
                pass
        effect(self, shell, happened, cause)

    monkeypatch.setattr(Checkers, "effect", watched)
    run(World(Random(seed), Profile.none()), seed)
    assert ended == []
    assert not any(broken)
    assert reasons <= {UnloggedReason.BUSY, UnloggedReason.FENCED, UnloggedReason.OVERLOADED}
