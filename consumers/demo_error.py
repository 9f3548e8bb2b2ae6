"""Why the demo cannot go on, as one sentence for the person who started it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from consumers.exits import ExitCode, exit_code_of
from kvlog.errors import Retryable

if TYPE_CHECKING:
    from kvlog.errors import KvlogError

__all__ = ["DemoError"]


_UNREACHABLE = "Check that it is running, and that this is its address"


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

    @classmethod
    def of(cls, error: KvlogError, sentence: str) -> Self:
        """From an error of kvlog: its problem and its fix, as sentences. `sentence` ends where the problem follows."""
        problem = str(error.fields.get("problem", error)).rstrip(".")
        fix = str(error.fields.get("fix", _UNREACHABLE if isinstance(error, Retryable) else error.hint))
        fix = fix.rstrip(".")
        return cls(f"{sentence} {problem}.", fix=f"{fix[:1].upper()}{fix[1:]}.", code=exit_code_of(error))

    def __str__(self) -> str:
        return f"{self.sentence} {self.fix}".strip()
