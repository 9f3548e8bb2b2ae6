"""The middleware and its channel: who is fenced hears of it, once, and nobody else does."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from kvlog.engines.fence_board import FenceBoard, FenceReader
from kvlog.engines.vllm_fence import FenceMiddleware

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


@pytest.fixture
def engine() -> str:
    """A name of this test's own."""
    return f"test-{os.urandom(8).hex()}"


@pytest.fixture
def board(engine):
    """A scheduler's end."""
    one = FenceBoard(engine)
    assert one.start()
    yield one
    one.close()


def heard_by(engine: str) -> tuple[list[str], threading.Event]:
    """A started reader's list, and an event at each name."""
    names: list[str] = []
    event = threading.Event()

    def hear(name: str) -> None:
        names.append(name)
        event.set()

    FenceReader(engine, hear).start()
    return names, event


def test_board_tells_readers_that_come_before_and_after(engine, board):
    """A reader that connects late hears what was said shortly before."""
    board.say("cmpl-a-0-ab")
    names, event = heard_by(engine)
    assert event.wait(5)
    event.clear()
    board.say("cmpl-b-0-cd")
    assert event.wait(5)
    assert ["cmpl-a-0-ab", "cmpl-b-0-cd"] == names


def test_reader_waits_for_a_board_that_is_not_there_yet(engine):
    """The HTTP process starts before the engine."""
    names, event = heard_by(engine)
    board = FenceBoard(engine)
    board.start()
    board.say("x")
    assert event.wait(5)
    assert ["x"] == names
    board.close()


def test_board_whose_name_is_taken_tells_nobody(engine, board):
    """It does not fail either."""
    assert not FenceBoard(engine).start()


class Client:
    """One request through a middleware around an app of the test's."""

    def __init__(self, app: Any, headers: tuple[tuple[bytes, bytes], ...] = ()) -> None:
        self.sent: list[Any] = []
        self.middleware = FenceMiddleware(app)
        state = SimpleNamespace(
            vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id="none"))
        )
        self.scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "headers": list(headers),
            "app": SimpleNamespace(state=state),
        }

    async def receive(self) -> Any:
        """Nothing comes."""
        return await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        """Note it."""
        self.sent.append(message)

    async def run(self) -> None:
        """Ask."""
        await self.middleware(self.scope, self.receive, self.send)


def request_id(scope: Any) -> str:
    """What vLLM would build its id of."""
    return next(str(value, "ascii") for key, value in scope["headers"] if key == b"x-request-id")


async def test_fenced_stream_ends_with_an_error_event_and_its_request_is_let_go():
    """Nothing is sent after it, whatever the engine still emits."""
    ended: list[bool] = []

    async def app(scope, receive, send):
        await send(START)
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        client.middleware.heard(f"cmpl-{request_id(scope)}-0-ab12cd34")
        try:
            while True:
                await asyncio.sleep(0)
                await send({"type": "http.response.body", "body": b"data: 2\n\n", "more_body": True})
        except asyncio.CancelledError:
            ended.append(True)
            raise

    client = Client(app)
    await client.run()
    last = client.sent[-1]
    event = json.loads(last["body"].removeprefix(b"data: "))
    assert ("fenced", False, [True]) == (event["error"]["type"], last.get("more_body", False), ended)


async def test_fenced_answer_that_has_not_begun_is_a_conflict():
    """A client that does not stream gets a status."""

    async def app(scope, receive, send):
        client.middleware.heard(f"chatcmpl-{request_id(scope)}-ab12cd34")
        await asyncio.Event().wait()

    client = Client(app)
    await client.run()
    assert [("http.response.start", 409)] == [(m["type"], m["status"]) for m in client.sent[:1]]


async def test_other_request_is_not_touched():
    """Nor is one whose id only begins alike."""

    async def app(scope, receive, send):
        client.middleware.heard(f"cmpl-{request_id(scope)}0-0-ab12cd34")
        client.middleware.heard("cmpl-other-0-ab12cd34")
        await asyncio.sleep(0.01)
        await send(START)
        await send({"type": "http.response.body", "body": b"whole"})

    client = Client(app)
    await client.run()
    assert [START, {"type": "http.response.body", "body": b"whole"}] == client.sent


async def test_client_keeps_its_own_request_id():
    """Unless another request has the same one at the moment."""
    seen = []

    async def app(scope, receive, send):
        seen.append(request_id(scope))
        if len(seen) == 1:
            again = dict(client.scope, headers=[(b"x-request-id", b"mine")])
            await client.middleware(again, client.receive, client.send)

    client = Client(app, ((b"x-request-id", b"mine"),))
    await client.run()
    assert "mine" == seen[0]
    assert "mine" != seen[1]


async def test_failure_of_the_app_is_the_apps():
    """The middleware neither hides nor changes it."""

    async def app(scope, receive, send):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await Client(app).run()


async def test_server_without_a_connector_is_left_alone():
    """Nothing is added to its requests."""
    seen = []

    async def app(scope, receive, send):
        seen.append(scope["headers"])

    client = Client(app)
    client.scope["app"].state.vllm_config = None
    await client.run()
    assert [[]] == seen
