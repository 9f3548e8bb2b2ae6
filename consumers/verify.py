"""`kvlog verify [SESSION]`: folds the log anew, with every checksum and the chain, and decodes every payload.

The exit code is the verdict. Records of an older epoch are refused by every reader and are no damage: they are fencing
at work. Damage is a record that cannot be read, one of the owner's that does not fit (gap, diverged), or rows that do
not decode; it stays a finding for as long as the log holds it, whether the session was healed since or not.
"""

from __future__ import annotations

from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.text import Text

from consumers.access import log_settings, opened
from consumers.answers import Answer
from consumers.exits import ExitCode
from consumers.reading import PartitionFold, home_of
from consumers.render import Column, bytes_text, count_text, facts, mark, number_text, progress, table
from consumers.show import unknown_session
from kvlog.core.effects import SessionHealed, StoreRows
from kvlog.core.session import Standing
from kvlog.core.verdicts import Verdict, Why
from kvlog.errors import DecodeError
from kvlog.ids import Partition, parse_session_id
from kvlog.limits import DEFAULT
from kvlog.records import Codec
from kvlog.wire.codec import decode_payload

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType

    from consumers.reading import Step
    from kvlog.ids import Offset, SessionId
    from kvlog.log.base import Log, PartitionBounds

__all__ = ["HELP", "add_arguments", "run"]

HELP = "fold the log anew, with every checksum and the chain; the exit code is the verdict"

_FINDINGS_MAX = 1000
"""Of one partition, in the answer; all are counted."""
_SHOWN_MAX = 50
_ROOTLESS_MAX = DEFAULT.sessions_a_partition


@dataclass(frozen=True, slots=True)
class Finding:
    """One record that is damaged."""

    partition: Partition
    offset: Offset
    session: SessionId | None
    problem: str


@dataclass(slots=True)
class Verified:
    """What was found in one partition.

    Args:
        partition: which.
        bounds: what was read.
        records: messages read, of the session if one was asked for.
        size_bytes: of their values.
        rows: positions whose payload was decoded.
        refused: refused records by verdict.
        findings: damaged records, the first so many.
        damaged: how many there are.
        healed: how often a session became whole again.
        standings: sessions at the end, by standing.
        rootless: sessions of which records were read that nobody can judge, because what is needed of them is gone.
    """

    partition: Partition
    bounds: PartitionBounds
    records: int = 0
    size_bytes: int = 0
    rows: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)
    damaged: int = 0
    healed: int = 0
    standings: Counter[str] = field(default_factory=Counter)
    rootless: set[SessionId] = field(default_factory=set)

    def found(self, step: Step, problem: str) -> None:
        """Note a damaged record."""
        self.damaged += 1
        if len(self.findings) < _FINDINGS_MAX:
            self.findings.append(Finding(self.partition, step.offset, step.session, problem))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument(
        "session", metavar="SESSION", nargs="?", help="only this session; without: all of them"
    )


async def run(arguments: argparse.Namespace) -> Answer:
    """Verify one session, or everything that the log holds.

    Raises:
        SessionUnknown: no record of the session is in the log.
        InvalidSessionId: this cannot be a session's id.
        LogUnavailable: the log cannot be read now.
    """
    session = None if arguments.session is None else parse_session_id(arguments.session)
    async with opened(log_settings(arguments)) as log:
        partitions = [home_of(session, log)] if session else [Partition(p) for p in range(log.partitions)]
        found = [await _verified(log, partition, session) for partition in partitions]
        if session and not found[0].records:
            raise await unknown_session(log, session)
        code = _verdict(found, session)
        return Answer(code, _figures(log, found, session, code), _shown(log, found, session, code))


async def _verified(log: Log, partition: Partition, session: SessionId | None) -> Verified:
    bounds = await log.bounds(partition)
    found = Verified(partition, bounds)
    fold = PartitionFold(log, partition, first=bounds.log_start, end=bounds.high_watermark)
    with progress(f"verifying partition {partition}", bounds.high_watermark - bounds.log_start) as advance:
        async with aclosing(fold.steps()) as steps:
            async for step in steps:
                in_doubt = step.message is not None and step.session is None  # it may be anybody's
                if session is None or step.session == session or in_doubt:
                    _examine(found, step)
                advance(step.offset - bounds.log_start)
    states = fold.core.sessions() if session is None else filter(None, [fold.core.session(session)])
    for state in states:
        if state.standing is not Standing.UNROOTED:
            found.standings[state.standing.value] += 1
            found.rootless.discard(state.session)
    return found


def _examine(found: Verified, step: Step) -> None:
    if step.message is not None:
        found.records += 1
        found.size_bytes += len(step.message.value)
    refusal = step.refusal
    if refusal is not None:
        judgement = refusal.judgement
        found.refused[judgement.verdict.value] += 1
        if judgement.verdict is Verdict.UNKNOWN and step.session and len(found.rootless) < _ROOTLESS_MAX:
            found.rootless.add(step.session)
        if judgement.why is Why.UNREADABLE:
            found.found(step, f"unreadable: {step.problem}")
        elif judgement.verdict in {Verdict.GAP, Verdict.DIVERGED} and judgement.why is not Why.BROKEN:
            found.found(step, f"{judgement.verdict.value}: {judgement.why.value}")
    for effect in step.effects:
        found.healed += isinstance(effect, SessionHealed)
        if isinstance(effect, StoreRows) and effect.delta.codec is not Codec.IDS:
            _decode(found, step, effect)


def _decode(found: Verified, step: Step, effect: StoreRows) -> None:
    """The payload's checksum fits by now; what is left to see is that it is what its codec says."""
    delta, layout = effect.delta, effect.layout
    try:
        decode_payload(
            effect.payload, delta.codec, layout.dtype, decoded_bytes=len(delta.tokens) * layout.row_bytes
        )
        found.rows += len(delta.tokens)
    except DecodeError as error:
        found.found(step, f"rows do not decode: {error.fields['problem']}")


def _verdict(found: list[Verified], session: SessionId | None) -> ExitCode:
    if any(one.damaged or one.standings[Standing.BROKEN.value] for one in found):
        return ExitCode.BROKEN
    if session is not None:
        standings = found[0].standings
        known = standings[Standing.WHOLE.value] + standings[Standing.ENDED.value]
        return ExitCode.WHOLE if known else ExitCode.UNKNOWN
    return ExitCode.WHOLE


def _words(code: ExitCode, session: SessionId | None) -> str:
    match code:
        case ExitCode.WHOLE:
            return "whole"
        case ExitCode.UNKNOWN:
            return "truncated: the log no longer holds what is needed to know this session"
        case _:
            return "broken: see `kvlog show SESSION`" if session is None else "broken"


def _sums(found: list[Verified]) -> tuple[Counter[str], Counter[str]]:
    refused, standings = Counter[str](), Counter[str]()
    for one in found:
        refused.update(one.refused)
        standings.update(one.standings)
        standings["truncated"] += len(one.rootless)
    return refused, standings


def _figures(log: Log, found: list[Verified], session: SessionId | None, code: ExitCode) -> dict[str, object]:
    refused, standings = _sums(found)
    return {
        "log": log.where,
        "session": session,
        "verdict": code.name.lower() if code is not ExitCode.UNKNOWN else "truncated",
        "records": sum(one.records for one in found),
        "bytes": sum(one.size_bytes for one in found),
        "rows": sum(one.rows for one in found),
        "sessions": {name: standings[name] for name in ("whole", "ended", "broken", "truncated")},
        "refused": dict(refused),
        "damaged": sum(one.damaged for one in found),
        "healed": sum(one.healed for one in found),
        "findings": [
            {
                "partition": finding.partition,
                "offset": finding.offset,
                "session": finding.session,
                "problem": finding.problem,
            }
            for one in found
            for finding in one.findings
        ],
        "partitions": [
            {
                "partition": one.partition,
                "log_start": one.bounds.log_start,
                "high_watermark": one.bounds.high_watermark,
                "records": one.records,
                "damaged": one.damaged,
            }
            for one in found
        ],
    }


def _shown(
    log: Log, found: list[Verified], session: SessionId | None, code: ExitCode
) -> tuple[RenderableType, ...]:
    refused, standings = _sums(found)
    records = sum(one.records for one in found)
    head = {
        "log": log.where,
        **({"session": session} if session else {}),
        "read": f"{count_text(records, 'record')}, {bytes_text(sum(one.size_bytes for one in found))},"
        f" {count_text(sum(one.rows for one in found), 'row')} decoded",
        "sessions": ", ".join(
            f"{standings[name]} {name}" for name in ("whole", "ended", "broken", "truncated")
        ),
        "refused": ", ".join(f"{count} {verdict}" for verdict, count in sorted(refused.items())) or "none",
        "healed": number_text(sum(one.healed for one in found)),
    }
    verdict = mark(_words(code, session), "good" if code is ExitCode.WHOLE else "bad")
    parts: list[RenderableType] = [facts({**head, "verdict": verdict})]
    findings = [finding for one in found for finding in one.findings]
    damaged = sum(one.damaged for one in found)
    if findings:
        columns = (
            Column("PARTITION", right=True),
            Column("OFFSET", right=True),
            Column("SESSION", wraps=True),
            Column("PROBLEM", wraps=True),
        )
        rows = [
            (str(f.partition), str(f.offset), f.session or "in doubt", f.problem)
            for f in findings[:_SHOWN_MAX]
        ]
        parts.append(table(f"damaged records: {damaged}", columns, rows))
    if damaged > _SHOWN_MAX:
        parts.append(
            Text(f"{damaged - _SHOWN_MAX} more; --json lists the first {_FINDINGS_MAX} of a partition")
        )
    return tuple(parts)
