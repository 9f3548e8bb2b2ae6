"""A synthetic engine with its HTTP server in this process, and a client's few words to it."""

from __future__ import annotations

import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import uvicorn

from consumers.plain_http import NO_AUTHORITIES
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.server import EngineServer
from kvlog.engines.step_loop import StepLoop, StepLoopOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from tests.integration import one_request
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvlog.engines.acked_gate import AckedOptions

__all__ = [
    "MODEL",
    "PROMPT",
    "SECONDS",
    "Served",
    "complete",
    "events",
    "ids",
    "serving",
    "serving_beside_a_daemon",
    "streamed",
    "text",
    "wait_for",
]

SECONDS = 10.0
wait_for = partial(one_request.wait_for, seconds=SECONDS)
MODEL = SyntheticModel(SyntheticOptions(row_bytes=1024))
PROMPT = "once upon a time"


@dataclass
class Served:
    """An engine that listens."""

    client: httpx.Client
    replicator: Replicator
    loop: StepLoop
    daemon: FakeDaemon | None = None


@contextmanager
def serving_beside_a_daemon(path: Path) -> Iterator[Served]:
    """An engine with a daemon (`daemon`), for tests that disturb neither."""
    with FakeDaemon.running(path, Knobs(block_bytes=1 << 16)) as running, serving(path) as served:
        served.daemon = running.daemon
        yield served


@contextmanager
def serving(path: Path, *, acked: AckedOptions | None = None, **options) -> Iterator[Served]:
    """An engine in this process, on a free port of 127.0.0.1."""
    replicator = Replicator(ReplicatorOptions(socket=path, close_seconds=0.2), MODEL.identity)
    loop = StepLoop(MODEL, replicator, StepLoopOptions(**options))
    config = uvicorn.Config(
        EngineServer(MODEL, loop, replicator, acked).app(),
        "127.0.0.1",
        0,
        log_level="warning",
        lifespan="off",
        ws="none",
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    replicator.start()
    replicator.wait_connected(1.0)
    loop.start()
    thread.start()
    wait_for(lambda: server.started)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", verify=NO_AUTHORITIES, timeout=SECONDS
        ) as client:
            yield Served(client, replicator, loop)
    finally:
        server.should_exit = True
        thread.join(SECONDS)
        loop.close()
        replicator.close()


def complete(client: httpx.Client, **body) -> Any:
    """One answer, not streamed."""
    response = client.post("/v1/completions", json={"prompt": PROMPT, "return_token_ids": True, **body})
    assert response.status_code == 200, response.text
    return response.json()


def events(response: httpx.Response) -> Iterator[dict]:
    """The events of a stream; the last one, [DONE], must come unless there was an error."""
    for line in response.iter_lines():
        if line == "data: [DONE]":
            return
        if line:
            event = json.loads(line.removeprefix("data: "))
            yield event
            if "error" in event:
                return
    pytest.fail("the stream ended without [DONE]")


def streamed(client: httpx.Client, **body) -> list[dict]:
    """All events of one streamed answer."""
    body = {"prompt": PROMPT, "return_token_ids": True, "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response))


def ids(chunks: list[dict]) -> list[int]:
    """Token ids of a stream."""
    return [token for chunk in chunks for token in chunk["choices"][0].get("token_ids", [])]


def text(chunks: list[dict]) -> str:
    """Text of a stream."""
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)
