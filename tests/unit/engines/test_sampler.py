"""The sampler's rules one by one."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kvlog.engines.sampler import Sampler
from kvlog.errors import LocalProtocolError


def _logits(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_pick_at_temperature_zero_is_the_largest_logit() -> None:
    """Greedy takes the most likely token, whatever the seed and the draw."""
    assert {2} == {Sampler(seed=seed).pick(_logits(0, 1, 5, 2), seed) for seed in range(9)}


def test_pick_at_temperature_zero_with_ties_takes_the_lowest_id() -> None:
    """Two nodes must break ties alike, so the lowest id wins."""
    assert Sampler().pick(_logits(1, 7, 7, 7), 0) == 1


def _philox4x64_10(counter: list[int], key: list[int]) -> list[int]:
    """The generator as its paper has it, written anew."""
    mask = (1 << 64) - 1
    for _ in range(10):
        low, high = 0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]
        counter = [
            (high >> 64) ^ counter[1] ^ key[0],
            high & mask,
            (low >> 64) ^ counter[3] ^ key[1],
            low & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_pick_with_known_seed_draws_as_the_paper_says() -> None:
    """A session may be resumed by a later release or numpy, so the draws of a seed never change."""
    assert _philox4x64_10([0] * 4, [0] * 2)[0] == 0x16554D9ECA36314C
    seed, tokens = 2024, 1 << 10
    sampler = Sampler(temperature=1.0, seed=seed)
    flat = np.zeros(tokens, dtype=np.float32)
    expected = [_philox4x64_10([1, 0, 0, 0], [seed, draw])[0] >> 54 for draw in range(50)]
    assert expected == [sampler.pick(flat, draw) for draw in range(50)]


def test_pick_draws_in_any_order_are_equal() -> None:
    """A draw depends on its number, not on the draws before it."""
    logits = np.random.default_rng(1).normal(size=300).astype(np.float32)
    sampler = Sampler(temperature=0.9, top_k=40, top_p=0.95, seed=5)
    forward = [sampler.pick(logits, draw) for draw in range(40)]
    backward = [
        Sampler(temperature=0.9, top_k=40, top_p=0.95, seed=5).pick(logits, draw)
        for draw in range(39, -1, -1)
    ]
    assert forward == backward[::-1]
    assert len(set(forward)) > 5


def test_pick_with_another_seed_draws_other_tokens() -> None:
    """The seed matters, from its lowest bit to its highest."""
    logits = np.zeros(1000, dtype=np.float32)
    drawn = {
        tuple(Sampler(temperature=1, seed=seed).pick(logits, k) for k in range(6))
        for seed in (0, 1, 1 << 40, (1 << 63) - 1)
    }
    assert len(drawn) == 4


def test_pick_with_top_k_one_is_greedy() -> None:
    """One candidate leaves nothing to draw."""
    assert {2} == {
        Sampler(temperature=5, top_k=1, seed=9).pick(_logits(0, 1, 5, 5), draw) for draw in range(20)
    }


def test_pick_with_top_k_and_ties_keeps_the_lowest_ids() -> None:
    """top_k keeps exactly k tokens; of equal ones those with the lowest ids."""
    sampler = Sampler(temperature=1, top_k=3, seed=3)
    assert {0, 1, 4} == {sampler.pick(_logits(1, 1, 1, 1, 2), draw) for draw in range(200)}


def test_pick_with_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    """Shares 0.5, 0.3, 0.2: 0.7 needs the first two."""
    logits = np.log(np.array([0.2, 0.5, 0.3])).astype(np.float32)
    sampler = Sampler(temperature=1, top_p=0.7, seed=3)
    assert {1, 2} == {sampler.pick(logits, draw) for draw in range(200)}


def test_pick_with_top_k_and_top_p_takes_the_share_of_what_top_k_left() -> None:
    """Shares 0.4, 0.3, 0.3 cut to two are 4/7 and 3/7, so 0.5 of them needs only the first."""
    logits = np.log(np.array([0.4, 0.3, 0.3])).astype(np.float32)
    assert {0} == {
        Sampler(temperature=1, top_k=2, top_p=0.5, seed=3).pick(logits, draw) for draw in range(100)
    }


def test_pick_with_top_p_over_a_flat_vocabulary_looks_past_the_first_candidates() -> None:
    """A nucleus wider than the first candidates is still exactly the shortest prefix."""
    sampler = Sampler(temperature=1, top_p=0.5, seed=3)
    drawn = {sampler.pick(np.zeros(1000, dtype=np.float32), draw) for draw in range(1000)}
    assert max(drawn) < 500
    assert len(drawn) > 400


def test_pick_with_forbidden_tokens_never_draws_them() -> None:
    """-inf is weight 0, also at the edges of the vocabulary."""
    logits = _logits(-math.inf, 0, -math.inf, 0, -math.inf)
    assert {1, 3} == {Sampler(temperature=1, seed=1).pick(logits, draw) for draw in range(100)}


@pytest.mark.parametrize("temperature", [5e-324, 1e-12])
def test_pick_with_a_tiny_temperature_is_greedy(temperature: float) -> None:
    """Dividing by almost nothing must not overflow into NaN."""
    assert Sampler(temperature=temperature, seed=1).pick(_logits(3, 8, 7.5), 0) == 1


def test_pick_with_huge_logits_stays_finite() -> None:
    """The softmax is relative to the largest logit."""
    assert Sampler(temperature=1, seed=1).pick(_logits(3e38, -3e38, 0), 0) == 0


def test_pick_over_many_draws_follows_the_shares() -> None:
    """Draws are distributed as the softmax says, within five standard deviations."""
    shares = np.array([0.1, 0.2, 0.7])
    sampler = Sampler(temperature=1, seed=77)
    draws = 4000
    logits = np.log(shares).astype(np.float32)
    counts = np.bincount([sampler.pick(logits, draw) for draw in range(draws)], minlength=3)
    assert np.all(np.abs(counts - draws * shares) < 5 * np.sqrt(draws * shares * (1 - shares)))


@pytest.mark.parametrize("logits", [(math.nan, 1.0), (math.inf, 1.0), (-math.inf, -math.inf)])
def test_pick_with_broken_logits_is_refused(logits: tuple[float, ...]) -> None:
    """A model that puts out NaN must end the request, not emit token 0 for ever."""
    with pytest.raises(LocalProtocolError) as caught:
        Sampler(temperature=1).pick(_logits(*logits), 0)
    assert caught.value.fields["parameter"] == "logits"


@pytest.mark.parametrize(
    ("parameter", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "hot"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 1.5),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 63),
        ("seed", "7"),
        ("seed", None),
    ],
)
def test_sampler_with_a_bad_parameter_says_what_to_send(parameter: str, value: object) -> None:
    """A value out of range is refused by name, with what to send instead."""
    with pytest.raises(LocalProtocolError) as caught:
        Sampler(**{parameter: value})  # type: ignore[arg-type]
    assert (parameter, value) == (caught.value.fields["parameter"], caught.value.fields["value"])
    assert "number" in str(caught.value.fields["send"])
