"""Bad requests at the engine's HTTP server: a 400 that says what to send, and nobody else notices."""

from __future__ import annotations

import json
import socket
from typing import TYPE_CHECKING, Any

import pytest

from tests.integration.fake_daemon import FakeDaemon
from tests.integration.served_engine import (
    PROMPT,
    SECONDS,
    complete,
    events,
    ids,
    serving,
    serving_beside_a_daemon,
    streamed,
    wait_for,
)

if TYPE_CHECKING:
    from tests.integration.served_engine import Served

HINT = "Name the session with 1 to 256 bytes of printable UTF-8."
LONG = "it is 10000 bytes long, 256 is the most"
CONTROL = "it has a control character"

BODIES: list[tuple[object, str]] = [
    ("", "it is empty"),
    ("x" * 10_000, LONG),
    ("€" * 86, "it is 258 bytes long, 256 is the most"),
    ("a\nb", CONTROL),
    ("a\0b", CONTROL),
    ("\x7f", CONTROL),
    ("\x85", CONTROL),
    ("\ud800", "it has a lone surrogate, which is not UTF-8"),
    (5, "it is not a string"),
    (1.5, "it is not a string"),
    (False, "it is not a string"),
    ([], "it is not a string"),
    (["a"], "it is not a string"),
    ({}, "it is not a string"),
]
HEADERS: list[tuple[list[bytes], str]] = [
    ([b""], "it is empty"),
    ([b"x" * 10_000], LONG),
    ([b"a\tb"], CONTROL),
    ([b"\xc2\x85"], CONTROL),
    ([b"\xff"], "the header X-Session-ID is not UTF-8"),
    ([b"\xed\xa0\x80"], "the header X-Session-ID is not UTF-8"),
    ([b"a", b"b"], "there are 2 headers X-Session-ID"),
]
NO_HTTP = [b"a\nb", b"a\0b", b"a\x01b"]
ODD = ["a/b", "../..", "a b", "%2F", "?x=1#y", "é", "日本", "😀", "\\", "'\"", "x" * 256]


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    """An engine with a daemon, for tests that disturb neither."""
    with serving_beside_a_daemon(tmp_path_factory.mktemp("link") / "s") as served:
        yield served


def by_body(served: Served, session: object, path: str = "completions") -> tuple[int, dict[str, Any]]:
    """One request that names its session in the body: surrogates and all, which a client library would not send."""
    prompt = {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}]}
    body = json.dumps({**prompt, "max_tokens": 2, "session": session}).encode()
    response = served.client.post(f"/v1/{path}", content=body)
    return response.status_code, response.json()


def by_header(served: Served, values: list[bytes], path: str = "completions") -> tuple[int, bytes]:
    """One request that names its session in a header, byte for byte."""
    body = json.dumps(
        {"prompt": PROMPT, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 2}
    ).encode()
    lines = [f"POST /v1/{path} HTTP/1.1".encode(), b"Host: x", b"Connection: close"]
    lines += [b"X-Session-ID: " + value for value in values]
    lines += [f"Content-Length: {len(body)}".encode(), b"", body]
    url = served.client.base_url
    with socket.create_connection((url.host, url.port), SECONDS) as connection:
        connection.sendall(b"\r\n".join(lines))
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, said = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), said


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(("session", "problem"), BODIES)
def test_http_bad_session_in_the_body_is_400_and_says_what_to_send(engine, session, problem, path):
    """What cannot be a session's name is refused before anything is computed or logged."""
    before = len(engine.daemon.opened)
    error = {"type": "invalid_request", "message": f"session: {problem}. {HINT}"}
    assert (400, {"error": error}) == by_body(engine, session, path)
    assert before == len(engine.daemon.opened)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(("values", "problem"), HEADERS)
def test_http_bad_session_in_a_header_is_400_and_says_what_to_send(engine, values, problem, path):
    """The header is checked as the body is, and is never a guess between two."""
    before = len(engine.daemon.opened)
    status, said = by_header(engine, values, path)
    error = {"type": "invalid_request", "message": f"session: {problem}. {HINT}"}
    assert (400, {"error": error}) == (status, json.loads(said))
    assert before == len(engine.daemon.opened)


@pytest.mark.parametrize("value", NO_HTTP)
def test_http_header_that_is_no_http_is_400(engine, value):
    """A line break ends a header: what follows it is nobody's session."""
    before = len(engine.daemon.opened)
    assert 400 == by_header(engine, [value])[0]
    assert before == len(engine.daemon.opened)


@pytest.mark.parametrize("session", ODD)
def test_http_odd_session_is_one_and_the_same_in_body_and_header(engine, session):
    """Slashes, spaces and any script are a name like another, whichever way it comes."""
    assert 200 == by_body(engine, session)[0]
    status, said = by_header(engine, [session.encode()])
    assert 200 == status
    assert 0 < json.loads(said)["kvlog"]["attached"]
    assert [session] * 2 == [asked.session for asked in engine.daemon.opened[-2:]]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"prompt": "\ud800"}, "prompt: it has a lone surrogate"),
        ({"prompt": PROMPT, "stop": "\ud800"}, "stop: it has a lone surrogate"),
        ({"prompt": PROMPT, "temperature": 10**400}, "temperature: it is too large."),
        ({"prompt": PROMPT, "temperature": float("nan")}, "temperature: nan is not possible, send "),
        ({"prompt": PROMPT, "acked_seconds": float("inf")}, "acked_seconds: it is not over 0 "),
        ({"prompt": PROMPT, "acked": True, "sync": "ids"}, "sync: ids puts no rows into the log"),
    ],
)
def test_http_value_that_cannot_be_used_is_400(engine, body, said):
    """JSON can spell what no tokenizer and no sampler takes: that is the sender's fault, not the engine's."""
    response = engine.client.post("/v1/completions", content=json.dumps(body).encode())
    assert (400, said) == (response.status_code, response.json()["error"]["message"][: len(said)])


def test_http_bad_requests_cost_an_answer_in_progress_nothing(tmp_path):
    """Amid all of them an answer goes on, is the same and is logged to its last row; the engine takes the next one."""
    path, tokens = tmp_path / "s", 60
    with FakeDaemon.running(path) as running, serving(path, steps_per_second=200) as served:
        expected = ids(streamed(served.client, max_tokens=tokens, session="alone"))
        body = {
            "prompt": PROMPT,
            "return_token_ids": True,
            "stream": True,
            "max_tokens": tokens,
            "session": "good",
        }
        with served.client.stream("POST", "/v1/completions", json=body) as response:
            stream = events(response)
            chunks = [next(stream)]
            refused = [by_body(served, session)[0] for session, _ in BODIES]
            refused += [by_header(served, values)[0] for values, _ in HEADERS]
            refused += [by_header(served, [value])[0] for value in NO_HTTP]
            chunks += stream
        assert {400} == set(refused)
        assert expected == ids(chunks)
        wait_for(lambda: len(running.daemon.sessions["good"].tokens) == len(PROMPT) + tokens - 1)
        assert {"alone", "good"} == set(running.daemon.sessions)
        assert "ok" == served.client.get("/health").json()["status"]
        assert expected == complete(served.client, max_tokens=tokens)["choices"][0]["token_ids"]
