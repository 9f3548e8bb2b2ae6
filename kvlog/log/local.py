"""The local log: kvlog.log.base in a directory, for one machine, demos and tests; readers and writers in any process.

    LocalLog ── Scribe          one thread, one connection: everything that this process writes (local_scribe)
             ├─ ReadThread      bounds, tables, committed offsets
             ├─ Bell            wakes readers when any process has committed (local_bell)
             └─ LocalReader ×n  each with a ReadThread of its own (local_reader)

What it promises: an acknowledged append survives kill -9 of every process (power loss: see local_store.Synchronous);
offsets have no holes; readers in other processes see a commit within milliseconds. What it does not: several machines.
A writer that is stopped (SIGSTOP) in the middle of a transaction (0.3 ms) or a checkpoint (some 50 ms every 8 MiB)
keeps the others from writing until it goes on or dies; `write_lock_holder` names it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError, LocalProtocolError, LogUnavailable
from kvlog.limits import DEFAULT
from kvlog.log import local_rows as rows
from kvlog.log.local_bell import TICK_SECONDS, Bell
from kvlog.log.local_lock import Holder, holder
from kvlog.log.local_reader import LocalReader, ReadThread
from kvlog.log.local_scribe import Scribe
from kvlog.log.local_store import Paths, Synchronous, create, open_database
from kvlog.log.local_submit import ReadOnly
from kvlog.log.local_table import LocalTable
from kvlog.log.local_writer import CLOSE_SECONDS, LocalWriter

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from kvlog.ids import Offset, Partition
    from kvlog.log.base import LogReader, LogWriter, PartitionBounds, Table
    from kvlog.log.local_submit import Submitter

__all__ = ["Holder", "LocalLog", "LocalLogOptions", "Synchronous", "write_lock_holder"]

RECORD_BYTES_CEILING = 512 << 20
"""SQLite takes 10⁹ bytes in one row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalLogOptions:
    """How a local log is made and kept.

    Args:
        partitions: P, fixed when the log is made.
        record_bytes_max: the largest value that `append` takes.
        retention_seconds: older messages are deleted; None: never.
        retention_bytes: of each partition's keys and values together; the oldest are deleted; None: never. The file can
            become partitions × retention_bytes large, plus about a tenth; it does not shrink, its pages are used again.
        synchronous: what an acknowledged append survives.
        read_only: take the log as it is, its P too, and change nothing: no file is made, nothing is deleted by
            retention, and writers, commits and table rows are refused. For tools.

    Raises:
        ConfigError: a value is out of its range.
    """

    partitions: int = 16
    record_bytes_max: int = DEFAULT.record_bytes
    retention_seconds: float | None = 3600.0
    retention_bytes: int | None = 1 << 30
    synchronous: Synchronous = Synchronous.NORMAL
    read_only: bool = False

    def __post_init__(self) -> None:
        """Refuse what cannot work."""
        _check("log.partitions", self.partitions, rows.PARTITIONS_MAX)
        _check("log.record_bytes_max", self.record_bytes_max, RECORD_BYTES_CEILING)
        for name in ("retention_seconds", "retention_bytes"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                problem = f"it is {value}, and must be above 0"
                raise ConfigError(
                    setting=f"log.{name}", problem=problem, fix="Leave it out to keep everything"
                )


def _check(setting: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        problem = f"it is {value}, and must be from 1 to {most}"
        raise ConfigError(setting=setting, problem=problem, fix="Choose a value in that range")


class LocalLog:
    """Implements kvlog.log.base.Log in a directory, for one event loop; any number may share the directory."""

    def __init__(self, directory: Path, options: LocalLogOptions | None = None) -> None:
        self._paths = Paths(directory)
        self._options = options or LocalLogOptions()
        seconds = self._options.retention_seconds
        age_ms = None if seconds is None else int(seconds * 1000)
        self._retention = rows.Retention(age_ms, self._options.retention_bytes)
        self._thread = ReadThread(self._paths)
        self._bell = Bell(self._paths.bell)
        self._scribe: Scribe | None = None
        self._submitter: Submitter | None = None
        self._partitions = self._options.partitions
        self._identity = ""
        self._writers: list[LocalWriter] = []
        self._readers: list[LocalReader] = []

    @property
    def partitions(self) -> int:
        """P, which never changes."""
        return self._partitions

    @property
    def where(self) -> str:
        """The directory as a URL."""
        return self._paths.url

    async def open(self) -> Sequence[str]:
        """Make the log if there is none, check it, and start the writing thread; see Log.open."""
        if self._submitter is not None:
            return ()
        if self._options.read_only:
            self._identity, self._partitions = await asyncio.to_thread(_found, self._paths)
            self._submitter = ReadOnly()
        else:
            self._identity = await asyncio.to_thread(_made, self._paths, self.partitions)
            synchronous = self._options.synchronous
            scribe = Scribe(self._paths, self._identity, retention=self._retention, synchronous=synchronous)
            scribe.start()
            self._submitter = self._scribe = scribe
        if self._bell.open():
            return ()
        return (f"inotify does not work here, so readers look every {TICK_SECONDS} s instead of at once",)

    async def identity(self) -> str:
        """The log's random id, made with it; a directory that was recreated has another one.

        Raises:
            LogUnavailable: the directory is gone, or cannot be read now.
        """
        return await self._thread.run(lambda database: database.identity)

    async def bounds(self, partition: Partition) -> PartitionBounds:
        """Log start offset and high watermark, as of now; see Log.bounds."""
        return await self._thread.run(lambda database: rows.bounds(database.connection, partition))

    async def writer(self) -> LogWriter:
        """A writer; all writers of this log share one thread and one order.

        Raises:
            LocalProtocolError: the log was opened to read only.
        """
        if self._scribe is None:
            self._writing()
            raise LocalProtocolError(problem="this log was opened to read only")
        writer = LocalWriter(
            self._scribe,
            where=self.where,
            partitions=self.partitions,
            record_bytes_max=self._options.record_bytes_max,
        )
        self._writers.append(writer)
        return writer

    async def reader(self, *, group: str | None = None) -> LogReader:
        """A reader, with a thread of its own."""
        thread = ReadThread(self._paths)
        reader = LocalReader(thread, self._bell, self._writing(), identity=self._identity, group=group)
        self._readers.append(reader)
        return reader

    async def table(self, name: str) -> Table:
        """A compacted table; it exists from its first row on."""
        return LocalTable(name, self._writing(), self._thread)

    async def close(self) -> None:
        """Close everything that was handed out; pending appends get CLOSE_SECONDS to become durable."""
        for reader in self._readers:
            await reader.close()
        if self._scribe is not None:
            await self._scribe.close(seconds=CLOSE_SECONDS)
        if self._submitter is not None:
            self._bell.close()
        await self._thread.close()

    # ------------------------------------------------------------------------------------------ for tools and tests

    async def committed(self, group: str) -> Mapping[Partition, Offset]:
        """The offsets that a group's readers have committed; empty for a group that never did."""
        return (await self.groups()).get(group, {})

    async def groups(self) -> Mapping[str, Mapping[Partition, Offset]]:
        """The committed offsets of all groups."""
        return await self._thread.run(lambda database: rows.committed(database.connection))

    async def bytes_between(self, partition: Partition, *, first: Offset, end: Offset) -> int:
        """Key and value bytes of the messages in [first, end) that are still there: lag in bytes, by two look-ups."""
        return await self._thread.run(
            lambda database: rows.bytes_between(database.connection, partition, first=first, end=end)
        )

    async def delete_records(self, partition: Partition, *, before: Offset) -> Offset:
        """Delete a partition's messages below an offset, as Kafka's DeleteRecords. Returns: the new log start."""
        done = await self._writing().submit(
            lambda transaction: transaction.delete_before(partition, before), size=0
        )
        start: Offset = await done
        return start

    async def trim(self) -> None:
        """Apply retention now, in bounded steps. Whoever has the log open does so every second by itself."""
        submitter, retention = self._writing(), self._retention
        for partition in range(self.partitions):
            more = True
            while more:
                done = await submitter.submit(
                    partial(rows.Transaction.trim, partition=partition, retention=retention), size=0
                )
                more = await done

    def _writing(self) -> Submitter:
        if self._submitter is None:
            raise LogUnavailable(where=self.where, problem="this log was not opened")
        return self._submitter


def _found(paths: Paths) -> tuple[str, int]:
    """Check a log that must be there already. Returns: its identity and P."""
    try:
        if not paths.database.exists():
            problem = "there is no log here: no daemon has made one yet, or log.url names another place"
            raise LogUnavailable(where=paths.url, problem=problem)
        database = open_database(paths)
    except OSError as error:  # the directory may belong to another user
        raise LogUnavailable(where=paths.url, problem=error.strerror or str(error)) from error
    database.connection.close()
    return database.identity, database.partitions


def write_lock_holder(directory: Path) -> Holder | None:
    """The process that is writing to a local log right now; None: nobody, or one that cannot be seen from here."""
    return holder(Paths(directory).lock)


def _made(paths: Paths, partitions: int) -> str:
    """Make the log if it is missing, and check that it is the one that is configured. Returns: its identity."""
    create(paths, partitions=partitions)
    database = open_database(paths)
    database.connection.close()
    if database.partitions != partitions:
        problem = (
            f"the log in {paths.directory} has {database.partitions} partitions, {partitions} are configured"
        )
        fix = f"Set log.partitions to {database.partitions}, or log.url to another place; P never changes"
        raise ConfigError(setting="log.partitions", problem=problem, fix=fix)
    return database.identity
