"""TakeOver: every phase × every input, and every path from the first question to primary or to giving up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvlog.core.effects import AppendRecord, ReadWatermark
from kvlog.core.takeover import Claimant, Phase, TakeOver
from kvlog.ids import Epoch, NodeId, Nonce, Offset, SessionId
from kvlog.limits import TINY
from kvlog.records import Claim
from kvlog.wire.header import header_bytes
from tests.unit.core.logbook import CONTEXT, IDENTITY, NO_PAYLOAD, PARTITION, claim, sixteen, writer

if TYPE_CHECKING:
    from collections.abc import Callable

S = SessionId("s")
ME = Claimant(NodeId("node-A"), writer("A"), IDENTITY, CONTEXT)
ASKED = (ReadWatermark(S, PARTITION),)


def takeover() -> TakeOver:
    """A take-over that has not begun."""
    return TakeOver(S, PARTITION, ME, header_bytes, TINY)


def nonce(name: object) -> Nonce:
    """A nonce by name."""
    return Nonce(sixteen(f"nonce {name}"))


def claimed(attempt: TakeOver, *, high_watermark: int = 7) -> Claim:
    """The claim that the take-over appends when it reads this watermark."""
    (effect,) = attempt.watermark_read(Offset(high_watermark), nonce(high_watermark))
    assert isinstance(effect, AppendRecord)
    assert isinstance(effect.record, Claim)
    return effect.record


def test_takeover_asks_for_the_watermark_first() -> None:
    """The epoch follows from what the leader says now."""
    attempt = takeover()
    assert ASKED == attempt.start()
    assert (Phase.ASKING, None, ME, None) == (
        attempt.phase,
        attempt.claim,
        attempt.claimant,
        attempt.newer_epoch,
    )


def test_takeover_claims_the_epoch_after_the_watermark() -> None:
    """Epoch = high watermark + 1: no admitted epoch can be higher at any offset below."""
    attempt = takeover()
    attempt.start()
    expected = Claim(S, Epoch(8), ME.writer, nonce(7), ME.node, IDENTITY, CONTEXT)
    assert (
        AppendRecord(PARTITION, expected, header_bytes(expected), 0, NO_PAYLOAD),
    ) == attempt.watermark_read(Offset(7), nonce(7))
    assert (Phase.CLAIMED, expected) == (attempt.phase, attempt.claim)


def test_takeover_of_an_empty_partition_claims_epoch_one() -> None:
    """Epochs begin at 1: 0 stands for none."""
    attempt = takeover()
    attempt.start()
    assert claimed(attempt, high_watermark=0).epoch == 1


@dataclass(frozen=True)
class Step:
    """One input, by name, and what each phase does with it: the next phase, and whether it asks or claims."""

    give: Callable[[TakeOver], object]
    expected: dict[Phase, tuple[Phase, str]]


def give_watermark(attempt: TakeOver) -> object:
    """The watermark was read."""
    return attempt.watermark_read(Offset(30), nonce(30))


def give_failure(attempt: TakeOver) -> object:
    """The watermark could not be read, or the append failed."""
    return attempt.failed()


def give_own_refused(attempt: TakeOver) -> object:
    """The fold refused our newest claim."""
    return attempt.refused(attempt.claim or claim(1), Epoch(99))


def give_other_refused(attempt: TakeOver) -> object:
    """The fold refused somebody's claim."""
    return attempt.refused(claim(99, "B"), Epoch(99))


def give_own_admitted(attempt: TakeOver) -> object:
    """The fold admitted our newest claim."""
    return attempt.admitted(attempt.claim or claim(1))


def give_other_admitted(attempt: TakeOver) -> object:
    """The fold admitted somebody's claim."""
    return attempt.admitted(claim(99, "B"))


STEPS = {
    "watermark read": Step(
        give_watermark,
        {
            Phase.ASKING: (Phase.CLAIMED, "claims"),
            Phase.CLAIMED: (Phase.CLAIMED, "nothing"),
            Phase.WON: (Phase.WON, "nothing"),
            Phase.FENCED: (Phase.FENCED, "nothing"),
            Phase.UNAVAILABLE: (Phase.UNAVAILABLE, "nothing"),
        },
    ),
    "failed": Step(
        give_failure,
        {
            Phase.ASKING: (Phase.ASKING, "asks"),
            Phase.CLAIMED: (Phase.ASKING, "asks"),
            Phase.WON: (Phase.WON, "nothing"),
            Phase.FENCED: (Phase.FENCED, "nothing"),
            Phase.UNAVAILABLE: (Phase.UNAVAILABLE, "nothing"),
        },
    ),
    "own claim refused": Step(
        give_own_refused,
        {
            Phase.ASKING: (Phase.ASKING, "nothing"),
            Phase.CLAIMED: (Phase.ASKING, "asks"),
            Phase.WON: (Phase.WON, "nothing"),
            Phase.FENCED: (Phase.FENCED, "nothing"),
            Phase.UNAVAILABLE: (Phase.UNAVAILABLE, "nothing"),
        },
    ),
    "another's claim refused": Step(give_other_refused, {phase: (phase, "nothing") for phase in Phase}),
    "own claim admitted": Step(
        give_own_admitted,
        {
            Phase.ASKING: (Phase.ASKING, "no"),
            Phase.CLAIMED: (Phase.WON, "won"),
            Phase.WON: (Phase.WON, "won"),
            Phase.FENCED: (Phase.WON, "won"),
            Phase.UNAVAILABLE: (Phase.WON, "won"),
        },
    ),
    "another's claim admitted": Step(give_other_admitted, {phase: (phase, "no") for phase in Phase}),
}


def reach(phase: Phase) -> TakeOver:
    """A take-over that stands in this phase, by the shortest way."""
    attempt = takeover()
    attempt.start()
    match phase:
        case Phase.ASKING:
            pass
        case Phase.CLAIMED:
            claimed(attempt)
        case Phase.WON:
            attempt.admitted(claimed(attempt))
        case Phase.FENCED:
            for _ in range(TINY.claim_attempts):
                attempt.refused(claimed(attempt), Epoch(50))
        case Phase.UNAVAILABLE:
            for _ in range(TINY.claim_attempts):
                claimed(attempt)
                attempt.failed()
    assert phase is attempt.phase
    return attempt


def outcome(answer: object) -> str:
    """An answer in a word."""
    if isinstance(answer, bool):
        return "won" if answer else "no"
    match answer:
        case ():
            return "nothing"
        case (AppendRecord(),):
            return "claims"
        case (ReadWatermark(),):
            return "asks"
        case _:
            return str(answer)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("phase", Phase)
def test_takeover_in_every_phase_answers_every_input_as_the_table_says(phase: Phase, name: str) -> None:
    """Late and foreign answers change nothing; a claim that lands after all makes its claimer the owner."""
    attempt, step = reach(phase), STEPS[name]
    actual = outcome(step.give(attempt))
    assert step.expected[phase] == (attempt.phase, actual)


def test_takeover_gives_up_as_fenced_after_bounded_attempts() -> None:
    """Other claims won as often as was tried: the caller hears by which epoch."""
    attempt = takeover()
    attempt.start()
    answers = [attempt.refused(claimed(attempt), Epoch(50 + n)) for n in range(TINY.claim_attempts)]
    assert [ASKED] * (TINY.claim_attempts - 1) + [()] == answers
    assert (Phase.FENCED, 50 + TINY.claim_attempts - 1) == (attempt.phase, attempt.newer_epoch)


@pytest.mark.parametrize("where", [Phase.ASKING, Phase.CLAIMED])
def test_takeover_gives_up_as_unavailable_after_bounded_attempts(where: Phase) -> None:
    """A log that does not answer is not asked for ever, whichever step fails."""
    attempt = takeover()
    attempt.start()
    answers = []
    for _ in range(TINY.claim_attempts):
        if where is Phase.CLAIMED:
            claimed(attempt)
        answers.append(attempt.failed())
    assert [ASKED] * (TINY.claim_attempts - 1) + [()] == answers
    assert Phase.UNAVAILABLE is attempt.phase


def test_each_attempt_is_a_claim_of_its_own() -> None:
    """A claimer knows its claim by its nonce: the one that failed may land, and must not be taken for the next."""
    attempt = takeover()
    attempt.start()
    first = claimed(attempt, high_watermark=7)
    attempt.failed()
    second = claimed(attempt, high_watermark=9)
    assert (8, 10) == (first.epoch, second.epoch)
    assert not attempt.admitted(first)
    assert () == attempt.refused(first, Epoch(10))
    assert Phase.CLAIMED is attempt.phase
    assert attempt.admitted(second)


@pytest.mark.parametrize("stops_after", range(4))
def test_takeover_interrupted_after_any_step_can_be_begun_again(stops_after: int) -> None:
    """A crash leaves at most an idle owner: the next take-over claims a newer epoch, whatever landed."""
    attempt = takeover()
    steps: list[Callable[[], object]] = [attempt.start, lambda: claimed(attempt), attempt.failed]
    for step in steps[:stops_after]:
        step()
    again = takeover()
    again.start()
    newer = claimed(again, high_watermark=20)
    assert attempt.claim is None or newer.epoch > attempt.claim.epoch
    assert again.admitted(newer)
