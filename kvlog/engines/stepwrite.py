"""One step's new rows of all turns, gathered straight into the ring as one entry; what does not fit waits.

Budget: a step writes at most `step_bytes`, but at least one row of every turn that is behind, so that a batch keeps up
however large its rows are. A turn that is far behind (a prefill, a full ring, a daemon that was away) catches up over
several steps from the engine's own cache, and its cursor stays where the ring is.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvlog.errors import RingFull, RowTooLarge
from kvlog.ids import Epoch, Position, Shard, Turn

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.buffers.ring import RingWriter, TableFields
    from kvlog.engines.base import RowCache

    RowSource = tuple["LogCursor", RowCache, Sequence[int]]
    """Where a turn's rows are; the ids are those of at least every position of the cache that is to be written.

    A plain tuple: one is made for each turn at each step, and a class of its own takes ten times as long to make.
    """

__all__ = ["LogCursor", "StepBudget", "Written", "rows_behind", "share_rows", "write_step"]

_SMALLER_TRIES = 3
"""A full ring is tried again with a quarter of the rows so often: what is free may lie in two parts."""

_SMALLER_BY = 4


@dataclass(slots=True)
class LogCursor:
    """How far the ring has one turn's rows; `position` moves when rows are written.

    `only_reads`: another rank writes them, so that none are ever missing here.
    """

    turn: Turn
    epoch: Epoch
    session_hash: int
    position: int
    only_reads: bool = False


def rows_behind(source: RowSource) -> int:
    """Rows that are computed and not in the ring, and are to go there."""
    cursor, cache, tokens = source
    behind = min(cache.length, len(tokens)) - cursor.position
    return behind if behind > 0 and not cursor.only_reads else 0


class StepBudget(NamedTuple):
    """How much one step may write: `step_bytes` of rows, and which turn is served first."""

    step_bytes: int
    first: int


class Written(NamedTuple):
    """What went into the ring; `full`: rows were left out because the ring had no room."""

    rows: int
    full: bool


def share_rows(behind: Sequence[int], rows_max: int, first: int) -> list[int]:
    """Split a budget: one row for each in turn from index `first` on, then all that is left to each in the same order.

    Args:
        behind: rows each turn could write, ≥ 1.
        rows_max: the budget, ≥ 0.
        first: any number; taken modulo the number of turns, so that a rising one is fair.
    """
    count = len(behind)
    order = [(first + k) % count for k in range(count)] if count else []
    shares = [0] * count
    left = rows_max
    for index in order:
        take = min(1, left)
        shares[index] = take
        left -= take
    for index in order:
        take = min(behind[index] - shares[index], left)
        shares[index] += take
        left -= take
    return shares


def write_step(
    ring: RingWriter, sources: Sequence[RowSource], row_bytes: int, shard: Shard, budget: StepBudget
) -> Written:
    """Write what the budget and the ring allow, and move the cursors.

    Raises:
        RowTooLarge: the ring never takes a row of this size.
        DecodeError: the daemon's side of the ring is nonsense; close the link.
    """
    late = [(source, behind) for source in sources if (behind := rows_behind(source))]
    if not late:
        return Written(0, full=False)
    wanted = max(len(late), budget.step_bytes // row_bytes)
    most = ring.rows_max(len(late), row_bytes) or ring.rows_max(1, row_bytes)
    if not most:
        raise RowTooLarge(row_bytes=row_bytes, record_bytes_max=ring.entry_bytes_max)
    rows_max = min(wanted, most)
    for _ in range(_SMALLER_TRIES):
        picked = _pick(late, rows_max, budget.first)
        try:
            rows = _write_entry(ring, picked, row_bytes, shard)
        except RingFull:
            rows_max = sum(rows for _, rows in picked) // _SMALLER_BY
            if not rows_max:
                break
        else:
            return Written(rows, full=rows < min(wanted, sum(behind for _, behind in late)))
    return Written(0, full=True)


def _pick(late: Sequence[tuple[RowSource, int]], rows_max: int, first: int) -> list[tuple[RowSource, int]]:
    """Which turns write how many rows, ≥ 1 each; mostly that is all they have."""
    behind = [rows for _, rows in late]
    if sum(behind) <= rows_max:
        return list(late)
    shares = share_rows(behind, rows_max, first)
    return [(source, rows) for (source, _), rows in zip(late, shares, strict=True) if rows]


def _write_entry(
    ring: RingWriter, picked: Sequence[tuple[RowSource, int]], row_bytes: int, shard: Shard
) -> int:
    """One entry; cursors move only when it is committed."""
    tokens = array("I")
    table: list[TableFields] = []
    for (cursor, _, known), rows in picked:
        start = cursor.position
        if rows == 1:  # a decode step: mostly so
            tokens.append(known[start])
        else:
            tokens.extend(known[start : start + rows])
        table.append((cursor.turn, cursor.epoch, cursor.session_hash, shard, Position(start), rows))
    reservation = ring.reserve(table, tokens, row_bytes)
    try:
        at, into = 0, reservation.rows
        for (cursor, cache, _), rows in picked:
            end = at + rows * row_bytes
            cache.copy_rows(cursor.position, into[at:end])
            at = end
    except BaseException:
        ring.abandon(reservation)
        raise
    ring.commit(reservation)
    for (cursor, _, _), rows in picked:
        cursor.position += rows
    return len(tokens)
