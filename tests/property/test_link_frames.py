"""The link's decoder against arbitrary bytes: a message, a wait for more, or DecodeError; nothing else, ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlog.errors import DecodeError
from kvlog.link.frames import DaemonFrames, EngineFrames, encode
from tests.unit.link.samples import FROM_DAEMON, FROM_ENGINE


def drain(frames) -> list[object]:
    """All messages up to the first junk."""
    out: list[object] = []
    try:
        while (message := frames.take()) is not None:
            out.append(message)
    except DecodeError as error:
        out.append(error)
    return out


@given(st.binary(max_size=300))
def test_decoder_arbitrary_bytes_never_escape(data):
    """Junk from a peer is one typed error."""
    frames = EngineFrames()
    frames.feed(data)
    assert all(message is not None for message in drain(frames))


@given(st.sampled_from(FROM_DAEMON), st.data())
def test_decoder_flipped_byte_is_a_message_or_an_error(message, data):
    """A damaged message never raises anything but DecodeError, and never hangs."""
    raw = bytearray(encode(message))
    at = data.draw(st.integers(4, len(raw) - 1))
    raw[at] ^= data.draw(st.integers(1, 255))
    frames = DaemonFrames()
    frames.feed(bytes(raw))
    assert len(drain(frames)) <= 1


@given(st.lists(st.sampled_from(FROM_ENGINE), max_size=8), st.lists(st.integers(1, 40), max_size=200))
def test_decoder_any_cut_of_a_stream_gives_the_same_messages(messages, sizes):
    """Borders of reads mean nothing."""
    stream = b"".join(encode(message) for message in messages)
    frames, out = EngineFrames(), []
    for size in sizes:
        frames.feed(stream[:size])
        stream = stream[size:]
        out += drain(frames)
    frames.feed(stream)
    assert messages == out + drain(frames)
