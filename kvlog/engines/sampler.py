"""The next token from logits: greedy, or drawn by a counter, so that a resumed request needs no hidden state.

The k-th draw of a request is a function of (seed, k, logits, options) and of nothing else: there is no
generator whose state would have to travel with the session. A node that takes over needs the seed and the
number of tokens drawn.

Strategy: softmax in float64 relative to the largest logit; top_k first, then top_p over what top_k left, as
vLLM does; then the inverse of the cumulative weights at one uniform number. The weights are never sorted as a
whole: 49,152 float64 take 6 ms to sort and 0.7 ms to partition. Equal logits on two nodes give equal tokens;
logits that differ by rounding do so unless the draw falls between two sums that are about 1e-7 apart.
Source: Philox4x64-10 of J. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011, as numpy
has it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from kvlog.errors import LocalProtocolError

if TYPE_CHECKING:
    import numpy.typing as npt

    Weights = npt.NDArray[np.float64]
    TokenIds = npt.NDArray[np.intp]

__all__ = ["SEED_END", "Sampler"]

SEED_END = 1 << 63
"""Seeds are below this: the positive range of the 64-bit integers that HTTP clients send."""

_FIRST_CANDIDATES = 64
"""Tokens looked at first for top_p; eight times more at each next try, so 262,144 at the fifth."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """How a request chooses its tokens.

    Args:
        temperature: divides the logits; finite, ≥ 0. 0 is greedy, and then the rest is not looked at.
        top_k: only the k most likely tokens; 0 is no limit.
        top_p: only the most likely tokens that together have at least this share; 0 < top_p ≤ 1.
        seed: 0 ≤ seed < 2**63.

    Raises:
        LocalProtocolError: a value out of range (fields: parameter, value, send); send what `send` says.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values that would make the draw meaningless."""
        if not (_is_number(self.temperature) and 0 <= self.temperature < math.inf):
            _refuse("temperature", self.temperature, "a finite number, 0 or more; 0 is greedy")
        if not (_is_whole(self.top_k) and self.top_k >= 0):
            _refuse("top_k", self.top_k, "a whole number, 0 or more; 0 is no limit")
        if not (_is_number(self.top_p) and 0 < self.top_p <= 1):
            _refuse("top_p", self.top_p, "a number above 0 and at most 1; 1 is no limit")
        if not (_is_whole(self.seed) and 0 <= self.seed < SEED_END):
            _refuse("seed", self.seed, "a whole number, 0 to 2**63 - 1")

    def pick(self, logits: npt.NDArray[np.float32], draw: int) -> int:
        """Choose one token; ties go to the lowest id.

        Args:
            logits: [vocabulary], read only; -inf forbids a token.
            draw: number of tokens that this request has drawn before, from 0.

        Raises:
            LocalProtocolError: the logits hold NaN or +inf, or forbid every token: the model is broken.
        """
        assert logits.ndim == 1, "logits of one position"
        top = float(logits.max())
        if not math.isfinite(top):
            raise LocalProtocolError(
                parameter="logits", value=top, send="finite logits, -inf for forbidden tokens"
            )
        if self.temperature == 0:
            return int(logits.argmax())
        with np.errstate(
            over="ignore", under="ignore"
        ):  # a tiny temperature: all but the best go to weight 0
            weights = np.exp((logits.astype(np.float64) - top) / self.temperature)
        return self._pick_by_weight(weights, _uniform(seed=self.seed, draw=draw))

    def _pick_by_weight(self, weights: Weights, uniform: float) -> int:
        limited = 0 < self.top_k < len(weights)
        if self.top_p < 1:
            ids = _nucleus(weights, self.top_k if limited else len(weights), self.top_p)
        elif limited:
            ids = _heaviest(weights, self.top_k)
        else:
            return _invert(weights, uniform)
        return int(ids[_invert(weights[ids], uniform)])


def _refuse(parameter: str, value: object, send: str) -> None:
    raise LocalProtocolError(parameter=parameter, value=value, send=send)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _uniform(*, seed: int, draw: int) -> float:
    """The draw-th uniform number of a seed, in [0, 1), 53 bits.

    It is Philox under the key (seed, draw) at the counter (1, 0, 0, 0), numpy's first, word 0.
    """
    assert draw >= 0, "draws are counted from 0"
    raw = np.random.Philox(key=np.array([seed, draw], dtype=np.uint64)).random_raw()
    return (int(raw) >> 11) * 2.0**-53


def _heaviest(weights: Weights, count: int) -> TokenIds:
    """Ids of the `count` largest weights, largest first, ties by id."""
    threshold = np.partition(weights, len(weights) - count)[len(weights) - count]
    above = np.flatnonzero(weights > threshold)
    ties = np.flatnonzero(weights == threshold)[: count - len(above)]
    ids = np.concatenate([above, ties])
    return ids[np.lexsort((ids, -weights[ids]))]


def _nucleus(weights: Weights, most: int, share: float) -> TokenIds:
    """The shortest prefix of the `most` heaviest tokens whose weight reaches `share` of theirs."""
    within = weights if most == len(weights) else weights[_heaviest(weights, most)]
    wanted = float(within.sum()) * share
    count = min(_FIRST_CANDIDATES, most)
    while True:
        ids = _heaviest(weights, count)
        reached = int(np.searchsorted(np.cumsum(weights[ids]), wanted))
        if reached < count or count == most:
            return ids[: reached + 1]
        count = min(8 * count, most)


def _invert(weights: Weights, uniform: float) -> int:
    """The index at which the running sum passes `uniform` of the total; never one of weight 0."""
    sums = np.cumsum(weights)
    last = int(np.searchsorted(sums, sums[-1]))  # uniform * total may round up to the total
    return min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), last)
