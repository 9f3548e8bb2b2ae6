"""`kvlog show SESSION`: one session's timeline, read from the log and folded as every node folds it."""

from __future__ import annotations

import difflib
from contextlib import aclosing
from dataclasses import asdict
from typing import TYPE_CHECKING

from consumers.access import log_settings, opened
from consumers.answers import Answer
from consumers.exits import ExitCode
from consumers.reading import PartitionFold, home_of
from consumers.render import (
    Column,
    bytes_text,
    clock_text,
    count_text,
    date_text,
    facts,
    mark,
    number_text,
    progress,
    table,
)
from consumers.tables import session_rows
from consumers.timeline import Happening, Timeline
from kvlog.core.session import SessionState, Standing
from kvlog.errors import SessionUnknown
from kvlog.ids import parse_session_id

if TYPE_CHECKING:
    import argparse

    from rich.console import RenderableType
    from rich.text import Text

    from consumers.timeline import Moment
    from kvlog.ids import SessionId
    from kvlog.log.base import Log, PartitionBounds

__all__ = ["HELP", "add_arguments", "read_session", "run", "unknown_session"]

HELP = "one session's timeline: claims, epochs, owners, refused records and why"

_MOMENTS = 1000
_MOMENTS_MAX = 1_000_000
_NEAR_MAX = 3

_LOOKS: dict[Happening, str] = {
    Happening.CLAIM: "good",
    Happening.HEALED: "good",
    Happening.REFUSED: "doubtful",
    Happening.DROPPED: "doubtful",
    Happening.BROKEN: "bad",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("session", metavar="SESSION", help="the session's id")
    parser.add_argument(
        "--last", type=int, default=_MOMENTS, metavar="N", help=f"only the newest N lines ({_MOMENTS})"
    )
    parser.add_argument("--reveal", action="store_true", help="show token ids, which are the conversation")


async def run(arguments: argparse.Namespace) -> Answer:
    """Read the session's partition from its log start and tell what became of the session.

    Raises:
        SessionUnknown: no record of it is in the log.
        InvalidSessionId: this cannot be a session's id.
        LogUnavailable: the log cannot be read now.
    """
    session = parse_session_id(arguments.session)
    timeline = Timeline(
        session, moments_max=min(max(1, arguments.last), _MOMENTS_MAX), reveal=arguments.reveal
    )
    async with opened(log_settings(arguments)) as log:
        state, bounds = await read_session(log, session, timeline)
        if timeline.records == 0:
            raise await unknown_session(log, session)
        return _answer(log, timeline, state, bounds)


async def read_session(
    log: Log, session: SessionId, timeline: Timeline
) -> tuple[SessionState | None, PartitionBounds]:
    """Fold the session's partition from its log start to its end as of now.

    Returns: the session's state, None if too little of it is left in the log; and the bounds that were read.
    """
    partition = home_of(session, log)
    bounds = await log.bounds(partition)
    fold = PartitionFold(log, partition, first=bounds.log_start, end=bounds.high_watermark)
    with progress(f"reading partition {partition}", bounds.high_watermark - bounds.log_start) as advance:
        async with aclosing(fold.steps()) as steps:
            async for step in steps:
                timeline.add(step)
                advance(step.offset - bounds.log_start)
    return fold.core.session(session), bounds


async def unknown_session(log: Log, session: SessionId) -> SessionUnknown:
    """The error for a session without records; names those with a similar id."""
    known = [row.session for row in await session_rows(log)]
    near = difflib.get_close_matches(session, known, _NEAR_MAX)
    fields: dict[str, object] = {"session": session, "partition": home_of(session, log), "log": log.where}
    return SessionUnknown(**fields, similar=", ".join(near)) if near else SessionUnknown(**fields)


def _answer(log: Log, timeline: Timeline, state: SessionState | None, bounds: PartitionBounds) -> Answer:
    """The verdict is about now: a session that broke and was healed is whole."""
    session = timeline.session
    partition = home_of(session, log)
    known = state is not None and state.standing is not Standing.UNROOTED
    if not known:
        code = ExitCode.UNKNOWN
    else:
        assert state is not None, "a known session has a state"
        code = ExitCode.BROKEN if state.standing is Standing.BROKEN else ExitCode.WHOLE
    figures: dict[str, object] = {
        "session": session,
        "partition": partition,
        "log": log.where,
        "log_start": bounds.log_start,
        "high_watermark": bounds.high_watermark,
        "records": timeline.records,
        "bytes": timeline.bytes,
        "refused": timeline.refused,
        **_state_figures(state),
        "timeline": [_moment_figures(moment) for moment in timeline.moments],
        "omitted": timeline.omitted,
    }
    return Answer(code, figures, _shown(log, timeline, state, bounds))


def _state_figures(state: SessionState | None) -> dict[str, object]:
    if state is None:
        return {"standing": "truncated"}
    identity = state.claim.identity
    rooted = state.standing is not Standing.UNROOTED
    return {
        "standing": state.standing.value if rooted else "truncated",
        "epoch": state.epoch,
        "owner": state.claim.node,
        "writer": state.writer.hex(),
        "length": state.length if rooted else None,
        "shard_lengths": [shard.length for shard in state.shards],
        "next_seq": state.next_seq,
        "chain": None if state.chain is None else f"{state.chain:016x}",
        "first_needed": state.first_needed_offset,
        "kv_bytes": state.length * identity.layout.row_bytes * identity.shards if rooted else None,
        "model": identity.model.hex(),
        "weights": identity.weights.hex(),
        "shards": identity.shards,
        "layout": {
            name: value if isinstance(value, int) else str(value)
            for name, value in asdict(identity.layout).items()
        },
    }


def _moment_figures(moment: Moment) -> dict[str, object]:
    figures: dict[str, object] = {
        "what": moment.what.value,
        "offset": moment.offset,
        "last_offset": moment.last_offset,
        "timestamp_ms": moment.timestamp_ms,
        "epoch": moment.epoch,
        "node": moment.node,
        "length": moment.length,
        "records": moment.records,
        "detail": moment.detail,
    }
    if moment.positions:
        figures |= {"positions": moment.positions, "bytes": moment.payload_bytes}
    if moment.tokens:
        figures["tokens"] = moment.tokens
    return figures


def _shown(
    log: Log, timeline: Timeline, state: SessionState | None, bounds: PartitionBounds
) -> tuple[RenderableType, ...]:
    moments = list(timeline.moments)
    days = {date_text(m.timestamp_ms) for m in moments if m.timestamp_ms is not None}
    title = f"timeline, UTC {' to '.join(sorted({min(days), max(days)}))}" if days else "timeline"
    if timeline.omitted:
        title += f"; {timeline.omitted} older lines left out, --last N shows more"
    lines = table(
        title,
        (
            Column("OFFSET", right=True),
            Column("TIME"),
            Column("WHAT"),
            Column("EPOCH", right=True),
            Column("NODE", wraps=True),
            Column("LENGTH", right=True),
            Column("DETAIL", wraps=True),
        ),
        [_row(moment) for moment in moments],
    )
    return (_facts(log, timeline, state, bounds), lines)


def _facts(
    log: Log, timeline: Timeline, state: SessionState | None, bounds: PartitionBounds
) -> RenderableType:
    partition = home_of(timeline.session, log)
    refused = ", ".join(f"{count} {verdict}" for verdict, count in sorted(timeline.refused.items()))
    values: dict[str, str | Text] = {
        "session": timeline.session,
        "partition": f"{partition} of {log.partitions}, offsets {bounds.log_start} to {bounds.high_watermark}",
        "records": f"{number_text(timeline.records)} in {bytes_text(timeline.bytes)}; refused: {refused or 'none'}",
    }
    if state is None or state.standing is Standing.UNROOTED:
        why = "too little of it is left in the log: its first records are gone, or could not be read"
        return facts(values | {"standing": mark(f"truncated: {why}", "doubtful")})
    layout = state.claim.identity.layout
    healthy = state.standing is not Standing.BROKEN
    kv_bytes = state.length * layout.row_bytes * state.claim.identity.shards
    values |= {
        "standing": mark(state.standing.value, "good" if healthy else "bad"),
        "owner": f"{state.claim.node}, epoch {state.epoch}, writer {state.writer.hex()[:8]}",
        "length": f"{count_text(state.length, 'position')}, {bytes_text(kv_bytes)} of KV",
        "chain": "-" if state.chain is None else f"{state.chain:016x}, next seq {state.next_seq}",
        "needed from": f"offset {state.first_needed_offset}",
        "model": f"{state.claim.identity.model.hex()[:16]}, weights {state.claim.identity.weights.hex()[:16]}",
        "layout": (
            f"{layout.layers} layers × {layout.planes} planes × {layout.kv_heads} heads × {layout.head_dim},"
            f" {layout.dtype}, {count_text(state.claim.identity.shards, 'shard')}: {bytes_text(layout.row_bytes)} a row"
        ),
    }
    return facts(values)


def _row(moment: Moment) -> tuple[str | Text, ...]:
    offsets = str(moment.offset)
    if moment.last_offset != moment.offset:
        offsets += f"-{moment.last_offset}"
    detail = moment.detail
    if moment.positions and moment.what is Happening.DELTA:
        counted = f"{count_text(moment.positions, 'row')} in {count_text(moment.records, 'record')}"
        detail = f"{counted}, {bytes_text(moment.payload_bytes)}, {detail}"
    elif moment.records > 1:
        detail = f"{moment.records} records: {detail}"
    if moment.tokens:
        detail += "\ntoken ids " + " ".join(map(str, moment.tokens))
    kind = _LOOKS.get(moment.what)
    what = mark(moment.what.value, kind) if kind else moment.what.value  # type: ignore[arg-type]  # one of four words
    return (
        offsets,
        clock_text(moment.timestamp_ms),
        what,
        number_text(moment.epoch),
        moment.node or "-",
        number_text(moment.length),
        detail,
    )
