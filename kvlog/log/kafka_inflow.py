"""How a broker's answers come in: each into a buffer of its own, whole, and a fetch's is used where it has come.

    asyncio's streams   socket ─▶ bytes of 256 KiB ─▶ bytearray that grows ─▶ bytes     a task switch for each piece
    Inflow              socket ─▶ one buffer an answer

aiokafka (0.14) reads each connection through a StreamReader of 64 KiB, which pauses and resumes the transport for each
piece of a large answer. Once a connection is made, `take_over` puts a protocol of ours in the place of the stream's.
What has come whole it gives to aiokafka's own `_handle_frame`; what happens to the connection it passes on to the
stream, so aiokafka notices the end of a connection as ever. A request that is `AnsweredInPlace` is shown its answer,
and aiokafka the answer's head only. A release of aiokafka that we have not seen keeps its stream: slower, and as right.

An answer's stated length is not believed: beyond a first part its buffer grows as bytes come. Buffers are used again
when nobody refers to them any more, so that answers land in warm memory that need not be cleared; three are kept.
"""

from __future__ import annotations

import asyncio
import struct
import weakref
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import aiokafka
from aiokafka.conn import CloseReason

if TYPE_CHECKING:
    from aiokafka.conn import AIOKafkaConnection

__all__ = ["AnsweredInPlace", "Inflow", "take_over"]

_SEEN = "0.14."
"""The releases of aiokafka whose connections are what we take them for."""

_LENGTH = struct.Struct(">i")
_HEAD_BYTES = 64
"""More than the head of an answer ever has: a number, and tags of which Kafka has none."""

_BUFFER_BYTES = 64 << 10
"""The least that a buffer has: more than any answer but those to fetches."""

_FIRST_BYTES = 16 << 20
"""As much of an answer's stated length as is believed: two of our fetches."""

_KEPT_MAX = 3
"""One that is received into, one that waits, one that is being applied."""


@runtime_checkable
class AnsweredInPlace(Protocol):
    """A request that reads its answer where it has come, as long as it is referenced."""

    def show(self, answer: memoryview) -> None:
        """Here is the answer, head and all; aiokafka's `decode` of it comes next, with its head only."""
        ...


class _Buffers:
    """Buffers that are used again."""

    def __init__(self) -> None:
        self._kept: list[bytearray] = []

    def take(self, size: int) -> bytearray:
        """One of so many bytes or more, to which nobody refers."""
        for buffer in self._kept:
            if len(buffer) >= size and _is_free(buffer):
                return buffer
        made = bytearray(max(size, _BUFFER_BYTES))
        self._kept = [*self._kept, made][-_KEPT_MAX:]
        return made


class Inflow(asyncio.BufferedProtocol):
    """Cuts what a connection receives into answers.

    Args:
        connection: whose answers; it is closed at the first that cannot be read. Not kept alive by this, as aiokafka's
            own reading task does not.
        stream: the protocol that was in this place, and hears what is not bytes.
    """

    def __init__(self, connection: AIOKafkaConnection, stream: Any) -> None:  # noqa: ANN401 - aiokafka has no types
        self._connection = weakref.ref(connection)
        self._stream = stream
        self._is_broken = False
        self._buffers = _Buffers()
        self._length_bytes = bytearray(_LENGTH.size)
        self._answer: bytearray | None = None  # None: its length comes first
        self._length = 0
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes go: never more than to the end of the answer."""
        if self._answer is None:
            return memoryview(self._length_bytes)[self._filled :]
        if self._filled == len(self._answer):
            self._answer += bytes(len(self._answer))
        return memoryview(self._answer)[self._filled : self._length]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._filled += nbytes
        if self._answer is None:
            if self._filled < _LENGTH.size:
                return
            (self._length,) = _LENGTH.unpack(self._length_bytes)
            self._answer, self._filled = self._buffers.take(min(self._length, _FIRST_BYTES)), 0
        if self._filled >= self._length:
            answer = memoryview(self._answer)[: max(self._length, 0)]
            self._answer, self._filled = None, 0
            self._hand_out(answer)

    def _hand_out(self, answer: memoryview) -> None:
        connection = self._connection()
        if connection is None or self._is_broken:
            return  # it closes the transport when it goes, and has closed it
        try:
            _handle(connection, answer, length=self._length)
        except Exception as error:  # noqa: BLE001 - as in aiokafka's reading task: whatever it is, the connection ends
            self._is_broken = True
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)

    def eof_received(self) -> bool | None:
        """The broker sends no more."""
        stays_open: bool | None = self._stream.eof_received()
        return stays_open

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        self._stream.connection_lost(exc)

    def pause_writing(self) -> None:
        """The socket is full."""
        self._stream.pause_writing()

    def resume_writing(self) -> None:
        """There is room again."""
        self._stream.resume_writing()


def take_over(connection: AIOKafkaConnection) -> None:
    """Receive a connection's answers from now on; it must be connected, with nothing asked."""
    if aiokafka.__version__.startswith(_SEEN):
        inflow = Inflow(connection, connection._protocol)  # noqa: SLF001 - see the module
        connection._writer.transport.set_protocol(inflow)  # noqa: SLF001 - see the module


def _handle(connection: AIOKafkaConnection, answer: memoryview, *, length: int) -> None:
    """Give aiokafka the answer to its oldest request."""
    if length < 0:
        raise ValueError(length)
    waiting = connection._requests  # noqa: SLF001 - see the module
    request = waiting[0][1] if waiting else None
    if isinstance(request, AnsweredInPlace):
        request.show(answer)
        answer = answer[:_HEAD_BYTES]
    connection._handle_frame(bytes(answer))  # noqa: SLF001 - see the module


def _is_free(buffer: bytearray) -> bool:
    """Whether no view of it is left: Python lets nobody change the size of a buffer that is looked at."""
    try:
        buffer.append(0)
    except BufferError:
        return False
    del buffer[-1]
    return True
