"""What `kvlog lag` has measured, as JSON values and as tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from rich.text import Text

from consumers.render import (
    Column,
    bytes_text,
    clock_text,
    date_text,
    facts,
    mark,
    number_text,
    seconds_text,
    table,
)
from kvlog.core.lag import total

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from rich.console import RenderableType

    from kvlog.core.lag import Lag
    from kvlog.ids import Offset, Partition, SessionId
    from kvlog.log.base import PartitionBounds
    from kvlog.wire.tables import NodeRow

__all__ = ["Behind", "Measured", "NodeLag", "NodeState", "lag_figures", "lag_tables"]

_UNITS = (
    Column("RECORDS", right=True),
    Column("BYTES", right=True),
    Column("TOKENS", right=True),
    Column("SECONDS", right=True),
)


class NodeState(StrEnum):
    """What a node's heartbeats say of it."""

    LIVE = "live"
    SILENT = "silent"
    """No heartbeat came while we waited; its figures are those of its last one."""
    LEFT = "left"
    """It said goodbye: it follows nothing any more."""


@dataclass(frozen=True, slots=True)
class Behind:
    """A node's lag in one partition.

    Args:
        partition: which.
        applied: every offset below was folded there.
        lag: how far behind.
        sessions: the same of each session.
        is_truncated: records that it has not applied are gone already.
        needed: the lowest offset that it, or a new reader of one of its sessions, may still need; None: it did not say.
        records_to_loss: between the log start and that; negative: lost since it was said.
    """

    partition: Partition
    applied: Offset
    lag: Lag
    sessions: Mapping[SessionId, Lag]
    is_truncated: bool
    needed: Offset | None
    records_to_loss: int | None


@dataclass(frozen=True, slots=True)
class NodeLag:
    """One node, and its lag in each partition that it follows."""

    row: NodeRow
    state: NodeState
    behind: tuple[Behind, ...]

    @property
    def lag(self) -> Lag:
        """Over all its partitions; an age that is not known for one of them is not known."""
        lag = total(one.lag for one in self.behind)
        return replace(lag, seconds=None) if any(one.lag.seconds is None for one in self.behind) else lag


@dataclass(frozen=True, slots=True)
class Measured:
    """The state of a log and its nodes at one moment."""

    where: str
    now_ms: int
    bounds: Mapping[Partition, PartitionBounds]
    nodes: tuple[NodeLag, ...]


def lag_figures(measured: Measured, sessions_max: int) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "log": measured.where,
        "time_ms": measured.now_ms,
        "partitions": [
            {"partition": p, "log_start": b.log_start, "high_watermark": b.high_watermark}
            for p, b in measured.bounds.items()
        ],
        "nodes": [_node_figures(node) for node in measured.nodes],
        "sessions": [
            {"session": session, "node": node.row.node, "partition": behind.partition, **lag.figures()}
            for node, behind, session, lag in _sessions(measured, sessions_max)
        ],
        "sessions_behind": len(list(_all_sessions(measured))),
    }


def _node_figures(node: NodeLag) -> dict[str, object]:
    row = node.row
    return {
        "node": row.node,
        "state": node.state.value,
        "host": row.host,
        "pid": row.pid,
        "primary": row.primary,
        "known": row.known,
        "broken": list(row.broken),
        "sessions_truncated": row.truncated,
        "pool_bytes": row.pool_bytes,
        "pool_free_bytes": row.pool_free_bytes,
        "lag": node.lag.figures() if node.behind else None,
        "partitions": [
            {
                "partition": one.partition,
                "applied": one.applied,
                "truncated": one.is_truncated,
                "needed": one.needed,
                "records_to_loss": one.records_to_loss,
                **one.lag.figures(),
            }
            for one in node.behind
        ],
    }


def lag_tables(measured: Measured, sessions_max: int) -> tuple[RenderableType, ...]:
    """What a person sees: nodes, then partitions that hold anything, then the sessions that are furthest behind."""
    holding = {p: b for p, b in measured.bounds.items() if b.high_watermark > 0}
    kept = sum(b.high_watermark - b.log_start for b in holding.values())
    head = facts(
        {
            "log": measured.where,
            "at": f"{date_text(measured.now_ms)} {clock_text(measured.now_ms)} UTC",
            "holds": f"{number_text(kept)} records in {len(holding)} of {len(measured.bounds)} partitions",
        }
    )
    if not measured.nodes:
        return (head, Text("\nno node has ever written a heartbeat here: is this the log that kvlogd uses?"))
    parts: list[RenderableType] = [head, _node_table(measured), _partition_table(measured, holding)]
    behind = list(_all_sessions(measured))
    if behind:
        parts.append(_session_table(measured, sessions_max, len(behind)))
    else:
        parts.append(Text("sessions: none is behind on any node that follows its partition"))
    return tuple(parts)


def _node_table(measured: Measured) -> RenderableType:
    columns = (
        Column("NODE", wraps=True),
        Column("STATE"),
        Column("PRIMARY", right=True),
        Column("BROKEN", right=True),
        Column("POOL", right=True),
        *_UNITS,
    )
    return table("lag by node", columns, [_node_row(node) for node in measured.nodes])


def _node_row(node: NodeLag) -> tuple[str | Text, ...]:
    row = node.row
    looks = {NodeState.LIVE: "good", NodeState.SILENT: "bad", NodeState.LEFT: "quiet"}
    state = mark(node.state.value, looks[node.state])  # type: ignore[arg-type]  # one of the four words
    used = 100 * (row.pool_bytes - row.pool_free_bytes) // row.pool_bytes if row.pool_bytes else None
    broken = mark(str(len(row.broken)), "bad") if row.broken else "0"
    pool = "-" if used is None else f"{used} %"
    units = _units(node.lag) if node.behind else ("-",) * len(_UNITS)
    return (row.node, state, f"{row.primary:,} of {row.known:,}", broken, pool, *units)


def _partition_table(measured: Measured, holding: Mapping[Partition, PartitionBounds]) -> RenderableType:
    columns = (
        Column("PARTITION", right=True),
        Column("NODE", wraps=True),
        Column("APPLIED", right=True),
        Column("WATERMARK", right=True),
        Column("TO LOSS", right=True),
        *_UNITS,
    )
    rows = [
        (
            str(one.partition),
            node.row.node,
            _applied(one),
            number_text(holding[one.partition].high_watermark),
            "-" if one.records_to_loss is None else number_text(one.records_to_loss),
            *_units(one.lag),
        )
        for one, node in sorted(
            ((one, node) for node in measured.nodes for one in node.behind if one.partition in holding),
            key=lambda pair: (pair[0].partition, pair[1].row.node),
        )
    ]
    return table("lag by partition", columns, rows)


def _applied(one: Behind) -> str | Text:
    text = number_text(one.applied)
    return mark(f"{text} (gone)", "bad") if one.is_truncated else text


def _session_table(measured: Measured, sessions_max: int, count: int) -> RenderableType:
    columns = (
        Column("SESSION", wraps=True),
        Column("NODE", wraps=True),
        Column("PARTITION", right=True),
        *_UNITS,
    )
    rows = [
        (session, node.row.node, str(behind.partition), *_units(lag))
        for node, behind, session, lag in _sessions(measured, sessions_max)
    ]
    shown = f"; the {len(rows)} furthest" if len(rows) < count else ""
    return table(f"lag by session: {count} behind{shown}", columns, rows)


def _all_sessions(measured: Measured) -> Iterator[tuple[NodeLag, Behind, SessionId, Lag]]:
    for node in measured.nodes:
        for behind in node.behind:
            for session, lag in behind.sessions.items():
                yield node, behind, session, lag


def _sessions(measured: Measured, sessions_max: int) -> list[tuple[NodeLag, Behind, SessionId, Lag]]:
    """The sessions that are furthest behind, by bytes, then by records."""
    rows = sorted(
        _all_sessions(measured),
        key=lambda row: (-(row[3].size_bytes or 0), -row[3].records, row[2], row[0].row.node),
    )
    return rows[:sessions_max]


def _units(lag: Lag) -> tuple[str | Text, ...]:
    """Numbers that were not counted to their end begin with ≥."""
    least = "" if lag.is_exact else "≥"
    figures = (
        number_text(lag.records),
        "-" if lag.size_bytes is None else least + bytes_text(lag.size_bytes),
        "-" if lag.tokens is None else least + number_text(lag.tokens),
        seconds_text(lag.seconds),
    )
    return tuple(mark(text, "doubtful") for text in figures) if lag.records else figures
