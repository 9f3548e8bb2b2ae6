"""Which cache bytes a model folder stands for: digests of the model and of its weights, from the files, in ms.

model digest    config.json in canonical form without the keys that change no byte of a cache, the rotary parameters
                as loaded, the architecture's class name, the layout with its dtype.
weights digest  of each safetensors file: name, size, header (names, shapes, dtypes, offsets of all tensors), and of
                each tensor its first, middle and last 256 bytes. Training, merging an adapter or quantising changes
                every sample of the tensors that it touches; a change of single weights between samples is not seen.

adapter digest  of a LoRA adapter: adapter_config.json in canonical form without where its base model came from, and its
                one safetensors file as above.

Two folders with equal weights but another order of tensors or another way of cutting them into files have different
digests: they are taken for different, which costs a recompute and nothing else.
Source: safetensors format, https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import os
import struct
from dataclasses import astuple
from typing import TYPE_CHECKING

from kvlog.checksums import digest
from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path
    from typing import BinaryIO

    from kvlog.ids import Digest
    from kvlog.layout import Layout

__all__ = ["adapter_digest", "model_digest", "weights_digest"]

_SAMPLE_BYTES = 256

_HEADER_BYTES_MAX = 100_000_000
"""The format's own bound."""

_LENGTH = struct.Struct("<Q")

_KEYS_OF_NO_MEANING = {
    *("dtype", "torch_dtype", "transformers_version", "use_cache"),
    *("base_model_name_or_path", "revision", "inference_mode"),
}
"""And those that begin with an underscore: where a folder came from. The dtype that counts is the cache's."""


def model_digest(folder: Path, *, architecture: str, rope: object, layout: Layout) -> Digest:
    """Digest what determines the meaning of a row beside the weights.

    Args:
        folder: holds config.json.
        architecture: the model's class name.
        rope: rotary parameters as loaded, JSON values.
        layout: of a row.

    Raises:
        ConfigError: config.json cannot be read; give the folder of a model.
    """
    meaning = _meaning(folder, "config.json")
    return digest(_canonical(meaning), _canonical(rope), architecture.encode(), _canonical(astuple(layout)))


def weights_digest(folder: Path) -> Digest:
    """Digest the weights of a folder by their headers and samples.

    Raises:
        ConfigError: there are no readable safetensors files; convert the model with `save_pretrained`.
    """
    return digest(*(part for name in _weight_files(folder) for part in _file_parts(folder, name)))


def adapter_digest(folder: Path) -> Digest:
    """Digest a LoRA adapter by its configuration, and its weights' header and samples; not by its name or place.

    Raises:
        ConfigError: there is no readable adapter_config.json or adapter_model.safetensors.
    """
    meaning = _meaning(folder, "adapter_config.json")
    return digest(_canonical(meaning), *_file_parts(folder, "adapter_model.safetensors"))


def _meaning(folder: Path, name: str) -> dict[str, object]:
    """What of a configuration changes bytes."""
    try:
        config = json.loads((folder / name).read_bytes())
        return {key: value for key, value in config.items() if not _is_meaningless(key)}
    except (OSError, ValueError, AttributeError) as error:
        raise _bad(folder, f"{name} cannot be read: {error}") from error


def _is_meaningless(key: str) -> bool:
    return key.startswith("_") or key in _KEYS_OF_NO_MEANING


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=str).encode()


def _weight_files(folder: Path) -> list[str]:
    """The files that transformers loads: those of the index, else the one."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        try:
            return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise _bad(folder, f"{index.name} cannot be read: {error}") from error
    if not (folder / "model.safetensors").is_file():
        raise _bad(folder, "it has no model.safetensors")
    return ["model.safetensors"]


def _file_parts(folder: Path, name: str) -> Iterator[bytes]:
    try:
        with (folder / name).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _header(file, size)
            yield from (name.encode(), _LENGTH.pack(size), header)
            for tensor in _tensors(header):
                yield from _samples(file, _LENGTH.size + len(header), tensor["data_offsets"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _bad(folder, f"{name} is not a whole safetensors file: {error}") from error


def _header(file: BinaryIO, size: int) -> bytes:
    (length,) = _LENGTH.unpack(_exactly(file, _LENGTH.size))
    if length > min(_HEADER_BYTES_MAX, size - _LENGTH.size):
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return _exactly(file, length)


def _tensors(header: bytes) -> Iterator[Mapping[str, list[int]]]:
    described = json.loads(header)
    if not isinstance(described, dict):
        raise TypeError("a header that is not an object")
    return (described[name] for name in sorted(described) if name != "__metadata__")


def _samples(file: BinaryIO, data: int, offsets: list[int]) -> Iterator[bytes]:
    begin, end = offsets
    if not 0 <= begin <= end:
        raise ValueError(f"a tensor from {begin} to {end}")
    length = min(_SAMPLE_BYTES, end - begin)
    for start in (begin, (begin + end - length) // 2, end - length):
        file.seek(data + start)
        yield _exactly(file, length)


def _exactly(file: BinaryIO, length: int) -> bytes:
    data = file.read(length)
    if len(data) < length:
        raise ValueError(f"it ends {length - len(data)} bytes early")
    return data


def _bad(folder: Path, problem: str) -> ConfigError:
    return ConfigError(
        setting="model",
        folder=str(folder),
        problem=problem,
        fix="give a folder that save_pretrained has written",
    )
