"""LoRA adapters for tests: a folder as peft writes it, and the attributes of a vLLM LoRARequest that are read."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["adapter", "lora"]


def adapter(folder: Path, seed: int = 0, *, rank: int = 8) -> Path:
    """An adapter of one module."""
    folder.mkdir(exist_ok=True)
    weights = np.random.default_rng(seed).normal(size=(rank, 64)).astype(np.float32)
    save_file({"base_model.model.q_proj.lora_A.weight": weights}, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": 16, "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora(folder: Path, number: int = 1, **fields: Any) -> SimpleNamespace:
    """A request for it."""
    plain = {"lora_name": "a", "lora_int_id": number, "lora_path": str(folder), "load_inplace": False}
    return SimpleNamespace(**{**plain, **fields})
