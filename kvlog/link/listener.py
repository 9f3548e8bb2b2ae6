"""A daemon's unix socket: taken only when no living daemon has it, for owner and group, never left behind.

Check and bind happen under a lock of the directory, so that of two daemons that start together one gets the
path.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["PATH_BYTES_MAX", "Credentials", "Listener", "listen", "peer_credentials"]

PATH_BYTES_MAX = 107
"""sun_path has 108 bytes, the last one is NUL. Source: unix(7)."""

_MODE = 0o660
_BACKLOG = 64
_UCRED = struct.Struct("3i")
_SO_PEERGROUPS = 59
"""Not in Python's socket module. Source: asm-generic/socket.h, Linux 4.13."""
_GROUPS_MAX = 1024
"""A process may have 65,536 groups; one with more than this is judged by the first so many of them."""


@dataclass(frozen=True, slots=True)
class Credentials:
    """Who is at the other end of a unix socket, as the kernel says; `pid` is 0 for another pid namespace."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int]


@dataclass(frozen=True, slots=True)
class Listener:
    """A bound, listening socket and the file that leads to it."""

    socket: socket.socket
    path: Path
    inode: int

    def close(self) -> None:
        """Stop listening, and take the file away unless another daemon has put its own there."""
        self.socket.close()
        with suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


def peer_credentials(connection: socket.socket) -> Credentials:
    """Read the credentials of a connection's other end."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
    pid, uid, gid = _UCRED.unpack(raw)
    try:
        listed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, 4 * _GROUPS_MAX)
    except OSError:  # an old kernel, or more groups than we read: the primary group must do
        listed = b""
    groups = struct.unpack(f"{len(listed) // 4}I", listed)
    return Credentials(pid, uid, gid, frozenset(groups))


def listen(path: Path) -> Listener:
    """Bind and listen; the socket does not block.

    Raises:
        ConfigError: the path is too long, its directory is missing or cannot be written, a living daemon listens
            there (the problem names its pid), or something else than a socket is there; nothing was changed.
    """
    size = len(os.fsencode(path))
    if size > PATH_BYTES_MAX:
        raise _refusal(
            path,
            f"it has {size} bytes, a unix socket's path has at most {PATH_BYTES_MAX}",
            "choose a shorter path",
        )
    with _directory_locked(path):
        _clear(path)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            listener.bind(os.fspath(path))
            os.chmod(path, _MODE)  # noqa: PTH101  # before listen: nobody could connect in between
            listener.listen(_BACKLOG)
        except OSError as error:
            listener.close()
            raise _refusal(
                path, error.strerror or str(error), "give the daemon a directory that it can write"
            ) from None
        return Listener(listener, path, path.lstat().st_ino)


@contextmanager
def _directory_locked(path: Path) -> Iterator[None]:
    try:
        directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(
            path, f"its directory: {error.strerror}", "create the directory and let the daemon write it"
        ) from None
    try:
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise _refusal(path, "its directory cannot be written", "let the daemon's user write it")
        fcntl.flock(directory, fcntl.LOCK_EX)  # held for a few system calls by whoever has it
        yield
    finally:
        os.close(directory)


def _clear(path: Path) -> None:
    """Remove a stale socket file; refuse anything that lives or is not ours."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _refusal(path, "it exists and is not a socket", "move the file away or choose another path")
    try:
        probe = _connected(path)
    except PermissionError:
        raise _refusal(path, "the socket there belongs to someone else", "choose another path") from None
    if probe is None:
        path.unlink(missing_ok=True)
        return
    with probe:
        pid = peer_credentials(probe).pid or "unknown"  # 0: its backlog was full, or another pid namespace
    raise _refusal(
        path, f"a living process listens there, pid {pid}", "stop that daemon or choose another path"
    )


def _connected(path: Path) -> socket.socket | None:
    """A connection to whoever listens at the path; None if nobody does."""
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        probe.connect(os.fspath(path))
    except (ConnectionRefusedError, FileNotFoundError):
        probe.close()
        return None
    except BlockingIOError:  # its backlog is full, so it lives
        return probe
    except OSError as error:
        probe.close()
        if error.errno == errno.EACCES:
            raise PermissionError(*error.args) from None
        raise
    return probe


def _refusal(path: Path, problem: str, fix: str) -> ConfigError:
    return ConfigError(setting="link.socket", problem=f"{path}: {problem}", fix=fix)
