"""One request as the step loop sees it: what to compute next, the next token, and when it is over. No threads, no I/O.

Tokens of an answer that a user has already (`resume`) are output: they count for the limit, for stop strings and for
the number of draws; their text is not sent again.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.engines.answer_text import AnswerText

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from kvlog.engines.base import StepModel
    from kvlog.engines.sampler import Sampler

__all__ = ["FinishReason", "Generation", "GenerationRequest", "NewToken"]

PREFILL_TOKENS_MAX = 2048
"""Tokens computed in one step; a longer prompt shares the loop with others. Cut at multiples of it from position 0, so
that the same prompt is always computed in the same pieces."""

SINGLE_STEPS_MAX = 16
"""So many missing tokens of an answer are computed one by one, as the engine that drew them did: the same shapes, so
the same rounding. More of them are prefilled, which is faster and may differ by rounding."""


class FinishReason(StrEnum):
    """OpenAI's words for why an answer is over."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What is to be computed.

    Args:
        prompt: token ids, at least one.
        resume: token ids of the answer so far.
        max_tokens: of the answer, `resume` included, ≥ 1.
        sampler: chooses tokens; the k-th of the answer is draw k.
        stops: strings that end the answer.
    """

    prompt: tuple[int, ...]
    resume: tuple[int, ...]
    max_tokens: int
    sampler: Sampler
    stops: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class NewToken:
    """One more token of the answer; `text` is what became whole by it, `finish` ends the answer."""

    token: int
    text: str
    finish: FinishReason | None


class Generation:
    """The progress of one request. `tokens`: prompt and answer so far, growing; others may read it."""

    def __init__(self, request: GenerationRequest, model: StepModel) -> None:
        self.request = request
        self.tokens: list[int] = [*request.prompt]
        self._stop_tokens = model.stop_tokens
        self._text = AnswerText(model.decode, request.stops)
        self._limit = min(request.max_tokens, model.positions_max - len(request.prompt))
        self.finished: FinishReason | None = None
        for token in request.resume:
            if self.finished is None:
                self._take(token)

    @property
    def answer_tokens(self) -> int:
        """Tokens of the answer, those of `resume` included."""
        return len(self.tokens) - len(self.request.prompt)

    def next_piece(self, computed: int) -> list[int]:
        """Token ids to compute in the next step.

        Args:
            computed: rows that the cache has.
        """
        prompt = len(self.request.prompt)
        if computed < prompt:
            end = min(prompt, (computed // PREFILL_TOKENS_MAX + 1) * PREFILL_TOKENS_MAX)
        elif len(self.tokens) - computed <= SINGLE_STEPS_MAX:
            end = computed + 1
        else:
            end = min(len(self.tokens), computed + PREFILL_TOKENS_MAX)
        return self.tokens[computed:end]

    def draw(self, logits: npt.NDArray[np.float32]) -> NewToken:
        """Choose the next token after the last one of `tokens`."""
        token = self.request.sampler.pick(logits, self.answer_tokens)
        text = self._take(token)
        return NewToken(token, text, self.finished)

    def _take(self, token: int) -> str:
        """Append a token of the answer. Returns: its text."""
        self.tokens.append(token)
        if token in self._stop_tokens:
            self.finished = FinishReason.STOP
            return self._text.finish()
        text = self._text.push(token)
        if self._text.stopped:
            self.finished = FinishReason.STOP
        elif self.answer_tokens >= self._limit:
            self.finished = FinishReason.LENGTH
            text += self._text.finish()
        return text
