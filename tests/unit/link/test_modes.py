"""Sync modes: text to value and back."""

from __future__ import annotations

import pytest

from kvlog.errors import ConfigError
from kvlog.modes import FULL, IDS, SyncKind, SyncMode, parse_sync_mode


@pytest.mark.parametrize(
    ("text", "mode"),
    [("full", FULL), ("ids", IDS), ("every:16,50ms", SyncMode(SyncKind.EVERY, 16, 50))],
)
def test_sync_mode_text_comes_back(text, mode):
    """A mode is what its text says, and says it again."""
    assert mode == parse_sync_mode(text)
    assert text == str(mode)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Full",
        "every",
        "every:16",
        "every:0,50ms",
        "every:16,0ms",
        "every:4097,50ms",
        "every:16,60001ms",
        "every:\N{FULLWIDTH DIGIT ONE},5ms",
    ],
)
def test_sync_mode_other_text_is_refused_with_the_forms(text):
    """Who misspells a mode is told what to write."""
    with pytest.raises(ConfigError, match=r"every:TOKENS,TIMEms") as caught:
        parse_sync_mode(text, setting="sync.default")
    assert caught.value.setting == "sync.default"
