"""What the benchmarks found, as rows: the terminal's table, markdown for the README, JSON for later.

A row has a median, the smallest and largest value, what it was held against, and the ratio of the two. Ratios are taken
inside a round where the two took turns, and the median of those counts: a disturbance then hits both.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Row", "as_json", "as_markdown", "paired", "percentile", "show", "single"]

_HEADINGS = ("measure", "case", "unit", "median (min-max), n", "against", "median", "ratio", "goal", "also")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line.

    Args:
        measure: which benchmark.
        case: what of it.
        unit: of all values.
        values: one a round, or one a try.
        against: what it is held against, if anything is.
        their_values: of that.
        ratio: ours to theirs.
        goal: in words; met: None where none was set.
        also: further figures, by name.
    """

    measure: str
    case: str
    unit: str
    values: tuple[float, ...]
    against: str = ""
    their_values: tuple[float, ...] = ()
    ratio: float | None = None
    goal: str = ""
    met: bool | None = None
    also: dict[str, float | str] = field(default_factory=dict)

    def cells(self) -> tuple[str, ...]:
        """One text a column."""
        verdict = {True: ": met", False: ": MISSED", None: ""}[self.met]
        return (
            self.measure,
            self.case,
            self.unit,
            spread_text(self.values),
            self.against,
            spread_text(self.their_values),
            "" if self.ratio is None else _text(self.ratio),
            self.goal + verdict,
            ", ".join(f"{name} {_text(value)}" for name, value in self.also.items()),
        )


def single(measure: str, case: str, unit: str, values: Sequence[float], **also: float | str) -> Row:
    """A row that is held against nothing."""
    return Row(measure=measure, case=case, unit=unit, values=tuple(values), also=also)


def paired(row: Row, pairs: Sequence[tuple[float, float]]) -> Row:
    """Fills a row's values and ratio from rounds of (ours, theirs)."""
    given = {
        name: getattr(row, name) for name in ("measure", "case", "unit", "against", "goal", "met", "also")
    }
    return Row(
        **given,
        values=tuple(ours for ours, _ in pairs),
        their_values=tuple(theirs for _, theirs in pairs),
        ratio=statistics.median(ours / theirs for ours, theirs in pairs),
    )


def percentile(values: Sequence[float], percent: float) -> float:
    """The value that so many percent do not exceed: one of them, never an interpolation."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


def spread_text(values: Sequence[float]) -> str:
    """Median, and the range where there is one."""
    if not values:
        return ""
    if len(values) == 1:
        return _text(values[0])
    median, low, high = statistics.median(values), min(values), max(values)
    return f"{_text(median)} ({_text(low)}-{_text(high)}), {len(values)}"


def show(rows: Sequence[Row]) -> None:
    """Prints the table; where the output is no terminal it is as wide as it needs to be."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=220)
    table = Table(*_HEADINGS, show_lines=False)
    for row in rows:
        style = {True: "green", False: "bold red", None: ""}[row.met]
        table.add_row(*row.cells(), style=style)
    console.print(table)


def as_markdown(rows: Sequence[Row]) -> str:
    """The same table for a document."""
    lines = [" | ".join(_HEADINGS), " | ".join("---" for _ in _HEADINGS)]
    lines += [" | ".join(cell.replace("|", "/") for cell in row.cells()) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def as_json(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Every value of every row, and the median."""
    return [asdict(row) | {"median": statistics.median(row.values) if row.values else None} for row in rows]


def _text(value: float | str) -> str:
    if isinstance(value, str):
        return value
    if value >= 100 or value == int(value):
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"
