"""Tells an engine's HTTP process which requests were fenced in its scheduler's process: a socket without a file.

One message a fenced request: its engine's id of it, UTF-8. The socket lives in Linux's abstract namespace, so nothing
is left behind by whoever is killed; since such a name has no owner, both ends check that the other is the same user.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FenceBoard", "FenceReader"]

_READERS_MAX: Final = 16
"""API server processes of one engine."""

_REMEMBERED: Final = 64
"""Requests that a reader hears of when it comes late; they are fenced within the second that it needs to connect."""

_NAME_BYTES_MAX: Final = 1024
_RETRY_SECONDS_MIN: Final = 0.1
_RETRY_SECONDS_MAX: Final = 2.0
_CREDENTIALS: Final = struct.Struct("3i")


class FenceBoard:
    """The scheduler's end. `say` never waits: a reader that does not read is given up."""

    def __init__(self, engine: str) -> None:
        self._address = _address(engine)
        self._lock = threading.Lock()
        self._readers: list[socket.socket] = []
        self._said: deque[bytes] = deque(maxlen=_REMEMBERED)
        self._listener: socket.socket | None = None

    def start(self) -> bool:
        """Begin to listen. Returns: False if that is not possible here; nobody will be told then."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        try:
            listener.bind(self._address)
            listener.listen(_READERS_MAX)
        except OSError:
            listener.close()
            return False
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), name="kvlog-fence", daemon=True).start()
        return True

    def say(self, request: str) -> None:
        """A request was fenced."""
        name = request.encode()[:_NAME_BYTES_MAX]
        with self._lock:
            self._said.append(name)
            self._readers = [reader for reader in self._readers if _sent(reader, name)]

    def close(self) -> None:
        """End."""
        listener, self._listener = self._listener, None
        if listener is not None:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        with self._lock:
            for reader in self._readers:
                reader.close()
            self._readers = []

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                reader, _ = listener.accept()
            except OSError:
                return
            reader.setblocking(False)  # noqa: FBT003 - a socket's own method
            with self._lock:
                if not _same_user(reader) or len(self._readers) >= _READERS_MAX or self._listener is None:
                    reader.close()
                elif all(_sent(reader, name) for name in self._said):
                    self._readers.append(reader)


class FenceReader:
    """The HTTP process's end: calls `heard` on a thread of its own, and connects again for ever."""

    def __init__(self, engine: str, heard: Callable[[str], None]) -> None:
        self._address = _address(engine)
        self._heard = heard

    def start(self) -> None:
        """Begin; ends with the process."""
        threading.Thread(target=self._run, name="kvlog-fence", daemon=True).start()

    def _run(self) -> None:
        pause = _RETRY_SECONDS_MIN
        while True:
            if self._listen():
                pause = _RETRY_SECONDS_MIN
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS_MAX)

    def _listen(self) -> bool:
        """Connect and hear until it ends. Returns: whether somebody was there."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as board:
            try:
                board.connect(self._address)
                if not _same_user(board):
                    return False
                while name := board.recv(_NAME_BYTES_MAX):
                    self._heard(name.decode(errors="replace"))
            except OSError:
                return False
        return True


def _address(engine: str) -> bytes:
    return b"\0kvlog-fence-" + engine.encode()[:80]


def _sent(reader: socket.socket, name: bytes) -> bool:
    try:
        reader.send(name)
    except OSError:
        reader.close()
        return False
    return True


def _same_user(peer: socket.socket) -> bool:
    _, user, _ = _CREDENTIALS.unpack(
        peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return bool(user == os.geteuid())
