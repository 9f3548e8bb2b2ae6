"""What the demo claims, and whether what was measured proves it. Values in, verdicts out; nothing is measured here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from consumers.demo_log import SessionStory

__all__ = ["Claimed", "Evidence", "Killed", "Paused", "TakeOverTimes", "Tampered", "Uninterrupted", "claims"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOverTimes:
    """From the kill to the next token, in milliseconds; the parts add up.

    Args:
        detect_ms: until the client's stream broke.
        claim_ms: until the log held node B's claim.
        catch_up_ms: until node B had read it back and folded all before it, and its engine knew what to attach.
        attach_ms: until the rows were copied and verified.
        first_token_ms: until the next token was here: missing rows, one step, HTTP.
    """

    detect_ms: float
    claim_ms: float
    catch_up_ms: float
    attach_ms: float
    first_token_ms: float

    @property
    def total_ms(self) -> float:
        """From the kill to the next token."""
        return self.detect_ms + self.claim_ms + self.catch_up_ms + self.attach_ms + self.first_token_ms


@dataclass(frozen=True, slots=True, kw_only=True)
class Killed:
    """Node A was killed, node B went on.

    Args:
        shown: tokens of the answer that came from A.
        resumed: those that came from B.
        prompt_tokens: of the conversation.
        kvlog: what B's engine said at the end, digests of its cache included.
        story: what the log says of the session.
        times: the kill to the next token.
    """

    shown: tuple[int, ...]
    resumed: tuple[int, ...]
    prompt_tokens: int
    kvlog: Mapping[str, Any]
    story: SessionStory
    times: TakeOverTimes


@dataclass(frozen=True, slots=True, kw_only=True)
class Uninterrupted:
    """The same answer from an engine that nobody killed, and that had no daemon to get rows from."""

    tokens: tuple[int, ...]
    kvlog: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tampered:
    """The same take-over from two copies of the session: one as it was, one with a flipped byte.

    Args:
        whole_attached: rows that B attached from the copy as it was.
        attached: rows that B attached from the damaged copy.
        damaged_start: the damaged record's first position.
        damaged_offset: where it stands.
        folded: why our own fold refused it; empty: it did not.
        noticed_offset: where B's daemon says that the session broke; None: it did not.
        tokens: of the answer that went on from the damaged copy, what was shown before included.
    """

    whole_attached: int
    attached: int
    damaged_start: int
    damaged_offset: int
    folded: str
    noticed_offset: int | None
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Paused:
    """Node A was paused, node B went on, node A continued.

    Args:
        tokens: of the answer, from A before the pause and from B.
        ending: kind of the error that ended A's stream; empty: it ended as if nothing had happened.
        dropped: tokens that A still sent afterwards; nobody read them.
        story: what the log says; its `late` are A's records after B's claim.
        stale_at_b: offsets that B's daemon refused as stale.
        stale_at_a: offsets that A's own daemon did.
    """

    tokens: tuple[int, ...]
    ending: str
    dropped: int
    story: SessionStory
    stale_at_b: frozenset[int]
    stale_at_a: frozenset[int]

    @property
    def late_everywhere(self) -> bool:
        """Every late record is stale for three readers: our own fold, B, and A itself; and there was one."""
        late = set(self.story.late)
        return bool(late) and late == set(self.story.stale) and late <= self.stale_at_b & self.stale_at_a


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Everything that one demo has measured. `is_exact`: tokens that are computed again must be equal."""

    killed: Killed
    reprefill_ms: float
    reference: Uninterrupted
    tampered: Tampered
    paused: Paused
    is_exact: bool

    @property
    def ratio(self) -> float:
        """How many times longer the take-over lasts without rows."""
        return self.reprefill_ms / self.killed.times.total_ms

    @property
    def layers_equal(self) -> tuple[bool, ...]:
        """For each layer, whether the rows that B loaded are the uninterrupted run's; empty: none were loaded."""
        return _layers(self, self.killed.kvlog["attached"])

    @property
    def layers_equal_later(self) -> tuple[bool, ...]:
        """The same of the whole cache at the end of the answer: rows that B computed itself included."""
        return _layers(self, self.positions_at_end)

    @property
    def positions_at_end(self) -> int:
        """Rows of node B's cache when its answer was complete."""
        return max(map(int, self.killed.kvlog["kv_digests"]), default=0)


@dataclass(frozen=True, slots=True)
class Claimed:
    """One claim.

    Args:
        name: its name in the JSON.
        text: what is claimed.
        held: whether it is so.
        counts: whether it must be; if not, it is only reported.
        detail: the figures behind it.
    """

    name: str
    text: str
    held: bool
    counts: bool
    detail: str


def claims(evidence: Evidence) -> tuple[Claimed, ...]:
    """Judge all four."""
    return (_tokens_equal(evidence), _kv_equal(evidence), _tamper(evidence), _zombie(evidence))


def _layers(evidence: Evidence, positions: int) -> tuple[bool, ...]:
    key = str(positions)
    mine = evidence.killed.kvlog["kv_digests"].get(key, [])
    theirs = evidence.reference.kvlog["kv_digests"].get(key, [])
    if len(mine) != len(theirs):
        return (False,)
    return tuple(one == other for one, other in zip(mine, theirs, strict=True))


def _tokens_equal(evidence: Evidence) -> Claimed:
    actual = evidence.killed.shown + evidence.killed.resumed
    expected = evidence.reference.tokens
    same = _common(actual, expected)
    detail = f"{same} of {len(expected)} tokens"
    if actual == expected:
        detail += f", {len(evidence.killed.resumed)} of them from node B"
    text = "tokens equal those of an uninterrupted run"
    return Claimed("tokens_equal", text, actual == expected, evidence.is_exact, detail)


def _kv_equal(evidence: Evidence) -> Claimed:
    layers = evidence.layers_equal
    attached = evidence.killed.kvlog["attached"]
    later, whole = evidence.layers_equal_later, evidence.positions_at_end
    detail = (
        f"{sum(layers)} of {len(layers)} layers, {attached:,} positions;"
        f" of all {whole:,} at the end: {sum(later)} of {len(later)}"
    )
    if not layers:
        detail = "node B loaded no rows at all"
    # A reference that had attached rows of its own would prove nothing.
    alone = evidence.reference.kvlog["attached"] == 0
    text = "KV bytes that were loaded equal the uninterrupted run's"
    return Claimed("kv_equal", text, bool(layers) and all(layers) and alone, counts=True, detail=detail)


def _tamper(evidence: Evidence) -> Claimed:
    seen = evidence.tampered
    noticed = bool(seen.folded) and seen.noticed_offset == seen.damaged_offset
    kept_out = seen.attached <= seen.damaged_start < seen.whole_attached
    same = seen.tokens == evidence.reference.tokens
    detail = (
        f"noticed at its record ({seen.folded}); {seen.attached:,} rows before it attached,"
        f" of an untouched copy {seen.whole_attached:,}"
    )
    if not noticed:
        detail = "nobody noticed the record"
    elif not kept_out:
        detail = (
            f"{seen.attached:,} rows attached, the damage is at {seen.damaged_start:,};"
            f" of an untouched copy {seen.whole_attached:,}"
        )
    elif not same:
        detail += "; the answer went on with other tokens"
    text = "a flipped byte in the log is noticed, and never attached"
    held = noticed and kept_out and (same or not evidence.is_exact)
    return Claimed("tamper_detected", text, held, counts=True, detail=detail)


def _zombie(evidence: Evidence) -> Claimed:
    seen = evidence.paused
    same = seen.tokens == evidence.reference.tokens
    late, fenced = len(seen.story.late), seen.ending == "fenced"
    detail = f"{late} late {'record' if late == 1 else 'records'} stale for every reader; its stream ended as fenced"
    if not fenced:
        detail = f"its stream ended as {seen.ending or 'if nothing had happened'}"
    elif not seen.late_everywhere:
        detail = f"{len(seen.story.stale)} of {late} late records are stale, and not for every reader"
    elif not same:
        detail += "; the answer went on with other tokens"
    text = "a paused node that comes back is fenced"
    held = fenced and seen.late_everywhere and (same or not evidence.is_exact)
    return Claimed("zombie_fenced", text, held, counts=True, detail=detail)


def _common(actual: Sequence[int], expected: Sequence[int]) -> int:
    """Length of the common prefix."""
    pairs = zip(actual, expected, strict=False)
    return next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(actual), len(expected)))
