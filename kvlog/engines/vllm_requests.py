"""What of a vLLM request names its session, and what else its rows depend on.

Session: vLLM's own `session_id` (body or X-Session-ID), else `kv_transfer_params["kvlog"]["session"]`, else the
engine's id of the request: then it is replicated, but only whoever knows that id can resume it, and it ends with the
request.

kv_transfer_params["kvlog"] may hold: session, take_over (the answer was begun elsewhere), sync (full, ids, every:…).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvlog.checksums import digest
from kvlog.engines.step_plan import UnloggedCause
from kvlog.engines.step_planner import NewRequest
from kvlog.engines.turn_state import TurnRequest
from kvlog.errors import ConfigError, InvalidSessionId
from kvlog.ids import parse_session_id
from kvlog.link.messages import DIGEST_NONE
from kvlog.modes import parse_sync_mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.ids import Digest
    from kvlog.modes import SyncMode

__all__ = ["context_digest", "describe_request"]

_CHILD_OF_N: Final = re.compile(r"[0-9]+_")
"""vLLM numbers the children of a request with n > 1 in front of its id; their own n is 1 by then."""

_BEAM: Final = re.compile(r"-beam-[0-9]+\b|^beam_search-")

_KEYS: Final = frozenset({"session", "take_over", "sync"})


def describe_request(
    request: Any,  # noqa: ANN401 - theirs
    tokens: Sequence[int],
    wait_seconds: float,
    adapter: Digest | UnloggedCause = DIGEST_NONE,
) -> NewRequest:
    """Read a vLLM Request.

    Args:
        request: theirs.
        tokens: its ids, growing.
        wait_seconds: how long the daemon may try to become primary.
        adapter: digest of its LoRA adapter's weights; DIGEST_NONE: it has none; or why it is not known.
    """
    name = str(request.request_id)
    params = _parameters(request)
    session = None if params is None else request.session_id or params.get("session")
    turn = _unlogged(request, name)
    if turn is None and isinstance(adapter, UnloggedCause):
        turn = adapter
    if turn is not None or params is None or isinstance(adapter, UnloggedCause):
        return NewRequest(name, turn or UnloggedCause.PARAMETERS, tokens, named=session is not None)
    try:
        asked = TurnRequest(
            session=parse_session_id(name if session is None else str(session)),
            context=context_digest(request, adapter),
            mode=_mode(params.get("sync")),
            wait_seconds=wait_seconds,
            take_over=params.get("take_over") is True,
        )
    except InvalidSessionId:
        return NewRequest(name, UnloggedCause.NOT_NAMED, tokens, named=True)
    except ConfigError:
        return NewRequest(name, UnloggedCause.PARAMETERS, tokens, named=True)
    return NewRequest(name, asked, tokens, named=session is not None)


def context_digest(request: Any, adapter: Digest = DIGEST_NONE) -> Digest:  # noqa: ANN401 - theirs
    """What a row depends on beside the tokens before it: LoRA, media, salt; DIGEST_NONE without any.

    Args:
        request: theirs.
        adapter: digest of its LoRA adapter's weights.
    """
    parts: list[bytes] = []
    if request.lora_request is not None:
        parts += [b"lora", adapter]
    for feature in request.mm_features or ():
        place = feature.mm_position
        parts += [b"media", str(feature.identifier).encode(), f"{place.offset},{place.length}".encode()]
    if request.cache_salt is not None:
        parts += [b"salt", str(request.cache_salt).encode()]
    return digest(*parts) if parts else DIGEST_NONE


def _unlogged(request: Any, name: str) -> UnloggedCause | None:  # noqa: ANN401 - theirs
    sampling = request.sampling_params
    if sampling is None:
        return UnloggedCause.POOLING
    if request.prompt_embeds is not None:
        return UnloggedCause.PROMPT_EMBEDS
    if request.resumable:
        return UnloggedCause.STREAMING_INPUT
    if (sampling.n or 1) > 1 or _CHILD_OF_N.match(name):
        return UnloggedCause.PARALLEL
    if _BEAM.search(name):
        return UnloggedCause.BEAM_SEARCH
    return None


def _parameters(request: Any) -> Mapping[str, Any] | None:  # noqa: ANN401 - theirs
    """kv_transfer_params["kvlog"]; empty without; None: not what it should be."""
    params = (request.kv_transfer_params or {}).get("kvlog", {})
    if not isinstance(params, Mapping) or not params.keys() <= _KEYS:
        return None
    if not isinstance(params.get("take_over", False), bool) or not isinstance(params.get("session", ""), str):
        return None
    return params


def _mode(text: object) -> SyncMode | None:
    """The session's mode.

    Raises:
        ConfigError: it is no mode.
    """
    return None if text is None else parse_sync_mode(str(text), setting="kvlog.sync")
