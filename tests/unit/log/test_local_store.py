"""The local log's directory: what it refuses, in which words, and that nothing is half made."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest

from kvlog.errors import ConfigError, LogUnavailable
from kvlog.log import local_store
from kvlog.log.local_store import Paths, create, filesystem, open_database, unavailable

MOUNTS = """\
22 1 254:0 / / rw,relatime - ext4 /dev/vda rw
30 22 0:25 / /mnt/kv\\040cache rw shared:1 - nfs4 server:/export rw
31 22 0:26 / /mnt rw - xfs /dev/vdb rw
32 22 0:27 / /mnt/kv rw - tmpfs none rw
"""


def made(directory: Path, partitions: int = 2) -> Paths:
    """A log of its own."""
    paths = Paths(directory)
    create(paths, partitions=partitions)
    return paths


def database_text(paths: Paths, sql: str) -> None:
    """Changes the database behind our back."""
    connection = sqlite3.connect(paths.database, isolation_level=None)
    connection.execute(sql)
    connection.close()


@pytest.mark.parametrize(
    ("directory", "expected"),
    [
        ("/var/lib/kvlog", "ext4"),
        ("/mnt/disk", "xfs"),
        ("/mnt/kv", "tmpfs"),
        ("/mnt/kv cache/log", "nfs4"),
        ("/mnt/kv-not-that", "xfs"),
    ],
)
def test_filesystem_is_the_one_mounted_deepest(directory: str, expected: str) -> None:
    """The type is that of the longest mount point that the directory lies under, whole names only."""
    assert expected == filesystem(Path(directory), MOUNTS)


def test_create_makes_a_wal_database_of_our_format(tmp_path: Path) -> None:
    """A new log has large pages, WAL, our application id and version, and every partition."""
    paths = made(tmp_path / "a" / "b", partitions=5)
    database = open_database(paths)
    pragmas = {
        name: database.connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in (
            "page_size",
            "journal_mode",
            "application_id",
            "user_version",
            "secure_delete",
            "query_only",
        )
    }
    expected = {
        "page_size": 65536,
        "journal_mode": "wal",
        "application_id": int.from_bytes(b"kvlg", "big"),
        "user_version": 1,
        "secure_delete": 0,
        "query_only": 1,
    }
    assert expected == pragmas
    assert (5, 32) == (database.partitions, len(database.identity))
    database.connection.close()


def test_create_again_leaves_the_log_as_it_is(tmp_path: Path) -> None:
    """Whoever comes second finds the first one's log, also with another P."""
    first = open_database(made(tmp_path, partitions=2))
    second = open_database(made(tmp_path, partitions=7))
    assert (first.identity, 2) == (second.identity, second.partitions)
    first.connection.close()
    second.connection.close()


def test_create_interrupted_before_its_rename_starts_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that dies before the rename leaves no log, and the next one is not disturbed by what it left."""

    def died(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", died)
        with pytest.raises(KeyboardInterrupt):
            made(tmp_path)
    assert Paths(tmp_path).unfinished.exists()
    assert not Paths(tmp_path).database.exists()
    open_database(made(tmp_path)).connection.close()
    assert not Paths(tmp_path).unfinished.exists()


def test_create_where_a_file_stands_is_a_config_error(tmp_path: Path) -> None:
    """A path that is no directory is refused with the path."""
    file = tmp_path / "file"
    file.write_text("not a directory")
    with pytest.raises(ConfigError) as refused:
        made(file)
    assert ("log.url", str(file)) == (refused.value.fields["setting"], refused.value.fields["value"])


def test_create_without_permission_is_a_config_error(tmp_path: Path) -> None:
    """A directory that we cannot write is refused, and the fix says so."""
    if os.geteuid() == 0:
        forbidden = Path("/sys/kvlog-log")  # even root cannot make a directory there
    else:
        tmp_path.chmod(0o500)
        forbidden = tmp_path
    with pytest.raises(ConfigError) as refused:
        made(forbidden)
    assert "can write" in str(refused.value.fields["fix"])


def test_create_on_network_filesystem_is_a_config_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filesystem that several hosts can mount is refused by its name before anything is written."""
    monkeypatch.setattr(local_store, "filesystem", lambda *_: "nfs4")
    with pytest.raises(ConfigError, match="nfs4"):
        made(tmp_path)
    assert [] == list(tmp_path.iterdir())


def test_create_without_shared_memory_is_a_config_error(tmp_path: Path) -> None:
    """Where SQLite cannot have its WAL, the log is refused; nothing with its name is left."""
    with pytest.raises(ConfigError, match="not WAL"):
        create(Paths(tmp_path), partitions=1, vfs="unix-dotfile")
    assert not Paths(tmp_path).database.exists()


def test_open_of_missing_log_is_unavailable(tmp_path: Path) -> None:
    """Opening, unlike creating, makes nothing."""
    with pytest.raises(LogUnavailable, match="gone"):
        open_database(Paths(tmp_path))
    assert [] == list(tmp_path.iterdir())


def test_open_of_other_file_is_a_config_error(tmp_path: Path) -> None:
    """A file that is no database is not a log of kvlog."""
    Paths(tmp_path).database.write_bytes(b"something else entirely " * 100)
    with pytest.raises(ConfigError, match="not a log of kvlog"):
        open_database(made(tmp_path))


def test_open_of_other_programs_database_is_a_config_error(tmp_path: Path) -> None:
    """A database without our application id is another program's."""
    paths = Paths(tmp_path)
    database_text(paths, "CREATE TABLE theirs (x)")
    with pytest.raises(ConfigError, match="another program"):
        open_database(made(tmp_path))


def test_open_of_other_format_is_a_config_error(tmp_path: Path) -> None:
    """A format version that this build does not know is refused with both numbers."""
    paths = made(tmp_path)
    database_text(paths, "PRAGMA user_version = 2")
    with pytest.raises(ConfigError, match="format version 2, this build reads 1"):
        open_database(paths)


def test_open_of_damaged_database_is_a_config_error(tmp_path: Path) -> None:
    """A database whose pages are overwritten is called damaged, with what to do."""
    paths = made(tmp_path)
    with paths.database.open("r+b") as file:
        file.seek(100)  # the header of the first b-tree page
        file.write(b"\xff" * 60_000)
    with pytest.raises(ConfigError, match="damaged") as refused:
        open_database(paths)
    assert "move the directory away" in str(refused.value.fields["fix"])


def test_database_of_recreated_directory_is_not_current(tmp_path: Path) -> None:
    """An open database knows that its path names another one now, or none."""
    database = open_database(made(tmp_path))
    assert database.is_current()
    for file in tmp_path.iterdir():
        file.unlink()
    assert not database.is_current()
    made(tmp_path)
    assert not database.is_current()
    database.connection.close()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (sqlite3.SQLITE_FULL, "the disk is full"),
        (sqlite3.SQLITE_IOERR_WRITE, "the disk fails"),
        (sqlite3.SQLITE_CORRUPT, "damaged"),
        (sqlite3.SQLITE_NOTADB, "damaged"),
        (sqlite3.SQLITE_BUSY, "some words"),
    ],
)
def test_unavailable_says_what_the_operator_needs(tmp_path: Path, code: int, words: str) -> None:
    """SQLite's code becomes words that say what is wrong and where."""
    error = sqlite3.OperationalError("some words")
    error.sqlite_errorcode = code
    told = unavailable(Paths(tmp_path), error)
    assert words in str(told.fields["problem"])
    assert tmp_path.as_uri() == told.fields["where"]
