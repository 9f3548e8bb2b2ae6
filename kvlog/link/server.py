"""A daemon's end of the link: accepts engines, checks who they are, hands their messages to one handler.

One engine never disturbs another: junk, silence, a full send queue or a failing handler call ends that engine's
link and nothing else. Messages of one engine reach the handler in the order in which they were sent, except that
the answers to OpenTurn are awaited beside the stream; at most `open_requests_max` of them at a time.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, assert_never

from kvlog.errors import DecodeError, KvlogError, LinkClosed, UnknownVersion
from kvlog.limits import DEFAULT, Limits
from kvlog.link.frames import EngineFrames, encode
from kvlog.link.listener import Credentials, Listener, listen, peer_credentials
from kvlog.link.messages import (
    CloseTurn,
    Forget,
    FromDaemon,
    FromEngine,
    Hello,
    OpenTurn,
    Ping,
    Pong,
    Rejected,
    RejectReason,
    Release,
    TurnOpened,
    TurnUnlogged,
    UnloggedReason,
    Welcome,
)

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["Accepted", "LinkHandler", "LinkServer", "Peer", "ServerOptions"]

_READ_BYTES = 1 << 18
_QUEUE_OF_LARGEST = 4
"""A send queue holds so many of the largest messages, in bytes."""

_STRANGER_SECONDS = 0.5
"""How long someone who may not connect may take to say Hello; he is told so, but must not cost much."""

_CONNECTIONS_A_PEER = 2
"""Connections, greeted or not, for each engine that is allowed; more are closed without a word."""

_ACCEPT_PAUSE_SECONDS = 0.1
"""Out of file descriptors or memory: the connection stays in the backlog, accepting at once again would spin."""


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Who may connect, and how much of the daemon one engine may use.

    Args:
        uids: user ids beside root and the daemon's own that may connect.
        gids: groups (primary or supplementary) that may connect.
        peers_max: engines connected at once; further ones are rejected as OVERLOADED.
        hello_seconds: how long an engine may take to say Hello.
        open_requests_max: OpenTurns of one engine that wait for their answer; further ones get NOT_SUPPORTED.
        queue_messages_max: messages to one engine that it has not read; one more closes its link.
        limits: bounds of one message; a send queue holds at most 4 of the largest in bytes.
    """

    uids: frozenset[int] = frozenset()
    gids: frozenset[int] = frozenset()
    peers_max: int = 64
    hello_seconds: float = 5.0
    open_requests_max: int = 4096
    queue_messages_max: int = 65_536
    limits: Limits = DEFAULT


@dataclass(frozen=True, slots=True)
class Accepted:
    """The handler takes the engine. `fds`: ring, pool read-only, doorbell; they stay the handler's own."""

    welcome: Welcome
    fds: tuple[int, ...]


class LinkHandler(Protocol):
    """What a daemon does with its engines' messages, on the event loop; the plain methods must not block.

    Order: hello, then any of the others, then `closed` once, after which nothing of that peer comes any more.
    An exception from any method ends that peer's link, and comes back through `closed`.
    """

    async def hello(self, peer: Peer, message: Hello) -> Accepted | Rejected:
        """An engine wants in; its credentials have been checked."""
        ...

    async def open_turn(self, peer: Peer, message: OpenTurn) -> TurnOpened | TurnUnlogged | None:
        """Answer within about `message.wait_ms`. Cancelled when the link ends; `closed` follows.

        Returns: the answer, to be sent; None: the handler has sent it.
        """
        ...

    def close_turn(self, peer: Peer, message: CloseTurn) -> None:
        """The engine has written all that it will of a turn."""
        ...

    def release(self, peer: Peer, message: Release) -> None:
        """The engine has copied the blocks of a turn's attach."""
        ...

    def forget(self, peer: Peer, message: Forget) -> None:
        """Start to end a session for good."""
        ...

    def closed(self, peer: Peer, cause: Exception | None) -> None:
        """The link has ended: free what the peer had. Called for every peer of `hello`; must not raise.

        Args:
            peer: whose link it was.
            cause: None: the engine closed it, or this server stops; else what went wrong, be it a bug of ours.
        """
        ...


class Peer:
    """One connected engine; compared and hashed by identity.

    Args:
        credentials: who it is, as the kernel says.
        hello: what it said of itself.
    """

    __slots__ = ("_end", "_ended", "_options", "_queue", "_queued_bytes", "_wake", "credentials", "hello")

    def __init__(self, credentials: Credentials, hello: Hello, options: ServerOptions) -> None:
        self.credentials = credentials
        self.hello = hello
        self._options = options
        self._queue: list[bytes] = []
        self._queued_bytes = 0
        self._wake = asyncio.Event()
        self._ended = asyncio.Event()
        self._end = LinkClosed(problem="open")

    def send(self, message: FromDaemon) -> None:
        """Queue a message; never waits.

        The message is dropped when the link has ended. An engine that does not keep up loses its link.

        Raises:
            LocalProtocolError: the message cannot be encoded; see `frames.encode`.
        """
        if self._ended.is_set():
            return
        data = encode(message, self._options.limits)
        bytes_max = _QUEUE_OF_LARGEST * self._options.limits.control_message_bytes
        if len(self._queue) >= self._options.queue_messages_max or self._queued_bytes + len(data) > bytes_max:
            self.close(f"the engine does not read: {len(self._queue)} messages wait")
            return
        self._queue.append(data)
        self._queued_bytes += len(data)
        self._wake.set()

    def close(self, problem: str) -> None:
        """End the link now, whatever waits to be sent; `closed` follows with LinkClosed as its cause."""
        if not self._ended.is_set():
            self._end = LinkClosed(problem=problem)
            self._ended.set()

    async def ended(self) -> LinkClosed:
        """Wait until the link is to end; for the server only."""
        await self._ended.wait()
        return self._end

    async def next_batch(self) -> bytes:
        """Wait for what is to be sent; for the server only."""
        while not self._queue:
            self._wake.clear()
            await self._wake.wait()
        batch = b"".join(self._queue)
        self._queue.clear()
        self._queued_bytes = 0
        return batch


class LinkServer:
    """Listens on a unix socket and serves engines until cancelled.

    `listen` binds (connections queue from then on), `serve` runs; when it ends, the socket's file is gone.
    """

    def __init__(self, path: Path, handler: LinkHandler, options: ServerOptions | None = None) -> None:
        self._path = path
        self._handler = handler
        self._options = options or ServerOptions()
        self._listener: Listener | None = None
        self._connections = 0
        self._peers = 0
        self._counters: Counter[str] = Counter()

    @property
    def peers(self) -> int:
        """Engines that are linked now."""
        return self._peers

    @property
    def counters(self) -> Mapping[str, int]:
        """Events since the start.

        Not let in: refused (credentials), overloaded, silent, junk, rejected, accept_failed. Let in: accepted.
        How links ended: gone (by the engine), junk, ended (by us), failed (a bug of ours).
        """
        return self._counters

    def listen(self) -> None:
        """Bind the socket.

        Raises:
            ConfigError: see `listener.listen`; nothing was started.
        """
        self._listener = listen(self._path)

    async def serve(self) -> None:
        """Accept engines until cancelled."""
        assert self._listener is not None, "listen first"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    try:
                        connection, _ = await loop.sock_accept(self._listener.socket)
                    except OSError:
                        self._counters["accept_failed"] += 1
                        await asyncio.sleep(_ACCEPT_PAUSE_SECONDS)
                        continue
                    group.create_task(self._peer_task(connection))
        finally:
            self._listener.close()

    async def _peer_task(self, connection: socket.socket) -> None:
        """One engine from accept to close; nothing that happens here reaches another."""
        self._connections += 1
        try:
            with connection:
                await self._admit(connection)
        except _GoneError:
            self._counters["gone"] += 1
        finally:
            self._connections -= 1

    async def _admit(self, connection: socket.socket) -> None:
        """Let an engine in, or tell it why not, but after its Hello: else the answer would be lost in a reset."""
        connection.setblocking(False)  # noqa: FBT003  # socket's own interface
        credentials = peer_credentials(connection)
        allowed = self._allowed(credentials)
        if self._connections > _CONNECTIONS_A_PEER * self._options.peers_max:
            self._counters["overloaded"] += 1
            return
        pipe = _Pipe(connection, self._options.limits)
        hello = await self._greeting(pipe, self._options.hello_seconds if allowed else _STRANGER_SECONDS)
        if not allowed:
            self._counters["refused"] += 1
            if hello is not None:
                hint = f"Run the engine as the daemon's user, or add its group to link.gids (uid {credentials.uid})."
                await pipe.send(Rejected(RejectReason.NOT_ALLOWED, hint))
        elif hello is not None:
            await self._welcome(Peer(credentials, hello, self._options), pipe)

    async def _welcome(self, peer: Peer, pipe: _Pipe) -> None:
        if self._peers >= self._options.peers_max:
            self._counters["overloaded"] += 1
            hint = "Stop engines of this node, or raise link.engines_max."
            await pipe.send(Rejected(RejectReason.OVERLOADED, hint))
            return
        self._counters["accepted"] += 1
        self._peers += 1
        try:
            await _PeerSession(pipe, peer, self._handler, self._options).run(self._counters)
        finally:
            self._peers -= 1

    async def _greeting(self, pipe: _Pipe, seconds: float) -> Hello | None:
        """The Hello; None, and counted, if none came that we can talk to."""
        try:
            async with asyncio.timeout(seconds):
                message = await pipe.receive()
        except TimeoutError:
            self._counters["silent"] += 1
            return None
        except UnknownVersion as error:
            self._counters["rejected"] += 1
            await pipe.send(
                Rejected(RejectReason.OTHER_PROTOCOL, f"{error.problem}: upgrade the older of the two.")
            )
            return None
        except DecodeError:
            self._counters["junk"] += 1
            return None
        if isinstance(message, Hello):
            return message
        self._counters["junk"] += 1
        return None

    def _allowed(self, credentials: Credentials) -> bool:
        uids = self._options.uids | {0, os.getuid()}
        return credentials.uid in uids or bool(self._options.gids & (credentials.groups | {credentials.gid}))


class _GoneError(Exception):
    """The engine closed its end, or died: its right, and no cause to be told."""


class _Pipe:
    """Messages over one non-blocking socket."""

    def __init__(self, connection: socket.socket, limits: Limits) -> None:
        self._connection = connection
        self._limits = limits
        self._frames = EngineFrames(limits)

    async def receive(self) -> FromEngine:
        while (message := self._frames.take()) is None:
            try:
                data = await asyncio.get_running_loop().sock_recv(self._connection, _READ_BYTES)
            except OSError:
                raise _GoneError from None
            if not data:
                raise _GoneError
            self._frames.feed(data)
        return message

    async def send(self, message: FromDaemon) -> None:
        await self.send_bytes(encode(message, self._limits))

    async def send_bytes(self, data: bytes) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._connection, data)
        except OSError:
            raise _GoneError from None

    async def send_with_fds(self, message: FromDaemon, fds: tuple[int, ...]) -> None:
        """The first message on a fresh socket, whose buffer takes it at once."""
        data = encode(message, self._limits)
        try:
            sent = socket.send_fds(self._connection, [data], list(fds))
        except OSError:
            raise _GoneError from None
        await self.send_bytes(data[sent:])


_CAUSES: dict[type[Exception], str] = {DecodeError: "junk", LinkClosed: "ended"}


class _PeerSession:
    """The life of one engine's connection after its Hello."""

    def __init__(self, pipe: _Pipe, peer: Peer, handler: LinkHandler, options: ServerOptions) -> None:
        self._pipe = pipe
        self._peer = peer
        self._handler = handler
        self._options = options
        self._opening = 0

    async def run(self, counters: Counter[str]) -> None:
        """Serve until the end, and say how it ended."""
        cause: Exception | None = None
        try:
            await self._serve(counters)
        except* _GoneError:
            counters["gone"] += 1
        except* Exception as group:  # noqa: BLE001  # a task's top: the handler's bug must end this link only
            cause = _first_leaf(group)
            counters[_CAUSES.get(type(cause), "failed")] += 1
        finally:
            self._peer.close("the link has ended")
            self._handler.closed(self._peer, cause)

    async def _serve(self, counters: Counter[str]) -> None:
        answer = await self._handler.hello(self._peer, self._peer.hello)
        if isinstance(answer, Rejected):
            counters["rejected"] += 1
            await self._pipe.send(answer)
            return
        await self._pipe.send_with_fds(answer.welcome, answer.fds)
        async with asyncio.TaskGroup() as group:
            group.create_task(self._sender())
            group.create_task(self._ender())
            while True:
                self._dispatch(await self._pipe.receive(), group)

    async def _sender(self) -> None:
        while True:
            await self._pipe.send_bytes(await self._peer.next_batch())

    async def _ender(self) -> None:
        raise await self._peer.ended()

    def _dispatch(self, message: FromEngine, group: asyncio.TaskGroup) -> None:
        match message:
            case OpenTurn():
                self._open(message, group)
            case CloseTurn():
                self._handler.close_turn(self._peer, message)
            case Release():
                self._handler.release(self._peer, message)
            case Forget():
                self._handler.forget(self._peer, message)
            case Ping():
                self._peer.send(Pong())
            case Hello():
                raise DecodeError(problem="a second Hello")
            case _:
                assert_never(message)

    def _open(self, message: OpenTurn, group: asyncio.TaskGroup) -> None:
        if self._opening >= self._options.open_requests_max:
            detail = f"{self._opening} turns are being opened already"
            self._peer.send(TurnUnlogged(message.request, UnloggedReason.NOT_SUPPORTED, detail))
            return
        self._opening += 1
        group.create_task(self._answer(message))

    async def _answer(self, message: OpenTurn) -> None:
        try:
            answer = await self._handler.open_turn(self._peer, message)
            if answer is not None:
                self._peer.send(answer)
        finally:
            self._opening -= 1


def _first_leaf(group: BaseExceptionGroup[Exception]) -> Exception:
    """One of the exceptions in a group; ours are more telling than others."""
    leaves: list[Exception] = []
    pending: list[BaseException] = [group]
    while pending:
        item = pending.pop()
        if isinstance(item, BaseExceptionGroup):
            pending.extend(item.exceptions)
        elif isinstance(item, Exception):
            leaves.append(item)
    return next((leaf for leaf in leaves if isinstance(leaf, KvlogError)), leaves[0])
