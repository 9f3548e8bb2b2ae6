"""Digests of a model's files: what they see, what they refuse."""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvlog.engines.transformers_identity import model_digest, weights_digest
from kvlog.errors import ConfigError
from kvlog.layout import DType, Layout

if TYPE_CHECKING:
    from pathlib import Path

LAYOUT = Layout(layers=1, planes=2, kv_heads=1, head_dim=8, dtype=DType.FLOAT32)


def _weights() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(3)
    return {
        "large": generator.normal(size=(50, 50)),
        "small": generator.normal(size=3),
        "none": np.zeros((0, 4)),
    }


def _digest_of(folder: Path, weights: dict[str, np.ndarray]) -> bytes:
    folder.mkdir(exist_ok=True)
    save_file(weights, folder / "model.safetensors")
    return weights_digest(folder)


def test_weights_digest_of_the_same_weights_is_equal(tmp_path: Path) -> None:
    """Where the folder lies does not matter."""
    assert _digest_of(tmp_path / "a", _weights()) == _digest_of(tmp_path / "b", _weights())


@pytest.mark.parametrize(("name", "index"), [("large", 0), ("large", 1250), ("large", 2499), ("small", 1)])
def test_weights_digest_sees_a_change_at_a_sample(tmp_path: Path, name: str, index: int) -> None:
    """Beginning, middle and end of every tensor are looked at."""
    changed = _weights()
    changed[name].flat[index] += 1e-9
    assert _digest_of(tmp_path / "a", _weights()) != _digest_of(tmp_path / "b", changed)


def test_weights_digest_sees_names_shapes_and_dtypes(tmp_path: Path) -> None:
    """The header counts as a whole."""
    weights = _weights()
    others = [
        {("renamed" if name == "small" else name): tensor for name, tensor in weights.items()},
        weights | {"large": weights["large"].reshape(25, 100)},
        weights | {"small": weights["small"].view(np.int64)},
    ]
    digests = {_digest_of(tmp_path / str(index), other) for index, other in enumerate([weights, *others])}
    assert len(digests) == 4


def test_weights_digest_of_several_files_follows_the_index(tmp_path: Path) -> None:
    """Only the files that transformers loads count, and all of them."""
    for name in ("a", "b", "stray"):
        save_file({name: np.ones(4)}, tmp_path / f"{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    before = weights_digest(tmp_path)
    save_file({"stray": np.zeros(4)}, tmp_path / "stray.safetensors")
    assert before == weights_digest(tmp_path)
    save_file({"b": np.zeros(4)}, tmp_path / "b.safetensors")
    assert before != weights_digest(tmp_path)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (b"", "ends 8 bytes early"),
        (struct.pack("<Q", 1 << 40), "a header of 1099511627776 bytes in a file of 8"),
        (struct.pack("<Q", 4) + b"{]}!", "not a whole safetensors file"),
        (struct.pack("<Q", 9) + b'{"a": {}}', "data_offsets"),
        (struct.pack("<Q", 37) + b'{"a":{"data_offsets":[0,4000000000]}}', "ends 256 bytes early"),
        (struct.pack("<Q", 28) + b'{"a":{"data_offsets":[9,1]}}', "a tensor from 9 to 1"),
        (struct.pack("<Q", 3) + b"[1]", "not a whole safetensors file"),
    ],
)
def test_weights_digest_of_a_torn_file_is_refused(tmp_path: Path, data: bytes, problem: str) -> None:
    """A file that is cut or is something else is named, never half digested."""
    (tmp_path / "model.safetensors").write_bytes(data)
    with pytest.raises(ConfigError) as caught:
        weights_digest(tmp_path)
    assert problem in str(caught.value.fields["problem"])


def test_weights_digest_without_weights_says_so(tmp_path: Path) -> None:
    """Old formats are not loaded; the fix says how to get the new one."""
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(ConfigError) as caught:
        weights_digest(tmp_path)
    assert "no model.safetensors" in str(caught.value.fields["problem"])
    assert "save_pretrained" in str(caught.value.fields["fix"])


def test_weights_digest_with_a_damaged_index_says_so(tmp_path: Path) -> None:
    """An index that cannot be read is not taken for none."""
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ConfigError, match="index"):
        weights_digest(tmp_path)


def test_model_digest_takes_each_part_into_account(tmp_path: Path) -> None:
    """Config, rotary parameters, architecture and layout each change it; the order of keys does not."""
    (tmp_path / "config.json").write_text('{"a": 1, "b": 2}')
    mine = model_digest(tmp_path, architecture="Llama", rope={"theta": 1.0}, layout=LAYOUT)
    others = [
        model_digest(tmp_path, architecture="Other", rope={"theta": 1.0}, layout=LAYOUT),
        model_digest(tmp_path, architecture="Llama", rope={"theta": 2.0}, layout=LAYOUT),
        model_digest(
            tmp_path, architecture="Llama", rope={"theta": 1.0}, layout=Layout(1, 2, 1, 8, DType.FLOAT16)
        ),
    ]
    (tmp_path / "config.json").write_text('{"b": 2, "a": 1, "_from": "here", "transformers_version": "9"}')
    assert mine == model_digest(tmp_path, architecture="Llama", rope={"theta": 1.0}, layout=LAYOUT)
    (tmp_path / "config.json").write_text('{"a": 1, "b": 3}')
    others.append(model_digest(tmp_path, architecture="Llama", rope={"theta": 1.0}, layout=LAYOUT))
    assert len({mine, *others}) == 5
