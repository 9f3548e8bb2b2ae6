"""One request's progress, without threads: pieces to compute, draws, ends, resumes."""

from __future__ import annotations

import pytest

from kvlog.engines.generation import (
    PREFILL_TOKENS_MAX,
    SINGLE_STEPS_MAX,
    FinishReason,
    Generation,
    GenerationRequest,
    NewToken,
)
from kvlog.engines.sampler import Sampler
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions

MODEL = SyntheticModel(SyntheticOptions(row_bytes=64, positions_max=10_000))


class StoppingModel(SyntheticModel):
    """Token 7 ends its answers."""

    @property
    def stop_tokens(self) -> frozenset[int]:
        return frozenset({7})


def request(*, prompt: int = 3, resume=(), max_tokens: int = 100, stops=(), **sampling) -> GenerationRequest:
    """A request with tokens 0, 1, 2 … as its prompt."""
    return GenerationRequest(tuple(range(prompt)), tuple(resume), max_tokens, Sampler(**sampling), stops)


def run(generation: Generation, model=MODEL) -> list[NewToken]:
    """Compute to the end."""
    cache, out = model.new_cache(), []
    while generation.finished is None:
        logits = model.forward(cache, generation.next_piece(cache.length))
        if cache.length == len(generation.tokens):
            out.append(generation.draw(logits))
    return out


def pieces(generation: Generation, computed: int) -> list[int]:
    """Sizes of the pieces up to the last known token."""
    sizes = []
    while computed < len(generation.tokens):
        sizes.append(len(generation.next_piece(computed)))
        computed += sizes[-1]
    return sizes


@pytest.mark.parametrize("computed", [0, 1, 100, PREFILL_TOKENS_MAX])
def test_generation_prompt_is_cut_at_fixed_positions(computed):
    """What was attached does not move the borders of the pieces."""
    sizes = pieces(Generation(request(prompt=5000), MODEL), computed)
    assert 5000 - computed == sum(sizes)
    ends = [computed + sum(sizes[: k + 1]) for k in range(len(sizes))]
    borders = [PREFILL_TOKENS_MAX, 2 * PREFILL_TOKENS_MAX, 5000]
    assert [end for end in borders if end > computed] == ends


def test_generation_few_missing_answer_tokens_are_computed_singly():
    """As they were drawn, so that the rounding is the same; the prompt before them in one piece."""
    assert [3, 1, 1, 1, 1] == pieces(Generation(request(resume=[300] * 4), MODEL), 0)
    assert [1, 1] == pieces(Generation(request(resume=[300] * 4), MODEL), 5)


def test_generation_many_missing_answer_tokens_are_prefilled():
    """A long gap is not walked token by token."""
    many = SINGLE_STEPS_MAX + 1
    assert [3, many] == pieces(Generation(request(resume=[300] * many), MODEL), 0)


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.8, "top_k": 40, "seed": 1}]
)
@pytest.mark.parametrize("cut", [1, 17, 39])
def test_generation_resumed_gives_the_rest_of_the_same_answer(sampling, cut):
    """Answer tokens so far count as draws: the seed and their number are the sampler's whole state."""
    whole = run(Generation(request(max_tokens=40, **sampling), MODEL))
    tokens = [new.token for new in whole]
    rest = run(Generation(request(max_tokens=40, resume=tokens[:cut], **sampling), MODEL))
    assert whole[cut:] == rest


def test_generation_limit_counts_resumed_tokens():
    """max_tokens is of the answer, wherever its parts were computed."""
    out = run(Generation(request(max_tokens=5, resume=[300, 301, 302]), MODEL))
    assert [None, FinishReason.LENGTH] == [new.finish for new in out]


@pytest.mark.parametrize("resume", [[300, 301], [300, 301, 302, 303]])
def test_generation_resumed_at_its_end_is_finished(resume):
    """A node that died between the last token and its end left nothing to compute."""
    generation = Generation(request(max_tokens=2, resume=resume), MODEL)
    assert FinishReason.LENGTH is generation.finished
    assert generation.answer_tokens == 2


def test_generation_positions_of_the_model_bound_the_answer():
    """A sequence never outgrows the model."""
    small = SyntheticModel(SyntheticOptions(row_bytes=64, positions_max=8))
    assert len(run(Generation(request(prompt=5), small), small)) == 3


def test_generation_stop_token_ends_it_without_text():
    """What means the end is not shown."""
    model = StoppingModel(SyntheticOptions(row_bytes=64))
    generation = Generation(request(resume=[300, 7, 301]), model)
    assert FinishReason.STOP is generation.finished
    assert [0, 1, 2, 300, 7] == generation.tokens


def test_generation_stop_string_over_the_border_of_a_resume_is_found():
    """One half was drawn elsewhere, the other here."""
    answer = run(Generation(request(max_tokens=10), MODEL))
    text = "".join(new.text for new in answer)
    stop = text[len(answer[0].text) - 2 : len(answer[0].text) + 2]
    out = run(Generation(request(max_tokens=10, resume=[answer[0].token], stops=(stop,)), MODEL))
    assert FinishReason.STOP is out[-1].finish
    assert "".join(new.text for new in out) == ""
