"""Makes model folders: from a GGUF file, from the hub, or at random. A program of its own for kvlog.engines.models.

    python -m kvlog.engines.transformers_build gguf FILE FOLDER
    python -m kvlog.engines.transformers_build hub REPOSITORY FOLDER
    python -m kvlog.engines.transformers_build random FOLDER LAYERS SEED

It is a process of its own because converting takes seconds, a gigabyte of memory, and libraries that print and retry as
they like; its parent has a deadline. Exit code 0: the folder is complete.
"""

from __future__ import annotations

import functools
import json
import signal
import sys
from pathlib import Path

import gguf
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig, LlamaConfig, LlamaForCausalLM
from transformers.utils.hub import cached_file

__all__ = ["from_gguf", "from_hub", "main", "random_llama"]

_HUB_ANSWER_SECONDS = 8
"""The hub's client retries for 24 s when there is no network; a hub that answers does so in one."""

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def from_gguf(file: Path, folder: Path) -> None:
    """Convert a Llama model in a GGUF file to bfloat16 safetensors, with its tokenizer."""
    _remember_what_was_parsed()
    model = AutoModelForCausalLM.from_pretrained(
        file.parent,
        gguf_file=file.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),  # else it cannot be saved
    )
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _remember_what_was_parsed() -> None:
    """Let transformers parse a file once instead of three times, and name the tensors once instead of once a module.

    Both are more than half of the time, 48 s without and 22 s with. It holds to this process's end.
    """
    for name in ("GGUFReader", "get_tensor_name_map"):
        setattr(gguf, name, functools.cache(getattr(gguf, name)))


def from_hub(repository: str, folder: Path) -> None:
    """Copy a model from the hub, or from the hub's own cache on this machine (HF_HUB_OFFLINE and others apply)."""
    signal.alarm(_HUB_ANSWER_SECONDS)  # ends this process: the parent reads it as "no answer"
    cached_file(repository, "config.json")
    signal.alarm(0)
    AutoModelForCausalLM.from_pretrained(repository, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(repository).save_pretrained(folder)


def random_llama(folder: Path, *, layers: int = 3, seed: int = 0) -> None:
    """Write a small Llama with random weights and a tokenizer of single bytes, 1.5 MB at 3 layers, in 0.1 s.

    It has grouped heads (4 over 2), head_dim 32, 8,192 positions, float32. Its answers mean nothing. Initialised at
    0.15: at the usual 0.02 greedy decoding falls into repeats, and equal tokens then prove little.

    Args:
        folder: made if need be.
        layers: ≥ 1.
        seed: equal seeds give equal weights.
    """
    config = LlamaConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        vocab_size=256 + len(_SPECIAL_TOKENS),
        max_position_embeddings=8192,
        initializer_range=0.15,
        bos_token_id=256,
        eos_token_id=258,
        pad_token_id=256,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(_byte_tokenizer()))
    (folder / "tokenizer_config.json").write_text(json.dumps(_byte_tokenizer_config()))


def _byte_tokenizer() -> dict[str, object]:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    special = [
        {"id": 256 + index, "content": content, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for index, content in enumerate(_SPECIAL_TOKENS)
    ]
    vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
    return {
        "version": "1.0",
        "added_tokens": special,
        "pre_tokenizer": byte_level,
        "decoder": byte_level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    }


def _byte_tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _SPECIAL_TOKENS[0],
        "eos_token": _SPECIAL_TOKENS[2],
        "pad_token": _SPECIAL_TOKENS[0],
        "chat_template": _CHAT_TEMPLATE,
        "model_max_length": 8192,
    }


def _byte_characters() -> list[str]:
    """The printable character that stands for each byte in byte-level vocabularies.

    Source: bytes_to_unicode of GPT-2's encoder.
    """
    printable = {
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    }
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def main(arguments: list[str]) -> None:
    """Do what the command line says."""
    match arguments:
        case ["gguf", file, folder]:
            from_gguf(Path(file), Path(folder))
        case ["hub", repository, folder]:
            from_hub(repository, Path(folder))
        case ["random", folder, layers, seed]:
            random_llama(Path(folder), layers=int(layers), seed=int(seed))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
