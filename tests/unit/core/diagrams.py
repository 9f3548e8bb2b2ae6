"""The state diagrams of docs/fencing.md, written from the tables of the cores."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core import primary, session, takeover
from kvlog.core.primary import Tenure
from kvlog.core.session import Standing
from kvlog.core.takeover import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from enum import StrEnum

__all__ = ["BLOCKS", "block_in", "with_blocks"]


def mermaid(
    first: StrEnum, states: Iterable[StrEnum], transitions: Mapping[StrEnum, Mapping[str, StrEnum]]
) -> str:
    """A state diagram: states without an arrow that leaves them are final."""
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    for state in states:
        arrows = transitions.get(state, {})
        lines += [f"    {state.name} --> {there.name}: {event}" for event, there in arrows.items()]
        if not arrows:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)


BLOCKS = {
    "session": mermaid(Standing.UNROOTED, Standing, session.TRANSITIONS),  # type: ignore[arg-type]
    "takeover": mermaid(Phase.ASKING, Phase, takeover.TRANSITIONS),  # type: ignore[arg-type]
    "tenure": mermaid(Tenure.OWNED, Tenure, primary.TRANSITIONS),  # type: ignore[arg-type]
}
"""By the name in the document's markers."""


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- generated: {name} -->\n```mermaid\n", "\n```\n<!-- end -->"


def block_in(document: str, name: str) -> str:
    """The diagram that stands in the document."""
    begin, end = _markers(name)
    return document.split(begin)[1].split(end, maxsplit=1)[0]


def with_blocks(document: str) -> str:
    """The document with the diagrams as they should be."""
    for name, wanted in BLOCKS.items():
        begin, end = _markers(name)
        before, rest = document.split(begin)
        document = before + begin + wanted + end + rest.split(end, maxsplit=1)[1]
    return document
