"""What a mutant is: attributes of the real core and what stands in their place while it runs."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING
from unittest import mock

from tests.sim.checkers import alone
from tests.sim.schedule import SimulationFailed, simulate

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.sim.faults import Fault

Change = tuple[object, str, object]


@dataclass(frozen=True)
class Mutant:
    """One broken core.

    Args:
        name: the rule that is off.
        changes: (object, attribute, what replaces it).
        always: faults that its runs must have, since the rule is there for them.
    """

    name: str
    changes: tuple[Change, ...]
    always: tuple[Fault, ...] = ()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Break the core for the length of a with block."""
        with ExitStack() as stack:
            for target, attribute, replacement in self.changes:
                stack.enter_context(mock.patch.object(target, attribute, replacement))
            yield


@dataclass(frozen=True)
class Caught:
    """By which checker, at which seed."""

    checker: str
    seed: int


def together(name: str, *parts: Mutant) -> Mutant:
    """Several rules off at once."""
    return Mutant(
        name,
        tuple(change for part in parts for change in part.changes),
        tuple(dict.fromkeys(fault for part in parts for fault in part.always)),
    )


def hunt(mutant: Mutant, seeds: int, *, first: int = 0, checker: str | None = None) -> Caught | None:
    """Run seeds until a checker catches the mutant; None if none does.

    Args:
        mutant: which.
        seeds: how many at most.
        first: where to begin.
        checker: the only one that may speak; by default each may, and the first one ends the run.
    """
    with mutant.applied(), alone(checker) if checker else nullcontext():
        for seed in range(first, first + seeds):
            try:
                simulate(seed, always=mutant.always)
            except SimulationFailed as failure:
                if checker in (None, failure.checker):
                    return Caught(failure.checker, seed)
    return None
