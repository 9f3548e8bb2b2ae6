"""Text of a token stream, piece by piece: a token may end in the middle of a character.

Byte-level vocabularies cut characters anywhere, and a tokenizer shows a cut one as U+FFFD: one for all its bytes, or
one for each, and there are at most three. So at most three U+FFFD at the end of the text are held back until what
follows decides them; all before is final. Decoding everything again at each token would be quadratic; only the tokens
since a recent border are decoded, with some before it as context, because some tokenizers show a token differently at
the beginning of a text.
Source: the two-offset method of text-generation-inference and vLLM (detokenizer_utils.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["StreamDecoder"]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"

_UNFINISHED_BYTES_MAX = 3
"""Of a character that has four."""

_CONTEXT_TOKENS = 6
"""Kept before the border; the longest character has 4 bytes, so at most 4 tokens belong together."""

_WINDOW_TOKENS_MAX = 64
"""A stream of bytes that never ends a character is let go after so many tokens, at the cost of one odd character."""


class StreamDecoder:
    """Turns tokens into text such that all pieces together are the decoded whole.

    Args:
        decode: the text of token ids, as StepModel.decode.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []
        self._shown = 0

    def push(self, *tokens: int) -> str:
        """Take the next tokens and return the text that they complete; it may be empty.

        A resumed request first pushes the tokens that its user has seen and drops the text: what follows is the rest.
        """
        return "".join(self._push(token) for token in tokens)

    def finish(self) -> str:
        """Return what is still held back: the character that the stream has left unfinished."""
        text = self._decode(self._window)
        rest, self._shown = text[self._shown :], len(text)
        return rest

    def _push(self, token: int) -> str:
        self._window.append(token)
        text = self._decode(self._window)
        held = min(len(text) - len(text.rstrip(_UNFINISHED)), _UNFINISHED_BYTES_MAX)
        is_final = not held or len(self._window) >= _WINDOW_TOKENS_MAX
        end = len(text) if is_final else len(text) - held
        piece = text[self._shown : end]
        self._shown = max(self._shown, end)
        if is_final and len(self._window) > _CONTEXT_TOKENS:
            self._window = self._window[-_CONTEXT_TOKENS:]
            self._shown = len(self._decode(self._window))
        return piece
