"""A daemon's socket file: whose it is, and what is refused."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys

import pytest

from kvlog.errors import ConfigError
from kvlog.link.listener import PATH_BYTES_MAX, listen, peer_credentials
from tests.processes import die_with_parent


def test_listen_makes_a_socket_for_owner_and_group(tmp_path):
    """Others cannot even connect."""
    listener = listen(tmp_path / "s")
    assert stat.S_IMODE((tmp_path / "s").stat().st_mode) == 0o660
    listener.close()
    assert not (tmp_path / "s").exists()


def test_listen_path_of_a_living_daemon_is_refused_and_names_its_pid(tmp_path):
    """Two daemons on one path would share engines at random."""
    path = tmp_path / "s"
    code = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen();"
        "print('up', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, path],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    ) as other:
        assert other.stdout is not None
        assert other.stdin is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match=f"pid {other.pid}") as caught:
            listen(path)
        other.stdin.close()
    assert str(path) in str(caught.value)


def test_listen_living_daemon_with_a_full_backlog_is_refused(tmp_path):
    """A daemon that is too busy to accept is not dead."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(os.fspath(path))
        busy.listen(0)
        waiting = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) for _ in range(3)]
        for one in waiting:
            one.connect_ex(os.fspath(path))
        with pytest.raises(ConfigError, match="a living process"):
            listen(path)
        for one in waiting:
            one.close()


def test_listen_stale_socket_file_is_replaced(tmp_path):
    """What a killed daemon leaves behind stops nobody."""
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(os.fspath(path))
        dead.listen()
    assert path.exists()
    listener = listen(path)
    with socket.socket(socket.AF_UNIX) as engine:
        engine.connect(os.fspath(path))
        assert os.getpid() == peer_credentials(engine).pid
    listener.close()


def test_listen_something_else_at_the_path_is_left_alone(tmp_path):
    """Only socket files are ours to replace."""
    path = tmp_path / "s"
    path.write_text("precious")
    with pytest.raises(ConfigError, match="not a socket"):
        listen(path)
    assert path.read_text() == "precious"


def test_listen_path_too_long_is_refused_with_both_numbers(tmp_path):
    """The kernel's limit is told before the kernel tells it."""
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match=str(PATH_BYTES_MAX)):
        listen(path)


def test_listen_missing_directory_is_refused(tmp_path):
    """A mistyped directory is named."""
    with pytest.raises(ConfigError, match="No such file"):
        listen(tmp_path / "nowhere" / "s")


def test_listen_directory_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    """The daemon's user must own the place."""
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(ConfigError, match="cannot be written"):
        listen(tmp_path / "s")


def test_close_leaves_another_daemons_socket_alone(tmp_path):
    """A daemon that stops late does not take its successor's file away."""
    path = tmp_path / "s"
    first = listen(path)
    path.rename(tmp_path / "old")
    second = listen(path)
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()
