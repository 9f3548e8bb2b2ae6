"""The demo's client: streams answers from an engine and notes when each piece came. It is the router here."""

from __future__ import annotations

import json
import time
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import httpx

from consumers.plain_http import plain_client

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

    from consumers.demo_prompt import Prompt

__all__ = [
    "Answer",
    "Asked",
    "Broken",
    "Client",
    "EngineClient",
    "Finished",
    "Part",
    "Piece",
    "events",
    "whole_answer",
]

_CONNECT_SECONDS = 10.0
_SILENCE_SECONDS = 180.0
"""The longest silence of a stream: a prefill on a busy machine, or a node that is stopped for as long as another one
needs to finish its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request.

    Args:
        prompt: the conversation.
        session: its id in the log.
        tokens_max: of the answer, resumed ones included.
        resumed: token ids of the answer that the user has.
        digests_at: numbers of positions at which the engine is to digest its cache; None: not at all.
    """

    prompt: Prompt
    session: str
    tokens_max: int
    resumed: Sequence[int] = ()
    digests_at: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the answer. `at`: when it was here, monotonic seconds."""

    tokens: tuple[int, ...]
    text: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete. `kvlog`: what its engine says of it, see docs/engine-http.md."""

    kvlog: Mapping[str, Any]
    prompt_tokens: int
    at: float


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer is not complete. `kind`: of the engine's error, or `connection`."""

    kind: str
    message: str
    at: float


Part = Piece | Finished | Broken


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come. `began`: when it was asked for, monotonic seconds."""

    began: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_at: float | None = None
    end: Finished | Broken | None = None

    def take(self, part: Part) -> None:
        """Add what came."""
        if not isinstance(part, Piece):
            self.end = part
            return
        if part.tokens and self.first_at is None:
            self.first_at = part.at
        self.tokens += part.tokens
        self.text += part.text

    @property
    def first_token_seconds(self) -> float | None:
        """From the asking to the first token; None: there was none."""
        return None if self.first_at is None else self.first_at - self.began


class Client(Protocol):
    """Asks one engine."""

    def stream(self, asked: Asked) -> AsyncIterator[Part]:
        """Ask; the last thing that comes is Finished or Broken."""
        ...


class EngineClient:
    """Asks one of our own engines (docs/engine-http.md).

    Args:
        url: its address.
    """

    def __init__(self, url: str) -> None:
        self._url = url

    async def stream(self, asked: Asked) -> AsyncIterator[Part]:
        """Ask; the last thing that comes is Finished or Broken."""
        async with aclosing(events(f"{self._url}/v1/chat/completions", _body(asked))) as told:
            async for event in told:
                part = event if isinstance(event, Broken) else _read(event)
                yield part
                if isinstance(part, Finished):
                    return


async def events(url: str, body: Mapping[str, Any]) -> AsyncGenerator[Mapping[str, Any] | Broken, None]:
    """Post a request and give the stream's events; the last one is Broken, unless who reads them leaves before."""
    timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    try:
        async with (
            plain_client(timeout) as client,
            client.stream("POST", url, json=body) as response,
        ):
            if response.status_code != httpx.codes.OK:
                yield _refused(response.status_code, await response.aread())
                return
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    yield Broken(event["error"]["type"], event["error"]["message"], time.monotonic())
                    return
                yield event
        yield Broken("connection", "the stream ended before the answer did", time.monotonic())
    except httpx.HTTPError as error:
        yield Broken("connection", str(error) or type(error).__name__, time.monotonic())


def _refused(status: int, answer: bytes) -> Broken:
    """From the body of an answer with another status than 200."""
    try:
        error = json.loads(answer)["error"]
        kind, message = error["type"], error["message"]
    except (ValueError, KeyError, TypeError):
        kind, message = f"status {status}", answer.decode(errors="replace")
    bad = status in {httpx.codes.BAD_REQUEST, httpx.codes.REQUEST_ENTITY_TOO_LARGE}
    return Broken("invalid_request" if bad else kind, message, time.monotonic())


def _body(asked: Asked) -> dict[str, Any]:
    digests = {} if asked.digests_at is None else {"kv_digests": list(asked.digests_at)}
    return {
        "messages": list(asked.prompt.messages),
        "session": asked.session,
        "max_tokens": asked.tokens_max,
        "resume_token_ids": list(asked.resumed),
        "stream": True,
        "return_token_ids": True,
        **digests,
    }


def _read(event: Mapping[str, Any]) -> Piece | Finished:
    now = time.monotonic()
    if "kvlog" in event:
        return Finished(event["kvlog"], event["usage"]["prompt_tokens"], now)
    choice = event["choices"][0]
    return Piece(tuple(choice.get("token_ids", ())), choice["delta"].get("content", ""), now)


async def whole_answer(client: Client, asked: Asked) -> Answer:
    """Ask an engine and wait for the end, whichever it is."""
    answer = Answer(time.monotonic())
    async for part in client.stream(asked):
        answer.take(part)
    return answer
