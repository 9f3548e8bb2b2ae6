"""An answer that comes in pieces is shown in whole words, within the width, whatever the model says."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from consumers.demo_answer_box import AnswerBox


def shown(*pieces: str, width: int = 30, encoding: str = "utf-8", cut: int | None = None) -> list[str]:
    """The lines of an answer that came in these pieces; after `cut` of them another node speaks."""
    raw = io.BytesIO()
    out = io.TextIOWrapper(raw, encoding=encoding)
    box = AnswerBox(Console(file=out, width=width, force_terminal=False), "answer")
    box.speak("A", "cyan")
    for number, piece in enumerate(pieces):
        if number == cut:
            box.cut("A is dead", "red")
            box.speak("B", "green")
        box.push(piece)
    box.close()
    out.flush()
    return raw.getvalue().decode(encoding).splitlines()


def test_box_wraps_whole_words_behind_a_gutter():
    """A word that does not fit goes to the next line, however many pieces it came in."""
    assert [
        "  ╭── answer ────────────────╮",
        "A │ The night of the great",
        "  │ storm was foreboding.",
        "  ╰──────────────────────────╯",
    ] == shown("The night", " of the gr", "eat ", "storm", " was fore", "bod", "ing.")


def test_box_that_is_cut_goes_on_in_the_middle_of_a_word():
    """What the user has is shown up to the last character; the other node goes on with the next one."""
    assert [
        "  ╭── answer ────────────────╮",
        "A │ The light",
        "  ├── A is dead ─────────────┤",
        "B │ house was dark.",
        "  ╰──────────────────────────╯",
    ] == shown("The ", "light", "house", " was dark.", cut=2)


def test_box_keeps_line_breaks():
    """A list stays a list."""
    assert ["A │ One:", "  │ 1. a", "  │ 2. b"] == shown("One:\n\n1. a\n", "2. b")[1:4]


def test_box_without_unicode_is_drawn_with_what_there_is():
    """An old terminal gets plain characters."""
    assert [
        "  +-- answer ----------------+",
        "A | na?ve",
        "  +--------------------------+",
    ] == shown("naïve", encoding="ascii")


@pytest.mark.parametrize("hostile", ["\x1b[2J", "a\x07b", "\u202e", "x" * 500, "\r\rover", "猫" * 40])
def test_box_survives_what_models_say(hostile):
    """Escapes, bells, overrides and endless words neither move the cursor nor leave the box."""
    lines = shown("A ", hostile, " z")
    assert not any(character in "".join(lines) for character in "\x1b\x07\r\u202e")
    assert all(len(line.encode("utf-16-le")) // 2 <= 30 for line in lines)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.sampled_from("ab \n.,é猫"), max_size=12), max_size=12), st.integers(20, 60))
def test_box_shows_every_character_in_order(pieces, width):
    """Whatever the pieces, the same words are shown, and no line is wider than the terminal."""
    lines = shown(*pieces, width=width)
    said = "".join(line[4:] for line in lines[1:-1])
    assert "".join("".join(pieces).split()) == "".join(said.split())
    assert all(Console(width=500).measure(line).maximum <= width for line in lines)
