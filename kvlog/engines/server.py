"""The engine's HTTP server: OpenAI's completions over a StepLoop, streamed or whole. Documented in docs/engine-http.md.

The event loop only parses and formats; computing and the daemon have threads of their own. An answer's events come in
by `call_soon_threadsafe` into a queue that is as long as the answer at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from kvlog.engines.acked_gate import AckedGate, AckedOptions
from kvlog.engines.acked_output import AckedOutput
from kvlog.engines.generation import Generation, NewToken
from kvlog.engines.http_answer import DONE, AnswerFormat, WholeAnswer, error_body, event, failure_status
from kvlog.engines.http_body import BODY_BYTES_MAX, Call, parse_call, sentence
from kvlog.engines.jobs import AnswerEvent, Failed, Finished, Job, JobSession
from kvlog.errors import LocalProtocolError
from kvlog.ids import SessionId

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

    from kvlog.engines.base import StepModel
    from kvlog.engines.replicator import Replicator
    from kvlog.engines.step_loop import StepLoop

__all__ = ["EngineServer"]

_RETRY_AFTER_SECONDS = 1

_CLIENT_LEFT = 499
"""nginx's word for it; nobody reads this answer."""


@dataclass(frozen=True, slots=True)
class _Answering:
    """One request on its way: where its events come in, with the time of each, and how they go out."""

    job: Job
    events: asyncio.Queue[tuple[float, AnswerEvent]]
    shape: AnswerFormat


class EngineServer:
    """Makes the ASGI application; model, loop and replicator are started and closed by whoever made them.

    Args:
        model: for token ids, text and limits.
        loop: what computes.
        replicator: for `/health`.
        acked: for requests in `acked` mode that say nothing else.
    """

    def __init__(
        self, model: StepModel, loop: StepLoop, replicator: Replicator, acked: AckedOptions | None = None
    ) -> None:
        self._model = model
        self._loop = loop
        self._replicator = replicator
        self._acked = acked or AckedOptions()

    def app(self) -> Starlette:
        """The application."""
        return Starlette(
            routes=[
                Route("/v1/completions", self._completions, methods=["POST"]),
                Route("/v1/chat/completions", self._chat, methods=["POST"]),
                Route("/v1/models", self._models, methods=["GET"]),
                Route("/health", self._health, methods=["GET"]),
            ],
        )

    async def _models(self, _: Request) -> Response:
        model = {"id": self._model.name, "object": "model", "owned_by": "kvlog"}
        return JSONResponse({"object": "list", "data": [model]})

    async def _health(self, _: Request) -> Response:
        failure = self._loop.failure
        return JSONResponse(
            {
                "status": "ok" if failure is None else f"failed: {failure}",
                "connected": self._replicator.connected,
                "active": self._loop.active,
                "queued": self._loop.queued,
                "replication": asdict(self._replicator.counts),
                "loads": asdict(self._replicator.loads),
            },
            200 if failure is None else 503,
        )

    async def _completions(self, request: Request) -> Response:
        return await self._serve(request, chat=False)

    async def _chat(self, request: Request) -> Response:
        return await self._serve(request, chat=True)

    async def _serve(self, request: Request, *, chat: bool) -> Response:
        data = await _body(request)
        if data is None:
            return JSONResponse(error_body("invalid_request", f"body: over {BODY_BYTES_MAX} bytes."), 413)
        try:
            sessions = [value for name, value in request.headers.raw if name == b"x-session-id"]
            call = parse_call(data, self._model, chat=chat, session_headers=sessions)
        except LocalProtocolError as error:
            return JSONResponse(error_body("invalid_request", sentence(error)), 400)
        answering = self._answering(call, chat=chat)
        if not self._loop.submit(answering.job):
            if (failure := self._loop.failure) is not None:
                message = f"This engine has failed and answers nothing any more: {failure}"
                return JSONResponse(error_body("failed", message), 503)
            return JSONResponse(
                error_body("overloaded", "The queue of this engine is full; try again, or elsewhere."),
                503,
                headers={"Retry-After": str(_RETRY_AFTER_SECONDS)},
            )
        if call.stream:
            return StreamingResponse(self._stream(answering), media_type="text/event-stream")
        return await self._whole(answering, request)

    def _answering(self, call: Call, *, chat: bool) -> _Answering:
        request_id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        generation = Generation(call.request, self._model)
        gate = None
        if call.acked:
            options = replace(self._acked, seconds=call.acked_seconds or self._acked.seconds)
            gate = AckedGate(options, len(generation.tokens))
        shape = AnswerFormat(
            request_id,
            self._model.name,
            chat,
            call.return_token_ids,
            prompt_tokens=len(call.request.prompt),
            resumed_tokens=generation.answer_tokens,
            acked=gate,
        )
        # An answer's events: its tokens, bounded by max_tokens.
        events: asyncio.Queue[tuple[float, AnswerEvent]] = asyncio.Queue()
        running = asyncio.get_running_loop()

        def sink(told: AnswerEvent) -> None:
            if gate is not None and isinstance(told, Failed):
                gate.fail()
            with contextlib.suppress(RuntimeError):  # the event loop has ended before the step loop
                running.call_soon_threadsafe(events.put_nowait, (time.monotonic(), told))

        session = JobSession(
            call.session or SessionId(request_id), call.session is not None, call.mode, call.take_over
        )
        return _Answering(Job(generation, session, sink, call.kv_digests, gate), events, shape)

    async def _stream(self, answering: _Answering) -> AsyncIterator[bytes]:
        """Events until the end; a client that leaves cancels the job."""
        shape, tokens = answering.shape, 0
        try:
            if (opening := shape.opening()) is not None:
                yield event(opening)
            async for told in _told(answering):
                match told:
                    case NewToken():
                        tokens += 1
                        yield event(shape.token_chunk(told))
                    case Failed():
                        yield event(error_body(told.kind, told.message))
                        return
                    case Finished():
                        yield event(shape.last_chunk(told, tokens))
                        yield DONE
                        return
        finally:
            self._loop.cancel(answering.job)

    async def _whole(self, answering: _Answering, request: Request) -> Response:
        try:
            async with asyncio.TaskGroup() as group:
                collecting = group.create_task(self._collect(answering))
                leaving = group.create_task(_disconnected(request))
                await asyncio.wait([collecting, leaving], return_when=asyncio.FIRST_COMPLETED)
                answer = collecting.result() if collecting.done() else Response(status_code=_CLIENT_LEFT)
                collecting.cancel()
                leaving.cancel()
            return answer
        finally:
            self._loop.cancel(answering.job)

    async def _collect(self, answering: _Answering) -> Response:
        answer = WholeAnswer()
        async for told in _told(answering):
            match told:
                case NewToken():
                    answer.add(told)
                case Failed():
                    return JSONResponse(error_body(told.kind, told.message), failure_status(told))
                case Finished():
                    return JSONResponse(answering.shape.whole(answer, told))
        raise AssertionError("an answer ends with Finished or Failed")


async def _told(answering: _Answering) -> AsyncIterator[AnswerEvent]:
    """An answer's events, each when it may be shown; the last one is Finished or Failed."""
    job, held = answering.job, None
    while True:
        told: AnswerEvent | None
        at, told = await answering.events.get()
        if isinstance(told, NewToken) and job.acked is not None:
            if held is None:
                assert job.handle is not None, "a turn is opened before its first token"
                held = AckedOutput(job.acked, job.handle)
            told = await held.wait(told, at)
        if told is not None:
            yield told
            if not isinstance(told, NewToken):
                return


async def _body(request: Request) -> bytes | None:
    """The body; None if it is too large."""
    data = bytearray()
    async for part in request.stream():
        data += part
        if len(data) > BODY_BYTES_MAX:
            return None
    return bytes(data)


async def _disconnected(request: Request) -> None:
    """Return when the client has left."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
