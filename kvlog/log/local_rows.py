"""The tables of a local log's database, and every statement on them. Blocking; knows no thread, lock or file.

    meta          name, value                                     identity, partitions, created_ms
    partitions    partition, log_start, timestamp_ms, end_bytes   of the last message that was deleted
    messages_<p>  offset, timestamp_ms, end_bytes, kind, epoch, key, value
    offsets       name, partition, offset, committed_ms           a consumer group's
    entries       change, name, key, value, written_ms            compacted tables; a NULL value is a tombstone

A table for each partition, because a message at the very end of a b-tree costs one or two pages, and one in the
middle of a common b-tree three or four: 131 KB instead of 269 KB of WAL for a message of 23 KB.

Offsets have no holes: the next one is the last message's plus one, or log_start where none is left (INV-LOCAL-NO-HOLE).
end_bytes counts the partition's key and value bytes up to and with a message, deleted ones included; so bytes between
two offsets (retention, lag) cost two look-ups. Timestamps never go back in a partition, whatever the clock does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import KvlogError, LogReplaced, LogTruncated
from kvlog.ids import Offset, Partition
from kvlog.log.base import LogMessage, PartitionBounds, TableRow

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Iterator, Mapping, Sequence

    from kvlog.log.base import AppendRequest

__all__ = [
    "PARTITIONS_MAX",
    "Fetched",
    "Retention",
    "Transaction",
    "bounds",
    "bytes_between",
    "changes",
    "committed",
    "create_tables",
    "fetch",
    "has_old_tombstones",
    "keep_from",
]

PARTITIONS_MAX = 1 << 10
"""Each has a page of 64 KiB from the start, and a poll looks at each that is assigned."""

TRIM_ROWS_MAX = 256
TRIM_BYTES_MAX = 64 << 20
"""One transaction of `trim` deletes at most so much of a partition; four times what is written between two trims."""

TOMBSTONE_MS = 24 * 3600 * 1000
"""A deleted key is remembered so long, as Kafka's delete.retention.ms; who refreshes more rarely may miss it."""

_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value) WITHOUT ROWID;
CREATE TABLE partitions (
    partition INTEGER PRIMARY KEY, log_start INTEGER NOT NULL, timestamp_ms INTEGER NOT NULL, end_bytes INTEGER NOT NULL
);
CREATE TABLE offsets (
    name TEXT NOT NULL, partition INTEGER NOT NULL, offset INTEGER NOT NULL, committed_ms INTEGER NOT NULL,
    PRIMARY KEY (name, partition)
) WITHOUT ROWID;
CREATE TABLE entries (
    change INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL, key BLOB NOT NULL, value BLOB,
    written_ms INTEGER NOT NULL, UNIQUE (name, key)
);
CREATE INDEX entries_by_name ON entries (name, change);
CREATE INDEX tombstones ON entries (written_ms) WHERE value IS NULL
"""

_MESSAGES = """
CREATE TABLE $messages (
    offset INTEGER PRIMARY KEY, timestamp_ms INTEGER NOT NULL, end_bytes INTEGER NOT NULL,
    kind INTEGER NOT NULL, epoch INTEGER NOT NULL, key BLOB NOT NULL, value BLOB NOT NULL
)
"""


def create_tables(connection: sqlite3.Connection, *, partitions: int, meta: Mapping[str, object]) -> None:
    """Make every table of a new log, within the caller's transaction."""
    for statement in _SCHEMA.split(";"):
        connection.execute(statement)
    for partition in range(partitions):
        connection.execute(_in(partition, _MESSAGES))
        connection.execute("INSERT INTO partitions VALUES (?, 0, 0, 0)", (partition,))
    connection.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())


def _in(partition: int, sql: str) -> str:
    """A statement on one partition's messages."""
    return sql.replace("$messages", f"messages_{partition:d}")


@dataclass(frozen=True, slots=True)
class Retention:
    """What `trim` keeps of each partition; None: everything."""

    milliseconds: int | None
    bytes_max: int | None


@dataclass(slots=True)
class _Tail:
    """Where a partition ends, within one transaction."""

    next_offset: int
    timestamp_ms: int
    end_bytes: int


def _one(connection: sqlite3.Connection, sql: str, *values: object) -> tuple[int, ...]:
    row = connection.execute(sql, values).fetchone()
    assert row is not None, "every partition has its row from the log's creation on"
    found: tuple[int, ...] = row
    return found


def _floor(connection: sqlite3.Connection, partition: int) -> tuple[int, ...]:
    """(log_start, timestamp_ms, end_bytes) of a partition's deleted part."""
    sql = "SELECT log_start, timestamp_ms, end_bytes FROM partitions WHERE partition = ?"
    return _one(connection, sql, partition)


def _tail(connection: sqlite3.Connection, partition: int) -> _Tail:
    sql = _in(partition, "SELECT offset, timestamp_ms, end_bytes FROM $messages ORDER BY offset DESC LIMIT 1")
    row = connection.execute(sql).fetchone()
    if row is None:
        return _Tail(*_floor(connection, partition))
    return _Tail(row[0] + 1, row[1], row[2])


class Transaction:
    """What one write transaction does. The caller begins, commits and rolls back.

    Args:
        connection: within BEGIN IMMEDIATE, so that nobody else moves the tails that are kept here.
        now_ms: the time of everything written.
    """

    def __init__(self, connection: sqlite3.Connection, *, now_ms: int) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._tails: dict[int, _Tail] = {}

    def append(self, request: AppendRequest) -> Offset:
        """Write one message at the end of its partition. Its value must be bytes by now."""
        tail = self._tails.get(request.partition)
        if tail is None:
            tail = self._tails[request.partition] = _tail(self._connection, request.partition)
        offset = tail.next_offset
        value = request.value
        assert isinstance(value, bytes), "the writer keeps its own copy of the value"
        timestamp_ms = max(self._now_ms, tail.timestamp_ms)
        end_bytes = tail.end_bytes + len(request.key) + len(value)
        row = (offset, timestamp_ms, end_bytes, request.kind, request.epoch, request.key, value)
        sql = _in(request.partition, "INSERT INTO $messages VALUES (?, ?, ?, ?, ?, ?, ?)")
        self._connection.execute(sql, row)
        self._tails[request.partition] = _Tail(offset + 1, timestamp_ms, end_bytes)
        return Offset(offset)

    def commit_offsets(self, group: str, applied: Mapping[Partition, Offset]) -> None:
        """Write a group's applied offsets."""
        rows = [(group, partition, offset, self._now_ms) for partition, offset in applied.items()]
        self._connection.executemany("INSERT OR REPLACE INTO offsets VALUES (?, ?, ?, ?)", rows)

    def put(self, name: str, key: bytes, value: bytes | None) -> None:
        """Write a table's key under a new change number; None leaves a tombstone."""
        row = (name, key, value, self._now_ms)
        # REPLACE deletes the older row, and AUTOINCREMENT never gives a change number twice.
        self._connection.execute(
            "INSERT OR REPLACE INTO entries (name, key, value, written_ms) VALUES (?, ?, ?, ?)", row
        )

    def trim(self, partition: int, retention: Retention) -> bool:
        """Delete what is too old or too much, up to a bound. Returns: whether there may be more to delete."""
        before = keep_from(self._connection, partition, retention, now_ms=self._now_ms)
        if before is not None:
            self.delete_before(partition, before)
        return before is not None

    def delete_before(self, partition: int, before: int) -> Offset:
        """Delete a partition's messages below an offset. Returns: the new log start, never past the end."""
        first = _floor(self._connection, partition)[0]
        start = max(first, min(before, _tail(self._connection, partition).next_offset))
        if start > first:
            sql = _in(partition, "SELECT timestamp_ms, end_bytes FROM $messages WHERE offset = ?")
            floor = _one(self._connection, sql, start - 1)
            sql = "UPDATE partitions SET log_start = ?, timestamp_ms = ?, end_bytes = ? WHERE partition = ?"
            self._connection.execute(sql, (start, *floor, partition))
            self._connection.execute(_in(partition, "DELETE FROM $messages WHERE offset < ?"), (start,))
            self._tails.pop(partition, None)
        return Offset(start)

    def forget_tombstones(self) -> None:
        """Delete tombstones that every table has had time to see."""
        sql = "DELETE FROM entries WHERE value IS NULL AND written_ms < ?"
        self._connection.execute(sql, (self._now_ms - TOMBSTONE_MS,))


def keep_from(
    connection: sqlite3.Connection, partition: int, retention: Retention, *, now_ms: int
) -> Offset | None:
    """Up to where one `trim` deletes: what is too old or too much, as far as one transaction may; None: nothing."""
    first, _, floor_bytes = _floor(connection, partition)
    total_bytes = _tail(connection, partition).end_bytes
    before = first
    for offset, timestamp_ms, end_bytes in _oldest(connection, partition):
        too_old = retention.milliseconds is not None and timestamp_ms < now_ms - retention.milliseconds
        # If this message were the oldest one kept, what is kept would begin where the one before it ends.
        too_much = retention.bytes_max is not None and total_bytes - floor_bytes > retention.bytes_max
        if not (too_old or too_much):
            break
        floor_bytes = end_bytes
        before = offset + 1
    return Offset(before) if before > first else None


def _oldest(connection: sqlite3.Connection, partition: int) -> Iterator[tuple[int, int, int]]:
    """(offset, timestamp_ms, end_bytes) of a partition's oldest messages, as many as one trim may delete."""
    sql = _in(partition, "SELECT offset, timestamp_ms, end_bytes FROM $messages ORDER BY offset LIMIT ?")
    start_bytes: int | None = None
    for row in connection.execute(sql, (TRIM_ROWS_MAX,)):
        yield row
        start_bytes = row[2] if start_bytes is None else start_bytes
        if row[2] - start_bytes >= TRIM_BYTES_MAX:
            return


def has_old_tombstones(connection: sqlite3.Connection, *, now_ms: int) -> bool:
    """Whether `forget_tombstones` has anything to do."""
    sql = "SELECT 1 FROM entries WHERE value IS NULL AND written_ms < ? LIMIT 1"
    return connection.execute(sql, (now_ms - TOMBSTONE_MS,)).fetchone() is not None


def bounds(connection: sqlite3.Connection, partition: Partition) -> PartitionBounds:
    """Log start offset and high watermark; within a read transaction, or twice the truth."""
    log_start = _floor(connection, partition)[0]
    return PartitionBounds(Offset(log_start), Offset(_tail(connection, partition).next_offset))


def bytes_between(connection: sqlite3.Connection, partition: Partition, *, first: Offset, end: Offset) -> int:
    """Key and value bytes of the messages in [first, end) that are still there."""
    floor_bytes = _floor(connection, partition)[2]

    def end_bytes(offset: int) -> int:
        sql = _in(partition, "SELECT end_bytes FROM $messages WHERE offset = ?")
        row = connection.execute(sql, (offset - 1,)).fetchone()
        return floor_bytes if row is None else int(row[0])

    return max(0, end_bytes(end) - end_bytes(first))


@dataclass(frozen=True, slots=True)
class Fetched:
    """One look at the log: messages, and the partitions whose position it does not have, each with what to raise.

    `more`: it ended at a bound of the look, not at the log's end.
    """

    messages: Sequence[LogMessage]
    problems: Mapping[Partition, KvlogError]
    more: bool = False


def fetch(
    connection: sqlite3.Connection, positions: Sequence[tuple[Partition, Offset]], *, bytes_max: int
) -> Fetched:
    """Read one partition after the other, until there are messages enough; the first is returned however large."""
    messages: list[LogMessage] = []
    problems: dict[Partition, KvlogError] = {}
    room, more = bytes_max, False
    for partition, offset in positions:
        found = 0
        for message in _read(connection, partition, offset):
            room -= len(message.value) + len(message.key or b"")
            if room < 0 and messages:
                return Fetched(messages, problems, more=True)
            messages.append(message)
            found += 1
        more |= found == _READ_ROWS_MAX
        if not found:
            # Only then can the position be out of bounds: from log start to the end there is a message at every offset.
            problem = _problem(partition, offset, bounds(connection, partition))
            if problem is not None:
                problems[partition] = problem
    return Fetched(messages, problems, more)


_READ_ROWS_MAX = 4096
"""Of one partition in one look; bounds what a poll with a generous bytes_max collects of tiny messages."""


def _read(connection: sqlite3.Connection, partition: Partition, offset: Offset) -> Iterator[LogMessage]:
    sql = _in(
        partition,
        "SELECT offset, timestamp_ms, key, value FROM $messages WHERE offset >= ? ORDER BY offset LIMIT ?",
    )
    rows = connection.execute(sql, (offset, _READ_ROWS_MAX))
    for wanted, (found, timestamp_ms, key, value) in enumerate(rows, offset):
        if found != wanted:
            return  # below the log start: nothing is returned past what is missing
        yield LogMessage(partition, Offset(found), timestamp_ms, key, value)


def _problem(partition: Partition, wanted: Offset, found: PartitionBounds) -> KvlogError | None:
    if wanted < found.log_start:
        return LogTruncated(partition=partition, wanted=wanted, log_start=found.log_start)
    if wanted > found.high_watermark:
        problem = f"it ends at {found.high_watermark}, before the position {wanted}"
        return LogReplaced(partition=partition, problem=problem)
    if wanted < found.high_watermark:
        return LogReplaced(
            partition=partition, problem=f"the message at {wanted} is missing: the database is damaged"
        )
    return None


def committed(connection: sqlite3.Connection) -> Mapping[str, Mapping[Partition, Offset]]:
    """The committed offsets of each group."""
    found: dict[str, dict[Partition, Offset]] = {}
    for name, partition, offset in connection.execute(
        "SELECT name, partition, offset FROM offsets ORDER BY 1, 2"
    ):
        found.setdefault(name, {})[Partition(partition)] = Offset(offset)
    return found


def changes(connection: sqlite3.Connection, name: str, *, after: int) -> tuple[Sequence[TableRow], int]:
    """A table's rows with a change number above `after`, oldest first, and the last number.

    From the beginning (after = 0), tombstones are left out: there is nothing to delete yet.
    """
    sql = "SELECT change, key, value FROM entries WHERE name = ? AND change > ? ORDER BY change"
    rows = connection.execute(sql, (name, after)).fetchall()
    last = rows[-1][0] if rows else after
    return [TableRow(key, value) for _, key, value in rows if after or value is not None], last
