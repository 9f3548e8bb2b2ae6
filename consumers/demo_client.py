"""The demo's client: streams chat completions from an engine and notes when each piece came. It is the router here."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping, Sequence

    from consumers.demo_prompt import Prompt

__all__ = ["Answer", "Asked", "Broken", "Finished", "Piece", "stream", "whole_answer"]

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

    def body(self) -> dict[str, Any]:
        """The request's JSON."""
        digests = {} if self.digests_at is None else {"kv_digests": list(self.digests_at)}
        return {
            "messages": list(self.prompt.messages),
            "session": self.session,
            "max_tokens": self.tokens_max,
            "resume_token_ids": list(self.resumed),
            "stream": True,
            "return_token_ids": True,
            **digests,
        }


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


@dataclass(slots=True)
class Answer:
    """An answer as far as it has come. `began`: when it was asked for, monotonic seconds."""

    began: float
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_at: float | None = None
    end: Finished | Broken | None = None

    def take(self, part: Piece | Finished | Broken) -> None:
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


async def stream(url: str, asked: Asked) -> AsyncIterator[Piece | Finished | Broken]:
    """Ask an engine; the last thing that comes is Finished or Broken."""
    timeout = httpx.Timeout(_SILENCE_SECONDS, connect=_CONNECT_SECONDS)
    try:
        async with (
            httpx.AsyncClient(
                trust_env=False, timeout=timeout
            ) as client,  # no proxy between us and this machine
            client.stream("POST", f"{url}/v1/chat/completions", json=asked.body()) as response,
        ):
            if response.status_code != httpx.codes.OK:
                error = json.loads(await response.aread())["error"]
                yield Broken(error["type"], error["message"], time.monotonic())
                return
            async for line in response.aiter_lines():
                part = _read(line)
                if part is not None:
                    yield part
                if isinstance(part, Finished | Broken):
                    return
        yield Broken("connection", "the stream ended before the answer did", time.monotonic())
    except httpx.HTTPError as error:
        yield Broken("connection", str(error) or type(error).__name__, time.monotonic())


def _read(line: str) -> Piece | Finished | Broken | None:
    now = time.monotonic()
    if not line.startswith("data: ") or line == "data: [DONE]":
        return None
    chunk = json.loads(line.removeprefix("data: "))
    if "error" in chunk:
        return Broken(chunk["error"]["type"], chunk["error"]["message"], now)
    if "kvlog" in chunk:
        return Finished(chunk["kvlog"], chunk["usage"]["prompt_tokens"], now)
    choice = chunk["choices"][0]
    return Piece(tuple(choice.get("token_ids", ())), choice["delta"].get("content", ""), now)


async def whole_answer(url: str, asked: Asked) -> Answer:
    """Ask an engine and wait for the end, whichever it is."""
    answer = Answer(time.monotonic())
    async for part in stream(url, asked):
        answer.take(part)
    return answer
