"""Both ends of the link over a real socket: greeting, questions, bounds, and peers that misbehave."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from kvlog.errors import ConfigError, LinkClosed
from kvlog.ids import Position, Turn
from kvlog.link.client import ClientOptions, connect
from kvlog.link.frames import DaemonFrames, encode
from kvlog.link.messages import (
    Acked,
    CloseTurn,
    Rejected,
    RejectReason,
    Release,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
)
from kvlog.link.server import ServerOptions
from tests.unit.link.ends import (
    SECONDS,
    Events,
    ask,
    keeper,
    linked,
    plain,
    running,
    wait_for,
)
from tests.unit.link.samples import HELLO, OPEN_TURN, TURN_OPENED, WELCOME


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


def test_link_question_may_be_answered_by_the_handler_itself(tmp_path):
    """What it says next must not overtake its answer: nothing is sent for it a second time."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, events):

        def reply(asked):
            daemon.handler.peers[0].send(replace(TURN_OPENED, request=asked.request))
            daemon.handler.peers[0].send(Acked(Turn(3), Position(1)))

        daemon.handler.reply = reply
        assert isinstance(ask(client), TurnOpened)
        wait_for(lambda: events.seen)
        assert [Acked(Turn(3), Position(1))] == events.seen
        assert not client.closed


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
        assert before >= len(list(Path("/proc/self/fd").iterdir()))


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


def test_client_that_leaves_is_heard_to_its_last_word(tmp_path):
    """What was sent before leaving arrives, though the daemon is slow, and answers what nobody reads any more."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, events):
        ask(client)
        daemon.call(lambda: time.sleep(0.1))
        sent = [CloseTurn(Turn(k), Position(k)) for k in range(1000)]
        for message in sent:
            client.send(message)
            daemon.call(lambda: daemon.handler.peers[0].send(Acked(Turn(3), Position(12))))
        client.leave(SECONDS)
        assert sent == daemon.handler.calls
        assert events.ended.wait(SECONDS)


@pytest.mark.parametrize("size", [16, 1 << 18])
def test_client_does_not_wait_longer_to_leave_than_it_was_told(tmp_path, size):
    """A daemon that does not read, or that does not hang up, is left all the same."""
    with running(tmp_path / "s") as daemon, linked(tmp_path / "s") as (client, events):
        daemon.call(lambda: time.sleep(1.0))
        for _ in range(4):
            client.send(replace(OPEN_TURN, tokens=bytes(size)))
        began = time.monotonic()
        client.leave(0.1)
        assert 0.1 <= time.monotonic() - began < 0.6
        assert events.ended.wait(SECONDS)
