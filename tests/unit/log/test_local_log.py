"""The local log as a whole, in one process: options, space, recreated and removed directories, waking."""

from __future__ import annotations

import asyncio
import shutil
import time
from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import ConfigError, LocalProtocolError, LogReplaced, LogUnavailable, OutcomeUnknown
from kvlog.ids import Offset, Partition
from kvlog.log import local_bell, local_pen, local_reader, local_rows
from kvlog.log.base import AppendRequest, TableRow
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.log.local_lock import Holder, WriteLock, holder
from kvlog.log.local_store import Paths, Synchronous, open_database

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from pathlib import Path

    from kvlog.log.base import LogMessage, LogWriter

P0 = Partition(0)
DEADLINE_SECONDS = 20.0


@pytest.fixture
async def open_log(tmp_path: Path) -> AsyncIterator[Callable[[LocalLogOptions], LocalLog]]:
    """Makes handles on one directory, and closes them."""
    logs: list[LocalLog] = []

    def make(options: LocalLogOptions) -> LocalLog:
        logs.append(LocalLog(tmp_path / "log", options))
        return logs[-1]

    yield make
    for log in logs:
        await log.close()


async def append(writer: LogWriter, *values: bytes, partition: Partition = P0) -> list[Offset]:
    """Appends and waits."""
    futures = [await writer.append(AppendRequest(partition, b"k", value, 2, 1)) for value in values]
    return list(await asyncio.gather(*futures))


@pytest.mark.parametrize(
    ("wrong", "setting"),
    [
        ({"partitions": 0}, "log.partitions"),
        ({"partitions": 5000}, "log.partitions"),
        ({"record_bytes_max": 0}, "log.record_bytes_max"),
        ({"record_bytes_max": 1 << 30}, "log.record_bytes_max"),
        ({"retention_seconds": 0}, "log.retention_seconds"),
        ({"retention_bytes": -1}, "log.retention_bytes"),
    ],
)
def test_options_out_of_range_are_a_config_error(wrong: dict[str, int], setting: str) -> None:
    """A value that cannot work is refused by the setting's name, before anything is opened."""
    with pytest.raises(ConfigError) as refused:
        LocalLogOptions(**wrong)  # type: ignore[arg-type]
    assert setting == refused.value.fields["setting"]


async def test_open_with_other_partitions_names_both(open_log: Callable[[LocalLogOptions], LocalLog]) -> None:
    """P never changes: another one in the configuration is refused with both numbers."""
    await open_log(LocalLogOptions(partitions=2)).open()
    with pytest.raises(ConfigError, match="has 2 partitions, 3 are configured"):
        await open_log(LocalLogOptions(partitions=3)).open()


async def test_use_before_open_and_after_close_is_unavailable(
    open_log: Callable[[LocalLogOptions], LocalLog],
) -> None:
    """A log that is not open says so."""
    log = open_log(LocalLogOptions())
    with pytest.raises(LogUnavailable, match="not opened"):
        await log.writer()
    await log.open()
    writer = await log.writer()
    await log.close()
    with pytest.raises(LogUnavailable, match="closed"):
        await append(writer, b"late")
    with pytest.raises(LogUnavailable, match="closed"):
        await log.bounds(P0)


async def test_commit_without_group_is_our_callers_fault(
    open_log: Callable[[LocalLogOptions], LocalLog],
) -> None:
    """A reader that was made without a group has nowhere to commit to."""
    log = open_log(LocalLogOptions())
    await log.open()
    with pytest.raises(LocalProtocolError):
        await (await log.reader()).commit({P0: Offset(1)})


async def test_append_with_full_sync_is_durable_too(open_log: Callable[[LocalLogOptions], LocalLog]) -> None:
    """`synchronous = full` writes and reads as the default does."""
    log = open_log(LocalLogOptions(synchronous=Synchronous.FULL))
    await log.open()
    assert [0, 1] == await append(await log.writer(), b"a", b"b")


async def test_files_with_retention_stop_growing(
    open_log: Callable[[LocalLogOptions], LocalLog], tmp_path: Path
) -> None:
    """Deleted pages are used again: twenty times the retention goes through files of about its size."""
    kept = 2 << 20
    log = open_log(LocalLogOptions(partitions=2, retention_bytes=kept))
    await log.open()
    writer = await log.writer()
    sizes = []
    for _ in range(20):
        for partition in (P0, Partition(1)):
            await append(writer, *(bytes(200_000) for _ in range(10)), partition=partition)
        await log.trim()
        sizes.append((tmp_path / "log" / "log.db").stat().st_size)
    kept_now = [await log.bytes_between(Partition(p), first=Offset(0), end=Offset(1000)) for p in range(2)]
    assert all(size <= kept for size in kept_now)
    assert [] == [size for size in sizes if size > 4 * kept + (32 << 20)]
    assert max(sizes[10:]) <= max(sizes[:10]) + (4 << 20)


async def test_trim_by_time_runs_by_itself(open_log: Callable[[LocalLogOptions], LocalLog]) -> None:
    """Whoever has the log open for writing applies retention, also when nothing is written."""
    log = open_log(LocalLogOptions(retention_seconds=0.2))
    await log.open()
    await append(await log.writer(), b"a", b"b")
    async with asyncio.timeout(DEADLINE_SECONDS):
        while (await log.bounds(P0)).log_start < 2:  # noqa: ASYNC110 - another thread does it, and tells nobody
            await asyncio.sleep(0.05)
    assert (2, 2) == ((await log.bounds(P0)).log_start, (await log.bounds(P0)).high_watermark)


async def test_wal_restarts_when_a_long_read_ends(
    open_log: Callable[[LocalLogOptions], LocalLog], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that stays in one look lets the WAL grow; when it has gone, the WAL is used from its start again."""
    monkeypatch.setattr(local_pen, "CHECKPOINT_BYTES", 1 << 20)
    monkeypatch.setattr(local_pen, "WAL_PAGES_MAX", 16)
    log = open_log(LocalLogOptions())
    await log.open()
    writer = await log.writer()
    wal = tmp_path / "log" / "log.db-wal"
    await append(writer, bytes(500_000))
    database = open_database(Paths(tmp_path / "log"))
    with closing(database.connection) as connection:
        connection.execute("BEGIN")
        connection.execute("SELECT count(*) FROM messages_0").fetchone()
        for _ in range(20):
            await append(writer, bytes(500_000))
        grown = wal.stat().st_size
        assert grown > 10_000_000
        connection.execute("COMMIT")
    for _ in range(60):
        await append(writer, bytes(500_000))
    assert wal.stat().st_size <= grown + 5_000_000


async def test_wal_of_many_small_commits_stays_small(
    open_log: Callable[[LocalLogOptions], LocalLog], tmp_path: Path
) -> None:
    """A commit writes whole pages however small its message; the WAL is bounded by what is written, not by messages."""
    log = open_log(LocalLogOptions())
    await log.open()
    table = await log.table("nodes")
    for number in range(300):
        await table.put(b"node-a", b"%d" % number)
    assert (tmp_path / "log" / "log.db-wal").stat().st_size < 4 * local_pen.CHECKPOINT_BYTES


async def test_directory_removed_is_unavailable_and_comes_back_as_another_log(
    open_log: Callable[[LocalLogOptions], LocalLog], tmp_path: Path
) -> None:
    """While the directory is gone all waits; once it is recreated, what was pending is unknown, and all goes on."""
    log = open_log(LocalLogOptions(partitions=2))
    await log.open()
    writer, reader = await log.writer(), await log.reader()
    table = await log.table("nodes")
    await table.put(b"a", b"1")
    await table.refresh()
    await append(writer, b"old")
    reader.assign({P0: Offset(0), Partition(1): Offset(0)})
    await reader.poll(bytes_max=1000, timeout_seconds=1.0)
    shutil.rmtree(tmp_path / "log")
    pending = await writer.append(AppendRequest(P0, b"k", b"pending", 2, 1))
    with pytest.raises(LogUnavailable):
        await log.identity()
    with pytest.raises(LogUnavailable):
        await reader.poll(bytes_max=1000, timeout_seconds=0.1)
    await open_log(LocalLogOptions(partitions=2)).open()
    with pytest.raises(OutcomeUnknown, match="replaced"):
        await asyncio.wait_for(pending, DEADLINE_SECONDS)
    replaced = set()
    for partition in (P0, Partition(1)):
        with pytest.raises(LogReplaced) as error:
            await reader.poll(bytes_max=1000, timeout_seconds=0.1)
        replaced.add(error.value.fields["partition"])
        reader.seek(partition, Offset(0))
    assert {0, 1} == replaced
    assert [0] == await append(writer, b"new")
    assert [b"new"] == [bytes(m.value) for m in await reader.poll(bytes_max=1000, timeout_seconds=5.0)]
    await table.put(b"b", b"1")
    assert [TableRow(b"b", b"1")] == list(await table.refresh())


async def test_problem_of_one_partition_does_not_stop_the_others(
    open_log: Callable[[LocalLogOptions], LocalLog],
) -> None:
    """A position that the log lacks is told at once, then only when there is nothing else to return."""
    log = open_log(LocalLogOptions(partitions=2))
    await log.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, b"a", partition=Partition(1))
    reader.assign({P0: Offset(5), Partition(1): Offset(0)})
    with pytest.raises(LogReplaced):
        await reader.poll(bytes_max=1000, timeout_seconds=0.0)
    assert [b"a"] == [m.value for m in await reader.poll(bytes_max=1000, timeout_seconds=0.0)]
    with pytest.raises(LogReplaced):
        await reader.poll(bytes_max=1000, timeout_seconds=0.0)


async def test_reader_without_inotify_still_gets_everything(
    open_log: Callable[[LocalLogOptions], LocalLog], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where inotify does not work, `open` says so and the tick guarantees progress."""
    monkeypatch.setattr(local_bell, "_inotify_open", lambda: None)
    monkeypatch.setattr(local_bell, "TICK_SECONDS", 0.05)
    log = open_log(LocalLogOptions())
    differences = await log.open()
    assert "inotify does not work" in differences[0]
    writer, reader = await log.writer(), await log.reader()
    reader.assign({P0: Offset(0)})
    polling = asyncio.create_task(reader.poll(bytes_max=1000, timeout_seconds=DEADLINE_SECONDS))
    await asyncio.sleep(0.01)
    await append(writer, b"a")
    assert [b"a"] == [message.value for message in await polling]


@pytest.fixture
async def counted_log(
    open_log: Callable[[LocalLogOptions], LocalLog], monkeypatch: pytest.MonkeyPatch
) -> tuple[LocalLog, list[int]]:
    """A log whose readers wait for the bell, however long, and how many messages each look of them has found."""
    looks: list[int] = []

    def counted(*given: object, **more: object) -> local_rows.Fetched:
        found = local_rows.fetch(*given, **more)  # type: ignore[arg-type]
        looks.append(len(found.messages))
        return found

    monkeypatch.setattr(local_bell, "TICK_SECONDS", 10 * DEADLINE_SECONDS)
    monkeypatch.setattr(local_reader, "fetch", counted)
    log = open_log(LocalLogOptions(partitions=2))
    await log.open()
    return log, looks


async def test_reader_that_has_all_looks_again_when_the_bell_rings(
    counted_log: tuple[LocalLog, list[int]],
) -> None:
    """A message costs one look, and is there at once: what was read to the end is not looked at for nothing."""
    log, looks = counted_log
    writer, reader = await log.writer(), await log.reader()
    reader.assign({P0: Offset(0)})
    async with asyncio.timeout(DEADLINE_SECONDS):
        for number in range(5):
            polling = asyncio.create_task(reader.poll(bytes_max=1000, timeout_seconds=10 * DEADLINE_SECONDS))
            while not looks:  # noqa: ASYNC110  # until it waits
                await asyncio.sleep(0.001)
            await append(writer, b"%d" % number)
            assert [b"%d" % number] == [bytes(message.value) for message in await polling]
    assert [0, 1, 1, 1, 1, 1] == looks


async def test_reader_looks_at_once_for_what_a_look_has_left(counted_log: tuple[LocalLog, list[int]]) -> None:
    """More than a look takes, a place that was sought, a new assignment, a poll that was given up: none waits."""
    log, looks = counted_log
    writer, reader = await log.writer(), await log.reader()
    await append(writer, *(b"abcd" for _ in range(3)))
    await append(writer, b"other", partition=Partition(1))
    reader.assign({P0: Offset(0)})
    found: list[LogMessage] = []

    async def poll() -> None:
        found.extend(await reader.poll(bytes_max=9, timeout_seconds=10 * DEADLINE_SECONDS))

    async with asyncio.timeout(DEADLINE_SECONDS):
        for _ in range(3):
            await poll()
        reader.seek(P0, Offset(2))
        await poll()
        reader.assign({Partition(1): Offset(0)})
        given_up = asyncio.create_task(poll())
        await asyncio.sleep(0)
        given_up.cancel()
        await asyncio.wait([given_up])
        await poll()
    assert [(0, 0), (0, 1), (0, 2), (0, 2), (1, 0)] == [
        (message.partition, message.offset) for message in found
    ]
    assert () == await reader.poll(bytes_max=9, timeout_seconds=0.05)
    assert [1, 1, 1, 1] == looks[:4]


async def test_reader_sought_while_it_looks_does_not_wait_for_the_bell(
    counted_log: tuple[LocalLog, list[int]],
) -> None:
    """What a look has not seen is not known to be nothing."""
    log, _ = counted_log
    writer, reader = await log.writer(), await log.reader()
    await append(writer, b"a", b"b")
    for begins in (0, 2):  # the look finds something, or nothing
        reader.assign({P0: Offset(begins)})
        async with asyncio.timeout(DEADLINE_SECONDS):
            polling = asyncio.create_task(reader.poll(bytes_max=100, timeout_seconds=10 * DEADLINE_SECONDS))
            await asyncio.sleep(0)  # it looks
            reader.seek(P0, Offset(1))
            assert [b"b"] == [bytes(message.value) for message in await polling]
        assert {P0: Offset(2)} == reader.positions()


async def test_reader_assigned_anew_while_it_looks_forgets_what_it_found(
    counted_log: tuple[LocalLog, list[int]],
) -> None:
    """A partition that is not followed any more does not come back with its messages."""
    log, _ = counted_log
    writer, reader = await log.writer(), await log.reader()
    await append(writer, b"a")
    await append(writer, b"b", partition=Partition(1))
    reader.assign({P0: Offset(0)})
    async with asyncio.timeout(DEADLINE_SECONDS):
        polling = asyncio.create_task(reader.poll(bytes_max=100, timeout_seconds=10 * DEADLINE_SECONDS))
        await asyncio.sleep(0)  # it looks
        reader.assign({Partition(1): Offset(0)})
        assert [b"b"] == [bytes(message.value) for message in await polling]
    assert {Partition(1): Offset(1)} == reader.positions()


async def test_reader_that_sleeps_is_woken_by_a_seek(counted_log: tuple[LocalLog, list[int]]) -> None:
    """What is followed from now on is read now, not when the log grows."""
    log, looks = counted_log
    writer, reader = await log.writer(), await log.reader()
    await append(writer, b"a")
    reader.assign({P0: Offset(1)})
    async with asyncio.timeout(DEADLINE_SECONDS):
        polling = asyncio.create_task(reader.poll(bytes_max=100, timeout_seconds=10 * DEADLINE_SECONDS))
        while not looks:  # noqa: ASYNC110  # until it waits
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.02)
        reader.seek(P0, Offset(0))
        assert [b"a"] == [bytes(message.value) for message in await polling]


async def test_reader_without_inotify_looks_at_each_poll(
    counted_log: tuple[LocalLog, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing tells it when there is something, so it does not wait before it has looked."""
    log, _ = counted_log
    monkeypatch.setattr(local_bell.Bell, "hears", False)
    writer, reader = await log.writer(), await log.reader()
    reader.assign({P0: Offset(0)})
    async with asyncio.timeout(DEADLINE_SECONDS):
        for number in range(3):
            await append(writer, b"%d" % number)
            found = await reader.poll(bytes_max=1000, timeout_seconds=10 * DEADLINE_SECONDS)
            assert [b"%d" % number] == [bytes(message.value) for message in found]


async def test_bell_of_replaced_file_is_found_again(tmp_path: Path) -> None:
    """A bell whose file was replaced hears the new one after a tick."""
    path = tmp_path / "bell"
    path.touch()
    bell = local_bell.Bell(path)
    assert bell.open()
    path.unlink()
    path.touch()
    await bell.wait(bell.rings, DEADLINE_SECONDS)  # the tick
    rings = bell.rings
    with path.open("r+b") as file:
        local_bell.ring(file.fileno())
    await bell.wait(rings, DEADLINE_SECONDS)
    assert bell.rings > rings
    bell.close()


def test_lock_held_elsewhere_times_out_and_names_its_holder(tmp_path: Path) -> None:
    """A lock that is not given back is waited for a bounded time; who holds it is said."""
    path = tmp_path / "write.lock"
    with closing(WriteLock(path)) as first, closing(WriteLock(path)) as second:
        with first.held(seconds=1.0):
            found = holder(path)
            assert isinstance(found, Holder)
            started = time.monotonic()
            with (
                pytest.raises(LogUnavailable, match=f"process {found.pid} has held write.lock"),
                second.held(seconds=0.1),
            ):
                pass
            assert 0.1 <= time.monotonic() - started < 5.0
        assert holder(path) is None
        with second.held(seconds=1.0):
            assert holder(path) is not None
