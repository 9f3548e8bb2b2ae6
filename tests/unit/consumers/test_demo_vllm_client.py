"""The demo's client of a vLLM server: what it asks, what it reads, and what it tells when nobody told it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import TYPE_CHECKING, Any

import pytest

from consumers.demo_client import Answer, Asked, Broken, Finished, whole_answer
from consumers.demo_error import DemoError
from consumers.demo_prompt import Prompt
from consumers.demo_vllm_client import PromptTokens, VllmClient, Witness, told

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TURN = {
    "session": "s",
    "length": 12,
    "known": 10,
    "loaded": 9,
    "logged": True,
    "reason": None,
    "open_turn_ms": 5.0,
    "attach_ms": 2.0,
    "kv_digests": {"9": ["a"]},
}


class Server:
    """Answers as vLLM does, from what the test has set."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []
        self.tokenized: tuple[int, str] = (200, json.dumps({"tokens": [1, 2, 3]}))
        self.lines: list[str] = []
        self.status = 200
        self.url = ""


@contextmanager
def serving() -> Iterator[Server]:
    """A server on a thread."""
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            server.asked.append((self.path, body))
            status, text = server.tokenized
            if self.path == "/v1/completions":
                status, text = server.status, "".join(f"{line}\n\n" for line in server.lines)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        server.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        http.shutdown()
        thread.join()


def chunk(*tokens: int, text: str = "") -> str:
    """A piece of a stream."""
    return "data: " + json.dumps({"choices": [{"token_ids": list(tokens), "text": text}]})


USAGE = "data: " + json.dumps({"choices": [], "usage": {"prompt_tokens": 5}})


async def ask(server: Server, witness: Path, *, resumed: tuple[int, ...] = ()) -> Answer:
    """One request of a session with a witness."""
    client = VllmClient(server.url, Witness(witness), PromptTokens())
    asked = Asked(prompt=Prompt.make("Why?"), session="s", tokens_max=20, resumed=resumed, digests_at=(7,))
    return await whole_answer(client, asked)


async def test_stream_ends_with_what_the_witness_told(tmp_path, monkeypatch):
    """Pieces as they come; the end has the turn that ended after the question, not one of before."""
    witness = tmp_path / "w"
    witness.write_text(json.dumps(TURN | {"loaded": 1}) + "\n" + json.dumps(TURN | {"session": "t"}) + "\n")
    real = Witness.next_turn

    async def next_turn(self: Witness, session: str, before: int) -> dict[str, Any] | None:
        assert ("s", 1) == (session, before)
        with witness.open("a") as file:
            file.write(json.dumps(TURN) + "\n" + '{"session": "s", "half')
        return await real(self, session, before)

    monkeypatch.setattr(Witness, "next_turn", next_turn)
    with serving() as server:
        server.lines = [chunk(7, text=" a"), chunk(8, 9, text=" b"), USAGE, "data: [DONE]"]
        answer = await ask(server, witness, resumed=(5, 6))
    assert ([7, 8, 9], " a b") == (answer.tokens, answer.text)
    assert isinstance(answer.end, Finished)
    assert (9, 1, True) == tuple(answer.end.kvlog[name] for name in ("attached", "recomputed", "logged"))
    assert 3 == answer.end.prompt_tokens
    body = server.asked[-1][1]
    assert ([1, 2, 3, 5, 6], 18, 0) == (body["prompt"], body["max_tokens"], body["temperature"])
    assert {"take_over": True} == body["kv_transfer_params"]["kvlog"]
    assert {"digests_at": [7]} == body["kv_transfer_params"]["kvlog_witness"]


async def test_prompt_is_tokenized_once_for_all_servers(tmp_path):
    """What the timed request sends is known before; a question is not asked of the node that is to be timed."""
    prompts, prompt = PromptTokens(), Prompt.make("Why?")
    with serving() as server:
        assert (1, 2, 3) == await prompts.of(prompt, server.url)
    assert (1, 2, 3) == await prompts.of(prompt, "http://127.0.0.1:1")


async def test_stream_of_a_killed_or_fenced_server_is_broken(tmp_path):
    """An end without a usage is no end; an error event is told by its kind; a refusal by its status."""
    with serving() as server:
        server.lines = [chunk(7)]
        answer = await ask(server, tmp_path / "w")
        assert isinstance(answer.end, Broken)
        assert ([7], "connection") == (answer.tokens, answer.end.kind)
        server.lines = [chunk(7), 'data: {"error": {"type": "fenced", "code": 409, "message": "gone"}}']
        assert "fenced" == getattr((await ask(server, tmp_path / "w")).end, "kind", "")
        server.status, server.lines = 400, ['{"error": {"type": "BadRequestError", "message": "too long"}}']
        assert "invalid_request" == getattr((await ask(server, tmp_path / "w")).end, "kind", "")
        server.status, server.lines = 500, ["it broke"]
        assert "status 500" == getattr((await ask(server, tmp_path / "w")).end, "kind", "")


async def test_model_without_a_chat_template_is_told_in_a_sentence(tmp_path):
    """Whatever vLLM says of it; a server that is not there, too."""
    with serving() as server:
        server.tokenized = (400, '{"error": {"message": "no chat template"}}')
        with pytest.raises(DemoError, match=r"no chat template.*Name a model with a chat template"):
            await ask(server, tmp_path / "w")
    with pytest.raises(DemoError, match="vLLM does not answer"):
        await PromptTokens().of(Prompt.make("Why?"), "http://127.0.0.1:1")


async def test_turn_that_nobody_followed_proves_nothing(tmp_path, monkeypatch):
    """It says so instead of waiting for ever, and has no digests that could be equal to anything."""
    monkeypatch.setattr("consumers.demo_vllm_client._TOLD_SECONDS", 0.02)
    with serving() as server:
        server.lines = [chunk(7), USAGE]
        answer = await ask(server, tmp_path / "w")
    assert isinstance(answer.end, Finished)
    assert (False, 0, {}) == tuple(answer.end.kvlog[name] for name in ("logged", "attached", "kv_digests"))
    assert told(None).keys() == told(TURN).keys()
