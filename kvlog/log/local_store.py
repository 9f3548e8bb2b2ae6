"""A local log's directory: made by one process whatever races, opened and checked by all, its troubles named.

    log.db, log.db-wal, log.db-shm    SQLite in WAL mode, pages of 64 KiB
    write.lock                        who may write (local_lock)
    bell                              who is to be woken (local_bell)
    log.db.new                        only while a log is being made, or after a crash in the middle of that

One database for all partitions, not one a group of them: one identity, one WAL to checkpoint, one snapshot for a poll
that reads many partitions, and one commit for a group that spans them. Writers of several processes take turns at it:
two that write 900 KiB records as fast as they can reach 105-120 MB/s together, in two directories 140-180.

Pages of 64 KiB: a record is 100 KiB to 900 KiB, and smaller pages halve the speed of reading. `secure_delete` is
switched off because some distributions compile it in, and deleting would then write every byte once more.

Durability. `normal`, the default: a commit is in the kernel's page cache when it is acknowledged, so it survives
kill -9 of every process; a power loss or kernel panic may lose the newest commits (never one in the middle, never a
part of one), as with Kafka's own default. `full`: each group is synced to the disk before it is acknowledged.
"""

from __future__ import annotations

import os
import secrets
import shutil
import sqlite3
import time
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError, LogUnavailable
from kvlog.log.local_lock import WriteLock
from kvlog.log.local_rows import PARTITIONS_MAX, create_tables

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = [
    "LOCK_SECONDS",
    "Database",
    "Paths",
    "Synchronous",
    "create",
    "filesystem",
    "is_full",
    "open_database",
    "unavailable",
    "waiting_at_most",
]

FORMAT_VERSION = 1
APPLICATION_ID = 0x6B766C67  # "kvlg"
PAGE_BYTES = 1 << 16
BUSY_SECONDS = 2.0
"""SQLite's own waiting. With our lock around writes only recovery after a crash makes anybody wait."""
CACHE_KIB = 16 << 10
"""Page cache of a connection: one group of appends (local_scribe.GROUP_BYTES_MAX) fits, so that no page is spilled."""
WAL_BYTES_KEPT = 64 << 20
"""A WAL that grew past this while a reader kept it from restarting is cut when it can be."""
STATEMENTS_CACHED = 8 * PARTITIONS_MAX
"""Every statement that there is on every partition; a few KiB for each that is used."""
LOCK_SECONDS = 5.0
"""Waiting for another process's transaction longer than this is an outage: it is stopped, or the disk hangs."""
OPEN_ATTEMPTS = 3
"""A directory that is replaced more often than this while we open it is not one to use."""

_NETWORK_FILESYSTEMS = frozenset(
    {
        "9p",
        "afs",
        "ceph",
        "cifs",
        "fuse.glusterfs",
        "fuse.sshfs",
        "gfs2",
        "glusterfs",
        "lustre",
        "nfs",
        "nfs4",
    }
    | {"ncpfs", "ocfs2", "smb3", "smbfs"}
)
"""WAL needs memory that all its users share, and the bell one kernel: several hosts would corrupt the log."""


class Synchronous(StrEnum):
    """What an acknowledged append survives."""

    NORMAL = "normal"
    """The death of every process."""
    FULL = "full"
    """Power loss too."""


@dataclass(frozen=True, slots=True)
class Paths:
    """The files of a log's directory."""

    directory: Path

    @property
    def url(self) -> str:
        """The directory as people are told of it."""
        return self.directory.absolute().as_uri()

    @property
    def database(self) -> Path:
        """The database; SQLite adds -wal and -shm."""
        return self.directory / "log.db"

    @property
    def wal(self) -> Path:
        """SQLite's write-ahead log."""
        return self.directory / "log.db-wal"

    @property
    def unfinished(self) -> Path:
        """The database while it is being made."""
        return self.directory / "log.db.new"

    @property
    def lock(self) -> Path:
        """The write lock."""
        return self.directory / "write.lock"

    @property
    def bell(self) -> Path:
        """The file that writers touch after each commit."""
        return self.directory / "bell"


@dataclass(frozen=True, slots=True)
class Database:
    """An open connection, with what is fixed for the log that it belongs to.

    Args:
        file: device and inode of the database. They stay taken while the connection is open, so a recreated log has
            others.
    """

    paths: Paths
    connection: sqlite3.Connection
    file: tuple[int, int]
    identity: str
    partitions: int

    def is_current(self) -> bool:
        """Whether the path still names this database; not so when the directory was removed or recreated."""
        try:
            return _file(self.paths.database) == self.file
        except OSError:
            return False


def _file(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_dev, found.st_ino


def create(paths: Paths, *, partitions: int, vfs: str = "unix") -> None:
    """Make the directory and a log in it, if there is none. Of several processes that try at once, one makes it.

    Args:
        partitions: P of a new log; an existing one is left as it is.
        vfs: SQLite's; another one only in tests.

    Raises:
        ConfigError: the directory cannot be used, for a reason that names itself; nothing was made.
        LogUnavailable: the disk is full, or another process takes too long; try again.
    """
    try:
        paths.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_network(paths.directory)
        with closing(WriteLock(paths.lock)) as lock, lock.held(seconds=LOCK_SECONDS):
            paths.bell.touch()
            if not paths.database.exists():
                _make(paths, partitions, vfs)
    except sqlite3.Error as error:
        if is_full(error):
            raise unavailable(paths, error) from error
        raise _config(
            paths, f"SQLite cannot use it: {error}", "Use a local disk that this user can write"
        ) from error
    except OSError as error:
        fix = "Make it a directory that this user can write, on a local disk, or set log.url to another one"
        raise _config(paths, error.strerror or str(error), fix) from error


def _make(paths: Paths, partitions: int, vfs: str) -> None:
    """Build the database under another name and rename it: what has the right name is whole."""
    for leftover in paths.directory.glob(paths.unfinished.name + "*"):
        leftover.unlink()
    connection = _connect(paths.unfinished, vfs=vfs, mode="rwc")
    try:
        connection.execute(f"PRAGMA page_size = {PAGE_BYTES}")
        mode = connection.execute("PRAGMA journal_mode = WAL").fetchone()[0]
        if mode != "wal":
            problem = f"its filesystem cannot share memory between processes: SQLite gives {mode!r}, not WAL"
            raise _config(paths, problem, "Set log.url to a local disk (ext4, xfs, btrfs, tmpfs)")
        connection.execute("BEGIN IMMEDIATE")
        created_ms = time.time_ns() // 1_000_000
        identity = secrets.token_hex(16)
        meta = {"identity": identity, "partitions": partitions, "created_ms": created_ms}
        create_tables(connection, partitions=partitions, meta=meta)
        connection.execute(f"PRAGMA user_version = {FORMAT_VERSION}")
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute("COMMIT")
    finally:
        connection.close()  # the last one: SQLite checkpoints, syncs and removes the WAL
    paths.unfinished.rename(paths.database)
    _sync_directory(paths.directory)


def _connect(path: Path, *, mode: str, vfs: str = "unix") -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}&vfs={vfs}"
    # Each connection is used by one thread at a time, but not always closed by the one that opened it.
    return sqlite3.connect(
        uri,
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=STATEMENTS_CACHED,
    )


def open_database(
    paths: Paths, *, writes: bool = False, synchronous: Synchronous = Synchronous.NORMAL
) -> Database:
    """Connect to an existing log and check that it is one.

    Raises:
        LogUnavailable: it is not there, or cannot be opened now.
        ConfigError: the file is no log of ours, or of another format, or damaged.
    """
    for _ in range(OPEN_ATTEMPTS):
        try:
            before = _file(paths.database)
            connection = _connect(paths.database, mode="rw")
        except FileNotFoundError:
            raise LogUnavailable(
                where=paths.url, problem="the log is gone: its directory was removed"
            ) from None
        except sqlite3.Error as error:
            raise _opening(paths, error) from error
        database = None
        try:
            database = _checked(paths, connection, before)
            _tune(connection, writes=writes, synchronous=synchronous)
        except sqlite3.Error as error:
            database = None
            raise _opening(paths, error) from error
        finally:
            if database is None or not database.is_current():
                connection.close()
        if database.is_current():
            return database
    raise LogUnavailable(where=paths.url, problem="its directory is being replaced again and again")


def _checked(paths: Paths, connection: sqlite3.Connection, file: tuple[int, int]) -> Database:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    if application != APPLICATION_ID:
        fix = "Set log.url to another place, or move the file away"
        raise _config(paths, f"{paths.database.name} is a database of another program", fix)
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version != FORMAT_VERSION:
        problem = f"{paths.database.name} has format version {version}, this build reads {FORMAT_VERSION}"
        raise _config(paths, problem, "Use a build of kvlog that reads it, or set log.url to another place")
    meta = dict(connection.execute("SELECT name, value FROM meta"))
    return Database(paths, connection, file, str(meta["identity"]), int(meta["partitions"]))


def _tune(connection: sqlite3.Connection, *, writes: bool, synchronous: Synchronous) -> None:
    connection.execute("PRAGMA secure_delete = OFF")
    connection.execute(f"PRAGMA cache_size = -{CACHE_KIB}")
    # Checkpoints run under our lock only (local_lock), never by themselves.
    connection.execute("PRAGMA wal_autocheckpoint = 0")
    connection.execute(f"PRAGMA journal_size_limit = {WAL_BYTES_KEPT}")
    connection.execute(f"PRAGMA synchronous = {synchronous.value}")
    if not writes:
        connection.execute("PRAGMA query_only = ON")


@contextmanager
def waiting_at_most(database: Database, seconds: float) -> Iterator[None]:
    """Let SQLite wait for other connections for so long, not BUSY_SECONDS."""
    database.connection.execute(f"PRAGMA busy_timeout = {int(seconds * 1000)}")
    try:
        yield
    finally:
        database.connection.execute(f"PRAGMA busy_timeout = {int(BUSY_SECONDS * 1000)}")


def is_full(error: sqlite3.Error) -> bool:
    """Whether SQLite says that the disk is full. Nothing of the transaction is in the log then."""
    return _code(error) == sqlite3.SQLITE_FULL


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF  # the primary one; Python's own errors have none


def unavailable(paths: Paths, error: sqlite3.Error) -> LogUnavailable:
    """What SQLite said, in words for the operator."""
    match _code(error):
        case sqlite3.SQLITE_FULL:
            problem = f"the disk is full ({_free(paths)}): free some, or lower log.retention; waiting appends are kept"
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB:
            problem = (
                f"the database is damaged ({error}): stop all nodes, move the directory away, start again"
            )
        case sqlite3.SQLITE_IOERR:
            name = getattr(error, "sqlite_errorname", "SQLITE_IOERR")
            problem = f"the disk fails ({name}, {_free(paths)}): see the kernel's log"
        case _:
            problem = str(error)
    return LogUnavailable(where=paths.url, problem=problem)


def _free(paths: Paths) -> str:
    with suppress(OSError):
        return f"{shutil.disk_usage(paths.directory).free >> 20} MiB free"
    return "free space unknown"


def _opening(paths: Paths, error: sqlite3.Error) -> LogUnavailable | ConfigError:
    match _code(error):
        case sqlite3.SQLITE_NOTADB:
            fix = "Set log.url to another place, or move the file away"
            return _config(paths, f"{paths.database.name} is not a log of kvlog ({error})", fix)
        case sqlite3.SQLITE_CORRUPT:
            fix = (
                "Stop all nodes, move the directory away, start again: sessions are recomputed from token ids"
            )
            return _config(paths, f"{paths.database.name} is damaged ({error})", fix)
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM | sqlite3.SQLITE_CANTOPEN:
            fix = "Give this user read and write permission on the directory and all files in it"
            return _config(paths, f"{paths.database.name} cannot be opened for writing ({error})", fix)
        case _:
            return unavailable(paths, error)


def _config(paths: Paths, problem: str, fix: str) -> ConfigError:
    return ConfigError(setting="log.url", value=str(paths.directory), problem=problem, fix=fix)


def _refuse_network(directory: Path) -> None:
    with suppress(OSError):
        kind = filesystem(directory.resolve(), Path("/proc/self/mountinfo").read_text())
        if kind in _NETWORK_FILESYSTEMS:
            problem = f"it is on {kind}, which several hosts can mount; a local log is for one"
            raise _config(Paths(directory), problem, "Set log.url to a local disk, or use Kafka")


def filesystem(directory: Path, mountinfo: str) -> str | None:
    """The type of the filesystem that a directory is on.

    Args:
        directory: absolute, without links.
        mountinfo: the text of /proc/self/mountinfo, proc(5): the mount point is field 5, the type follows ` - `.
    """
    best, kind = "", None
    for line in mountinfo.splitlines():
        mount, _, rest = line.partition(" - ")
        point = mount.split()[4].replace("\\040", " ")
        if directory.is_relative_to(point) and len(point) >= len(best):
            best, kind = point, rest.split()[0]
    return kind


def _sync_directory(directory: Path) -> None:
    """Make a rename in it durable."""
    file = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
