"""Text of an answer as its tokens come: whole characters only, and nothing that may be the beginning of a stop string.

Both parts are functions of the tokens so far, not of when they came. So after a take-over the new engine pushes the
tokens that the user has, drops their text, and goes on exactly where the user's text ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.engines.detokenize import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["AnswerText", "StopScanner"]


class StopScanner:
    """Lets text through up to the first stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Take text. Returns: what may be shown; nothing from the first stop string on."""
        if self.stopped:
            return ""
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return held[: min(found)]
        keep = self._beginning(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def finish(self) -> str:
        """The answer is over. Returns: what was held back."""
        text, self._held = self._held, ""
        return "" if self.stopped else text

    def _beginning(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for size in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-size:]) for stop in self._stops):
                return size
        return 0


class AnswerText:
    """Both together."""

    def __init__(self, decode: Callable[[Sequence[int]], str], stops: Sequence[str]) -> None:
        self._tokens = StreamDecoder(decode)
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """A stop string has come."""
        return self._scanner.stopped

    def push(self, token: int) -> str:
        """Take a token. Returns: text to show."""
        return self._scanner.push(self._tokens.push(token))

    def finish(self) -> str:
        """The answer is over. Returns: the rest of the text."""
        return self._scanner.push(self._tokens.finish()) + self._scanner.finish()
