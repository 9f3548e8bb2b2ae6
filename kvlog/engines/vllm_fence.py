"""An ASGI middleware for vLLM's HTTP server: ends the answer of a request whose session another node has taken.

    vllm serve … --middleware kvlog.engines.vllm_fence.FenceMiddleware

A connector cannot abort a request. This one gives each request an X-Request-Id, which vLLM builds its own id of, hears
from the scheduler's process which ids were fenced, and then says so to the client and lets go of the request: a
streamed answer ends with an error event, another one with status 409; vLLM takes it for a client that has left, and
aborts.
"""

from __future__ import annotations

import asyncio
import json
import threading
import uuid
from typing import TYPE_CHECKING, Any, Final

from kvlog.engines.fence_board import FenceReader

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, MutableMapping

    Scope = MutableMapping[str, Any]
    Message = MutableMapping[str, Any]
    Receive = Callable[[], Awaitable[Message]]
    Send = Callable[[Message], Awaitable[None]]
    App = Callable[[Scope, Receive, Send], Awaitable[None]]

__all__ = ["FenceMiddleware"]

_HEADER: Final = b"x-request-id"
_ERROR: Final = {
    "error": {
        "type": "fenced",
        "code": 409,
        "message": "Another node has taken this session over; nothing of this answer counts from here on.",
    }
}


class _Answer:
    """One request's answer on its way out; what comes after `fence` is dropped."""

    def __init__(self, send: Send, loop: asyncio.AbstractEventLoop) -> None:
        self._send = send
        self._loop = loop
        self._started = self._over = self._streamed = False
        self.fenced = asyncio.Event()
        self.failure: Exception | None = None

    def fence(self) -> None:
        """Called on any thread."""
        self._loop.call_soon_threadsafe(self.fenced.set)

    async def send(self, message: Message) -> None:
        """Pass a message on."""
        if self.fenced.is_set():
            return
        if message["type"] == "http.response.start":
            self._started = True
            self._streamed = any(b"event-stream" in value for _, value in message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._over = not message.get("more_body", False)
        await self._send(message)

    async def say_fenced(self) -> None:
        """End the answer so that its client can tell."""
        text = json.dumps(_ERROR).encode()
        if not self._started:
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(text)).encode())]
            await self._send({"type": "http.response.start", "status": 409, "headers": headers})
            await self._send({"type": "http.response.body", "body": text})
        elif not self._over:
            body = b"data: " + text + b"\n\n" if self._streamed else b""
            await self._send({"type": "http.response.body", "body": body})


class FenceMiddleware:
    """Made by vLLM around its app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._answers: dict[str, _Answer] = {}
        self._reader: FenceReader | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, and watch it."""
        if scope["type"] != "http" or scope.get("method") != "POST" or not self._listens(scope):
            await self._app(scope, receive, send)
            return
        answer = _Answer(send, asyncio.get_running_loop())
        name = self._enter(scope, answer)
        try:
            await self._watched(scope, receive, answer)
        finally:
            with self._lock:
                self._answers.pop(name, None)

    async def _watched(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_serve(self._app, scope, receive, answer))
            watching = tasks.create_task(answer.fenced.wait())
            await asyncio.wait((serving, watching), return_when=asyncio.FIRST_COMPLETED)
            watching.cancel()
            if not serving.done():
                await answer.say_fenced()
                serving.cancel()
        if answer.failure is not None:
            raise answer.failure

    def heard(self, request: str) -> None:
        """A request was fenced; called on the reader's thread with vLLM's id of it."""
        with self._lock:
            for name, answer in self._answers.items():
                if f"-{name}-" in request:
                    answer.fence()

    def _listens(self, scope: Scope) -> bool:
        """Whether there is a connector to hear from; begins to listen with the first request."""
        if self._reader is None:
            config = getattr(getattr(scope.get("app"), "state", None), "vllm_config", None)
            transfer = getattr(config, "kv_transfer_config", None)
            if transfer is None:
                return False
            self._reader = FenceReader(str(transfer.engine_id), self.heard)
            self._reader.start()
        return True

    def _enter(self, scope: Scope, answer: _Answer) -> str:
        """Give the request an id that no other one has; its client's own, if it has one."""
        headers = scope["headers"]
        name = next((value.decode("latin-1") for key, value in headers if key.lower() == _HEADER), "")
        with self._lock:
            if not name or name in self._answers:
                name = uuid.uuid4().hex
                others = [(key, value) for key, value in headers if key.lower() != _HEADER]
                scope["headers"] = [*others, (_HEADER, name.encode())]
            self._answers[name] = answer
        return name


async def _serve(app: App, scope: Scope, receive: Receive, answer: _Answer) -> None:
    """Serve it; what goes wrong is the app's and is raised by the middleware as it was, not in a group."""
    try:
        await app(scope, receive, answer.send)
    except Exception as error:  # noqa: BLE001  # a task's top: raised again by who waits for it
        answer.failure = error
