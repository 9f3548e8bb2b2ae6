"""Both ends of the link over a real socket: the daemon's, against engines that misbehave."""

from __future__ import annotations

import os
import struct
from dataclasses import replace

import pytest

from daemon.settings import LinkSettings
from kvlog.errors import ConfigError
from kvlog.ids import Position, Turn
from kvlog.limits import TINY
from kvlog.link.client import ClientOptions, connect
from kvlog.link.frames import DaemonFrames, encode
from kvlog.link.listener import Credentials
from kvlog.link.messages import (
    Acked,
    CloseTurn,
    RejectReason,
    TurnOpened,
)
from kvlog.link.server import ServerOptions
from tests.unit.link.ends import (
    SECONDS,
    ask,
    linked,
    plain,
    running,
    wait_for,
)
from tests.unit.link.samples import HELLO, OPEN_TURN, WELCOME


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
        with pytest.raises(ConfigError, match="overloaded") as refused:
            connect(tmp_path / "s", HELLO, ClientOptions())
        assert "link.engines_max" in str(refused.value)
        assert "engines_max" in LinkSettings.model_fields, "the hint names a setting that there is"
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
