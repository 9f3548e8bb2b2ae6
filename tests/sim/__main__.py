"""Simulate: `python -m tests.sim`, with `--seed S` to replay one run.

Without arguments it runs seeds until 100,000 faults were injected. It prints the faults by kind; a failure prints its
seed and what was violated.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from itertools import count
from typing import TYPE_CHECKING

from tests.sim.faults import LOAD
from tests.sim.schedule import SimulationFailed, simulate

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.sim.faults import Fault

STEPS = 1500
"""Longer runs than in the tests: more faults a second, since less of the time goes into the endings."""
SEEDS_A_BATCH = 16
FAULTS_MIN = 100_000


def batch(seeds: range) -> Counter[Fault] | str:
    """Run some seeds; the faults that were injected, or how it failed."""
    counts: Counter[Fault] = Counter()
    for seed in seeds:
        try:
            counts += simulate(seed, steps=STEPS).counts
        except SimulationFailed as failure:
            return str(failure)
    return counts


def batches(seeds: int | None) -> Iterator[range]:
    """Seeds from 0 on, so many of them or without end."""
    for first in count(0, SEEDS_A_BATCH):
        if seeds is not None and first >= seeds:
            return
        last = first + SEEDS_A_BATCH
        yield range(first, last if seeds is None else min(last, seeds))


def table(counts: Counter[Fault]) -> Iterable[str]:
    """The faults by kind, most frequent first, and their sum; what is load and no fault stands apart."""
    for fault, number in counts.most_common():
        yield f"{number:>9,}  {fault.value}{' (load, not summed)' if fault in LOAD else ''}"
    yield f"{faults_in(counts):>9,}  faults in all"


def faults_in(counts: Counter[Fault]) -> int:
    """How many of what was injected are faults."""
    return sum(number for fault, number in counts.items() if fault not in LOAD)


def main() -> int:
    """Parse the arguments, run, print."""
    parser = ArgumentParser(prog="python -m tests.sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--seeds", type=int, help="run seeds 0 to SEEDS - 1")
    parser.add_argument(
        "--faults-min", type=int, default=FAULTS_MIN, help="run until so many faults were injected"
    )
    arguments = parser.parse_args()
    if arguments.seed is not None:
        outcome = batch(range(arguments.seed, arguments.seed + 1))
        return report(
            outcome if isinstance(outcome, str) else None, Counter() if isinstance(outcome, str) else outcome
        )
    counts: Counter[Fault] = Counter()
    workers = os.cpu_count() or 1
    with ProcessPoolExecutor(workers) as pool:
        todo = batches(arguments.seeds)
        while arguments.seeds is not None or faults_in(counts) < arguments.faults_min:
            some = [seeds for seeds, _ in zip(todo, range(workers), strict=False)]
            if not some:
                break
            for outcome in pool.map(batch, some):
                if isinstance(outcome, str):
                    return report(outcome, counts)
                counts += outcome
    return report(None, counts)


def report(failure: str | None, counts: Counter[Fault]) -> int:
    """Print the table, and the failure if there is one."""
    print("\n".join(table(counts)))
    if failure is not None:
        print(f"FAILED {failure}", file=sys.stderr)
    return failure is not None


if __name__ == "__main__":
    sys.exit(main())
