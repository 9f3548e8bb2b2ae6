"""The local log's tables: offsets, times, bytes, retention, tombstones; on a database in memory."""

from __future__ import annotations

import sqlite3
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogReplaced, LogTruncated
from kvlog.ids import Offset, Partition
from kvlog.log import local_rows as rows
from kvlog.log.base import AppendRequest, PartitionBounds, TableRow

if TYPE_CHECKING:
    from collections.abc import Iterator

P0, P1 = Partition(0), Partition(1)
KEEP_ALL = rows.Retention(None, None)


@pytest.fixture
def connection() -> Iterator[sqlite3.Connection]:
    """Two partitions."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    rows.create_tables(connection, partitions=2, meta={})
    yield connection
    connection.close()


def at(connection: sqlite3.Connection, now_ms: int) -> rows.Transaction:
    """A transaction at a time."""
    return rows.Transaction(connection, now_ms=now_ms)


def write(
    connection: sqlite3.Connection, *values: bytes, now_ms: int = 1000, partition: Partition = P0
) -> list[Offset]:
    """Appends in one transaction."""
    transaction = at(connection, now_ms)
    return [transaction.append(AppendRequest(partition, b"k", value, 2, 1)) for value in values]


def read(connection: sqlite3.Connection, offset: int, *, bytes_max: int = 1 << 20) -> rows.Fetched:
    """One look at partition 0."""
    return rows.fetch(connection, [(P0, Offset(offset))], bytes_max=bytes_max)


def offsets(fetched: rows.Fetched) -> list[int]:
    """Of the messages."""
    return [message.offset for message in fetched.messages]


def test_append_numbers_each_partition_by_itself(connection: sqlite3.Connection) -> None:
    """A partition's offsets are its own, whatever the others have."""
    assert [0, 1] == write(connection, b"a", b"b")
    assert [0] == write(connection, b"c", partition=P1)
    assert [2] == write(connection, b"d")
    assert PartitionBounds(Offset(0), Offset(3)) == rows.bounds(connection, P0)
    assert PartitionBounds(Offset(0), Offset(1)) == rows.bounds(connection, P1)


def test_timestamps_when_the_clock_goes_back_stay(connection: sqlite3.Connection) -> None:
    """A message is never older than the one before it, though the clock was set back, and all of them deleted."""
    write(connection, b"a", now_ms=5000)
    write(connection, b"b", now_ms=4000)
    at(connection, 4000).delete_before(P0, 2)
    write(connection, b"c", now_ms=3000)
    write(connection, b"d", now_ms=6000)
    assert [5000, 6000] == [message.timestamp_ms for message in read(connection, 2).messages]


def test_delete_before_stops_at_the_end_and_never_goes_back(connection: sqlite3.Connection) -> None:
    """The log start moves forward only, and at most to the next offset, which stays the next offset."""
    write(connection, b"a", b"b", b"c")
    assert 2 == at(connection, 1).delete_before(P0, 2)
    assert 2 == at(connection, 1).delete_before(P0, 1)
    assert 3 == at(connection, 1).delete_before(P0, 99)
    assert PartitionBounds(Offset(3), Offset(3)) == rows.bounds(connection, P0)
    assert [3] == write(connection, b"d")


def test_append_after_delete_in_the_same_transaction_goes_on(connection: sqlite3.Connection) -> None:
    """What a transaction deletes does not confuse where it appends."""
    transaction = at(connection, 1)
    request = AppendRequest(P0, b"k", b"a", 2, 1)
    transaction.append(request)
    transaction.delete_before(P0, 1)
    assert 1 == transaction.append(request)


def test_fetch_below_log_start_is_truncated(connection: sqlite3.Connection) -> None:
    """A position below the log start is a problem with all its numbers, and no message is returned past it."""
    write(connection, b"a", b"b", b"c")
    at(connection, 1).delete_before(P0, 2)
    fetched = read(connection, 1)
    assert [] == offsets(fetched)
    problem = fetched.problems[P0]
    assert isinstance(problem, LogTruncated)
    assert {"partition": 0, "wanted": 1, "log_start": 2} == problem.fields
    assert [2] == offsets(read(connection, 2))


def test_fetch_at_the_end_is_no_problem_and_past_it_one(connection: sqlite3.Connection) -> None:
    """The end itself is a position to wait at; past it the log is not the one that was read."""
    write(connection, b"a")
    assert ({}, []) == (read(connection, 1).problems, offsets(read(connection, 1)))
    assert isinstance(read(connection, 2).problems[P0], LogReplaced)


def test_fetch_of_missing_message_is_never_stepped_over(connection: sqlite3.Connection) -> None:
    """Should the database lose a message, reading stops before it and says so."""
    write(connection, b"a", b"b", b"c")
    connection.execute("DELETE FROM messages_0 WHERE offset = 1")
    assert [0] == offsets(read(connection, 0))
    assert "missing" in str(read(connection, 1).problems[P0])


def test_fetch_keeps_to_the_bytes_but_for_one_message(connection: sqlite3.Connection) -> None:
    """Keys and values together stay within bytes_max, except for a first message that is larger by itself."""
    write(connection, b"x" * 9, b"y" * 9, b"z" * 9)
    assert [0, 1] == offsets(read(connection, 0, bytes_max=20))
    assert [0] == offsets(read(connection, 0, bytes_max=19))
    assert [0] == offsets(read(connection, 0, bytes_max=1))


def test_keep_from_by_time_lets_go_what_is_older(connection: sqlite3.Connection) -> None:
    """Retention by time deletes messages older than it, and only from the front."""
    for now_ms in (1000, 2000, 3000):
        write(connection, b"a", now_ms=now_ms)
    retention = rows.Retention(milliseconds=1500, bytes_max=None)
    assert rows.keep_from(connection, 0, retention, now_ms=2500) is None
    assert 1 == rows.keep_from(connection, 0, retention, now_ms=2501)
    assert 3 == rows.keep_from(connection, 0, retention, now_ms=9999)
    assert rows.keep_from(connection, 0, KEEP_ALL, now_ms=9999) is None


def test_keep_from_by_bytes_keeps_at_most_so_many(connection: sqlite3.Connection) -> None:
    """Retention by bytes counts keys and values of what is kept, and forgets what was deleted before."""
    write(connection, *(b"x" * 9 for _ in range(10)))
    assert rows.keep_from(connection, 0, rows.Retention(None, 100), now_ms=1) is None
    assert 1 == rows.keep_from(connection, 0, rows.Retention(None, 99), now_ms=1)
    assert at(connection, 1).trim(0, rows.Retention(None, 45))
    assert PartitionBounds(Offset(6), Offset(10)) == rows.bounds(connection, P0)
    assert not at(connection, 1).trim(0, rows.Retention(None, 45))
    write(connection, b"x" * 9)
    assert 7 == rows.keep_from(connection, 0, rows.Retention(None, 45), now_ms=1)


def test_trim_deletes_at_most_a_bounded_number(connection: sqlite3.Connection) -> None:
    """One trim has a bound, says that there is more, and the next one goes on."""
    write(connection, *(b"x" for _ in range(rows.TRIM_ROWS_MAX + 5)))
    expired = rows.Retention(1, None)
    assert at(connection, 9999).trim(0, expired)
    assert rows.TRIM_ROWS_MAX == rows.bounds(connection, P0).log_start
    assert at(connection, 9999).trim(0, expired)
    assert rows.TRIM_ROWS_MAX + 5 == rows.bounds(connection, P0).log_start
    assert not at(connection, 9999).trim(0, expired)


def test_bytes_between_counts_what_is_still_there(connection: sqlite3.Connection) -> None:
    """Lag in bytes is the keys and values between two offsets, of which deleted ones are no part."""
    write(connection, b"x" * 9, b"x" * 19, b"x" * 29)
    total = rows.bytes_between(connection, P0, first=Offset(0), end=Offset(3))
    assert 60 == total
    assert 30 == rows.bytes_between(connection, P0, first=Offset(2), end=Offset(3))
    assert 0 == rows.bytes_between(connection, P0, first=Offset(3), end=Offset(3))
    at(connection, 1).delete_before(P0, 1)
    assert 50 == rows.bytes_between(connection, P0, first=Offset(0), end=Offset(3))
    at(connection, 1).delete_before(P0, 3)
    assert 0 == rows.bytes_between(connection, P0, first=Offset(0), end=Offset(3))


def test_changes_after_a_number_are_each_key_once(connection: sqlite3.Connection) -> None:
    """A table's changes are the newest row of each key that changed, in order; from the beginning, no tombstones."""
    transaction = at(connection, 1)
    for key, value in ((b"a", b"1"), (b"b", b"1"), (b"a", b"2"), (b"c", b"1"), (b"c", None)):
        transaction.put("t", key, value)
    transaction.put("other", b"z", b"1")
    found, last = rows.changes(connection, "t", after=0)
    assert [TableRow(b"b", b"1"), TableRow(b"a", b"2")] == found
    transaction.put("t", b"b", None)
    assert ([TableRow(b"b", None)], 7) == rows.changes(connection, "t", after=last)


def test_tombstones_are_forgotten_after_a_day_and_numbers_go_on(connection: sqlite3.Connection) -> None:
    """A deleted key is remembered for a day; its change number is never given again."""
    at(connection, 1000).put("t", b"a", b"1")
    at(connection, 1000).put("t", b"a", None)
    late = 1001 + rows.TOMBSTONE_MS
    assert not rows.has_old_tombstones(connection, now_ms=late - 1)
    assert rows.has_old_tombstones(connection, now_ms=late)
    at(connection, late).forget_tombstones()
    assert not rows.has_old_tombstones(connection, now_ms=late)
    at(connection, late).put("t", b"b", b"1")
    assert ([TableRow(b"b", b"1")], 3) == rows.changes(connection, "t", after=2)


def test_committed_offsets_are_by_group(connection: sqlite3.Connection) -> None:
    """Groups do not mix, the newest offset wins, and the groups can be listed."""
    at(connection, 1).commit_offsets("a", {P0: Offset(1), P1: Offset(2)})
    at(connection, 1).commit_offsets("a", {P0: Offset(3)})
    at(connection, 1).commit_offsets("b", {P0: Offset(9)})
    assert {"a": {0: 3, 1: 2}, "b": {0: 9}} == rows.committed(connection)
