"""What a reader says of a record, as values. Every reader says the same of the same record, from the log alone."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["ADMITTED", "Judgement", "Verdict", "Why"]


class Verdict(StrEnum):
    """The seven answers. Only GAP and DIVERGED can break a session; every refusal leaves its state unchanged."""

    ADMITTED = "admitted"
    STALE = "stale"
    """Of an older epoch."""
    DUPLICATE = "duplicate"
    """Folded before: the same claim, or a seq that was passed."""
    GAP = "gap"
    """Of the owner, but records before it are missing."""
    DIVERGED = "diverged"
    """Of the owner, and it does not fit what was folded before it."""
    FOREIGN = "foreign"
    """Of a writer who owns no epoch here."""
    UNKNOWN = "unknown"
    """This reader has not read enough of the session to judge."""


class Why(StrEnum):
    """The rule that decided."""

    FITS = "fits"
    OLDER_EPOCH = "older epoch"
    SAME_NONCE = "same claim again"
    SEQ_PASSED = "seq was folded before"
    SEQ_AHEAD = "seq is ahead of the next one"
    FIRST_NOT_TRUNCATE = "the first record of an epoch is not a Truncate"
    END_FIRST = "an End cannot be the first record of an epoch"
    LENGTH_AHEAD = "it keeps more positions than the session has"
    SHARDS_CHANGED = "it keeps positions of another number of shards"
    SHARD_UNKNOWN = "no such shard"
    START = "it does not start where the shard ends"
    TOO_LONG = "the session would exceed the limit of positions"
    PAYLOAD = "payload checksum"
    CHAIN = "chain"
    AFTER_END = "the session has ended"
    BROKEN = "the session is broken here"
    WRITER = "not the writer of this epoch"
    EPOCH_UNCLAIMED = "no claim of this epoch was admitted"
    EPOCH_AHEAD = "a claim's epoch exceeds its offset plus one"
    WINDOW = "the log was not read without a hole from the claim's epoch minus one"
    NO_ROOT = "the session's history is not known here"
    UNREADABLE = "its header could not be read"
    NO_SESSION = "no claim of the session was read"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A verdict, the rule that gave it, and the two values that it compared, where it compared numbers."""

    verdict: Verdict
    why: Why
    expected: int | None = None
    actual: int | None = None


ADMITTED = Judgement(Verdict.ADMITTED, Why.FITS)
