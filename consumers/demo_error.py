"""Why the demo cannot go on, as one sentence for the person who started it."""

from __future__ import annotations

from consumers.exits import ExitCode

__all__ = ["DemoError"]


class DemoError(Exception):
    """The demo cannot be shown to its end.

    Args:
        sentence: what happened.
        fix: what to do about it; empty: nothing that we know of.
        code: the exit code of the command.
    """

    def __init__(self, sentence: str, *, fix: str = "", code: ExitCode = ExitCode.BROKEN) -> None:
        super().__init__(sentence)
        self.sentence = sentence
        self.fix = fix
        self.code = code

    def __str__(self) -> str:
        return f"{self.sentence} {self.fix}".strip()
