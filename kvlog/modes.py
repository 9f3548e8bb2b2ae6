"""How closely a session follows its engine: every step, every so often, or token ids only.

full            each step's rows are published as they come
every:16,50ms   one delta for 16 tokens or for what came in 50 ms, whichever is first
ids             token ids only: another node prefills again, nothing is lost but time
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from kvlog.errors import ConfigError

__all__ = ["FULL", "IDS", "MILLISECONDS_MAX", "TOKENS_MAX", "SyncKind", "SyncMode", "parse_sync_mode"]

TOKENS_MAX = 4096
"""The most tokens that `every` may hold back: one full delta (Limits.delta_tokens)."""

MILLISECONDS_MAX = 60_000
"""The longest that `every` may hold back; a minute without a record is no replication any more."""

_EVERY = re.compile(r"every:([0-9]{1,6}),([0-9]{1,6})ms")


class SyncKind(StrEnum):
    """The family of a mode."""

    FULL = "full"
    EVERY = "every"
    IDS = "ids"


@dataclass(frozen=True, slots=True)
class SyncMode:
    """One session's mode.

    Args:
        kind: its family.
        tokens: `every` only, 1 to 4096: a delta is due when so many tokens wait.
        milliseconds: `every` only, 1 to 60,000: or when the oldest of them has waited so long.
    """

    kind: SyncKind
    tokens: int = 1
    milliseconds: int = 1

    def __post_init__(self) -> None:
        """Only `every` has figures, and they have bounds."""
        if self.kind is SyncKind.EVERY:
            assert 1 <= self.tokens <= TOKENS_MAX, "tokens out of range"
            assert 1 <= self.milliseconds <= MILLISECONDS_MAX, "milliseconds out of range"
        else:
            assert (self.tokens, self.milliseconds) == (1, 1), "only `every` has figures"

    def __str__(self) -> str:
        if self.kind is SyncKind.EVERY:
            return f"every:{self.tokens},{self.milliseconds}ms"
        return self.kind.value


FULL = SyncMode(SyncKind.FULL)
IDS = SyncMode(SyncKind.IDS)


def parse_sync_mode(text: str, *, setting: str = "sync.mode") -> SyncMode:
    """Read a mode's text form.

    Args:
        text: `full`, `every:16,50ms` or `ids`.
        setting: the name of what is being set, for the error.

    Raises:
        ConfigError: it is none of them, or a figure is out of range; correct the text.
    """
    if text == SyncKind.FULL:
        return FULL
    if text == SyncKind.IDS:
        return IDS
    match = _EVERY.fullmatch(text)
    if match is not None:
        tokens, milliseconds = int(match[1]), int(match[2])
        if 1 <= tokens <= TOKENS_MAX and 1 <= milliseconds <= MILLISECONDS_MAX:
            return SyncMode(SyncKind.EVERY, tokens, milliseconds)
    raise ConfigError(
        setting=setting,
        problem=f"{text[:64]!r} is no sync mode",
        fix=f"write full, ids, or every:TOKENS,TIMEms with 1-{TOKENS_MAX} tokens and 1-{MILLISECONDS_MAX} ms",
    )
