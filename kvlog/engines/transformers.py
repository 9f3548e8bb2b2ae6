"""The engine adapter for Hugging Face transformers: one model on the CPU, one ReplicatedCache a request.

Numerics: weights and cache in one dtype, attention is PyTorch's SDPA, the number of threads is pinned; nothing else
decides the rounding. So a request that is resumed from rows computes bit for bit what the uninterrupted one computes,
as long as the steps have the same shapes: token by token after the prefill. Prefill in pieces, or recomputing in one
piece what was decoded token by token, agrees to rounding only (float32: about 1e-5 of a logit).

What this adapter cannot keep in rows it refuses at load, by name: sliding windows and other layers without a row per
position, encoders, quantised or static caches, rotary parameters that depend on what the process has seen before.
"""

from __future__ import annotations

import inspect
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.cache_utils import DynamicCache, DynamicLayer
from transformers.utils import logging as transformers_logging

from kvlog.engines.replayed import load_replayed
from kvlog.engines.transformers_cache import TORCH_DTYPES, ReplicatedCache
from kvlog.engines.transformers_identity import model_digest, weights_digest
from kvlog.errors import ConfigError, LocalProtocolError
from kvlog.layout import DType, Identity, Layout

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    import numpy.typing as npt

    from kvlog.engines.base import RowCache

__all__ = ["TransformersModel"]

_ATTENTION = "sdpa"

_PROBE_TOKENS = (3, 1, 2)
"""Any ids that every vocabulary has."""

_PROBE_TOLERANCE = 0.05
"""Of the largest logit: a cache that the model uses in another way than we think is off by more, rounding by less."""


class TransformersModel:
    """A StepModel around a causal language model of transformers. Made by `load`; forward is for one thread at a time.

    Tokenising and decoding may be called from any thread.
    """

    def __init__(self, folder: Path, model: Any, tokenizer: Any, threads: int) -> None:  # noqa: ANN401 - theirs
        self._model = model
        self._tokenizer = tokenizer
        self._tokenizing = threading.Lock()  # tokenizers raise "Already borrowed" when two threads meet
        self._threads = threads
        self._cache_argument = _cache_argument(model)
        self._config = model.config.get_text_config(decoder=True)
        self._stop_tokens = _stop_tokens(model, tokenizer)
        self._identity = self._identify(folder)
        self.name = folder.name
        self._check_cache()

    @classmethod
    def load(cls, folder: Path, *, dtype: DType = DType.FLOAT32, threads: int = 1) -> TransformersModel:
        """Load a model from a folder, never from a network, and check that its cache can be replicated.

        Args:
            folder: config, safetensors, tokenizer, as save_pretrained writes them.
            dtype: of weights and cache; not uint8.
            threads: of PyTorch in this process; it decides the rounding, so all nodes need the same.

        Raises:
            ConfigError: not a model's folder, or a model or setting that this adapter does not do: see `problem`.
        """
        folder = Path(folder)
        if dtype not in TORCH_DTYPES:
            raise _bad(
                folder, f"a cache of {dtype} is not a dtype that it computes in", "use float32 or bfloat16"
            )
        if threads < 1:
            raise _bad(folder, f"{threads} threads", "use 1 or more")
        torch.set_num_threads(threads)
        transformers_logging.disable_progress_bar()
        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            _refuse_unsupported(folder, config)
            model, told = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=TORCH_DTYPES[dtype],
                attn_implementation=_ATTENTION,
                local_files_only=True,
                use_safetensors=True,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise _bad(folder, f"it cannot be loaded: {error}", "give a folder of save_pretrained") from error
        if told["missing_keys"]:
            raise _bad(
                folder, f"weights are missing: {sorted(told['missing_keys'])[:3]}", "copy the whole folder"
            )
        _refuse_cache_of(folder, model)
        return cls(folder, model.eval(), tokenizer, threads)

    @property
    def identity(self) -> Identity:
        """Model digest, weights digest, layout of a row, one shard."""
        return self._identity

    @property
    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end an answer."""
        return self._stop_tokens

    @property
    def positions_max(self) -> int:
        """The longest sequence it takes."""
        return int(self._config.max_position_embeddings)

    @property
    def vocabulary(self) -> int:
        """Token ids are below this."""
        return int(self._config.vocab_size)

    def new_cache(self) -> ReplicatedCache:
        """An empty cache."""
        return ReplicatedCache(self._identity.layout, self.positions_max)

    def load_replayed(self, file: Path) -> tuple[list[int], RowCache]:
        """A session that `kvlog replay` rebuilt from the log: its token ids, and a cache with its rows.

        Raises:
            DecodeError: not a replay file, or damaged.
            LayoutMismatch: the rows are another model's.
        """
        return load_replayed(file, self)

    def forward(self, cache: RowCache, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Compute the KV of `tokens` at the cache's end and return the logits after the last one.

        Shape: [vocabulary], float32.

        Raises:
            LocalProtocolError: a token id that the vocabulary lacks, or more positions than the model has; the cache is
                as it was.
        """
        assert isinstance(cache, ReplicatedCache), "a cache of new_cache"
        assert tokens, "at least one token"
        if not 0 <= min(tokens) <= max(tokens) < self.vocabulary:
            raise LocalProtocolError(
                token=max(tokens), vocabulary=self.vocabulary, send="ids of this model's vocabulary"
            )
        length = cache.length
        try:
            return self._compute(cache.model_cache, tokens)
        except BaseException:
            cache.cut(length)
            raise

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer puts before it."""
        with self._tokenizing:
            return list(self._tokenizer(text)["input_ids"])

    def encode_chat(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Token ids of (role, content) messages under the model's chat template, ready for the answer.

        Raises:
            LocalProtocolError: the model has no chat template, or the template refuses these roles.
        """
        if not self._tokenizer.chat_template:
            problem = "this model has no chat template; send a plain prompt to /v1/completions"
            raise LocalProtocolError(field="messages", problem=problem)
        listed = [{"role": role, "content": content} for role, content in messages]
        with self._tokenizing:
            try:
                text = self._tokenizer.apply_chat_template(listed, add_generation_prompt=True, tokenize=False)
            except (TemplateError, TypeError, ValueError, KeyError) as error:
                problem = f"the model's chat template refuses them: {error}"
                raise LocalProtocolError(field="messages", problem=problem) from error
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special ones left out."""
        with self._tokenizing:
            text: str = self._tokenizer.decode(
                list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        return text

    def _compute(self, cache: Any, tokens: Sequence[int]) -> npt.NDArray[np.float32]:  # noqa: ANN401 - theirs
        if (
            torch.get_num_threads() != self._threads
        ):  # another part of the process has changed it, or a new thread
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            ids = torch.tensor([list(tokens)])
            answer = self._model(
                input_ids=ids, use_cache=True, logits_to_keep=1, **{self._cache_argument: cache}
            )
            logits: npt.NDArray[np.float32] = answer.logits[0, -1].float().numpy()
        return logits

    def _identify(self, folder: Path) -> Identity:
        layout = self._probe_layout(folder)
        rope = getattr(self._config, "rope_parameters", None)
        model = model_digest(folder, architecture=type(self._model).__name__, rope=rope, layout=layout)
        return Identity(model, weights_digest(folder), layout, shards=1)

    def _probe_layout(self, folder: Path) -> Layout:
        """Compute a few tokens and look at what transformers' own cache then holds."""
        cache = DynamicCache(config=self._model.config)
        self._compute(cache, _PROBE_TOKENS)
        shapes = {tuple(plane.shape) for layer in cache.layers for plane in (layer.keys, layer.values)}
        dtypes = {plane.dtype for layer in cache.layers for plane in (layer.keys, layer.values)}
        if len(shapes) > 1 or len(dtypes) > 1:
            problem = (
                f"its K and V have several shapes or dtypes: {sorted(shapes)}, {sorted(map(str, dtypes))}"
            )
            raise _bad(folder, problem, "use a model with K and V of one shape in all layers")
        (_, heads, _, head_dim), dtype = shapes.pop(), dtypes.pop()
        name = next(name for name, known in TORCH_DTYPES.items() if known == dtype)
        return Layout(len(cache.layers), 2, heads, head_dim, name)

    def _check_cache(self) -> None:
        """Compare a prefill and a decode step over our cache with the same over transformers' own."""
        theirs, ours = DynamicCache(config=self._model.config), self.new_cache()
        for tokens in (_PROBE_TOKENS, _PROBE_TOKENS[:1]):
            expected = self._compute(theirs, tokens)
            actual = self._compute(ours.model_cache, tokens)
            difference = float(np.abs(expected - actual).max())
            if not difference <= _PROBE_TOLERANCE * float(np.abs(expected).max()):
                problem = f"its logits change by {difference} over a replicated cache"
                raise _bad(Path(self.name), problem, "report the architecture; serve it without kvlog")


def _bad(folder: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError(setting="model", folder=str(folder), problem=problem, fix=fix)


def _refuse_unsupported(folder: Path, config: Any) -> None:  # noqa: ANN401 - theirs
    """Refuse what the config alone tells.

    Raises:
        ConfigError: see there.
    """
    fix = "serve another model, or this one without kvlog"
    if config.is_encoder_decoder:
        raise _bad(
            folder, "an encoder-decoder: its cross attention has no row per position of the answer", fix
        )
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or {}
    kinds = {
        rope.get("rope_type"),
        *(part.get("rope_type") for part in rope.values() if isinstance(part, dict)),
    }
    if "dynamic" in kinds:
        raise _bad(folder, "dynamic rotary scaling: a row depends on what the process computed before", fix)
    for index, layer in enumerate(DynamicCache(config=config).layers):
        if type(layer) is not DynamicLayer:
            raise _bad(folder, f"layer {index} keeps a {type(layer).__name__}, not a row per position", fix)


def _refuse_cache_of(folder: Path, model: Any) -> None:  # noqa: ANN401 - theirs
    """Refuse a model whose folder asks for another kind of cache.

    Raises:
        ConfigError: see there.
    """
    wanted = getattr(model.generation_config, "cache_implementation", None)
    if wanted not in {None, "dynamic"}:
        fix = "remove cache_implementation from generation_config.json"
        raise _bad(folder, f"it asks for a {wanted} cache, whose rows are not the model's", fix)


def _cache_argument(model: Any) -> str:  # noqa: ANN401 - theirs
    """The name of the model's cache argument: `past_key_values` until transformers 5.2x, `cache` from then on."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _stop_tokens(model: Any, tokenizer: Any) -> frozenset[int]:  # noqa: ANN401 - theirs
    named = (model.generation_config.eos_token_id, model.config.eos_token_id, tokenizer.eos_token_id)
    listed = (ids if isinstance(ids, list) else [ids] for ids in named)
    return frozenset(token for ids in listed for token in ids if token is not None)
