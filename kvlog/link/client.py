"""An engine's end of the link: two threads around one socket, and nothing that makes a step wait.

    connect   hello, welcome, descriptors; blocking, with a deadline
    start     from here on a reader thread calls `LinkEvents`, a sender thread empties a bounded queue
    send      queues a message; never waits
    ask       queues an OpenTurn; its answer comes by a callback

A daemon that is silent is asked (Ping) and given up after `dead_seconds`: a paused process looks like a living one to
the kernel. An answer that nobody waits for any more is undone (Release, CloseTurn), so that no turn is left open.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

from kvlog.errors import ConfigError, DecodeError, LinkClosed
from kvlog.limits import DEFAULT, Limits
from kvlog.link.frames import DaemonFrames, encode
from kvlog.link.messages import (
    Acked,
    CloseTurn,
    FromDaemon,
    FromEngine,
    Hello,
    OpenTurn,
    Ping,
    Pong,
    Rejected,
    Release,
    RequestNumber,
    TurnEnded,
    TurnFenced,
    TurnOpened,
    TurnUnlogged,
    Welcome,
)

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Answer", "Answered", "ClientOptions", "LinkClient", "LinkEvent", "LinkEvents", "connect"]

LinkEvent = Acked | TurnFenced | TurnEnded
"""What a daemon says of itself about a turn."""

Answer = TurnOpened | TurnUnlogged
"""What a daemon answers to an OpenTurn."""

Answered = Callable[[Answer | LinkClosed], bool]
"""Takes the answer, or that there will be none; False: nobody waits for it any more, the client undoes it."""

WELCOME_FDS = 3
"""Ring, pool, doorbell."""

_FDS_MAX = 16
"""More than a Welcome has, so that surplus descriptors are received, and closed, instead of lost by the kernel."""

_READ_BYTES = 1 << 18
_TIMEVAL = struct.Struct("ll")
_FD = struct.Struct("i")


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Deadlines and bounds of an engine's end.

    Args:
        connect_seconds: for connect, Hello and Welcome together.
        ping_seconds: a daemon that was silent for so long is asked.
        dead_seconds: a daemon that was silent for so long is given up.
        queue_bytes_max: messages not yet taken by the kernel; more, and the link is given up.
        limits: bounds of one message.
    """

    connect_seconds: float = 2.0
    ping_seconds: float = 1.0
    dead_seconds: float = 5.0
    queue_bytes_max: int = 4 * DEFAULT.control_message_bytes
    limits: Limits = DEFAULT


class LinkEvents(Protocol):
    """What happens on a link; called on its reader thread, must not block."""

    def link_event(self, client: LinkClient, event: LinkEvent) -> None:
        """A turn was acknowledged further, fenced, or given up."""
        ...

    def link_closed(self, client: LinkClient, cause: LinkClosed) -> None:
        """The link has ended; nothing comes after this, and every unanswered question was told the cause."""
        ...


def connect(path: Path, hello: Hello, options: ClientOptions) -> LinkClient:
    """Reach the daemon and be welcomed.

    Returns: a link that has not been started; the caller owns it and its `fds`.

    Raises:
        LinkClosed: nobody listens, or the deadline passed, or it talks junk; try again.
        ConfigError: the daemon refuses this engine and says why; trying again helps only after a change.
    """
    deadline = time.monotonic() + options.connect_seconds
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    fds: list[int] = []
    frames = DaemonFrames(options.limits)
    try:
        connection.settimeout(options.connect_seconds)
        connection.connect(os.fspath(path))
        connection.sendall(encode(hello, options.limits))
        welcome = _welcome(connection, frames, fds, deadline)
    except (OSError, DecodeError) as error:  # TimeoutError is an OSError
        _close_all(connection, fds)
        raise LinkClosed(problem=f"{path}: {_reason(error)}") from None
    except ConfigError:
        _close_all(connection, fds)
        raise
    connection.settimeout(None)
    return LinkClient(connection, frames, welcome, tuple(fds), options)


def _reason(error: OSError | DecodeError) -> str:
    if isinstance(error, DecodeError):
        return f"the daemon talks junk: {error.problem}"
    return error.strerror or str(error) or type(error).__name__


def _close_all(connection: socket.socket, fds: list[int]) -> None:
    connection.close()
    for fd in fds:
        os.close(fd)


def _welcome(connection: socket.socket, frames: DaemonFrames, fds: list[int], deadline: float) -> Welcome:
    """Read until the first message is whole; descriptors are collected into `fds` whatever happens."""
    while (message := frames.take()) is None:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        data = _receive(connection, fds)
        if not data:
            raise DecodeError(problem="it closed the connection before Welcome")
        frames.feed(data)
    if isinstance(message, Rejected):
        problem = f"the daemon refuses this engine: {message.reason}"
        raise ConfigError(setting="link", problem=problem, fix=message.hint)
    if not isinstance(message, Welcome) or len(fds) != WELCOME_FDS:
        raise DecodeError(problem=f"{type(message).__name__} with {len(fds)} descriptors instead of Welcome")
    return message


def _receive(connection: socket.socket, fds: list[int]) -> bytes:
    """Bytes, and descriptors that no child process inherits; socket.recv_fds of Python 3.11 ignores its flags."""
    room = socket.CMSG_SPACE(_FDS_MAX * _FD.size)
    data, ancillary, _, _ = connection.recvmsg(_READ_BYTES, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            whole = len(content) - len(content) % _FD.size
            fds += [fd for (fd,) in _FD.iter_unpack(content[:whole])]
    return data


class LinkClient:
    """A greeted link. All methods may be called from any thread; none waits but `leave` and `join`.

    Args of the constructor come from `connect`.
    """

    def __init__(
        self,
        connection: socket.socket,
        frames: DaemonFrames,
        welcome: Welcome,
        fds: tuple[int, ...],
        options: ClientOptions,
    ) -> None:
        self.welcome = welcome
        self.fds = fds
        self._connection = connection
        self._frames = frames
        self._options = options
        self._changed = threading.Condition()
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._waiting: dict[RequestNumber, Answered] = {}
        self._requests = 0
        self._cause: LinkClosed | None = None
        self._threads: tuple[threading.Thread, ...] = ()

    @property
    def closed(self) -> bool:
        """The link has ended, or is about to."""
        return self._cause is not None

    @property
    def has_room(self) -> bool:
        """Less than half of the send queue is in use; who has many large messages waits for it."""
        return self._queued_bytes < self._options.queue_bytes_max // 2

    def start(self, events: LinkEvents) -> None:
        """Start both threads; when the system has none to give, the link is over and the error goes on."""
        seconds = int(self._options.ping_seconds)
        microseconds = int(self._options.ping_seconds % 1 * 1_000_000)
        timeout = _TIMEVAL.pack(seconds, microseconds)
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
        reader = threading.Thread(target=self._read, args=(events,), name="kvlog-link-reader", daemon=True)
        sender = threading.Thread(target=self._send_all, name="kvlog-link-sender", daemon=True)
        sender.start()
        self._threads = (reader, sender)
        try:
            reader.start()  # last: when the link is dead already, the reader's end waits for the sender's
        except RuntimeError:
            self._threads = (sender,)
            self.close("there is no thread to read it")
            sender.join()
            self._connection.close()
            raise

    def send(self, message: FromEngine) -> None:
        """Queue a message; dropped when the link has ended. A full queue ends the link.

        Raises:
            LocalProtocolError: it cannot be encoded; see `frames.encode`.
        """
        self._enqueue(encode(message, self._options.limits))

    def _enqueue(self, data: bytes) -> None:
        with self._changed:
            if self._cause is not None:
                return
            if self._queued_bytes + len(data) <= self._options.queue_bytes_max:
                self._queue.append(data)
                self._queued_bytes += len(data)
                self._changed.notify_all()
                return
        self.close(f"the daemon does not read: {self._queued_bytes} bytes wait")

    def ask(self, make: Callable[[RequestNumber], OpenTurn], answered: Answered) -> None:
        """Queue an OpenTurn under a fresh number.

        Args:
            make: builds the message from its number.
            answered: called exactly once, on the reader thread before any later message, or here if the link has ended.

        Raises:
            LocalProtocolError: it cannot be encoded, see `frames.encode`; `answered` is not called.
        """
        with self._changed:
            self._requests += 1
            number = RequestNumber(self._requests)
        data = encode(make(number), self._options.limits)
        with self._changed:
            cause = self._cause
            if cause is None:
                self._waiting[number] = answered
        if cause is None:
            self._enqueue(data)
        else:
            answered(cause)

    def close(self, problem: str = "closed by this side") -> None:
        """End the link soon; `link_closed` follows on the reader thread. May be called twice."""
        with self._changed:
            if self._cause is None:
                self._cause = LinkClosed(problem=problem)
            self._changed.notify_all()
        with contextlib.suppress(OSError):  # the other side was first
            self._connection.shutdown(socket.SHUT_RDWR)
        if not self._threads:  # never started: nobody else closes it
            self._connection.close()

    def leave(self, timeout_seconds: float) -> None:
        """End the link once the daemon has everything that was sent, or after so long: the one call that waits."""
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            sent = self._changed.wait_for(
                lambda: not self._queued_bytes or self._cause is not None, timeout_seconds
            )
        if sent and self._threads:
            with contextlib.suppress(OSError):  # the other side was first
                self._connection.shutdown(socket.SHUT_WR)
            self._threads[0].join(deadline - time.monotonic())  # the daemon has read up to here, and hangs up
        self.close()

    def join(self, timeout_seconds: float) -> None:
        """Wait for both threads after `close`, at most so long each."""
        for thread in self._threads:
            thread.join(timeout_seconds)

    def _send_all(self) -> None:
        """The sender thread."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._cause is not None)
                if self._cause is not None:
                    return
                batch = b"".join(self._queue)
                self._queue.clear()
            try:
                self._connection.sendall(batch)
            except OSError as error:
                self.close(_reason(error))
                return
            with self._changed:
                self._queued_bytes -= len(batch)
                self._changed.notify_all()

    def _read(self, events: LinkEvents) -> None:
        """The reader thread."""
        try:
            self._read_messages(events)
        except (OSError, DecodeError) as error:
            self.close(_reason(error))
        finally:
            self.close("the reader has ended")
            self._finish(events)

    def _finish(self, events: LinkEvents) -> None:
        with self._changed:
            cause = self._cause or LinkClosed(problem="ended")
            waiting = list(self._waiting.values())
            self._waiting.clear()
        for answered in waiting:
            answered(cause)
        self._threads[1].join()  # shutdown has woken it: the socket is closed only when nobody uses it
        self._connection.close()
        events.link_closed(self, cause)

    def _read_messages(self, events: LinkEvents) -> None:
        unanswered = (
            0  # counted in timeouts, not by a clock: if it was us who were paused, the daemon is not dead
        )
        while self._cause is None:
            while (message := self._frames.take()) is not None:
                self._dispatch(message, events)
            try:
                data = self._connection.recv(_READ_BYTES)
            except BlockingIOError:  # SO_RCVTIMEO: silence
                unanswered += 1
                if unanswered * self._options.ping_seconds >= self._options.dead_seconds:
                    self.close(f"the daemon has been silent for {self._options.dead_seconds} s")
                else:
                    self.send(Ping())
                continue
            if not data:
                self.close("the daemon closed the connection")
                return
            unanswered = 0
            self._frames.feed(data)

    def _dispatch(self, message: FromDaemon, events: LinkEvents) -> None:
        match message:
            case TurnOpened() | TurnUnlogged():
                self._answered(message)
            case Acked() | TurnFenced() | TurnEnded():
                events.link_event(self, message)
            case Pong():
                pass
            case Welcome() | Rejected():
                raise DecodeError(problem=f"a second {type(message).__name__}")
            case _:
                assert_never(message)

    def _answered(self, answer: Answer) -> None:
        with self._changed:
            answered = self._waiting.pop(answer.request, None)
        wanted = answered is not None and answered(answer)
        if not wanted and isinstance(answer, TurnOpened):  # too late: nobody will ever use this turn
            self.send(Release(answer.turn))
            self.send(CloseTurn(answer.turn, answer.log_from))
