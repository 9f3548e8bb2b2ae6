"""What docs/fencing.md draws is what the tables say, and what the tables say is what the cores do.

`KVLOG_REWRITE=1` writes the diagrams anew (not in CI). The session's table is held against judge and fold in
test_verdict_table.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvlog.core import primary, takeover
from kvlog.core.inputs import CloseTurn, HoleRead
from kvlog.core.primary import Tenure
from kvlog.core.takeover import Phase
from kvlog.ids import Offset, Partition, SessionId, Turn
from kvlog.limits import TINY
from tests.unit.core.cluster import Cluster, Machine
from tests.unit.core.diagrams import BLOCKS, block_in, with_blocks
from tests.unit.core.logbook import OTHER_WEIGHTS, seal, truncate
from tests.unit.core.test_takeover import (
    give_failure,
    give_own_admitted,
    give_own_refused,
    give_watermark,
    reach,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.core.takeover import TakeOver

DOCUMENT = Path(__file__).parents[3] / "docs" / "fencing.md"
S = SessionId("s")


@pytest.mark.parametrize("name", BLOCKS)
def test_diagram_of_the_document_is_generated_from_the_table(name: str) -> None:
    """A diagram that was drawn by hand would be wrong one day."""
    document = DOCUMENT.read_text(encoding="utf-8")
    if os.environ.get("KVLOG_REWRITE") == "1" and not os.environ.get("CI"):
        document = with_blocks(document)
        DOCUMENT.write_text(document, encoding="utf-8")
    assert BLOCKS[name] == block_in(document, name)


def test_document_without_its_diagrams_is_noticed() -> None:
    """A marker that was deleted would pass for a diagram that is right."""
    with pytest.raises((IndexError, ValueError)):
        block_in("# Fencing", "session")


GIVEN: dict[str, Callable[[TakeOver], object]] = {
    "watermark read": give_watermark,
    "no watermark": give_failure,
    "own claim admitted": give_own_admitted,
    "own claim refused": give_own_refused,
    "append failed": give_failure,
}


@pytest.mark.parametrize(
    ("phase", "event", "expected"),
    [
        (phase, event, there)
        for phase, arrows in takeover.TRANSITIONS.items()
        for event, there in arrows.items()
    ],
)
def test_takeover_takes_each_arrow_of_its_diagram(phase: Phase, event: str, expected: Phase) -> None:
    """The table is what TakeOver does; test_takeover holds every other input against it."""
    what, _, attempts = event.partition(", ")
    attempt = reach(phase)
    if attempts == "no attempt left":
        attempt._attempts = TINY.claim_attempts - (phase is Phase.ASKING)
    GIVEN[what](attempt)
    assert expected is attempt.phase


def test_takeover_is_final_where_no_arrow_leaves() -> None:
    """WON, FENCED and UNAVAILABLE are ends."""
    assert {Phase.WON, Phase.FENCED, Phase.UNAVAILABLE} == set(Phase) - set(takeover.TRANSITIONS)


def claimed_by_another(a: Machine) -> None:
    """A newer claim is in the log."""
    a.cluster.book.claim("B")
    a.read()


def append_lost(a: Machine) -> None:
    """Nobody knows whether it is in the log."""
    a.rows(1)
    a.lose()


def claimed_by_itself(a: Machine) -> None:
    """Another identity on the same node."""
    a.step(CloseTurn(Turn(1)))
    a.open(1, identity=OTHER_WEIGHTS)
    a.answer()
    a.land()
    a.read()


def own_record_diverged(a: Machine) -> None:
    """Something under our name does not fit."""
    state = a.cluster.book.state()
    a.cluster.book.append(seal(state, truncate(state, 0), chain=1))
    a.read()


def state_dropped(a: Machine) -> None:
    """The reader had to jump."""
    a.step(HoleRead(Partition(0), Offset(9)))


def end_folded(a: Machine) -> None:
    """The session is over."""
    a.end()
    a.land()
    a.read()


HAPPENS: list[tuple[str, Callable[[Machine], None]]] = [
    ("newer claim of another writer", claimed_by_another),
    ("append failed, or own newer claim", append_lost),
    ("append failed, or own newer claim", claimed_by_itself),
    ("own record Gap, Diverged or Unknown", own_record_diverged),
    ("fold state dropped", state_dropped),
    ("own End folded", end_folded),
]


@pytest.mark.parametrize(("event", "happen"), HAPPENS)
def test_tenure_takes_each_arrow_of_its_diagram(event: str, happen: Callable[[Machine], None]) -> None:
    """The table is what the node does to its primaries; each loss is final."""
    a = Cluster().machine("A")
    a.own(1)
    owner = a.core.primary(S)
    assert owner is not None
    happen(a)
    assert primary.TRANSITIONS[Tenure.OWNED][event] is owner.tenure
    assert a.core.primary(S) is not owner


def test_every_arrow_of_the_tenures_diagram_is_taken() -> None:
    """An arrow that nothing takes would be a fiction."""
    assert set(primary.TRANSITIONS[Tenure.OWNED]) == {event for event, _ in HAPPENS}
    assert set(Tenure) - set(primary.TRANSITIONS) == set(primary.TRANSITIONS[Tenure.OWNED].values())
