"""The sampler against a slow and obvious one."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines.sampler import Sampler

_LOGITS = st.lists(
    st.one_of(st.just(float("-inf")), st.floats(-30, 30, width=32)),
    min_size=1,
    max_size=300,
).filter(lambda values: max(values) > float("-inf"))
_SAMPLERS = st.builds(
    Sampler,
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 320),
    top_p=st.floats(0.01, 1),
    seed=st.integers(0, (1 << 63) - 1),
)


def _allowed(logits: np.ndarray, sampler: Sampler) -> set[int]:
    """The tokens that may be drawn, by sorting everything; those within rounding of top_p's edge too."""
    weights = np.exp((logits.astype(np.float64) - logits.max()) / sampler.temperature)
    ids = sorted(range(len(weights)), key=lambda token: (-weights[token], token))
    if sampler.top_k:
        ids = ids[: sampler.top_k]
    before = np.concatenate([[0], np.cumsum(weights[ids])])[:-1]
    total = weights[ids].sum()
    return {
        token
        for token, sum_before in zip(ids, before, strict=True)
        if sum_before < sampler.top_p * total * (1 + 1e-12)
    }


@given(_LOGITS, _SAMPLERS, st.integers(0, 1 << 40))
def test_pick_of_any_logits_is_allowed_and_repeatable(
    values: list[float], sampler: Sampler, draw: int
) -> None:
    """Every draw is a token that top_k and top_p leave, of weight above 0, and the same one each time."""
    logits = np.array(values, dtype=np.float32)
    token = sampler.pick(logits, draw)
    assert token in _allowed(logits, sampler)
    assert logits[token] > -np.inf
    assert token == sampler.pick(logits.copy(), draw)


@given(_LOGITS, st.floats(0.05, 5), st.integers(0, 1 << 62), st.integers(0, 1 << 30))
def test_pick_with_limits_that_limit_nothing_is_the_plain_draw_of_a_sorted_copy(
    values: list[float], temperature: float, seed: int, draw: int
) -> None:
    """top_k of the whole vocabulary is no limit."""
    logits = np.array(values, dtype=np.float32)
    plain = Sampler(temperature=temperature, seed=seed)
    limited = Sampler(temperature=temperature, seed=seed, top_k=len(values))
    assert plain.pick(logits, draw) == limited.pick(logits, draw)
