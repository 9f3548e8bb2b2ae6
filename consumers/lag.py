"""`kvlog lag`: how far each node is behind, per node, partition and session, in records, bytes, tokens and seconds.

A node's applied offsets are in its heartbeats, one a second. So the watermarks are read first, and then the next
heartbeat of each node is waited for: what it says is younger than the watermark, and a node without one is silent.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from consumers.access import log_settings, opened
from consumers.answers import Answer
from consumers.exits import ExitCode
from consumers.lag_tables import Behind, Measured, NodeLag, NodeState, lag_figures, lag_tables
from consumers.reading import session_of
from consumers.tables import NodeWatch
from kvlog.core.lag import Backlog, Waiting
from kvlog.errors import DecodeError, LogTruncated
from kvlog.ids import Offset, Partition
from kvlog.wire.message import decode

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Mapping

    from kvlog.log.base import Log, LogMessage, PartitionBounds
    from kvlog.wire.tables import NodeRow

__all__ = ["HELP", "add_arguments", "run"]

HELP = "how far each node is behind, per node, partition and session"

_PATIENCE_SECONDS = 3.0
"""Three heartbeats: a live node is heard of within one, a busy log takes its time."""
_LOOK_SECONDS = 0.1
_READ_MIB = 256
_READ_MIB_MAX = 1 << 20
_RECORDS_MAX = 200_000
"""Of one partition's backlog; bounds memory, 20 MB or so."""
_POLL_BYTES = 8 << 20
_POLL_SECONDS = 1.0
_READ_SECONDS = 30.0
"""Of one partition; what is not read by then is left uncounted."""
_SESSIONS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument(
        "--sessions",
        type=int,
        default=_SESSIONS,
        metavar="N",
        help=f"the N sessions that are furthest behind ({_SESSIONS})",
    )
    parser.add_argument(
        "--read-mib",
        type=int,
        default=_READ_MIB,
        metavar="N",
        help=f"read at most N MiB of a partition's backlog; past it, bytes and tokens are lower bounds ({_READ_MIB})",
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=_PATIENCE_SECONDS,
        metavar="SECONDS",
        help=f"wait so long for each node's heartbeat; without one it is silent ({_PATIENCE_SECONDS})",
    )


async def run(arguments: argparse.Namespace) -> Answer:
    """Measure the lag as of now.

    Raises:
        LogUnavailable: the log cannot be read now.
    """
    async with opened(log_settings(arguments)) as log:
        measured = await _measured(
            log,
            bytes_max=min(max(0, arguments.read_mib), _READ_MIB_MAX) << 20,
            patience_seconds=arguments.patience,
        )
    sessions = max(0, arguments.sessions)
    figures, shown = lag_figures(measured, sessions), lag_tables(measured, sessions)
    return Answer(ExitCode.WHOLE, figures, shown)


async def _measured(log: Log, *, bytes_max: int, patience_seconds: float) -> Measured:
    watch = await NodeWatch.open(log)
    try:
        await watch.refresh()
        bounds = {Partition(p): await log.bounds(Partition(p)) for p in range(log.partitions)}
        now_ms = time.time_ns() // 1_000_000
        alive = await _heard(watch, patience_seconds)
    finally:
        await watch.close()
    rows = sorted(watch.rows.values(), key=lambda row: row.node)
    following = [row for row in rows if not row.leaving]
    backlogs = {}
    for partition, found in bounds.items():
        waiting = await _waiting(log, partition, _lowest(following, partition, found), found, bytes_max)
        backlogs[partition] = Backlog(waiting, found.high_watermark, now_ms)
    nodes = tuple(
        NodeLag(row, _state(row, alive), () if row.leaving else _behind(row, bounds, backlogs))
        for row in rows
    )
    return Measured(log.where, now_ms, bounds, nodes)


async def _heard(watch: NodeWatch, patience_seconds: float) -> set[str]:
    """The nodes of which a heartbeat came from now on; all that are not leaving are waited for, a bounded time."""
    alive: set[str] = set()
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        alive |= await watch.refresh()
        if all(row.leaving or name in alive for name, row in watch.rows.items()):
            break
        await asyncio.sleep(_LOOK_SECONDS)
    return alive


def _state(row: NodeRow, alive: set[str]) -> NodeState:
    if row.leaving:
        return NodeState.LEFT
    return NodeState.LIVE if row.node in alive else NodeState.SILENT


def _lowest(rows: Iterable[NodeRow], partition: Partition, bounds: PartitionBounds) -> Offset:
    """From where the partition must be read for the node that is furthest behind."""
    applied = [row.applied[partition] for row in rows if partition in row.applied]
    return Offset(max(bounds.log_start, min(applied, default=bounds.high_watermark)))


def _behind(
    row: NodeRow, bounds: Mapping[Partition, PartitionBounds], backlogs: Mapping[Partition, Backlog]
) -> tuple[Behind, ...]:
    return tuple(
        _behind_in(Partition(partition), Offset(applied), row, bounds[Partition(partition)], backlogs)
        for partition, applied in sorted(row.applied.items())
        if Partition(partition) in bounds
    )


def _behind_in(
    partition: Partition,
    applied: Offset,
    row: NodeRow,
    bounds: PartitionBounds,
    backlogs: Mapping[Partition, Backlog],
) -> Behind:
    said = row.needed.get(partition)
    return Behind(
        partition=partition,
        applied=applied,
        lag=backlogs[partition].after(applied),
        sessions=backlogs[partition].sessions_after(applied),
        is_truncated=applied < bounds.log_start,
        needed=None if said is None else Offset(said),
        records_to_loss=None if said is None else said - bounds.log_start,
    )


async def _waiting(
    log: Log, partition: Partition, first: Offset, bounds: PartitionBounds, bytes_max: int
) -> list[Waiting]:
    """The partition's records from `first` to the watermark, as many as the bounds allow."""
    if first >= bounds.high_watermark:
        return []
    waiting: list[Waiting] = []
    reader = await log.reader()
    try:
        reader.assign({partition: first})
        room = bytes_max
        deadline = time.monotonic() + _READ_SECONDS
        while room > 0 and len(waiting) < _RECORDS_MAX and time.monotonic() < deadline:
            try:
                messages = await reader.poll(bytes_max=min(_POLL_BYTES, room), timeout_seconds=_POLL_SECONDS)
            except LogTruncated as error:  # retention moved on while we looked
                waiting.clear()
                reader.seek(partition, Offset(error.log_start))
                continue
            found = [_counted(message, log.partitions) for message in messages]
            waiting += [one for one in found if one.offset < bounds.high_watermark]
            room -= sum(one.size_bytes for one in found)
            if reader.positions()[partition] >= bounds.high_watermark:
                break
    finally:
        await reader.close()
    return waiting


def _counted(message: LogMessage, partitions: int) -> Waiting:
    try:
        record = decode(message.value).record
    except DecodeError:
        record = None  # it counts as a record; `kvlog verify` says what is wrong with it
    size_bytes = len(message.value) + len(message.key or b"")
    session = session_of(message, partitions)
    return Waiting(message.offset, session, size_bytes, Waiting.tokens_of(record), message.timestamp_ms)
