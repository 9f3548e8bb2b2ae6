"""The proofs of the transformers adapter on a real, trained model, whose answer a person can read."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from kvlog.engines.detokenize import StreamDecoder
from kvlog.engines.models import ModelSource, ensure_model
from kvlog.engines.transformers import TransformersModel
from kvlog.layout import DType, Layout
from tests.model.llama import Run, rows_of
from tests.model.row_difference import kv_difference

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
]  # the first run converts the model: 20 s to minutes

QUESTION = [("user", "Describe the sea on a stormy day, in a few sentences.")]
TOKENS = 60
CUT = 30


@functools.cache
def _model() -> TransformersModel:
    folder = ensure_model()
    if folder.source is ModelSource.RANDOM:
        pytest.skip(f"no trained model: {folder.warning}")
    return TransformersModel.load(folder.path, dtype=DType.FLOAT32, threads=1)


@functools.cache
def _uninterrupted() -> tuple[list[int], list[int], bytes]:
    """One run: its prompt, prompt and answer, rows."""
    model = _model()
    prompt = model.encode_chat(QUESTION)
    cache, tokens = model.new_cache(), list(prompt)
    Run(model, prompt).go_on(cache, tokens, until=TOKENS)
    return prompt, tokens, bytes(rows_of(model, cache))


def _resumed(rows: bytes, known: int) -> tuple[list[int], bytes]:
    model = _model()
    prompt, expected, _ = _uninterrupted()
    tokens, cache = expected[:known], model.new_cache()
    cache.load_rows(memoryview(rows)[: (known - 1) * model.identity.layout.row_bytes])
    Run(model, prompt).go_on(cache, tokens, until=TOKENS)
    return tokens, bytes(rows_of(model, cache))


def test_answer_resumed_from_rows_is_the_uninterrupted_one() -> None:
    """From the middle of a sentence: the same tokens, and the same KV bytes in all 30 layers."""
    prompt, expected, expected_rows = _uninterrupted()
    tokens, rows = _resumed(expected_rows, len(prompt) + CUT)
    found = kv_difference(expected_rows, rows, _model().identity.layout)
    assert (expected, (True,) * 30) == (tokens, found.layers_equal)
    assert Layout(30, 2, 3, 64, DType.FLOAT32) == _model().identity.layout


def test_answer_resumed_from_wrong_rows_is_another_one() -> None:
    """The control: negated V changes the answer, so equal answers prove that rows were used."""
    prompt, expected, rows = _uninterrupted()
    planes = np.frombuffer(rows, np.float32).reshape(-1, 30, 2, 3 * 64).copy()
    planes[:, :, 1] *= -1
    tokens, _ = _resumed(planes.tobytes(), len(prompt) + CUT)
    assert expected != tokens


def test_answer_is_english_that_a_person_can_read() -> None:
    """The demo's reader judges by whether the sentence goes on, so it has to be one."""
    prompt, tokens, _ = _uninterrupted()
    model = _model()
    stream = StreamDecoder(model.decode)
    text = stream.push(*tokens[len(prompt) :]) + stream.finish()
    assert model.decode(tokens[len(prompt) :]) == text
    words = text.lower().replace(",", " ").replace(".", " ").split()
    assert len({"the", "a", "of", "and", "in", "is", "to", "it", "with", "sea", "waves"} & set(words)) >= 5
    assert len(words) > 30
    assert text.isascii() or sum(not character.isascii() for character in text) < 5
