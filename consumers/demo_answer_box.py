"""Shows an answer while it comes: word by word, wrapped, with a gutter that says which node speaks.

      ╭─────────────────────────────────────────────╮
    A │ The night of the great storm was a dark and
      │ stormy
      ├── ✗ node A was killed with SIGKILL ──────────┤
    B │ night. The sky was a deep
      ╰─────────────────────────────────────────────╯

Nothing is drawn twice, so it looks the same in a terminal, in a file and in a CI's log.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, chop_cells
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["AnswerBox"]

_GUTTER = 4
_WIDTH_MAX = 100
"""Longer lines are hard to read."""

_PARTS = re.compile(r"\n|[^\S\n]+|\S+")


class AnswerBox:
    """One answer's box, open until `close`.

    Args:
        console: where; its width and colours are asked once.
        title: in the upper edge.
    """

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._ascii = console.options.ascii_only
        self._width = min(console.width, _WIDTH_MAX)
        self._speaker = ""
        self._label = ""
        self._style = ""
        self._held = ""
        self._column: int | None = None
        self._space = False
        self._edge(("╭", "╮"), title, "dim")

    def speak(self, speaker: str, style: str) -> None:
        """From here on this node speaks."""
        if speaker != self._speaker:
            self._speaker, self._style = speaker, style
            self._label = speaker

    def push(self, text: str) -> None:
        """Show text; a word that may go on is held back until it is known to be whole."""
        self._held += _printable(text)
        parts = _PARTS.findall(self._held)
        self._held = parts.pop() if parts and not parts[-1].isspace() else ""
        for part in parts:
            self._show(part)

    def cut(self, text: str, style: str) -> None:
        """A line across the box; the speaker's last word stays as far as it had come."""
        self._flush()
        self._edge(("├", "┤"), text, style)

    def close(self) -> None:
        """Show what was held back, and the lower edge."""
        self._flush()
        self._edge(("╰", "╯"), "", "dim")

    def _flush(self) -> None:
        if self._held:
            self._show(self._held)
            self._held = ""
        if self._column is not None:
            self._print("\n", "")
        self._column, self._space = None, False

    def _show(self, part: str) -> None:
        if part == "\n":
            if self._column is not None:
                self._print("\n", "")
                self._column = None
            self._space = False
        elif part.isspace():
            self._space = self._column is not None
        else:
            room = self._width - _GUTTER
            for piece in chop_cells(part, room):
                self._word(piece, room)

    def _word(self, word: str, room: int) -> None:
        size = cell_len(word)
        gap = 1 if self._space and self._column else 0
        if self._column is not None and self._column + gap + size > room:
            self._print("\n", "")
            self._column = None
        if self._column is None:
            self._begin_line()
            gap = 0
        self._print(" " * gap + word, self._style)
        self._column = (self._column or 0) + gap + size
        self._space = False

    def _begin_line(self) -> None:
        label, self._label = self._label, ""
        self._print(f"{label:<2}", f"bold {self._style}".strip())
        self._print(f"{'|' if self._ascii else '│'} ", "dim")
        self._column = 0

    def _edge(self, corners: tuple[str, str], text: str, style: str) -> None:
        left, right = ("+", "+") if self._ascii else corners
        line = "-" if self._ascii else "─"
        said = f"{line}{line} {text} " if text else ""
        filling = line * max(0, self._width - _GUTTER - cell_len(said))
        self._print("  ", "")
        self._print(left, "dim")
        self._print(said, style)
        self._print(filling + right, "dim")
        self._print("\n", "")
        self._label = self._speaker

    def _print(self, text: str, style: str) -> None:
        encoding = self._console.encoding
        known = text.encode(encoding, "replace").decode(encoding)
        self._console.print(Text(known, style=style), end="", soft_wrap=True)


def _printable(text: str) -> str:
    """A model may say anything; what would move the cursor or turn the terminal's colours does not get there."""
    return "".join(c if c.isprintable() or c == "\n" else " " if c.isspace() else "·" for c in text)
