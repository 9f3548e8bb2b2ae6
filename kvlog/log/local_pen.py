"""What a process writes a local log with: connection, lock and bell, held together and replaced together.

Used by the scribe's thread only. A pen is dropped after anything that may have left it in an odd state, and picked up
again at the next use; whether the log is still the same one is checked then, and under the lock each time.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvlog.errors import ConfigError, LogUnavailable, OutcomeUnknown
from kvlog.log.local_bell import ring
from kvlog.log.local_lock import WriteLock
from kvlog.log.local_rows import Transaction, has_old_tombstones, keep_from
from kvlog.log.local_store import (
    LOCK_SECONDS,
    PAGE_BYTES,
    Database,
    is_full,
    open_database,
    unavailable,
    waiting_at_most,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvlog.log.local_rows import Retention
    from kvlog.log.local_store import Paths, Synchronous

__all__ = ["Pen"]

_T = TypeVar("_T")

CHECKPOINT_BYTES = 8 << 20
"""Of WAL, about, that we wrote since our last checkpoint. Smaller ones hold the lock shorter (4 MiB: 26-28 ms, 16 MiB:
70-95 ms, on two busy cores and a cloud disk; nearly twice that without syncing the WAL before the lock) and come more
often; from 4 MiB on, they write equally fast.
"""

COMMIT_BYTES = 2 * PAGE_BYTES
"""What a commit writes beside its messages' bytes, because it writes whole pages: measured from 100 B to 900 KiB."""

WAL_PAGES_MAX = 2048
"""128 MiB: readers that overlap without a gap keep the WAL from restarting; past this a checkpoint waits for a gap."""

RESTART_SECONDS = 0.1
"""How long it waits for one; a reader that was stopped in the middle of a look must not stop the writers."""


class Pen:
    """Writes transactions into the log that the path names.

    Args:
        identity: of the log that our user knows; finding another one is OutcomeUnknown for whatever was to be written.
    """

    def __init__(self, paths: Paths, identity: str, synchronous: Synchronous) -> None:
        self._paths = paths
        self._identity = identity
        self._synchronous = synchronous
        self._held: tuple[Database, WriteLock, int] | None = None
        self._unchecked_bytes = 0
        self._wal_pages = 0

    @contextmanager
    def locked(self) -> Iterator[Database]:
        """The log, with no other writer in it.

        Raises:
            LogUnavailable: it is not there, cannot be opened, or another process does not leave it; try again.
            OutcomeUnknown: it is another log than before; from the next time on, that one is used.
        """
        database, lock, _ = self._picked_up()
        with lock.held(seconds=LOCK_SECONDS):
            if not database.is_current():
                raise self._unavailable("the log is gone: its directory was removed or replaced")
            yield database

    def transact(self, database: Database, work: Callable[[Transaction], _T], *, size: int = 0) -> _T:
        """Run `work` in one transaction, commit it, and ring the bell. Within `locked`.

        Args:
            size: the bytes that it writes, about.

        Raises:
            LogUnavailable: nothing of it is in the log; try again.
            OutcomeUnknown: it failed while committing, and may be there or appear.
        """
        try:
            database.connection.execute("BEGIN IMMEDIATE")
            result = work(Transaction(database.connection, now_ms=_now_ms()))
        except sqlite3.Error as error:
            _roll_back(database)
            raise unavailable(self._paths, error) from error
        except BaseException:
            _roll_back(database)
            raise
        try:
            database.connection.execute("COMMIT")
        except sqlite3.Error as error:
            _roll_back(database)
            told = unavailable(self._paths, error)
            # The commit mark is the last thing that goes to the WAL: without room for it there is no commit. After any
            # other error it may be there, and count once the WAL is recovered.
            raise told if is_full(error) else OutcomeUnknown(**told.fields) from error
        if self._held is not None:
            ring(self._held[2])
        self._unchecked_bytes += size + COMMIT_BYTES
        return result

    def checkpoint_if_due(self) -> None:
        """Now and then copy the WAL into the database, under the lock (INV-LOCAL-ONE-WRITER).

        Raises:
            LogUnavailable: it was not done; nothing is lost by that.
            OutcomeUnknown: it is another log.
        """
        if self._unchecked_bytes < CHECKPOINT_BYTES:
            return
        self._unchecked_bytes = 0
        # SQLite syncs the WAL itself, under the lock: the less is left to sync, the sooner it gives the lock back.
        with suppress(OSError):
            _sync(self._paths.wal)
        with self.locked() as database, suppress(sqlite3.Error):  # a full disk is told by the next append
            mode = "RESTART" if self._wal_pages > WAL_PAGES_MAX else "PASSIVE"
            with waiting_at_most(database, RESTART_SECONDS):
                self._wal_pages = database.connection.execute(f"PRAGMA wal_checkpoint({mode})").fetchone()[1]

    def trim(self, retention: Retention) -> bool:
        """Delete what retention lets go, one bounded transaction a partition, so that others get their turn.

        Returns: whether there is more to delete.

        Raises:
            LogUnavailable: something was not deleted; try again.
            OutcomeUnknown: the same, or it is another log.
        """
        database, _, _ = self._picked_up()
        connection, partitions, now_ms = database.connection, database.partitions, _now_ms()
        more = False
        try:
            due = [
                p for p in range(partitions) if keep_from(connection, p, retention, now_ms=now_ms) is not None
            ]
            tombstones = has_old_tombstones(connection, now_ms=now_ms)
        except sqlite3.Error as error:
            raise unavailable(self._paths, error) from error
        for partition in due:
            with self.locked() as database:
                trim = partial(Transaction.trim, partition=partition, retention=retention)
                more |= self.transact(database, trim)
        if tombstones:
            with self.locked() as database:
                self.transact(database, Transaction.forget_tombstones)
        return more

    def drop(self) -> None:
        """Close everything; the next use opens it again."""
        if self._held is not None:
            database, lock, bell = self._held
            self._held = None
            database.connection.close()
            lock.close()
            os.close(bell)

    def _picked_up(self) -> tuple[Database, WriteLock, int]:
        if self._held is None:
            try:
                database = open_database(self._paths, writes=True, synchronous=self._synchronous)
            except ConfigError as error:
                raise self._unavailable(str(error.fields["problem"])) from error
            try:
                self._held = database, *self._locks()
            except OSError as error:
                database.connection.close()
                raise self._unavailable(str(error)) from error
        database = self._held[0]
        if database.identity != self._identity:
            self._identity = database.identity
            raise OutcomeUnknown(problem="the log was replaced by another one")
        return self._held

    def _locks(self) -> tuple[WriteLock, int]:
        lock = WriteLock(self._paths.lock)
        try:
            return lock, os.open(self._paths.bell, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError:
            lock.close()
            raise

    def _unavailable(self, problem: str) -> LogUnavailable:
        return LogUnavailable(where=self._paths.url, problem=problem)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _sync(path: Path) -> None:
    """Sync a file that SQLite holds no lock on; closing any other would drop the locks of the whole process."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fdatasync(file)
    finally:
        os.close(file)


def _roll_back(database: Database) -> None:
    if database.connection.in_transaction:  # after some errors SQLite has rolled back by itself
        with suppress(sqlite3.Error):
            database.connection.execute("ROLLBACK")
