"""Which vLLM, and which of its configurations, the connector serves; what it does not is refused at start, by name.

Refusing is the only answer that is never silently wrong: a cache group that this adapter does not understand would be
logged in part, and a session restored in part answers nonsense.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kvlog.engines.vllm_settings import CudaUse
from kvlog.errors import ConfigError
from kvlog.layout import DType

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = [
    "VERSIONS",
    "CacheGroup",
    "EngineFacts",
    "check_api",
    "check_version",
    "first_refusal",
    "refuse_unsupported",
]

VERSIONS: Final = ((0, 32), (0, 33))
"""From the first, below the second: the versions that the tests run on. The connector API calls itself experimental."""

_API: Final = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished", "register_kv_caches", "handle_preemptions"),
    *("start_load_kv", "wait_for_layer_load", "save_kv_layer", "wait_for_save", "get_finished"),
    *("get_block_ids_with_load_errors", "build_connector_worker_meta", "bind_connector_metadata"),
    *("clear_connector_metadata", "reset_cache", "shutdown", "requires_kv_delivery"),
)

_K_AND_V: Final = "FullAttentionSpec"
_LATENT: Final = "MLAAttentionSpec"

_DTYPES: Final = frozenset({DType.BFLOAT16.value, DType.FLOAT16.value, DType.FLOAT32.value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGroup:
    """One of vLLM's KV cache groups.

    Args:
        kind: the class name of its spec.
        layers: names.
        dtype: of its elements, as torch names it.
        head_size: of K, or of the latent vector.
        head_size_v: of V; 0: there is none.
        sliding_window: in tokens; None: all positions are kept and attended.
        chunk: local attention in chunks of so many tokens; None: no.
        packed: why a position is not one K and one V row as computed; empty: it is.
    """

    kind: str
    layers: tuple[str, ...]
    dtype: str
    head_size: int
    head_size_v: int
    sliding_window: int | None = None
    chunk: int | None = None
    packed: str = ""

    @property
    def planes(self) -> int:
        """Of a row: 2, K and V; or 1, one latent vector (MLA)."""
        return 1 if self.kind == _LATENT else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What of vLLM's configuration decides whether it is served.

    Args:
        groups: KV cache groups.
        tensor_parallel: size.
        kv_heads: of a layer, all ranks together.
        nodes: machines of the engine.
        executor: how its ranks are started.
        pipeline_parallel: size.
        data_parallel: size.
        context_parallel: size, prefill and decode together.
        cache_dtype: --kv-cache-dtype.
        load_failure_policy: of the transfer config.
        role: of the transfer config.
        speculative: method; None: off.
        encoder_decoder: whether the model has cross attention.
        platform: device type.
        cuda: whether the operator takes the CUDA path as it is.
        plans_ahead: a step is planned before the one before it is carried out (asynchronous scheduling).
        loads_in_a_step: load_step_bytes is more than 0.
    """

    groups: tuple[CacheGroup, ...]
    tensor_parallel: int = 1
    kv_heads: int = 1
    nodes: int = 1
    executor: str = "mp"
    pipeline_parallel: int = 1
    data_parallel: int = 1
    context_parallel: int = 1
    cache_dtype: str = "auto"
    load_failure_policy: str = "recompute"
    role: str = "kv_both"
    speculative: str | None = None
    encoder_decoder: bool = False
    platform: str = "cpu"
    cuda: CudaUse = CudaUse.REFUSED
    plans_ahead: bool = False
    loads_in_a_step: bool = False


def refuse_unsupported(facts: EngineFacts) -> None:
    """Refuse what is not served.

    Raises:
        ConfigError: names the option, group or layer.
    """
    refusal = first_refusal(facts)
    if refusal is not None:
        raise refusal


def first_refusal(facts: EngineFacts) -> ConfigError | None:
    """Why these facts are not served; None: they are."""
    return _parallel(facts) or _options(facts) or _loads(facts) or _groups(facts)


def check_version(version: str, *, any_version: bool = False) -> None:
    """Refuse a vLLM outside the window.

    Args:
        version: vllm.__version__.
        any_version: the operator knows better; what the base class lacks is still refused.

    Raises:
        ConfigError: it is older or newer than what is tested.
    """
    numbers = version.split(".")
    try:
        found = (int(numbers[0]), int(numbers[1]))
    except (ValueError, IndexError):
        found = (0, 0)
    least, below = VERSIONS
    if any_version or least <= found < below:
        return
    raise ConfigError(
        setting="vllm",
        problem=f"version {version}; tested are {_dotted(least)} up to, not with, {_dotted(below)}",
        fix='install one of those, or set "any_version": true in kv_connector_extra_config at your own risk',
    )


def check_api(names: Iterable[str]) -> None:
    """Refuse a connector base class that lacks what we use: a clear error now instead of a crash in a worker.

    Args:
        names: attributes of the base class.

    Raises:
        ConfigError: names what is missing.
    """
    missing = sorted(set(_API) - set(names))
    if missing:
        problem = f"its connector base class lacks {', '.join(missing)}"
        raise ConfigError(setting="vllm", problem=problem, fix="install a version that docs/vllm.md names")


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _parallel(facts: EngineFacts) -> ConfigError | None:
    sizes = {
        "--pipeline-parallel-size": facts.pipeline_parallel,
        "--data-parallel-size": facts.data_parallel,
        "--decode-context-parallel-size": facts.context_parallel,
    }
    for option, size in sizes.items():
        if size != 1:
            return _refusal(
                option, f"{size} is not served", "1: each rank computes its heads of all of a session's rows"
            )
    return _tensor_parallel(facts)


def _tensor_parallel(facts: EngineFacts) -> ConfigError | None:
    """A rank has a shard of each row, or, of latent attention, all of it; and all ranks have one daemon."""
    size, option = facts.tensor_parallel, "--tensor-parallel-size"
    has_heads = any(group.planes != 1 for group in facts.groups)
    if has_heads and facts.kv_heads % size:
        problem = f"{size} ranks do not divide {facts.kv_heads} KV heads: some would be kept twice"
        return _refusal(option, problem, f"a divisor of {facts.kv_heads}")
    if size > 1 and (facts.nodes > 1 or facts.executor == "ray"):
        where = f"{facts.nodes} machines" if facts.nodes > 1 else "ranks that ray places"
        return _refusal(option, f"{size} over {where}: all ranks need one kvlogd", "one machine, executor mp")
    return None


def _loads(facts: EngineFacts) -> ConfigError | None:
    if facts.plans_ahead and facts.loads_in_a_step:
        problem = "a step that is planned ahead counts on rows that a failed load has not brought"
        return _refusal("load_step_bytes", problem, "0, its default, or --no-async-scheduling")
    return None


def _options(facts: EngineFacts) -> ConfigError | None:
    if facts.cache_dtype.startswith("fp8") or "int8" in facts.cache_dtype or "fp4" in facts.cache_dtype:
        problem = f"{facts.cache_dtype}: rows would need their scales"
        return _refusal("--kv-cache-dtype", problem, "auto, bfloat16, float16 or float32")
    if facts.load_failure_policy != "recompute":
        problem = f"{facts.load_failure_policy}: a load that fails would end the request"
        return _refusal("kv_load_failure_policy", problem, "recompute")
    if facts.role != "kv_both":
        return _refusal("kv_role", f"{facts.role}: a node both writes and restores", "kv_both")
    if facts.speculative is not None and "ngram" not in facts.speculative:
        problem = f"{facts.speculative}: a drafter with a cache of its own"
        return _refusal("--speculative-config", problem, "ngram, or none")
    if facts.encoder_decoder:
        return _refusal(
            "model", "an encoder-decoder: cross attention has no row per position", "another model"
        )
    if facts.platform not in {"cpu", "cuda"}:
        return _refusal("device", f"{facts.platform} is not served", "cpu or cuda")
    if facts.platform == "cuda" and facts.cuda is CudaUse.REFUSED:
        problem = "cuda: the way to a GPU's cache is written and reviewed, and has never run on a device"
        fix = (
            'set "cuda": "experimental" in kv_connector_extra_config to be the first, or serve without kvlog'
        )
        return _refusal("device", problem, fix)
    return None


def _groups(facts: EngineFacts) -> ConfigError | None:
    fix = "a model whose layers all keep K and V, or one latent row, of every position"
    if len(facts.groups) != 1:
        kinds = ", ".join(f"{group.kind} ({group.layers[0]} …)" for group in facts.groups if group.layers)
        return _refusal("model", f"its cache has {len(facts.groups)} groups: {kinds or 'none'}", fix)
    group = facts.groups[0]
    problem = _problem(group)
    if problem:
        return _refusal("model", f"{group.layers[0] if group.layers else 'a layer'}: {problem}", fix)
    return None


def _problem(group: CacheGroup) -> str:
    if group.kind not in {_K_AND_V, _LATENT}:
        return f"{group.kind} is not a K and V row, or a latent one, for each position"
    if group.sliding_window is not None:
        return f"a sliding window of {group.sliding_window} tokens"
    if group.chunk is not None:
        return f"local attention in chunks of {group.chunk} tokens"
    if group.kind == _K_AND_V and group.head_size_v != group.head_size:
        return f"K has {group.head_size} dimensions and V has {group.head_size_v}"
    if group.dtype not in _DTYPES:
        return f"elements of {group.dtype}"
    return group.packed


def _refusal(setting: str, problem: str, fix: str) -> ConfigError:
    return ConfigError(setting=setting, problem=problem, fix=fix)
