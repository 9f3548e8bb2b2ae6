"""Both ends of a link over a real socket, for its tests: a recording daemon, an engine, and waiting for conditions."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlog.link.client import ClientOptions, connect
from kvlog.link.server import Accepted, LinkServer, Peer, ServerOptions
from tests.unit.link.samples import HELLO, OPEN_TURN, TURN_OPENED, WELCOME

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.errors import LinkClosed
    from kvlog.link.messages import (
        OpenTurn,
        Rejected,
        TurnOpened,
        TurnUnlogged,
    )

SECONDS = 5.0
"""No condition of these tests takes so long, unless it never comes."""


class Handler:
    """Records everything; answers as told."""

    def __init__(self) -> None:
        self.fds = [os.open("/dev/null", os.O_RDONLY) for _ in range(3)]
        self.answer: Accepted | Rejected = Accepted(WELCOME, tuple(self.fds))
        self.reply: Callable[[OpenTurn], TurnOpened | TurnUnlogged] = lambda asked: replace(
            TURN_OPENED, request=asked.request
        )
        self.hold: asyncio.Event | None = None
        self.calls: list[object] = []
        self.causes: list[Exception | None] = []
        self.peers: list[Peer] = []
        self.cancelled = 0

    async def hello(self, peer, message):
        self.peers.append(peer)
        return self.answer

    async def open_turn(self, peer, message):
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return self.reply(message)

    def close_turn(self, peer, message):
        self.calls.append(message)

    def release(self, peer, message):
        self.calls.append(message)

    def forget(self, peer, message):
        raise RuntimeError("a bug of the handler")

    def closed(self, peer, cause):
        self.causes.append(cause)


@dataclass
class Events:
    """What a client was told."""

    seen: list[object] = field(default_factory=list)
    cause: LinkClosed | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def link_event(self, client, event):
        self.seen.append(event)

    def link_closed(self, client, cause):
        self.cause = cause
        self.ended.set()


class Daemon:
    """A LinkServer on a thread."""

    def __init__(self, path, options: ServerOptions | None = None) -> None:
        self.handler = Handler()
        self.server = LinkServer(path, self.handler, options)
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run)
        self.task: asyncio.Task[None] | None = None

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self.loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self.task = asyncio.create_task(self.server.serve())
        await asyncio.wait([self.task])

    def call(self, what: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(what)

    def stop(self) -> None:
        if self.thread.is_alive():
            self.call(lambda: self.task and self.task.cancel())
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def running(path, options: ServerOptions | None = None):
    """A daemon for a test."""
    daemon = Daemon(path, options)
    daemon.server.listen()
    daemon.thread.start()
    try:
        yield daemon
    finally:
        daemon.stop()
        for fd in daemon.handler.fds:
            os.close(fd)


@contextmanager
def linked(path, options: ClientOptions | None = None):
    """A started client and its events."""
    client = connect(path, HELLO, options or ClientOptions())
    for fd in client.fds:
        os.close(fd)
    events = Events()
    client.start(events)
    try:
        yield client, events
    finally:
        client.close()
        assert events.ended.wait(SECONDS)
        client.join(SECONDS)


@contextmanager
def plain(path):
    """A socket that says what the test wants."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(SECONDS)
        connection.connect(os.fspath(path))
        yield connection


def wait_for(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)


def ask(client, message=OPEN_TURN) -> object:
    """Ask and wait for the answer."""
    answers: list[object] = []
    done = threading.Event()

    def answered(answer) -> bool:
        answers.append(answer)
        done.set()
        return True

    client.ask(lambda number: replace(message, request=number), answered)
    assert done.wait(SECONDS)
    return answers[0]


def keeper(answers: list[object]):
    """Takes an answer into a list."""

    def answered(answer) -> bool:
        answers.append(answer)
        return True

    return answered
