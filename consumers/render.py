"""How figures look to a person: tables, sizes, times, progress. Nothing here knows what they mean."""

from __future__ import annotations

import datetime as dt
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.cells import cell_len
from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from typing import Literal

    from rich.console import RenderableType

    from kvlog.errors import KvlogError

__all__ = [
    "Advance",
    "Column",
    "bytes_text",
    "clock_text",
    "console",
    "count_text",
    "date_text",
    "error_text",
    "facts",
    "mark",
    "number_text",
    "progress",
    "seconds_text",
    "show",
    "table",
]

KIB = 1024
_WIDTH_MAX = 400
_WRAPPED_WIDTH_MIN = 12
"""A column that is squeezed to less than this cannot be read."""
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_STYLES = {"good": "green", "bad": "bold red", "doubtful": "yellow", "quiet": "dim"}


class _Terminal(Console):
    """A console that leaves it to its caller what a closed pipe means; rich would end the process with code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def console(*, stderr: bool = False) -> Console:
    """Where a person reads; colours and width by what it is connected to."""
    return _Terminal(stderr=stderr, highlight=False, soft_wrap=False)


def number_text(value: int | None) -> str:
    """1234567 → 1,234,567; what is not known is a dash."""
    return "-" if value is None else f"{value:,}"


def count_text(value: int, thing: str) -> str:
    """1 row, 2 rows."""
    return f"{value:,} {thing}" + ("" if value == 1 else "s")


def bytes_text(value: int | None) -> str:
    """1536 → 1.5 KiB; three digits or so."""
    if value is None:
        return "-"
    size, unit = float(value), 0
    while size >= KIB and unit < len(_UNITS) - 1:
        size, unit = size / KIB, unit + 1
    return f"{value} B" if unit == 0 else f"{size:.1f} {_UNITS[unit]}"


def seconds_text(value: float | None) -> str:
    """0.0123 → 0.01 s; 75 → 1 m 15 s."""
    minute, hour, day = 60, 3600, 86_400
    if value is None:
        return "-"
    if value < minute:
        return f"{value:.2f} s"
    if value < hour:
        return f"{int(value // minute)} m {int(value % minute)} s"
    if value < day:
        return f"{int(value // hour)} h {int(value % hour // minute)} m"
    return f"{int(value // day)} d {int(value % day // hour)} h"


def clock_text(timestamp_ms: int | None) -> str:
    """The time of day in UTC, with milliseconds."""
    return "-" if timestamp_ms is None else _utc(timestamp_ms).strftime("%H:%M:%S.%f")[:-3]


def date_text(timestamp_ms: int) -> str:
    """The day in UTC."""
    return _utc(timestamp_ms).strftime("%Y-%m-%d")


def _utc(timestamp_ms: int) -> dt.datetime:
    return dt.datetime.fromtimestamp(timestamp_ms / 1000, dt.UTC)


def mark(text: str, kind: Literal["good", "bad", "doubtful", "quiet"]) -> Text:
    """A word in the colour of what it says; without colours the word alone must do."""
    return Text(text, style=_STYLES[kind])


class Column:
    """A column's heading, its side, and whether a long value is broken over lines or kept in one."""

    def __init__(self, heading: str, *, right: bool = False, wraps: bool = False) -> None:
        self.heading = heading
        self.right = right
        self.wraps = wraps


def table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str | Text]]) -> Table:
    """A table that never cuts a value off: what is too wide goes on below."""
    made = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        header_style="dim",
        box=None,
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for number, column in enumerate(columns):
        needed = max(cell_len(str(text)) for text in (column.heading, *(row[number] for row in rows)))
        made.add_column(
            column.heading,
            justify="right" if column.right else "left",
            overflow="fold",
            no_wrap=not column.wraps,
            min_width=min(needed, _WRAPPED_WIDTH_MIN) if column.wraps else needed,
        )
    for row in rows:
        made.add_row(*row)
    return made


def facts(values: Mapping[str, str | Text]) -> Table:
    """Names and values, one pair a line."""
    made = Table.grid(padding=(0, 2))
    made.add_column(style="dim", no_wrap=True)
    made.add_column(overflow="fold")
    for name, value in values.items():
        made.add_row(name, value)
    return made


def error_text(error: KvlogError) -> RenderableType:
    """What went wrong, what is known of it, and what to do."""
    shown = facts({name: str(value) for name, value in error.fields.items()})
    title = Text(f"kvlog: {type(error).__name__}", style="bold red")
    made = Table.grid()
    made.add_row(title)
    made.add_row(shown)
    made.add_row(Text(error.hint))
    return made


def show(out: Console, parts: Sequence[RenderableType]) -> None:
    """Print for a person; what needs more room than the terminal has is left for the terminal to break."""
    for part in parts:
        needed = Measurement.get(out, out.options.update(max_width=_WIDTH_MAX), part).minimum
        width = out.width
        out.width = max(width, needed)
        out.print(part)
        out.width = width


class Advance:
    """Moves a progress bar; cheap enough to be called for every record."""

    def __init__(self, bar: Progress, total: int, text: str) -> None:
        self._bar = bar
        self._task = bar.add_task(text, total=total)

    def __call__(self, done: int) -> None:
        """Say how much is done so far, in the unit of the total."""
        self._bar.update(self._task, completed=done)

    def begin(self, text: str, total: int) -> None:
        """Start over with another piece of work."""
        self._bar.reset(self._task, total=total, description=text)


@contextmanager
def progress(text: str, total: int) -> Iterator[Advance]:
    """A bar on standard error while something takes long; nothing where that is not a terminal."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console(stderr=True), transient=True, disable=not sys.stderr.isatty()
    ) as bar:
        yield Advance(bar, total, text)
