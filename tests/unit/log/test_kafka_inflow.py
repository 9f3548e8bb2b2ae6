"""Answers cut out of what a connection receives, however it comes."""

from __future__ import annotations

import gc
import struct
from types import SimpleNamespace
from typing import Any

import aiokafka
import pytest

from kvlog.log.kafka_inflow import Inflow, take_over

ANSWERS = [b"", b"a", b"bb" * 200, bytes(range(256)) * 1000, b"last"]
BUFFER_BYTES, FIRST_BYTES = 64 << 10, 16 << 20


class FakeConnection:
    """Keeps the answers it is given; `fail_at` is one that it cannot read."""

    def __init__(self, fail_at: int = -1) -> None:
        self.answers: list[bytes] = []
        self.closed: list[BaseException | None] = []
        self.fail_at = fail_at
        self._requests: list[tuple[int, object, None]] = []

    def _handle_frame(self, answer: bytes) -> None:
        if len(self.answers) == self.fail_at:
            raise IndexError(answer)
        self.answers.append(answer)

    def close(self, *, reason: object, exc: BaseException) -> None:
        """See AIOKafkaConnection.close."""
        assert reason is not None
        self.closed.append(exc)


class FakeStream:
    """Keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[object] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *given: self.heard.append((name, *given))


def framed(answers: list[bytes]) -> bytes:
    """Answers as a broker sends them."""
    return b"".join(struct.pack(">i", len(answer)) + answer for answer in answers)


def receive(inflow: Inflow, data: bytes, piece: int) -> None:
    """Let bytes come, so many at a time at most."""
    at = 0
    while at < len(data):
        room = inflow.get_buffer(-1)
        count = min(piece, len(room), len(data) - at)
        room[:count] = data[at : at + count]
        del room
        inflow.buffer_updated(count)
        at += count


@pytest.mark.parametrize("piece", [1, 3, 4, 5, 1000, BUFFER_BYTES, 1 << 20])
def test_answers_come_whole_in_whatever_pieces_they_arrive(piece: int) -> None:
    """Lengths and answers may be cut anywhere, and several answers may come at once."""
    connection = FakeConnection()
    inflow = Inflow(connection, FakeStream())
    receive(inflow, framed(ANSWERS * 2), piece)
    assert ANSWERS * 2 == connection.answers
    assert not connection.closed


def test_buffer_grows_with_what_has_come_and_not_with_what_is_promised() -> None:
    """A length of two gigabytes takes no memory before the bytes are there."""
    connection = FakeConnection()
    inflow = Inflow(connection, FakeStream())
    receive(inflow, struct.pack(">i", (1 << 31) - 1) + bytes(100), 50)
    assert FIRST_BYTES == len(inflow.get_buffer(-1)) + 100
    receive(inflow, bytes(FIRST_BYTES), FIRST_BYTES)
    assert FIRST_BYTES == len(inflow.get_buffer(-1)) + 100
    assert not connection.closed


@pytest.mark.parametrize(
    ("fail_at", "data"), [(-1, struct.pack(">i", -1)), (1, framed([b"good", b"unreadable", b"good"]))]
)
def test_answer_that_cannot_be_read_ends_the_connection(fail_at: int, data: bytes) -> None:
    """Behind a negative length, or an answer to nothing that was asked, nobody knows where the next one begins."""
    connection = FakeConnection(fail_at)
    receive(Inflow(connection, FakeStream()), data, len(data))
    (error,) = connection.closed
    assert isinstance(error, ValueError | IndexError)
    assert connection.answers in ([], [b"good"])


def test_request_that_is_answered_in_place_sees_what_came_and_nothing_is_written_over_it() -> None:
    """The library sees the head only; a buffer is used again when no view of it is left, and not before."""
    connection = FakeConnection()
    shown: list[memoryview] = []
    connection._requests = [(1, SimpleNamespace(show=shown.append), None)]
    inflow = Inflow(connection, FakeStream())
    answers = [bytes([n]) * 300_000 for n in range(5)]
    for answer in answers:
        receive(inflow, framed([answer]), 100_000)
    assert answers == shown
    assert [answer[:64] for answer in answers] == connection.answers
    buffers = [view.obj for view in shown]
    shown.clear()
    receive(inflow, framed([b"x" * 300_000]), 100_000)
    assert any(shown[0].obj is buffer for buffer in buffers)


def test_what_happens_to_the_connection_reaches_the_stream() -> None:
    """The library's own reading task notices the end, and its writer the full socket."""
    stream, end = FakeStream(), OSError()
    inflow = Inflow(FakeConnection(), stream)
    inflow.pause_writing()
    inflow.resume_writing()
    inflow.eof_received()
    inflow.connection_lost(end)
    assert [
        ("pause_writing",),
        ("resume_writing",),
        ("eof_received",),
        ("connection_lost", end),
    ] == stream.heard


def test_connection_that_nobody_holds_any_more_is_not_held_here() -> None:
    """A link that was lost must be collected, with its connections."""
    connection = FakeConnection()
    inflow = Inflow(connection, FakeStream())
    del connection
    gc.collect()
    receive(inflow, framed([b"late"]), 100)


@pytest.mark.parametrize(("version", "is_taken"), [("0.14.0", True), ("0.15.0", False), ("1.0.0", False)])
def test_release_that_was_not_seen_keeps_its_stream(
    monkeypatch: pytest.MonkeyPatch, version: str, is_taken: bool
) -> None:
    """What stands behind a private name may be another thing there; the stream is slower, and right."""
    monkeypatch.setattr(aiokafka, "__version__", version)
    taken: list[object] = []
    transport = SimpleNamespace(set_protocol=taken.append)
    connection: Any = FakeConnection()
    connection._writer, connection._protocol = SimpleNamespace(transport=transport), FakeStream()
    take_over(connection)
    assert is_taken == bool(taken)
