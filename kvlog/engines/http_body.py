"""The body of a request to the engine's HTTP server: checked field by field; a refusal is one sentence for its sender.

The fields are documented in docs/engine-http.md. A field that would change the answer and is not supported is refused;
what does not matter to the answer (`user`, `metadata`, an unknown field) is ignored.
"""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.engines.generation import GenerationRequest
from kvlog.engines.sampler import SEED_END, Sampler
from kvlog.errors import ConfigError, InvalidSessionId, KvlogError, LocalProtocolError
from kvlog.ids import SessionId, parse_session_id
from kvlog.modes import FULL, IDS, SyncMode, parse_sync_mode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.engines.base import StepModel

__all__ = ["ACKED_SECONDS_MAX", "BODY_BYTES_MAX", "Call", "parse_call", "sentence"]

BODY_BYTES_MAX = 32 << 20
"""A prompt of a million token ids is about 7 MB of JSON."""

ACKED_SECONDS_MAX = 600.0
"""A token is never held for longer: who wants to wait for a log that is away for so long can ask again."""

MAX_TOKENS_DEFAULT = 256
_STOPS_MAX = 16
_STOP_CHARACTERS_MAX = 256
_DIGESTS_MAX = 8
"""Lengths at which one request may have its cache digested; each is a pass over its rows."""
_MESSAGES_MAX = 10_000

# What would be another answer if it were ignored, with the value that asks for nothing.
_NOT_SUPPORTED: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "tools": ([],),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


@dataclass(frozen=True, slots=True)
class Call:
    """A checked request.

    Args:
        request: what to compute.
        session: None: named only by the request.
        mode: how closely to log it; None: the daemon's setting; with `acked` never that, and never token ids only.
        stream: answer in events.
        return_token_ids: token ids in each chunk.
        kv_digests: lengths whose rows are to be digested at the end; None: not asked.
        take_over: the answer was begun elsewhere, so take its session even from a node that is busy with it.
        acked: show a token only when the log holds what it was drawn from.
        acked_seconds: how long a token is held; None: the engine's setting.
    """

    request: GenerationRequest
    session: SessionId | None
    mode: SyncMode | None
    stream: bool
    return_token_ids: bool
    kv_digests: tuple[int, ...] | None
    take_over: bool
    acked: bool
    acked_seconds: float | None


def parse_call(data: bytes, model: StepModel, *, chat: bool, session_headers: Sequence[bytes]) -> Call:
    """Check a body.

    Args:
        data: the body's bytes.
        model: for token ids and its limits.
        chat: messages instead of a prompt.
        session_headers: the values of X-Session-ID; the body's `session` wins.

    Raises:
        LocalProtocolError: it cannot be served (fields: field, problem; or those of Sampler); see `sentence`.
        InvalidSessionId: the session's name cannot be used.
    """
    fields = _Fields(_json(data))
    fields.refuse_unsupported()
    prompt = _chat_prompt(fields, model) if chat else _prompt(fields, model)
    if not prompt:
        raise _wrong("messages" if chat else "prompt", "it has no tokens")
    if len(prompt) >= model.positions_max:
        problem = f"it has {len(prompt)} tokens, this model takes {model.positions_max} with the answer"
        raise _wrong("messages" if chat else "prompt", problem)
    resume = fields.tokens("resume_token_ids", model.vocabulary)
    limit_name = "max_completion_tokens" if fields.has("max_completion_tokens") else "max_tokens"
    acked = fields.flag("acked")
    request = GenerationRequest(
        prompt=tuple(prompt),
        resume=tuple(resume),
        max_tokens=fields.whole(limit_name, MAX_TOKENS_DEFAULT, least=1, most=1 << 31),
        sampler=_sampler(fields),
        stops=_stops(fields),
    )
    return Call(
        request,
        _session(fields, session_headers),
        _mode(fields, acked=acked),
        stream=fields.flag("stream"),
        return_token_ids=fields.flag("return_token_ids"),
        kv_digests=_kv_digests(fields),
        take_over=bool(resume) or fields.flag("take_over"),
        acked=acked,
        acked_seconds=_acked_seconds(fields),
    )


def sentence(error: KvlogError) -> str:
    """What is wrong with a request, for whoever sent it."""
    said = error.fields
    if isinstance(error, InvalidSessionId):
        return f"session: {said.get('problem')}. {error.hint}"
    if "parameter" in said:
        return f"{said['parameter']}: {said.get('value')!r} is not possible, send {said.get('send')}."
    return f"{said.get('field')}: {said.get('problem')}."


def _wrong(field: str, problem: str) -> LocalProtocolError:
    return LocalProtocolError(field=field, problem=problem)


def _whole(name: str, text: str) -> str:
    """Text that can be encoded: JSON can spell half of a character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(name, "it has a lone surrogate, which is no character") from None
    return text


def _session(fields: _Fields, headers: Sequence[bytes]) -> SessionId | None:
    if fields.has("session"):
        named = fields.get("session")
        if not isinstance(named, str):
            raise InvalidSessionId(problem="it is not a string")
        return parse_session_id(named)
    if not headers:
        return None
    if len(headers) > 1:
        raise InvalidSessionId(problem=f"there are {len(headers)} headers X-Session-ID")
    try:
        return parse_session_id(headers[0].decode())  # not as HTTP's Latin-1: it is the body's session
    except UnicodeDecodeError:
        raise InvalidSessionId(problem="the header X-Session-ID is not UTF-8") from None


def _json(data: bytes) -> dict[str, object]:
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise _wrong("body", "it is not JSON") from None
    if not isinstance(body, dict):
        raise _wrong("body", "it is not a JSON object")
    return body


class _Fields:
    """Typed access to a body's fields; null is as good as absent."""

    def __init__(self, body: dict[str, object]) -> None:
        self._body = body

    def has(self, name: str) -> bool:
        return self._body.get(name) is not None

    def get(self, name: str) -> object:
        return self._body.get(name)

    def refuse_unsupported(self) -> None:
        for name, harmless in _NOT_SUPPORTED.items():
            if self.has(name) and self._body[name] not in harmless:
                raise _wrong(name, "this engine does not support it, leave it out")

    def text(self, name: str) -> str | None:
        value = self._body.get(name)
        if value is not None and not isinstance(value, str):
            raise _wrong(name, "it is not a string")
        return value

    def flag(self, name: str) -> bool:
        value = self._body.get(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise _wrong(name, "it is neither true nor false")
        return value

    def whole(self, name: str, default: int, *, least: int, most: int) -> int:
        value = self._body.get(name)
        if value is None:
            return default
        if type(value) is not int or not least <= value <= most:
            raise _wrong(name, f"it is not a whole number from {least} to {most}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._body.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _wrong(name, "it is not a number")
        try:
            return float(value)
        except OverflowError:
            raise _wrong(name, "it is too large") from None

    def tokens(self, name: str, vocabulary: int) -> list[int]:
        value = self._body.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(token) is not int for token in value):
            raise _wrong(name, "it is not a list of token ids")
        if value and not 0 <= min(value) <= max(value) < vocabulary:
            raise _wrong(name, f"it has a token id outside 0 to {vocabulary - 1}")
        return value


def _prompt(fields: _Fields, model: StepModel) -> list[int]:
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return model.encode(_whole("prompt", prompt))
    if isinstance(prompt, list):
        return fields.tokens("prompt", model.vocabulary)
    raise _wrong("prompt", "it is neither a string nor a list of token ids")


def _chat_prompt(fields: _Fields, model: StepModel) -> list[int]:
    messages = fields.get("messages")
    if not isinstance(messages, list) or not messages or len(messages) > _MESSAGES_MAX:
        raise _wrong("messages", f"it is not a list of 1 to {_MESSAGES_MAX} messages")
    return model.encode_chat([_message(message) for message in messages])


def _message(message: object) -> tuple[str, str]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise _wrong("messages", "a message is not an object with a role and a content")
    content = message.get("content")
    if isinstance(content, list):
        parts = [
            part.get("text") for part in content if isinstance(part, dict) and part.get("type") == "text"
        ]
        if len(parts) != len(content) or not all(isinstance(part, str) for part in parts):
            raise _wrong("messages", "a message has a part that is not text")
        content = "".join(str(part) for part in parts)
    if not isinstance(content, str):
        raise _wrong("messages", "a message's content is not text")
    return _whole("messages", str(message["role"])), _whole("messages", content)


def _sampler(fields: _Fields) -> Sampler:
    seed = fields.whole("seed", secrets.randbelow(SEED_END), least=0, most=SEED_END - 1)
    return Sampler(
        temperature=fields.number("temperature", 0.0),
        top_k=max(0, fields.whole("top_k", 0, least=-1, most=1 << 31)),
        top_p=fields.number("top_p", 1.0),
        seed=seed,
    )


def _stops(fields: _Fields) -> tuple[str, ...]:
    stop = fields.get("stop")
    stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or len(stops) > _STOPS_MAX:
        raise _wrong("stop", f"it is not a string or a list of at most {_STOPS_MAX} strings")
    if not all(isinstance(text, str) and 1 <= len(text) <= _STOP_CHARACTERS_MAX for text in stops):
        raise _wrong("stop", f"a stop string does not have 1 to {_STOP_CHARACTERS_MAX} characters")
    return tuple(_whole("stop", text) for text in stops)


def _kv_digests(fields: _Fields) -> tuple[int, ...] | None:
    lengths = fields.get("kv_digests")
    if lengths is None:
        return None
    whole = isinstance(lengths, list) and all(type(length) is int and length > 0 for length in lengths)
    if not isinstance(lengths, list) or not whole or len(lengths) > _DIGESTS_MAX:
        raise _wrong("kv_digests", f"it is not a list of at most {_DIGESTS_MAX} numbers of positions")
    return tuple(lengths)


def _acked_seconds(fields: _Fields) -> float | None:
    if not fields.has("acked_seconds"):
        return None
    seconds = fields.number("acked_seconds", 0.0)
    if not 0 < seconds <= ACKED_SECONDS_MAX:
        raise _wrong("acked_seconds", f"it is not over 0 and at most {ACKED_SECONDS_MAX:g}")
    return seconds


def _mode(fields: _Fields, *, acked: bool) -> SyncMode | None:
    text = fields.text("sync")
    if text is None:
        return FULL if acked else None  # the daemon's setting may be one that has no rows in the log
    try:
        mode = parse_sync_mode(text)
    except ConfigError as error:
        raise _wrong("sync", f"{error.problem}, {error.fix}") from None
    if acked and mode == IDS:
        raise _wrong(
            "sync", "ids puts no rows into the log that acked could wait for, leave one of the two out"
        )
    return mode
