"""Streamed text against the text decoded as a whole."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines.detokenize import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence


def _pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    ends = sorted({cut % (len(data) + 1) for cut in cuts} | {0, len(data)})
    return [data[start:end] for start, end in pairwise(ends)]


def _stream(pieces: list[bytes]) -> str:
    def decode(tokens: Sequence[int]) -> str:
        return b"".join(pieces[token] for token in tokens).decode(errors="replace")

    stream = StreamDecoder(decode)
    return "".join(stream.push(token) for token in range(len(pieces))) + stream.finish()


@given(st.text(max_size=80), st.lists(st.integers(0, 400)))
def test_stream_of_any_text_cut_anywhere_is_the_text(text: str, cuts: list[int]) -> None:
    """Tokens cut characters anywhere; the user sees the text."""
    data = text.encode("utf-8", "replace")
    assert data.decode() == _stream(_pieces(data, cuts))


@given(st.binary(max_size=60), st.lists(st.integers(0, 60)))
def test_stream_of_any_bytes_is_what_the_whole_decodes_to(data: bytes, cuts: list[int]) -> None:
    """Bytes that are no text look the same streamed and whole."""
    assert data.decode(errors="replace") == _stream(_pieces(data, cuts))
