"""Converting a GGUF file: what is parsed once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gguf
import pytest

from kvlog.engines import transformers_build

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.slow]  # imports torch and transformers


def test_gguf_file_is_parsed_once_for_config_weights_and_tokenizer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader costs seconds on a real model: whoever opens the same file again gets the same reader."""
    for name in ("GGUFReader", "get_tensor_name_map"):
        monkeypatch.setattr(gguf, name, getattr(gguf, name))  # put back after the test
    file = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    transformers_build._remember_what_was_parsed()
    names = [gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 30) for _ in range(2)]
    readers = [gguf.GGUFReader(str(file)) for _ in range(2)]
    assert (True, True) == (names[0] is names[1], readers[0] is readers[1])
