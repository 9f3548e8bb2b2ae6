"""A small random DeepSeek-V2 for tests: latent attention (MLA), one row of 512 + 64 elements a token and layer."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

from tests.model.llama import random_folder

LATENT, ROTARY = 512, 64
"""The only sizes that vLLM's reference kernel on the CPU is compiled for."""


@functools.cache
def random_latent_folder(layers: int = 2, seed: int = 11) -> Path:
    """Gives a folder with the random model, and the random Llama's tokenizer of single bytes.

    No experts: all layers are dense, so that equal rows are a matter of attention alone.
    """
    config = DeepseekV2Config(
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        first_k_dense_replace=layers,
        n_routed_experts=2,
        n_shared_experts=1,
        num_experts_per_tok=1,
        n_group=1,
        topk_group=1,
        kv_lora_rank=LATENT,
        q_lora_rank=None,
        qk_rope_head_dim=ROTARY,
        qk_nope_head_dim=32,
        v_head_dim=32,
        vocab_size=259,
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    folder = Path(tempfile.mkdtemp(prefix="kvlog-test-latent-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = DeepseekV2ForCausalLM(config)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(random_folder() / name, folder / name)
    return folder
