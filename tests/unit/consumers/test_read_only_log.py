"""A log that is opened to read only: nothing is made, nothing is deleted, nothing can be written."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LocalProtocolError, LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import AppendRequest
from kvlog.log.local import LocalLog, LocalLogOptions

if TYPE_CHECKING:
    from pathlib import Path

PARTITION = Partition(1)
READ_ONLY = LocalLogOptions(read_only=True)


async def write(directory: Path) -> None:
    """Makes a log of three partitions with one message and one table row."""
    log = LocalLog(directory, LocalLogOptions(partitions=3))
    await log.open()
    writer = await log.writer()
    await (await writer.append(AppendRequest(PARTITION, b"s", b"value", 1, 1)))
    await (await log.table("nodes")).put(b"a", b"row")
    await log.close()


async def test_read_only_log_of_no_directory_is_refused_and_not_made(tmp_path: Path) -> None:
    """A misspelt place is an error, not an empty log."""
    log = LocalLog(tmp_path / "none", READ_ONLY)
    with pytest.raises(LogUnavailable, match="no log here"):
        await log.open()
    await log.close()
    assert [] == os.listdir(tmp_path)  # noqa: PTH208


async def test_read_only_log_takes_partitions_as_they_are(tmp_path: Path) -> None:
    """A tool need not know P: it reads what is there, tables too."""
    await write(tmp_path)
    log = LocalLog(tmp_path, READ_ONLY)
    await log.open()
    assert 3 == log.partitions
    reader = await log.reader()
    reader.assign({PARTITION: Offset(0)})
    messages = await reader.poll(bytes_max=100, timeout_seconds=0.1)
    assert [b"value"] == [message.value for message in messages]
    assert [b"row"] == [row.value for row in await (await log.table("nodes")).refresh()]
    await log.close()


async def test_read_only_log_refuses_to_write(tmp_path: Path) -> None:
    """Writers, commits, table rows and deletions are refused."""
    await write(tmp_path)
    log = LocalLog(tmp_path, READ_ONLY)
    await log.open()
    reader, table = await log.reader(group="g"), await log.table("nodes")
    for refused in (
        log.writer(),
        reader.commit({PARTITION: Offset(1)}),
        table.put(b"a", None),
        log.delete_records(PARTITION, before=Offset(1)),
    ):
        with pytest.raises(LocalProtocolError, match="read only"):
            await refused
    await log.close()


async def test_read_only_log_deletes_nothing_by_its_own_retention(tmp_path: Path) -> None:
    """A tool with other settings than the daemons' must not apply them."""
    await write(tmp_path)
    log = LocalLog(tmp_path, LocalLogOptions(read_only=True, retention_seconds=1e-9, retention_bytes=1))
    await log.open()
    with pytest.raises(LocalProtocolError):
        await log.trim()
    assert 0 == (await log.bounds(PARTITION)).log_start
    await log.close()


async def test_read_only_log_refuses_an_unreadable_place(tmp_path: Path) -> None:
    """A file where a directory should be is named, not a traceback."""
    (tmp_path / "file").touch()
    log = LocalLog(tmp_path / "file", READ_ONLY)
    with pytest.raises(LogUnavailable, match=r"Not a directory|no log here"):
        await log.open()
    await log.close()
