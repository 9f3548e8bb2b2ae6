"""What the demo came to: the table of figures, the claims, the verdict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from consumers.render import mark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from consumers.demo_proofs import Claimed, Evidence

__all__ = ["DemoReport"]

_NAME_WIDTH = 36
"""Of the figures' names: with figures and remarks a line has less than 80 characters."""


class DemoReport:
    """Shows what was measured.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ascii = console.options.ascii_only

    def figures(self, evidence: Evidence) -> None:
        """The table of what was measured."""
        killed = evidence.killed
        times, known = killed.times, killed.prompt_tokens + len(killed.shown)
        grid = Table.grid(padding=(0, 2))
        grid.add_column(min_width=_NAME_WIDTH)
        grid.add_column(justify="right", no_wrap=True)
        grid.add_column(style="dim")
        rows: list[tuple[str, str, str]] = [
            (
                "tokens shown before the kill",
                f"{len(killed.shown)}",
                f"after a prompt of {killed.prompt_tokens:,}",
            ),
            ("tokens whose KV the log had", f"{killed.story.length:,}", f"of {known:,} with the prompt"),
            (
                "tokens that node B computed itself",
                f"{killed.kvlog['recomputed']:,}",
                "of those that were known",
            ),
            ("", "", ""),
            ("kill to next token", f"{times.total_ms:,.0f} ms", ""),
            ("  detect", f"{times.detect_ms:,.1f} ms", "the stream from A breaks"),
            ("  claim", f"{times.claim_ms:,.1f} ms", "until the log has it"),
            ("  catch up", f"{times.catch_up_ms:,.1f} ms", "until it is read back"),
            ("  attach", f"{times.attach_ms:,.1f} ms", f"{killed.kvlog['attached']:,} rows, verified"),
            ("  first token", f"{times.first_token_ms:,.1f} ms", "missing rows, one step"),
            ("the same by prefill on node B", f"{evidence.reprefill_ms:,.0f} ms", "nothing to attach"),
            ("ratio", f"{evidence.ratio:.1f} {self._sign('×', 'x')}", ""),
        ]
        for name, value, remark in rows:
            grid.add_row(Text(name), Text(value, style="bold"), Text(remark))
        self._line()
        self._console.print(Text("measured in this run", style="bold underline"))
        self._line()
        self._console.print(grid)

    def claims(self, claims: Sequence[Claimed]) -> None:
        """Each claim, whether it held, and by what."""
        self._line()
        self._console.print(Text("claimed", style="bold underline"))
        self._line()
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column()
        for claim in claims:
            grid.add_row(self._mark(claim), Text(claim.text))
            grid.add_row("", Text(claim.detail, style="dim"))
        self._console.print(grid)

    def verdict(self, *, held: bool, look: str) -> None:
        """The last word. `look`: the command that shows the session in the log; empty: the log is gone."""
        self._line()
        sign = self._sign("✔", "+") if held else self._sign("✗", "x")
        text = "Every claim held." if held else "A claim did not hold: see above."
        self._line(f"{sign} {text}", "bold green" if held else "bold red")
        if look:
            self._line("The log is still there:", "dim")
            self._console.print(Text(look), soft_wrap=True)
        self._line()

    def _mark(self, claim: Claimed) -> Text:
        if claim.held:
            return mark(f"{self._sign('✔', '+')} yes", "good")
        if not claim.counts:
            return mark("- no (reported only)", "doubtful")
        return mark(f"{self._sign('✗', 'x')} NO", "bad")

    def _line(self, text: str = "", style: str = "") -> None:
        self._console.print(Text(text, style=style))

    def _sign(self, sign: str, plain: str) -> str:
        return plain if self._ascii else sign
