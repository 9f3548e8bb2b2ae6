"""Both ends of the link over a real socket: greeting, questions, bounds, and peers that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import ConfigError, LinkClosed
from kvlog.ids import Position, Turn
from kvlog.limits import TINY
from kvlog.link.client import ClientOptions, connect
from kvlog.link.frames import DaemonFrames, encode
from kvlog.link.listener import Credentials
from kvlog.link.messages import (
    Acked,
    CloseTurn,
    OpenTurn,
    Rejected,
    RejectReason,
    Release,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.link.server import Accepted, LinkServer, Peer, ServerOptions
from tests.unit.link.samples import HELLO, OPEN_TURN, TURN_OPENED, WELCOME

if TYPE_CHECKING:
    from collections.abc import Callable

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


def test_link_greeting_brings_welcome_and_three_descriptors(tmp_path):
    """An engine gets ring, pool and doorbell with the welcome, closed on exec."""
    with running(tmp_path / "s") as daemon:
        client = connect(tmp_path / "s", HELLO, ClientOptions())
        assert WELCOME == client.welcome
        assert [False] * 3 == [os.get_inheritable(fd) for fd in client.fds]
        assert [Path("/dev/null").stat().st_ino] * 3 == [os.fstat(fd).st_ino for fd in client.fds]
        peer = daemon.handler.peers[0]
        assert (HELLO, os.getpid()) == (peer.hello, peer.credentials.pid)
        for fd in client.fds:
            os.close(fd)
        client.start(Events())
        client.close()
        client.join(SECONDS)


def test_link_question_is_answered_and_messages_keep_their_order(tmp_path):
    """What an engine sends arrives in its order; answers find their question."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, _):
        assert isinstance(ask(client), TurnOpened)
        sent = [CloseTurn(Turn(k), Position(k)) for k in range(100)]
        for message in sent:
            client.send(message)
        wait_for(lambda: len(daemon.handler.calls) == 100)
        assert sent == daemon.handler.calls


def test_link_events_reach_the_engine(tmp_path):
    """The daemon speaks without being asked."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, events):
        ask(client)
        event = Acked(Turn(3), Position(12))
        daemon.call(lambda: daemon.handler.peers[0].send(event))
        wait_for(lambda: events.seen)
        assert [event] == events.seen


def test_link_slow_question_does_not_hold_up_other_messages(tmp_path):
    """A claim may take a second; a release in the meantime is not late."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, _):
        daemon.handler.hold = asyncio.Event()
        answers: list[object] = []
        client.ask(lambda number: replace(OPEN_TURN, request=number), keeper(answers))
        client.send(Release(Turn(1)))
        wait_for(lambda: daemon.handler.calls)
        assert answers == []
        daemon.call(daemon.handler.hold.set)
        wait_for(lambda: answers)


def test_link_answer_that_nobody_waits_for_is_undone(tmp_path):
    """A turn that was opened too late is closed at once, so that the next one is not busy."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, _):
        client.ask(lambda number: replace(OPEN_TURN, request=number), lambda _: False)
        wait_for(lambda: len(daemon.handler.calls) == 2)
        turn = TURN_OPENED.turn
        assert [Release(turn), CloseTurn(turn, TURN_OPENED.log_from)] == daemon.handler.calls


def test_link_too_many_open_questions_are_refused_one_by_one(tmp_path):
    """An engine cannot pile up work in the daemon."""
    options = ServerOptions(open_requests_max=1)
    with running(tmp_path / "s", options) as daemon, linked(tmp_path / "s") as (client, _):
        daemon.handler.hold = asyncio.Event()
        client.ask(lambda number: replace(OPEN_TURN, request=number), lambda _: True)
        answer = ask(client)
        assert isinstance(answer, TurnUnlogged)
        assert UnloggedReason.NOT_SUPPORTED is answer.reason


def test_link_rejected_engine_is_told_why(tmp_path):
    """The operator reads the daemon's hint in the engine's error."""
    with running(tmp_path / "s") as daemon:
        daemon.handler.answer = Rejected(RejectReason.IDENTITY, "Serve the same weights.")
        with pytest.raises(ConfigError, match=r"identity.*Serve the same weights"):
            connect(tmp_path / "s", HELLO, ClientOptions())
        wait_for(lambda: daemon.handler.causes == [None])
        assert daemon.server.counters["rejected"] == 1


def test_link_engine_of_another_protocol_is_told_so(tmp_path):
    """Two builds that cannot talk can still say so."""
    with running(tmp_path / "s") as daemon, plain(tmp_path / "s") as engine:
        body = b"\x93\x01\x07\xa3xyz"
        engine.sendall(struct.pack("<I", len(body)) + body)
        frames = DaemonFrames()
        frames.feed(engine.recv(4096))
        answer = frames.take()
        assert isinstance(answer, Rejected)
        assert RejectReason.OTHER_PROTOCOL is answer.reason
        assert "protocol 7" in answer.hint
        assert [] == daemon.handler.peers


def test_link_without_a_daemon_is_closed(tmp_path):
    """No daemon is a reason to try again."""
    with pytest.raises(LinkClosed, match="No such file"):
        connect(tmp_path / "s", HELLO, ClientOptions())


def test_link_daemon_that_does_not_answer_is_given_up(tmp_path):
    """A paused daemon accepts connections and says nothing."""
    with socket.socket(socket.AF_UNIX) as paused:
        paused.bind(os.fspath(tmp_path / "s"))
        paused.listen()
        with pytest.raises(LinkClosed, match="timed out"):
            connect(tmp_path / "s", HELLO, ClientOptions(connect_seconds=0.05))


def test_link_daemon_that_talks_junk_is_given_up_and_its_descriptors_are_closed(tmp_path):
    """Whoever listens there is not trusted with anything."""
    with socket.socket(socket.AF_UNIX) as junk:
        junk.bind(os.fspath(tmp_path / "s"))
        junk.listen()

        def answer() -> None:
            connection, _ = junk.accept()
            with connection:
                connection.recv(4096)
                socket.send_fds(connection, [encode(WELCOME)], [0, 1])

        thread = threading.Thread(target=answer)
        thread.start()
        before = len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(LinkClosed, match="2 descriptors"):
            connect(tmp_path / "s", HELLO, ClientOptions())
        thread.join()
        assert before == len(list(Path("/proc/self/fd").iterdir()))


def test_link_daemon_that_falls_silent_is_given_up(tmp_path):
    """A daemon that is paused later is noticed by its silence."""
    options = ClientOptions(ping_seconds=0.02, dead_seconds=0.1)
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s", options) as (client, events):
        time.sleep(0.2)
        assert not client.closed, "a daemon that answers pings lives"
        daemon.call(lambda: time.sleep(0.5))
        assert events.ended.wait(SECONDS)
        assert "silent" in str(events.cause)


def test_link_that_ended_before_it_was_started_still_tells_its_end(tmp_path):
    """A daemon may die between the welcome and the first read."""
    with running(tmp_path / "s") as daemon:
        client = connect(tmp_path / "s", HELLO, ClientOptions())
        daemon.stop()
        events = Events()
        client.start(events)
        assert events.ended.wait(SECONDS)
        client.join(SECONDS)
        for fd in client.fds:
            os.close(fd)


def test_link_daemon_that_ends_fails_open_questions(tmp_path):
    """Nobody waits for an answer that cannot come."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, events):
        daemon.handler.hold = asyncio.Event()
        answers: list[object] = []
        client.ask(lambda number: replace(OPEN_TURN, request=number), keeper(answers))
        client.send(Release(Turn(1)))
        wait_for(lambda: daemon.handler.calls)
        daemon.stop()
        assert events.ended.wait(SECONDS)
        assert isinstance(answers[0], LinkClosed)
        assert daemon.handler.cancelled == 1
        assert isinstance(ask(client), LinkClosed), "a question to a closed link is answered at once"


def test_client_daemon_that_does_not_read_ends_the_link(tmp_path):
    """The engine's queue is bounded, and a full one is a dead link."""
    options = ClientOptions(queue_bytes_max=1 << 16)
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s", options) as (client, events):
        daemon.call(lambda: time.sleep(0.3))
        while not client.closed:
            client.send(replace(OPEN_TURN, tokens=bytes(16384)))
        assert events.ended.wait(SECONDS)
        assert "does not read" in str(events.cause)


def test_server_engine_that_does_not_read_loses_its_link_and_disturbs_nobody(tmp_path):
    """A slow engine costs a bounded queue, then its link."""
    path = tmp_path / "s"
    options = ServerOptions(queue_messages_max=1000)
    with running(path, options) as daemon, linked(path) as (client, _), plain(path) as slow:
        slow.sendall(encode(HELLO))
        wait_for(lambda: len(daemon.handler.peers) == 2)
        peer = daemon.handler.peers[1]

        def flood() -> None:
            for _ in range(500):
                peer.send(Acked(Turn(1), Position(1)))
            if not daemon.handler.causes:
                daemon.loop.call_later(0.001, flood)

        daemon.call(flood)
        wait_for(lambda: daemon.handler.causes)
        assert "does not read" in str(daemon.handler.causes[0])
        assert isinstance(ask(client), TurnOpened)


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n\r\n", encode(CloseTurn(Turn(1), Position(1)))])
def test_server_junk_instead_of_hello_disturbs_nobody(tmp_path, junk):
    """Who does not say Hello is dropped."""
    with (
        running(tmp_path / "s") as daemon,
        linked(tmp_path / "s") as (client, _),
        plain(tmp_path / "s") as bad,
    ):
        bad.sendall(junk)
        assert bad.recv(10) == b""
        assert daemon.server.counters["junk"] == 1
        assert isinstance(ask(client), TurnOpened)


def test_server_junk_after_hello_ends_that_link_only(tmp_path):
    """The handler learns why."""
    with (
        running(tmp_path / "s") as daemon,
        linked(tmp_path / "s") as (client, _),
        plain(tmp_path / "s") as bad,
    ):
        bad.sendall(encode(HELLO) + b"\xff\xff\xff\xff")
        wait_for(lambda: daemon.handler.causes)
        assert "a message of" in str(daemon.handler.causes[0])
        assert isinstance(ask(client), TurnOpened)


def test_server_bug_of_the_handler_ends_that_link_only(tmp_path):
    """A bug met by one engine is told, and is that engine's alone."""
    with (
        running(tmp_path / "s") as daemon,
        linked(tmp_path / "s") as (client, _),
        plain(tmp_path / "s") as other,
    ):
        body = b"\x92\x05\xa1s"
        other.sendall(encode(HELLO) + struct.pack("<I", len(body)) + body)
        wait_for(lambda: daemon.handler.causes)
        assert isinstance(daemon.handler.causes[0], RuntimeError)
        assert daemon.server.counters["failed"] == 1
        assert isinstance(ask(client), TurnOpened)


def test_server_silent_engine_is_dropped(tmp_path):
    """A connection costs nothing for long."""
    with (
        running(tmp_path / "s", ServerOptions(hello_seconds=0.05)) as daemon,
        plain(tmp_path / "s") as silent,
    ):
        assert silent.recv(10) == b""
        assert daemon.server.counters["silent"] == 1


def test_server_more_engines_than_allowed_are_told(tmp_path):
    """The number of engines is bounded, and the one too many learns what to do."""
    with running(tmp_path / "s", ServerOptions(peers_max=1)) as daemon, linked(tmp_path / "s"):
        with pytest.raises(ConfigError, match="overloaded"):
            connect(tmp_path / "s", HELLO, ClientOptions())
        assert daemon.server.counters["overloaded"] == 1


@pytest.mark.parametrize(
    ("credentials", "options", "allowed"),
    [
        (Credentials(1, os.getuid(), 7, frozenset()), ServerOptions(), True),
        (Credentials(1, 0, 7, frozenset()), ServerOptions(), True),
        (Credentials(1, 4242, 7, frozenset({8})), ServerOptions(), False),
        (Credentials(1, 4242, 7, frozenset({8})), ServerOptions(gids=frozenset({7})), True),
        (Credentials(1, 4242, 7, frozenset({8})), ServerOptions(gids=frozenset({8})), True),
        (Credentials(1, 4242, 7, frozenset({8})), ServerOptions(gids=frozenset({9})), False),
        (Credentials(1, 4242, 7, frozenset({8})), ServerOptions(uids=frozenset({4242})), True),
    ],
)
def test_server_lets_in_own_user_root_and_who_is_configured(
    tmp_path, monkeypatch, credentials, options, allowed
):
    """The kernel's word on who connects decides; others are counted, and told so."""
    monkeypatch.setattr("kvlog.link.server.peer_credentials", lambda _: credentials)
    with running(tmp_path / "s", options) as daemon, plain(tmp_path / "s") as engine:
        engine.sendall(encode(HELLO))
        frames = DaemonFrames()
        frames.feed(engine.recv(4096))
        answer = frames.take()
        assert (WELCOME if allowed else RejectReason.NOT_ALLOWED) == getattr(answer, "reason", answer)
        assert int(not allowed) == daemon.server.counters["refused"]


def test_server_stop_closes_links_and_takes_its_file_away(tmp_path):
    """After a stop nothing is left but the engines, who know."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (_, events):
        daemon.stop()
        assert events.ended.wait(SECONDS)
        assert [None] == daemon.handler.causes
        assert not (tmp_path / "s").exists()


def test_server_limits_bind_what_engines_send(tmp_path):
    """The bound on a message is the daemon's setting."""
    with (
        running(tmp_path / "s", ServerOptions(limits=TINY)) as daemon,
        linked(tmp_path / "s") as (client, events),
    ):
        client.send(replace(OPEN_TURN, tokens=bytes(8192)))
        assert events.ended.wait(SECONDS)
        assert "a message of" in str(daemon.handler.causes[0])
