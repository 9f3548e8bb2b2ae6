"""What a verb gives back: its verdict, the figures for a script, and how they look to a person."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rich.console import RenderableType

    from consumers.exits import ExitCode

__all__ = ["Answer"]


@dataclass(frozen=True, slots=True)
class Answer:
    """A verb's result.

    Args:
        code: the verdict.
        figures: JSON values; what `--json` prints as one object.
        shown: the same for a person.
    """

    code: ExitCode
    figures: Mapping[str, object]
    shown: tuple[RenderableType, ...]
