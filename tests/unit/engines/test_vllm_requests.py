"""How a vLLM request names its session, and which requests are served unlogged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.checksums import digest
from kvlog.engines.step_plan import UnloggedCause
from kvlog.engines.turn_state import TurnRequest
from kvlog.engines.vllm_requests import context_digest, describe_request
from kvlog.link.messages import DIGEST_NONE
from kvlog.modes import IDS

if TYPE_CHECKING:
    from kvlog.ids import Digest


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
    return describe_request(request(**fields), [1], 1.0).turn


def test_session_is_vllms_own_first():
    """Then the transfer parameters' one, then the engine's id, which ends with the request."""
    params = {"kvlog": {"session": "mine"}}
    found: list[Any] = [
        describe_request(request(**fields), [1], 1.0)
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


def test_context_digest_tells_lora_media_and_salt_apart():
    """Equal tokens with another adapter, picture or salt have other rows."""
    media = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=3, length=9))
    moved = SimpleNamespace(identifier="hash", mm_position=SimpleNamespace(offset=4, length=9))
    one, other = digest(b"one"), digest(b"other")
    fields: list[tuple[dict[str, Any], Digest]] = [
        ({}, DIGEST_NONE),
        ({"lora_request": object()}, one),
        ({"lora_request": object()}, other),
        ({"mm_features": [media]}, DIGEST_NONE),
        ({"mm_features": [moved]}, DIGEST_NONE),
        ({"cache_salt": "x"}, DIGEST_NONE),
        ({"cache_salt": "x", "lora_request": object()}, one),
    ]
    digests = [context_digest(request(**each), weights) for each, weights in fields]
    assert (DIGEST_NONE, len(fields)) == (digests[0], len(set(digests)))


def test_request_whose_adapter_is_not_known_is_unlogged():
    """Never a digest of half of it."""
    asked = request(session_id="s", lora_request=object())
    assert UnloggedCause.ADAPTER is describe_request(asked, [1], 1.0, UnloggedCause.ADAPTER).turn
    assert (
        UnloggedCause.PARALLEL
        is describe_request(
            request(sampling_params=SimpleNamespace(n=2)), [1], 1.0, UnloggedCause.ADAPTER
        ).turn
    )
