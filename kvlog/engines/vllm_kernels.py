"""vLLM's attention layers, as far as their caches go: the function that puts rows into slots. Imports nothing of vLLM.

Source: vllm/v1/attention/backend.py, `do_kv_cache_update` of AttentionImpl (keys, values) and MLAAttentionImpl (latent
vector and rotary part, written side by side), vLLM 0.32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

__all__ = ["writer_of"]


def writer_of(module: Any, planes: int) -> Callable[..., None]:  # noqa: ANN401 - theirs
    """The kernel's own writer, as `probe_page_map` calls it.

    Args:
        module: vLLM's attention layer.
        planes: 2: it takes keys and values; 1: latent vectors.
    """

    def write_keys_and_values(*rows_cache_slots: torch.Tensor) -> None:
        module.impl.do_kv_cache_update(module, *rows_cache_slots)

    def write_latents(latents: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        # Latents [n, 1, rank + rotary] lie in two tensors here, [n, rank] and [n, 1, rotary]; the cache has no heads.
        rank = module.kv_lora_rank
        parts = latents[:, 0, :rank], latents[:, :, rank:]
        scale = module._k_scale  # noqa: SLF001 - their own kernels are given it like this
        module.impl.do_kv_cache_update(*parts, cache.squeeze(1), slots, module.kv_cache_dtype, scale)

    return write_latents if planes == 1 else write_keys_and_values
