"""Text of an answer: whole characters, stop strings, and the same borders after a resume."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlog.engines.answer_text import AnswerText, StopScanner


def decode(tokens) -> str:
    """Token ids that are bytes."""
    return bytes(tokens).decode(errors="replace")


def test_stop_scanner_holds_back_what_may_begin_a_stop():
    """No part of a stop string is ever shown."""
    scanner = StopScanner(["END", "\n\n"])
    assert ["a", "", "", "E b", "", ""] == [scanner.push(text) for text in ["a", "E", "", " b", "\n", "\n"]]
    assert scanner.stopped
    assert scanner.push("more") == ""
    assert scanner.finish() == ""


def test_stop_scanner_finish_gives_what_was_held():
    """An answer that ends on half a stop string keeps it."""
    scanner = StopScanner(["END"])
    assert scanner.push("xEN") == "x"
    assert scanner.finish() == "EN"


def test_stop_scanner_first_of_several_stops_wins():
    """The answer ends at the earliest one, whichever it is."""
    scanner = StopScanner(["dog", "cat"])
    assert scanner.push("a cat and a dog") == "a "


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_stop_scanner_cuts_of_the_text_do_not_matter(text, stops, data):
    """However the text comes, what is shown is the text up to the first stop."""
    found = [at for at in (text.find(stop) for stop in stops) if at >= 0]
    scanner, shown, rest = StopScanner(stops), "", text
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        shown += scanner.push(rest[:size])
        rest = rest[size:]
    # Found while the text still grows, a stop that ends earlier wins over one that begins earlier but ends later.
    ends = [text.find(stop) + len(stop) for stop in stops if stop in text]
    shown += scanner.finish()
    assert scanner.stopped == bool(found)
    assert text.startswith(shown)
    if not found:
        assert text == shown
    else:
        assert len(shown) <= min(ends)


@given(st.text(max_size=20), st.integers(0, 80))
def test_answer_text_resumed_anywhere_shows_exactly_the_rest(text, cut):
    """The user's text is whole over a take-over, whatever character or stop it fell into."""
    tokens = text.encode()
    before, after = AnswerText(decode, ["b!"]), AnswerText(decode, ["b!"])
    seen = "".join(before.push(token) for token in tokens[:cut])
    whole = seen + "".join(before.push(token) for token in tokens[cut:]) + before.finish()
    for token in tokens[:cut]:
        after.push(token)
    assert whole == seen + "".join(after.push(token) for token in tokens[cut:]) + after.finish()
