"""Runs where vLLM is: what the connector says to vLLM's own cache specs and configurations, as one JSON object.

python -m tests.vllm.refusals FOLDER
"""

from __future__ import annotations

import json
import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import vllm
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from kvlog.engines.device_layout import refuse_other_order
from kvlog.engines.vllm import KvlogConnector
from kvlog.engines.vllm_kernels import writer_of
from kvlog.engines.vllm_probe import probe_page_map
from kvlog.engines.vllm_support import check_api, check_version
from kvlog.errors import ConfigError

PLAIN = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}


def specs() -> dict[str, list[Any]]:
    """Groups by the name of what is tried."""
    full = kv.FullAttentionSpec(**PLAIN)
    return {
        "plain": [full],
        "window": [kv.SlidingWindowSpec(**PLAIN, sliding_window=64)],
        "window as full": [kv.FullAttentionSpec(**PLAIN, sliding_window=64)],
        "chunked": [kv.ChunkedLocalAttentionSpec(**PLAIN, attention_chunk_size=64)],
        "mla": [kv.MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1})],
        "packed mla": [
            kv.MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, cache_dtype_str="x", state_content_bytes=656)
        ],
        "compressed mla": [kv.MLAAttentionSpec(**{**PLAIN, "num_kv_heads": 1}, tokens_per_state=4)],
        "mamba": [kv.MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,))],
        "hybrid": [full, kv.SlidingWindowSpec(**PLAIN, sliding_window=64)],
        "other V": [kv.FullAttentionSpec(**PLAIN, head_size_v=64)],
        "packed": [kv.FullAttentionSpec(**PLAIN, kv_quant_mode=kv.KVQuantMode.INT4_PER_TOKEN_HEAD)],
        "bytes": [kv.FullAttentionSpec(**{**PLAIN, "dtype": torch.uint8})],
    }


def said(make: Any) -> str:
    """What it refuses; empty: nothing."""
    try:
        make()
    except ConfigError as error:
        return str(error)
    return ""


def ask_latent_kernel() -> None:
    """The CPU's writer of latent rows puts them where vLLM's documented shape has them."""
    module = SimpleNamespace(
        impl=SimpleNamespace(do_kv_cache_update=partial(CPUMLAImpl.do_kv_cache_update, None)),
        kv_lora_rank=512,
        kv_cache_dtype="auto",
        _k_scale=None,
    )
    page = torch.zeros(1, 1, 16, 576, dtype=torch.bfloat16)
    refuse_other_order(probe_page_map(writer_of(module, 1), page, 1), "CPU_MLA")


def main(folder: str) -> None:
    """Try them all."""
    transfer = {
        "kv_connector": "KvlogConnector",
        "kv_connector_module_path": "kvlog.engines.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"link": "/nowhere"},
    }
    arguments = EngineArgs(
        model=folder, max_model_len=512, dtype="float32", kv_transfer_config=KVTransferConfig(**transfer)
    )
    config = arguments.create_engine_config()

    def connect(groups: list[Any], role: KVConnectorRole = KVConnectorRole.SCHEDULER) -> KvlogConnector:
        named = [kv.KVCacheGroupSpec([f"layers.{index}.attn"], spec) for index, spec in enumerate(groups)]
        cache = kv.KVCacheConfig(num_blocks=8, kv_cache_tensors=[], kv_cache_groups=named)
        return KvlogConnector(config, role, cache)

    answers = {name: said(lambda groups=groups: connect(groups)) for name, groups in specs().items()}
    for name, owner, field, value in (
        ("tensor parallel", config.parallel_config, "tensor_parallel_size", 2),
        ("tensor parallel that does not divide", config.parallel_config, "tensor_parallel_size", 3),
        ("pipeline parallel", config.parallel_config, "pipeline_parallel_size", 2),
        ("data parallel", config.parallel_config, "data_parallel_size", 2),
        ("fp8", config.cache_config, "cache_dtype", "fp8_e4m3"),
        ("policy", config.kv_transfer_config, "kv_load_failure_policy", "fail"),
        ("role", config.kv_transfer_config, "kv_role", "kv_consumer"),
        ("key", config.kv_transfer_config, "kv_connector_extra_config", {"lnik": "/s"}),
    ):
        before = getattr(owner, field)
        object.__setattr__(owner, field, value)
        answers[name] = said(lambda: connect([kv.FullAttentionSpec(**PLAIN)]))
        object.__setattr__(owner, field, before)
    object.__setattr__(config.parallel_config, "tensor_parallel_size", 3)
    answers["mla, tensor parallel"] = said(lambda: connect(specs()["mla"]))
    object.__setattr__(config.parallel_config, "tensor_parallel_size", 1)
    answers["latent kernel"] = said(ask_latent_kernel)
    answers["worker"] = said(lambda: connect([kv.FullAttentionSpec(**PLAIN)], KVConnectorRole.WORKER))
    answers["version"] = said(lambda: check_version(vllm.__version__))
    answers["base class"] = said(lambda: check_api(dir(KVConnectorBase_V1)))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(sys.argv[1])
