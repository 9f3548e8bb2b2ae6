"""The reader of a local log: looks in a thread of its own, and sleeps on the bell between looks."""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

from kvlog.errors import ConfigError, KvlogError, LocalProtocolError, LogReplaced, LogUnavailable
from kvlog.ids import Offset
from kvlog.log.local_rows import Fetched, fetch
from kvlog.log.local_store import Database, open_database, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvlog.ids import Partition
    from kvlog.log.base import LogMessage
    from kvlog.log.local_bell import Bell
    from kvlog.log.local_store import Paths
    from kvlog.log.local_submit import Submitter

__all__ = ["LocalReader", "ReadThread"]

_T = TypeVar("_T")


class ReadThread:
    """A thread with a read-only connection, opened when it is first needed and again when the log was recreated."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvlog-read")
        self._database: Database | None = None
        self._closed = False

    async def run(self, work: Callable[[Database], _T]) -> _T:
        """Run a function in one read transaction: all that it sees is of one moment.

        Raises:
            LogUnavailable: the log is not there, or cannot be read now.
        """
        if self._closed:
            raise LogUnavailable(where=self._paths.url, problem="this log was closed")
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._run, work)

    async def close(self) -> None:
        """Close the connection, after what is running."""
        if not self._closed:
            self._closed = True
            await asyncio.get_running_loop().run_in_executor(self._executor, self._disconnect)
            self._executor.shutdown(wait=False)

    def _run(self, work: Callable[[Database], _T]) -> _T:
        database = self._connected()
        try:
            database.connection.execute("BEGIN")
            try:
                return work(database)
            finally:
                database.connection.execute("COMMIT")
        except sqlite3.Error as error:
            self._disconnect()
            raise unavailable(self._paths, error) from error

    def _connected(self) -> Database:
        if self._database is not None and not self._database.is_current():
            self._disconnect()
        if self._database is None:
            try:
                self._database = open_database(self._paths)
            except ConfigError as error:
                raise LogUnavailable(where=self._paths.url, problem=error.fields["problem"]) from error
        return self._database

    def _disconnect(self) -> None:
        if self._database is not None:
            self._database.connection.close()
            self._database = None


class LocalReader:
    """Implements kvlog.log.base.LogReader; made by LocalLog.reader.

    A position that the log does not have is told at once, and again whenever there is nothing else to return, until it
    is sought or assigned anew; the other partitions go on.
    """

    def __init__(
        self, thread: ReadThread, bell: Bell, scribe: Submitter, *, identity: str, group: str | None
    ) -> None:
        self._thread = thread
        self._bell = bell
        self._scribe = scribe
        self._identity = identity
        self._group = group
        self._positions: dict[Partition, Offset] = {}
        self._problems: dict[Partition, KvlogError] = {}
        self._untold: set[Partition] = set()
        self._turn = 0
        self._sought = 0
        self._rings_seen: int | None = None
        """As many rings of the bell are known to have nothing for the present positions; None: that is not known."""

    def assign(self, positions: Mapping[Partition, Offset]) -> None:
        """Read these partitions from these offsets from now on, and no others."""
        self._positions = dict(positions)
        self._problems.clear()
        self._untold.clear()
        self._look_anew()

    def seek(self, partition: Partition, offset: Offset) -> None:
        """Continue one assigned partition at another offset."""
        assert partition in self._positions, f"partition {partition} is not assigned"
        self._positions[partition] = offset
        self._problems.pop(partition, None)
        self._untold.discard(partition)
        self._look_anew()

    def positions(self) -> Mapping[Partition, Offset]:
        """The next offset to be returned by `poll`, for each assigned partition."""
        return dict(self._positions)

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> Sequence[LogMessage]:
        """Wait for messages; see LogReader.poll."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        rings = self._rings_seen
        while True:
            if rings is not None and not self._problems:
                await self._bell.wait(rings, deadline - loop.time())
            rings = self._bell.rings
            fetched = await self._look(bytes_max)
            if self._untold:
                raise self._problems[self._untold.pop()]
            if fetched.messages:
                # Only now, with no await until they are returned: a poll that is cancelled loses nothing.
                for message in fetched.messages:
                    self._positions[message.partition] = Offset(message.offset + 1)
                return fetched.messages
            if self._problems:
                raise next(iter(self._problems.values()))
            if loop.time() >= deadline:
                return ()
            if fetched.more:
                rings = None

    async def commit(self, applied: Mapping[Partition, Offset]) -> None:
        """Store applied offsets under the reader's group."""
        if self._group is None:
            raise LocalProtocolError(problem="a reader without a group cannot commit")
        group, offsets = self._group, dict(applied)
        done = await self._scribe.submit(
            lambda transaction: transaction.commit_offsets(group, offsets), size=0
        )
        await done

    async def close(self) -> None:
        """Give back the thread and its connection."""
        await self._thread.close()

    def _look_anew(self) -> None:
        """Of a poll in progress too, whether it sleeps or looks."""
        self._sought += 1
        self._rings_seen = None
        self._bell.wake()

    async def _look(self, bytes_max: int) -> Fetched:
        """All that is there, or enough of it; then nothing is until the bell rings again."""
        healthy = [item for item in self._positions.items() if item[0] not in self._problems]
        self._turn += 1
        rings, sought, self._rings_seen = self._bell.rings, self._sought, None
        start = self._turn % len(healthy) if healthy else 0
        wanted = healthy[start:] + healthy[:start]  # so that a busy partition does not starve those after it

        def look(database: Database) -> tuple[str, Fetched]:
            return database.identity, fetch(database.connection, wanted, bytes_max=bytes_max)

        identity, fetched = await self._thread.run(look)
        if identity != self._identity:
            self._identity = identity
            problem = "the log was replaced by another one"
            self._found({p: LogReplaced(partition=p, problem=problem) for p in self._positions})
            return Fetched((), {})
        if sought != self._sought:  # it was for other positions
            return Fetched((), {}, more=True)
        self._found(fetched.problems)
        if self._bell.hears and not fetched.more:
            self._rings_seen = rings
        return fetched

    def _found(self, problems: Mapping[Partition, KvlogError]) -> None:
        self._problems.update(problems)
        self._untold.update(problems)
