"""The demo's client of a vLLM server, which is a router in little: it has the token ids, and sends them along.

vLLM's stream says nothing of what the connector did, and need not: the witness (kvlog.engines.vllm_witness) tells it
when the turn ends, from what lies in vLLM's own blocks. Token ids in and out are vLLM's own, so what went on on another
server is compared token by token.
"""

from __future__ import annotations

import asyncio
import json
import time
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import httpx

from consumers.demo_client import Broken, Finished, Piece, events
from consumers.demo_error import DemoError
from consumers.exits import ExitCode
from consumers.plain_http import plain_client
from consumers.vllm_server import SERVED_NAME

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping
    from pathlib import Path

    from consumers.demo_client import Asked, Part
    from consumers.demo_prompt import Prompt

__all__ = ["PromptTokens", "VllmClient", "Witness", "told"]

_TOKENIZE_SECONDS = 60.0
_TOLD_SECONDS = 20.0
"""For the turn to end: blocks are held for a bounded time to write what is behind, and digests are made."""

_POLL_SECONDS = 0.005


class PromptTokens:
    """Token ids of conversations, asked of one server and sent to all: each is the same prompt for every server."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, ...]] = {}

    async def of(self, prompt: Prompt, url: str) -> tuple[int, ...]:
        """The ids under the model's chat template, ready for the answer.

        Args:
            prompt: the conversation.
            url: of a server that may be asked, if nobody was before.

        DemoError: the model has no such template, or the server does not answer.
        """
        if prompt.nonce not in self._known:
            body = {"model": SERVED_NAME, "messages": list(prompt.messages)}
            try:
                async with plain_client(_TOKENIZE_SECONDS) as client:
                    answer = await client.post(f"{url}/tokenize", json=body)
            except httpx.HTTPError as error:
                raise DemoError(f"vLLM does not answer: {str(error) or type(error).__name__}") from error
            if answer.status_code != httpx.codes.OK:
                sentence = f"vLLM cannot make a prompt of the conversation: {answer.text}"
                raise DemoError(sentence, fix="Name a model with a chat template.", code=ExitCode.USAGE)
            self._known[prompt.nonce] = tuple(answer.json()["tokens"])
        return self._known[prompt.nonce]


class Witness:
    """What the witness of one server has told so far.

    Args:
        file: where it does.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def told(self) -> list[dict[str, Any]]:
        """Every turn that has ended, oldest first; a line that is still being written is left for later."""
        lines = self._file.read_text().splitlines(keepends=True) if self._file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def turns(self, session: str) -> list[dict[str, Any]]:
        """A session's turns that have ended, oldest first."""
        return [turn for turn in self.told() if turn["session"] == session]

    async def next_turn(self, session: str, before: int) -> dict[str, Any] | None:
        """Wait for one more turn than there were; None: it does not end, or nobody followed it."""
        deadline = time.monotonic() + _TOLD_SECONDS
        while len(found := self.turns(session)) <= before:
            if time.monotonic() > deadline:
                return None
            await asyncio.sleep(_POLL_SECONDS)
        return found[before]


class VllmClient:
    """Asks one server.

    Args:
        url: its address.
        witness: of its engine.
        prompts: shared by all clients of one demo.
    """

    def __init__(self, url: str, witness: Witness, prompts: PromptTokens) -> None:
        self._url = url
        self._witness = witness
        self._prompts = prompts

    async def stream(self, asked: Asked) -> AsyncIterator[Part]:
        """Ask; the last thing that comes is Finished or Broken."""
        prompt = await self._prompts.of(asked.prompt, self._url)
        before = len(self._witness.turns(asked.session))
        async with aclosing(events(f"{self._url}/v1/completions", _body(asked, prompt))) as said:
            async for event in said:
                if isinstance(event, Broken):
                    yield event
                elif event["choices"]:
                    choice = event["choices"][0]
                    yield Piece(tuple(choice.get("token_ids") or ()), choice["text"], time.monotonic())
                else:  # the last event has the usage, and no choices
                    at = time.monotonic()
                    turn = await self._witness.next_turn(asked.session, before)
                    yield Finished(told(turn), len(prompt), at)
                    return


def told(turn: Mapping[str, Any] | None) -> dict[str, Any]:
    """A turn as our own engines would tell it (docs/engine-http.md)."""
    if turn is None:
        untold = {"logged": False, "reason": "its turn was not followed to its end", "kv_digests": {}}
        return untold | {"attached": 0, "recomputed": 0, "open_turn_ms": 0.0, "attach_ms": 0.0}
    return {
        "attached": turn["loaded"],
        "recomputed": turn["known"] - turn["loaded"],
        "logged": turn["logged"],
        "reason": turn["reason"],
        "open_turn_ms": turn["open_turn_ms"],
        "attach_ms": turn["attach_ms"],
        "kv_digests": turn["kv_digests"],
    }


def _body(asked: Asked, prompt: tuple[int, ...]) -> dict[str, Any]:
    """The request's JSON: greedy, and of a session that is taken over if somebody has answered before."""
    witness = {} if asked.digests_at is None else {"kvlog_witness": {"digests_at": list(asked.digests_at)}}
    return {
        "model": SERVED_NAME,
        "prompt": [*prompt, *asked.resumed],
        "max_tokens": asked.tokens_max - len(asked.resumed),
        "temperature": 0,
        "session_id": asked.session,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        "kv_transfer_params": {"kvlog": {"take_over": bool(asked.resumed)}, **witness},
    }
