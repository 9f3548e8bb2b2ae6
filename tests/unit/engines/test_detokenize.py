"""Text that comes in tokens: whole characters, nothing lost, nothing twice."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.engines.detokenize import StreamDecoder

if TYPE_CHECKING:
    from collections.abc import Sequence


def _bytes_decode(tokens: Sequence[int]) -> str:
    return bytes(tokens).decode(errors="replace")


def _words_decode(tokens: Sequence[int]) -> str:
    """As SentencePiece does: the space before the first token of a text is not shown."""
    return "".join(f" word{token}" for token in tokens).removeprefix(" ")


def test_push_holds_a_character_until_it_is_whole() -> None:
    """A token that ends in the middle of a character shows what is before it."""
    stream = StreamDecoder(_bytes_decode)
    assert ["a", "", "", "€", "b"] == [stream.push(byte) for byte in "a€b".encode()]
    assert stream.finish() == ""


def test_push_of_a_bad_byte_shows_it_when_it_is_decided() -> None:
    """A byte that begins no character is shown as such once the next token proves it."""
    stream = StreamDecoder(_bytes_decode)
    assert ["", "�x"] == [stream.push(byte) for byte in b"\xffx"]


def test_finish_shows_an_unfinished_character() -> None:
    """An answer that stops in the middle of a character ends with the sign for it, once."""
    stream = StreamDecoder(_bytes_decode)
    assert "ok" == stream.push(*"ok€".encode()[:-1])
    assert ["�", ""] == [stream.finish(), stream.finish()]


def test_push_of_seen_tokens_first_goes_on_where_the_text_ended() -> None:
    """A node that takes over pushes what the user has, drops it, and shows exactly the rest."""
    text = "naïve 😀 café, " * 9
    tokens = list(text.encode())
    for cut in range(len(tokens)):
        first, second = StreamDecoder(_bytes_decode), StreamDecoder(_bytes_decode)
        shown = first.push(*tokens[:cut])
        assert shown == second.push(*tokens[:cut])
        assert text == shown + second.push(*tokens[cut:]) + second.finish()


def test_push_keeps_the_spaces_of_tokenizers_that_drop_the_first() -> None:
    """A token is decoded with those before it, because alone it would lose its space."""
    stream = StreamDecoder(_words_decode)
    tokens = list(range(50))
    assert _words_decode(tokens) == "".join(stream.push(token) for token in tokens)


def test_push_decodes_a_bounded_number_of_tokens() -> None:
    """The cost of a token does not grow with the text, not even when no character ever ends."""
    lengths = []

    def decode(tokens: Sequence[int]) -> str:
        lengths.append(len(tokens))
        return _bytes_decode(tokens)

    stream = StreamDecoder(decode)
    shown = stream.push(*([0xFF] * 500)) + stream.finish()
    assert max(lengths) <= 64
    assert "�" * 500 == shown
