"""How a broker's answers come in: each into the same buffer, whole, whatever its size.

    asyncio's streams   socket ─▶ bytes of 256 KiB ─▶ bytearray that grows ─▶ bytes     a task switch for each piece
    Inflow              socket ─▶ one buffer, kept ─▶ bytes                             a task switch for each answer

aiokafka (0.14) reads each connection through a StreamReader of 64 KiB, which pauses and resumes the transport for each
piece of a large answer. Once a connection is made, `take_over` puts a protocol of ours in the place of the stream's.
What has come whole it gives to aiokafka's own `_handle_frame`; what happens to the connection it passes on to the
stream, so aiokafka notices the end of a connection as ever. A release of aiokafka that we have not seen keeps its
stream: slower, and as right.

An answer's stated length is not believed: the buffer grows as bytes come. It is kept between answers, so that the next
one lands in warm memory, and is at most twice as large as the connection's largest answer, which the requests bound.
"""

from __future__ import annotations

import asyncio
import struct
import weakref
from typing import TYPE_CHECKING, Any

import aiokafka
from aiokafka.conn import CloseReason

if TYPE_CHECKING:
    from aiokafka.conn import AIOKafkaConnection

__all__ = ["Inflow", "take_over"]

_SEEN = "0.14."
"""The releases of aiokafka whose connections are what we take them for."""

_LENGTH = struct.Struct(">i")
_BUFFER_BYTES = 64 << 10
"""What a connection begins with: more than any answer but those to fetches."""


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
        self._buffer = bytearray(_BUFFER_BYTES)
        self._filled = 0

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Where the next bytes go."""
        if self._filled == len(self._buffer):
            self._buffer += bytes(len(self._buffer))
        return memoryview(self._buffer)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """So many bytes have come."""
        self._filled += nbytes
        connection = self._connection()
        if connection is None:
            return  # it closes the transport when it goes
        received = memoryview(self._buffer)[: self._filled]
        try:
            used = _hand_out(received, connection)
        except Exception as error:  # noqa: BLE001 - as in aiokafka's reading task: whatever it is, the connection ends
            connection.close(reason=CloseReason.CONNECTION_BROKEN, exc=error)
            return
        if used:
            left = bytes(received[used:])
            self._buffer[: len(left)] = left
            self._filled = len(left)

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


def _hand_out(received: memoryview, connection: AIOKafkaConnection) -> int:
    """Give the connection the answers that are whole. Returns: the bytes that they took."""
    at = 0
    while len(received) - at >= _LENGTH.size:
        (length,) = _LENGTH.unpack_from(received, at)
        if length < 0:
            raise ValueError(length)
        end = at + _LENGTH.size + length
        if end > len(received):
            break
        connection._handle_frame(bytes(received[at + _LENGTH.size : end]))  # noqa: SLF001 - see the module
        at = end
    return at
