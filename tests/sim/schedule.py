"""The order of a run: which of all things happens next, until the steps are over, and then the ending.

All chance comes from one `random.Random(seed)`; a seed is a run. Each step does one small thing at one place, and the
checkers look after it.
"""

from __future__ import annotations

from bisect import bisect
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING

from tests.sim.ending import end
from tests.sim.faults import ACTION_WEIGHTS, Fault, Profile
from tests.sim.mishaps import Mishaps
from tests.sim.world import World

if TYPE_CHECKING:
    from collections.abc import Collection

STEPS = 400
"""Long enough for about fifty records and a dozen turns; more seeds find more than longer runs."""


class SimulationFailed(AssertionError):
    """A run violated an invariant.

    Args:
        seed: replays it.
        checker: which one, or the core's own assertion.
        cause: what was raised.
    """

    def __init__(self, seed: int, checker: str, cause: BaseException) -> None:
        super().__init__(f"seed {seed}: {cause} (replay: make sim SEED={seed})")
        self.seed, self.checker = seed, checker


def simulate(seed: int, *, always: Collection[Fault] = (), steps: int = STEPS) -> Profile:
    """Run a seed to its end; what was injected is in the answer.

    Args:
        seed: the run.
        always: kinds of faults that this run must not leave out.
        steps: before the ending.
    """
    rng = Random(seed)
    world = World(rng, Profile.drawn(rng, frozenset(always)))
    run(world, seed, steps)
    return world.profile


def run(world: World, seed: int, steps: int = STEPS) -> None:
    """All steps and the ending of a world; a failure names the seed."""
    mishaps = Mishaps(world)
    weighed = world.ordinary()
    weighed += [(world.profile.rates[fault], mishaps.of(fault)) for fault in ACTION_WEIGHTS]
    weighed = [(weight, action) for weight, action in weighed if weight]
    bounds = list(accumulate(weight for weight, _ in weighed))
    try:
        for _ in range(steps):
            weighed[bisect(bounds, world.rng.random() * bounds[-1])][1]()
            for node in world.nodes:
                world.checkers.pinned(node)
        end(world)
    except (AssertionError, LookupError) as violation:  # a broken core trips over its own tables too
        checker = getattr(violation, "checker", "CoreAssertion")
        raise SimulationFailed(seed, checker, violation) from violation
