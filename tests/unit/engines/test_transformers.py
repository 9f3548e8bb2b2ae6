"""The transformers adapter on a random Llama: what is resumed from rows is what was never interrupted."""

from __future__ import annotations

import functools
import json
import shutil
import threading
from typing import TYPE_CHECKING

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, MistralConfig, T5Config
from transformers.cache_utils import DynamicCache

from kvlog.engines.sampler import Sampler
from kvlog.engines.transformers import TransformersModel
from kvlog.errors import ConfigError, LocalProtocolError
from kvlog.layout import DType
from tests.model.llama import Run, random_folder, random_model, rows_of
from tests.model.row_difference import kv_difference

if TYPE_CHECKING:
    from pathlib import Path

PROMPT = list(b"The tide went out, and what the sea had kept was ")
TOKENS = 120
SEEDED = Sampler(temperature=0.8, top_k=60, top_p=0.95, seed=99)


@functools.cache
def _uninterrupted(dtype: DType, sampler: Sampler) -> tuple[list[int], list[np.ndarray], bytes]:
    """One run of TOKENS tokens: its tokens, logits and rows."""
    model = random_model(dtype)
    cache, tokens = model.new_cache(), list(PROMPT)
    steps = Run(model, PROMPT, sampler).go_on(cache, tokens, until=TOKENS)
    return tokens, steps, bytes(rows_of(model, cache))


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
@pytest.mark.parametrize("cut", [1, 50, 100])
@pytest.mark.parametrize("sampler", [Sampler(), SEEDED])
def test_forward_after_load_rows_is_bit_equal_to_the_uninterrupted_run(
    dtype: DType, cut: int, sampler: Sampler
) -> None:
    """Rows, tokens and sampler are all that a take-over needs: the same tokens, logits and KV bytes follow."""
    model = random_model(dtype)
    expected_tokens, expected_steps, expected_rows = _uninterrupted(dtype, sampler)
    known = len(PROMPT) + cut
    tokens, cache = expected_tokens[:known], model.new_cache()
    cache.load_rows(memoryview(expected_rows)[: (known - 1) * model.identity.layout.row_bytes])
    steps = Run(model, PROMPT, sampler).go_on(cache, tokens, until=TOKENS)
    assert expected_tokens == tokens
    assert all(np.array_equal(one, other) for one, other in zip(expected_steps[cut:], steps, strict=True))
    assert kv_difference(expected_rows, bytes(rows_of(model, cache)), model.identity.layout).equal
    assert len(set(tokens[len(PROMPT) :])) > 30, "a run that repeats itself proves little"


def test_forward_after_load_of_negated_values_differs() -> None:
    """The control: with wrong V the answer is another one, so equal answers do prove that rows were used."""
    model = random_model()
    expected, _, rows = _uninterrupted(DType.FLOAT32, Sampler())
    planes = np.frombuffer(rows, np.float32).reshape(-1, 3, 2, 64).copy()
    planes[:, :, 1] *= -1
    known = len(PROMPT) + 50
    tokens, cache = expected[:known], model.new_cache()
    cache.load_rows(memoryview(planes.tobytes())[: (known - 1) * model.identity.layout.row_bytes])
    Run(model, PROMPT).go_on(cache, tokens, until=TOKENS)
    assert expected != tokens


def test_forward_of_interleaved_sessions_equals_each_alone() -> None:
    """Several caches in one process know nothing of each other."""
    model = random_model()
    prompts = [list(b"first session "), list(b"a second one, longer than the first"), list(b"3")]
    alone = []
    for prompt in prompts:
        cache, tokens = model.new_cache(), list(prompt)
        Run(model, prompt).go_on(cache, tokens, until=40)
        alone.append((tokens, bytes(rows_of(model, cache))))
    caches, growing = [model.new_cache() for _ in prompts], [list(prompt) for prompt in prompts]
    for step in range(1, 41):
        for prompt, cache, tokens in zip(prompts, caches, growing, strict=True):
            Run(model, prompt).go_on(cache, tokens, until=step)
    together = [(tokens, bytes(rows_of(model, cache))) for cache, tokens in zip(caches, growing, strict=True)]
    assert alone == together


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_forward_is_bit_equal_over_transformers_own_cache(dtype: DType) -> None:
    """Our cache changes no number: logits and KV are those over DynamicCache, also after the store has grown."""
    model = random_model(dtype)
    theirs, ours = DynamicCache(config=model._model.config), model.new_cache()
    for tokens in (PROMPT * 5, *([token] for token in PROMPT)):
        expected = model._compute(theirs, tokens)
        assert np.array_equal(expected, model.forward(ours, tokens))
    for index, layer in enumerate(theirs.layers):
        ours_keys, ours_values = ours._planes[index]
        assert layer.keys.equal(ours_keys[:, :, : ours.length])
        assert layer.values.equal(ours_values[:, :, : ours.length])


def test_forward_of_a_prompt_in_pieces_agrees_within_rounding() -> None:
    """Prefill in pieces is the same up to float32 rounding, and not promised to be the same bytes."""
    model = random_model()
    prompt = PROMPT * 6
    whole, pieces = model.new_cache(), model.new_cache()
    expected = model.forward(whole, prompt)
    for start in range(0, len(prompt), 64):
        actual = model.forward(pieces, prompt[start : start + 64])
    difference = kv_difference(
        bytes(rows_of(model, whole)), bytes(rows_of(model, pieces)), model.identity.layout
    )
    assert max(difference.difference_max) < 1e-4
    assert float(np.abs(expected - actual).max()) < 1e-4


def test_forward_in_another_thread_is_bit_equal() -> None:
    """The number of threads of PyTorch is pinned wherever the step loop runs."""
    model = random_model()
    expected = model.forward(model.new_cache(), PROMPT)
    found: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: found.append(model.forward(model.new_cache(), PROMPT)))
    thread.start()
    thread.join()
    assert np.array_equal(expected, found[0])


def test_forward_after_a_cut_computes_the_same_again() -> None:
    """A cache that was cut is the cache of the shorter sequence."""
    model = random_model()
    expected, _, rows = _uninterrupted(DType.FLOAT32, Sampler())
    cache = model.new_cache()
    cache.load_rows(memoryview(rows))
    cache.cut(len(PROMPT) + 9)
    tokens = expected[: len(PROMPT) + 10]
    Run(model, PROMPT).go_on(cache, tokens, until=TOKENS)
    assert (expected, rows) == (tokens, bytes(rows_of(model, cache)))


def test_forward_with_an_unknown_token_leaves_the_cache_as_it_was() -> None:
    """A token id that the vocabulary lacks is the client's fault and is refused by name."""
    model = random_model()
    cache = model.new_cache()
    model.forward(cache, PROMPT)
    for token in (-1, model.vocabulary):
        with pytest.raises(LocalProtocolError) as caught:
            model.forward(cache, [1, token])
        assert model.vocabulary == caught.value.fields["vocabulary"]
    assert len(PROMPT) == cache.length


def test_forward_that_fails_in_the_middle_leaves_the_cache_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that dies after some layers has not happened: no layer keeps its rows."""
    model = random_model()
    cache = model.new_cache()
    model.forward(cache, PROMPT)
    before = bytes(rows_of(model, cache))
    append = cache.append

    def failing(layer: int, *planes: object) -> object:
        if layer == 2:
            raise MemoryError
        return append(layer, *planes)  # type: ignore[arg-type]

    monkeypatch.setattr(cache, "append", failing)
    with pytest.raises(MemoryError):
        model.forward(cache, [5])
    monkeypatch.undo()
    assert [len(PROMPT)] * 3 == [cache.filled(layer) for layer in range(3)]
    model.forward(cache, [5])
    assert before == bytes(rows_of(model, cache, 0, len(PROMPT)))


def test_forward_past_the_last_position_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sequence longer than the model takes is refused, and the cache stays usable."""
    model = random_model()
    monkeypatch.setattr(model._config, "max_position_embeddings", 300)
    cache = model.new_cache()
    model.forward(cache, [1] * 299)
    with pytest.raises(LocalProtocolError) as caught:
        model.forward(cache, [1, 2])
    assert (301, 300) == (caught.value.fields["positions"], caught.value.fields["positions_max"])
    model.forward(cache, [1])
    assert cache.length == 300


def test_decode_of_encode_is_the_text() -> None:
    """Text of any script goes through."""
    model = random_model()
    text = "naïve café €5 😀\n"
    assert text == model.decode(model.encode(text))


def test_encode_chat_ends_where_the_answer_begins() -> None:
    """Messages are laid out by the model's template, with its special tokens as such."""
    model = random_model()
    tokens = model.encode_chat([("system", "Be brief."), ("user", "Hi <|im_end|>")])
    assert "system\nBe brief.\nuser\nHi \nassistant\n" == model.decode(tokens)
    assert (257, frozenset({258})) == (tokens[0], model.stop_tokens)


def test_encode_chat_without_a_template_says_what_to_send(monkeypatch: pytest.MonkeyPatch) -> None:
    """A base model has no chat; its prompts go elsewhere."""
    model = random_model()
    monkeypatch.setattr(model._tokenizer, "chat_template", None)
    with pytest.raises(LocalProtocolError) as caught:
        model.encode_chat([("user", "Hi")])
    assert "/v1/completions" in str(caught.value.fields["problem"])


def test_encode_chat_with_a_role_that_the_template_refuses_is_the_callers_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A template may refuse a conversation in its own words, which the client gets to read."""
    model = random_model()
    monkeypatch.setattr(model._tokenizer, "chat_template", "{{ raise_exception('no tools here') }}")
    with pytest.raises(LocalProtocolError) as caught:
        model.encode_chat([("tool", "Hi")])
    assert "no tools here" in str(caught.value.fields["problem"])


def test_identity_of_a_copied_folder_is_equal(tmp_path: Path) -> None:
    """Two nodes with a copy of one folder may attach each other's rows."""
    copy = shutil.copytree(random_folder(), tmp_path / "elsewhere")
    assert random_model().identity == TransformersModel.load(copy).identity
    assert (1, 3, 2, 2, 32) == (
        random_model().identity.shards,
        *(
            getattr(random_model().identity.layout, name)
            for name in ("layers", "planes", "kv_heads", "head_dim")
        ),
    )


def test_identity_with_other_weights_dtype_or_config_differs_there(tmp_path: Path) -> None:
    """The field that differs is the one that changed."""
    mine = random_model().identity
    other = TransformersModel.load(random_folder(seed=8)).identity
    assert (mine.model, mine.layout) == (other.model, other.layout)
    assert mine.weights != other.weights
    assert mine.weights == random_model(DType.BFLOAT16).identity.weights
    assert mine.model != random_model(DType.BFLOAT16).identity.model
    copy = shutil.copytree(random_folder(), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 77777.0
    (copy / "config.json").write_text(json.dumps(config))
    turned = TransformersModel.load(copy).identity
    assert (mine.weights, mine.layout) == (turned.weights, turned.layout)
    assert mine.model != turned.model


def test_identity_with_only_another_provenance_in_its_config_is_equal(tmp_path: Path) -> None:
    """Which transformers wrote the folder, and from where, changes no byte of a cache."""
    copy = shutil.copytree(random_folder(), tmp_path / "copy")
    config = json.loads((copy / "config.json").read_text())
    config |= {"transformers_version": "5.19.0", "_name_or_path": "somewhere", "dtype": "bfloat16"}
    (copy / "config.json").write_text(json.dumps(config, sort_keys=True, indent=7))
    assert random_model().identity == TransformersModel.load(copy).identity


def _refusal(folder: Path, **options: object) -> str:
    with pytest.raises(ConfigError) as caught:
        TransformersModel.load(folder, **options)  # type: ignore[arg-type]
    assert str(folder) == caught.value.fields["folder"]
    assert caught.value.fields["fix"]
    return str(caught.value.fields["problem"])


def test_load_of_a_sliding_window_model_is_refused(tmp_path: Path) -> None:
    """A layer that forgets positions has no row for each of them."""
    MistralConfig(sliding_window=64, num_hidden_layers=2).save_pretrained(tmp_path)
    assert "layer 0 keeps a DynamicSlidingWindowLayer" in _refusal(tmp_path)


def test_load_of_an_encoder_decoder_is_refused(tmp_path: Path) -> None:
    """Cross attention is not a row per position of the answer."""
    T5Config(num_layers=1).save_pretrained(tmp_path)
    assert "encoder-decoder" in _refusal(tmp_path)


def test_load_of_dynamic_rotary_scaling_is_refused(tmp_path: Path) -> None:
    """Rows must be a function of the session, not of what the process computed for others before."""
    rope = {
        "rope_type": "dynamic",
        "factor": 2.0,
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 2048,
    }
    LlamaConfig(rope_parameters=rope, num_hidden_layers=1).save_pretrained(tmp_path)
    assert "dynamic rotary scaling" in _refusal(tmp_path)


def test_load_of_a_folder_that_asks_for_a_quantised_cache_is_refused(tmp_path: Path) -> None:
    """A cache of other bytes than the model's K and V is not replicated."""
    copy = shutil.copytree(random_folder(), tmp_path / "copy")
    generation = json.loads((copy / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(
        json.dumps(generation | {"cache_implementation": "quantized"})
    )
    assert "asks for a quantized cache" in _refusal(copy)


def test_load_with_a_dtype_or_threads_that_cannot_be_is_refused() -> None:
    """Settings are checked before anything is loaded."""
    assert "uint8" in _refusal(random_folder(), dtype=DType.UINT8)
    assert "0 threads" in _refusal(random_folder(), threads=0)


def test_load_of_no_model_is_refused(tmp_path: Path) -> None:
    """A folder without a model, or one that is not there, is named."""
    assert "cannot be loaded" in _refusal(tmp_path)
    assert "cannot be loaded" in _refusal(tmp_path / "nowhere")


def test_load_of_torn_weights_is_refused(tmp_path: Path) -> None:
    """A copy that stopped half way is not served."""
    copy = shutil.copytree(random_folder(), tmp_path / "copy")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    assert "cannot be loaded" in _refusal(copy)


def test_load_with_weights_missing_is_refused(tmp_path: Path) -> None:
    """Missing weights would be made up at random by transformers; no answer is better than that one."""
    copy = shutil.copytree(random_folder(), tmp_path / "copy")
    model = AutoModelForCausalLM.from_pretrained(copy)
    smaller = LlamaForCausalLM(LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 2}))
    smaller.save_pretrained(tmp_path / "smaller")
    shutil.copy(tmp_path / "smaller" / "model.safetensors", copy / "model.safetensors")
    assert "weights are missing" in _refusal(copy)


def test_load_of_a_model_that_uses_its_cache_in_another_way_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The adapter compares its own cache with transformers' at load, so a wrong one serves nobody."""
    shift = {"keys": 0}
    from kvlog.engines import transformers_cache

    append = transformers_cache.ReplicatedCache.append

    def wrong(self: object, layer: int, keys: object, values: object) -> object:
        shift["keys"] += 1
        return append(self, layer, keys, -values)  # type: ignore[arg-type, operator]

    monkeypatch.setattr(transformers_cache.ReplicatedCache, "append", wrong)
    with pytest.raises(ConfigError) as caught:
        TransformersModel.load(random_folder())
    assert "over a replicated cache" in str(caught.value.fields["problem"])
    assert shift["keys"] > 0
