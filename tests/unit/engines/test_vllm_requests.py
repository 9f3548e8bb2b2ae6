"""How a vLLM request names its session, and which requests are served unlogged."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvlog.engines.step_plan import UnloggedCause
from kvlog.engines.turn_state import TurnRequest
from kvlog.engines.vllm_adapters import AdapterDigests
from kvlog.engines.vllm_requests import context_digest, describe_request
from kvlog.link.messages import DIGEST_NONE
from kvlog.modes import IDS


def request(**fields: Any) -> SimpleNamespace:
    """The attributes of a vLLM Request that are read."""
    plain: dict[str, Any] = {
        "request_id": "cmpl-1-0-ab12cd34",
        "session_id": None,
        "kv_transfer_params": None,
        "sampling_params": SimpleNamespace(n=1),
        "prompt_embeds": None,
        "resumable": False,
        "lora_request": None,
        "mm_features": [],
        "cache_salt": None,
    }
    return SimpleNamespace(**{**plain, **fields})


def turn(**fields: Any) -> Any:
    """What the request's turn asks for."""
    return describe_request(request(**fields), [1], 1.0, AdapterDigests()).turn


def test_session_is_vllms_own_first():
    """Then the transfer parameters' one, then the engine's id, which ends with the request."""
    params = {"kvlog": {"session": "mine"}}
    found: list[Any] = [
        describe_request(request(**fields), [1], 1.0, AdapterDigests())
        for fields in (
            {"session_id": "theirs", "kv_transfer_params": params},
            {"kv_transfer_params": params},
            {},
        )
    ]
    assert ["theirs", "mine", "cmpl-1-0-ab12cd34"] == [one.turn.session for one in found]
    assert [True, True, False] == [one.named for one in found]


def test_parameters_say_take_over_and_mode():
    """Both are the request's own business."""
    asked = turn(session_id="s", kv_transfer_params={"kvlog": {"take_over": True, "sync": "ids"}})
    assert (True, IDS, 1.0) == (asked.take_over, asked.mode, asked.wait_seconds)


@pytest.mark.parametrize(
    ("fields", "cause"),
    [
        ({"sampling_params": None}, UnloggedCause.POOLING),
        ({"sampling_params": SimpleNamespace(n=3)}, UnloggedCause.PARALLEL),
        ({"request_id": "2_cmpl-1-0-ab12cd34"}, UnloggedCause.PARALLEL),
        ({"request_id": "cmpl-7-8f-beam-3-ab12cd34"}, UnloggedCause.BEAM_SEARCH),
        ({"prompt_embeds": object()}, UnloggedCause.PROMPT_EMBEDS),
        ({"resumable": True}, UnloggedCause.STREAMING_INPUT),
        ({"session_id": "bad\nname"}, UnloggedCause.NOT_NAMED),
        ({"kv_transfer_params": {"kvlog": {"sesion": "typo"}}}, UnloggedCause.PARAMETERS),
        ({"kv_transfer_params": {"kvlog": {"sync": "often"}}}, UnloggedCause.PARAMETERS),
        ({"kv_transfer_params": {"kvlog": "s"}}, UnloggedCause.PARAMETERS),
    ],
)
def test_request_that_cannot_be_logged_says_why(fields, cause):
    """Served, not replicated."""
    assert cause is turn(**fields)


def test_parameters_of_another_connector_are_not_ours():
    """Only the kvlog key is looked at."""
    assert isinstance(turn(kv_transfer_params={"do_remote_prefill": True}), TurnRequest)


def adapter(folder: Path, seed: int = 0, *, rank: int = 8) -> Path:
    """A LoRA adapter of one module, as peft writes it."""
    folder.mkdir(exist_ok=True)
    weights = np.random.default_rng(seed).normal(size=(rank, 64)).astype(np.float32)
    save_file({"base_model.model.q_proj.lora_A.weight": weights}, folder / "adapter_model.safetensors")
    config = {"r": rank, "lora_alpha": 16, "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def lora(folder: Path, number: int = 1, **fields: Any) -> SimpleNamespace:
    """The attributes of a vLLM LoRARequest that are read."""
    plain = {"lora_name": "a", "lora_int_id": number, "lora_path": str(folder), "load_inplace": False}
    return SimpleNamespace(**{**plain, **fields})


def test_context_digest_tells_lora_media_and_salt_apart(tmp_path):
    """Equal tokens with another adapter, picture or salt have other rows."""
    one, other, larger = adapter(tmp_path / "a"), adapter(tmp_path / "b", 1), adapter(tmp_path / "c", rank=16)
    media = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=3, length=9))
    moved = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=4, length=9))
    fields: list[dict[str, Any]] = [
        {},
        {"lora_request": lora(one)},
        {"lora_request": lora(other, 2)},
        {"lora_request": lora(larger, 3)},
        {"mm_features": [media]},
        {"mm_features": [moved]},
        {"cache_salt": "x"},
        {"cache_salt": "x", "lora_request": lora(one)},
    ]
    digests = [context_digest(request(**each), AdapterDigests()) for each in fields]
    assert (DIGEST_NONE, len(fields)) == (digests[0], len(set(digests)))


def test_adapter_is_its_weights_and_not_its_name_or_place(tmp_path):
    """Two nodes may keep one adapter in different folders, under different names and numbers."""
    one = lora(adapter(tmp_path / "a"))
    other = lora(adapter(tmp_path / "b"), 7, lora_name="b")
    digests = {context_digest(request(lora_request=each), AdapterDigests()) for each in (one, other)}
    assert 1 == len(digests)


def test_adapter_is_read_once_unless_it_is_loaded_in_place(tmp_path):
    """What the engine has loaded counts, not what has come to lie in the file since."""
    folder = adapter(tmp_path / "a")
    known = AdapterDigests()
    first = known.of(lora(folder))
    adapter(folder, 1)
    assert first == known.of(lora(folder))
    assert first != known.of(lora(folder, load_inplace=True)) == known.of(lora(folder))
    assert first != known.of(lora(folder, 2))


def test_adapters_that_are_remembered_are_bounded(tmp_path, monkeypatch):
    """The one that was asked for least lately is read again."""
    monkeypatch.setattr("kvlog.engines.vllm_adapters._REMEMBERED_MAX", 2)
    folder = adapter(tmp_path / "a")
    known = AdapterDigests()
    first = known.of(lora(folder, 1))
    for number in (2, 1, 3):
        known.of(lora(folder, number))
    adapter(folder, 1)
    assert (first, False) == (known.of(lora(folder, 1)), first == known.of(lora(folder, 2)))


@pytest.mark.parametrize("lacks", ["adapter_config.json", "adapter_model.safetensors"])
def test_request_whose_adapter_cannot_be_read_is_unlogged_and_asked_again(tmp_path, lacks):
    """Old formats, a hub that was not downloaded yet: never a digest of half of it."""
    folder = adapter(tmp_path / "a")
    whole = (folder / lacks).read_bytes()
    (folder / lacks).unlink()
    known = AdapterDigests()
    asked = request(session_id="s", lora_request=lora(folder))
    assert UnloggedCause.ADAPTER is describe_request(asked, [1], 1.0, known).turn
    (folder / lacks).write_bytes(whole)
    assert isinstance(describe_request(asked, [1], 1.0, known).turn, TurnRequest)


def test_adapter_is_looked_for_where_the_engine_looks(tmp_path):
    """A name on the hub is somewhere in its cache."""
    folder = adapter(tmp_path / "a")
    known = AdapterDigests({"org/name": folder}.__getitem__)
    assert known.of(lora(Path("org/name"))) == AdapterDigests().of(lora(folder))
