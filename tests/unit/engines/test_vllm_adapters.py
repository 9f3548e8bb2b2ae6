"""LoRA adapters are told apart by what is in their files, read once, and never in the scheduler's time."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from kvlog.engines.vllm_adapters import AdapterDigests
from kvlog.errors import ConfigError
from tests.unit.engines.lora_folder import adapter, lora


def read(known: AdapterDigests, request: Any) -> bytes:
    """Begin, and ask until it is there."""
    known.begin(request)
    deadline = time.monotonic() + 10
    while (found := known.of(request)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    return found


def test_adapter_is_its_weights_and_configuration_and_not_its_name_or_place(tmp_path):
    """Two nodes may keep one adapter in different folders, under different names and numbers."""
    same = [lora(adapter(tmp_path / "a")), lora(adapter(tmp_path / "b"), 7, lora_name="b")]
    others = [lora(adapter(tmp_path / "c", 1)), lora(adapter(tmp_path / "d", rank=16))]
    digests = [read(AdapterDigests(), each) for each in (*same, *others)]
    assert (digests[0], 3) == (digests[1], len(set(digests)))


def test_adapter_is_read_once_unless_it_is_loaded_in_place(tmp_path):
    """What the engine has loaded counts, not what has come to lie in the file since."""
    folder = adapter(tmp_path / "a")
    known = AdapterDigests()
    first = read(known, lora(folder))
    adapter(folder, 1)
    assert first == read(known, lora(folder))
    assert first != read(known, lora(folder, load_inplace=True)) == read(known, lora(folder))
    assert first != read(known, lora(folder, 2))


def test_adapters_that_are_remembered_are_bounded(tmp_path, monkeypatch):
    """The one that was asked for least lately is read again."""
    monkeypatch.setattr("kvlog.engines.vllm_adapters._REMEMBERED_MAX", 2)
    folder = adapter(tmp_path / "a")
    known = AdapterDigests()
    first, *_ = [read(known, lora(folder, number)) for number in (1, 2, 1, 3)]
    adapter(folder, 1)
    assert known.of(lora(folder, 2)) is None  # forgotten: begun again
    assert (first, False) == (read(known, lora(folder, 3)), first == read(known, lora(folder, 2)))


@pytest.mark.parametrize("lacks", ["adapter_config.json", "adapter_model.safetensors"])
def test_adapter_that_cannot_be_read_is_refused_and_tried_again(tmp_path, lacks):
    """Old formats, a hub that was not downloaded yet."""
    folder = adapter(tmp_path / "a")
    whole = (folder / lacks).read_bytes()
    (folder / lacks).unlink()
    known = AdapterDigests()
    with pytest.raises(ConfigError, match=lacks):
        read(known, lora(folder))
    (folder / lacks).write_bytes(whole)
    assert read(known, lora(folder)) == read(AdapterDigests(), lora(folder))


def test_adapter_is_looked_for_where_the_engine_looks_on_a_thread_of_its_own(tmp_path):
    """A name on the hub is somewhere in its cache; a slow disk does not hold the scheduler up."""
    folder = adapter(tmp_path / "a")
    go = threading.Event()

    def find(place: str) -> Path:
        assert (place, True) == ("org/name", go.wait(10))
        return folder

    known = AdapterDigests(find)
    request = lora(Path("org/name"))
    known.begin(request)
    assert known.of(request) is None
    go.set()
    assert read(known, request) == read(AdapterDigests(), lora(folder))
    known.close()
