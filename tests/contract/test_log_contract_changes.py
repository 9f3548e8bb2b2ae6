"""What every log promises (kvlog.log.base): truncation, replacement, retention, committed offsets, tables."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import LogReplaced, LogTruncated
from kvlog.ids import Offset
from kvlog.log.base import PartitionBounds, TableRow
from tests.contract.log_steps import (
    DEADLINE_SECONDS,
    P0,
    P1,
    ZERO,
    append,
    collect,
    outlast_unavailable,
    until,
    values_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlog.log.base import LogMessage
    from tests.contract.log_factories import LogFactory


# ------------------------------------------------------------------------------------- truncated, replaced, retention


async def test_poll_below_log_start_is_truncated_and_recovers(log_factory: LogFactory) -> None:
    """A position below the log start raises LogTruncated with partition, wanted and log_start; a seek there goes on."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, *(b"%d" % number for number in range(6)))
    await log_factory.truncate(log, P0, Offset(4))
    reader.assign({P0: Offset(1)})
    with pytest.raises(LogTruncated) as truncated:
        await collect(reader, 1)
    assert {"partition": P0, "wanted": 1, "log_start": 4} == truncated.value.fields
    reader.seek(P0, Offset(4))
    assert [b"4", b"5"] == values_of(await collect(reader, 2))


async def test_poll_with_one_partition_truncated_reads_the_others(log_factory: LogFactory) -> None:
    """What is missing in one partition costs the others nothing."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"gone", b"kept")
    await append(writer, P1, *(b"%d" % number for number in range(5)))
    await log_factory.truncate(log, P0, Offset(1))
    reader.assign({P0: ZERO, P1: ZERO})
    read: list[LogMessage] = []
    missing: list[object] = []
    deadline = time.monotonic() + DEADLINE_SECONDS
    while len(read) < 6 and time.monotonic() < deadline:
        try:
            read += await reader.poll(bytes_max=1000, timeout_seconds=0.5)
        except LogTruncated as truncated:
            missing.append(truncated.fields["partition"])
            reader.seek(P0, Offset(1))
    assert {P0} == set(missing)
    assert [b"kept"] == values_of(read, P0)
    assert [b"0", b"1", b"2", b"3", b"4"] == values_of(read, P1)


async def test_truncation_does_not_give_offsets_twice(log_factory: LogFactory) -> None:
    """When everything is deleted, the next offset is still the one after the last, also for a new handle."""
    log = await log_factory.open()
    writer = await log.writer()
    await append(writer, P0, b"a", b"b", b"c")
    await log_factory.truncate(log, P0, Offset(3))
    assert PartitionBounds(Offset(3), Offset(3)) == await log.bounds(P0)
    other = await log_factory.open()
    assert [3] == await append(await other.writer(), P0, b"d")
    assert PartitionBounds(Offset(3), Offset(4)) == await log.bounds(P0)


async def test_poll_past_the_end_is_replaced(log_factory: LogFactory) -> None:
    """A position that the log does not reach means that its tail was lost, or that it is another log."""
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"a")
    reader.assign({P0: Offset(1000)})
    with pytest.raises(LogReplaced) as replaced:
        await collect(reader, 1)
    assert P0 == replaced.value.fields["partition"]
    assert replaced.value.fields["problem"]
    reader.seek(P0, ZERO)
    assert [b"a"] == values_of(await collect(reader, 1))


async def test_identity_is_one_for_all_handles(log_factory: LogFactory) -> None:
    """Every handle on one log names the same identity, and it does not change with use."""
    log, other = await log_factory.open(), await log_factory.open()
    before = await log.identity()
    await append(await log.writer(), P0, b"a")
    assert before
    assert [before, before] == [await log.identity(), await other.identity()]


async def test_recreated_log_has_another_identity_and_voids_positions(log_factory: LogFactory) -> None:
    """After the log was deleted and made anew, identity differs and no reader goes on as if nothing had happened."""
    if not log_factory.capabilities.recreates:
        pytest.skip("this implementation's factory cannot recreate its log")
    log = await log_factory.open()
    writer, reader = await log.writer(), await log.reader()
    await append(writer, P0, b"old 0", b"old 1")
    reader.assign({P0: ZERO})
    await collect(reader, 2)
    before = await log.identity()
    await log_factory.recreate()
    assert before != await outlast_unavailable(log.identity)
    with pytest.raises(LogReplaced):
        await outlast_unavailable(lambda: collect(reader, 1))
    reader.seek(P0, ZERO)
    fresh = await (await log_factory.open()).writer()
    await append(fresh, P0, b"new 0")
    assert [b"new 0"] == values_of(await outlast_unavailable(lambda: collect(reader, 1)))


async def test_retention_by_bytes_moves_the_log_start(log_factory: LogFactory) -> None:
    """What exceeds the bytes is deleted from the front; what is left can be read, offsets unchanged."""
    if not log_factory.capabilities.retains_at_once:
        pytest.skip("this implementation applies retention only every few minutes")
    log = await log_factory.open(retention_bytes=50_000)
    writer, reader = await log.writer(), await log.reader()
    sent = [b"%02d" % number * 5000 for number in range(20)]
    await append(writer, P0, *sent)

    async def trimmed() -> bool:
        found = await log.bounds(P0)
        return 0 < found.log_start and 20 == found.high_watermark

    await until(trimmed)
    start = (await log.bounds(P0)).log_start
    reader.assign({P0: start})
    assert sent[start:] == values_of(await collect(reader, 20 - start))
    assert [20] == await append(writer, P0, b"next")


# ---------------------------------------------------------------------------------------- committed offsets, tables


async def test_commit_is_seen_by_tools_and_other_handles(log_factory: LogFactory) -> None:
    """Applied offsets are stored under the reader's group, the newest wins, and groups do not mix."""
    log, other = await log_factory.open(), await log_factory.open()
    writer = await log.writer()
    await append(writer, P0, *(b"%d" % number for number in range(5)))
    reader = await log.reader(group="node-a")
    reader.assign({P0: ZERO, P1: ZERO})
    await reader.commit({P0: Offset(2), P1: ZERO})
    await reader.commit({P0: Offset(4)})
    assert {P0: 4, P1: 0} == await log_factory.committed(other, "node-a")
    assert {} == await log_factory.committed(other, "node-b")


async def test_table_newest_value_of_a_key_wins(log_factory: LogFactory) -> None:
    """A table that is read from the beginning has each key once, with its newest value, without deleted ones."""
    log = await log_factory.open()
    table = await log.table("sessions")
    for value in (b"1", b"2", b"3"):
        await table.put(b"a", value)
    await table.put(b"b", b"1")
    await table.put(b"c", b"1")
    await table.put(b"c", None)
    fresh = await (await log_factory.open()).table("sessions")
    assert {b"a": b"3", b"b": b"1"} == _as_map(await fresh.refresh())


async def test_table_refresh_returns_only_changes(log_factory: LogFactory) -> None:
    """A second refresh has what changed since the first, deletions as None; then nothing."""
    log = await log_factory.open()
    table = await log.table("nodes")
    await table.put(b"a", b"1")
    await table.put(b"b", b"1")
    assert {b"a": b"1", b"b": b"1"} == _as_map(await table.refresh())
    await table.put(b"b", b"2")
    await table.put(b"a", None)
    assert [TableRow(b"b", b"2"), TableRow(b"a", None)] == list(await table.refresh())
    assert [] == list(await table.refresh())


async def test_table_of_another_handle_is_seen(log_factory: LogFactory) -> None:
    """What one process puts, another's next refresh has; tables of other names do not mix in."""
    log, other = await log_factory.open(), await log_factory.open()
    mine, theirs = await log.table("nodes"), await other.table("nodes")
    elsewhere = await other.table("sessions")
    assert [] == list(await theirs.refresh())
    await mine.put(b"a", b"1")
    assert [TableRow(b"a", b"1")] == list(await theirs.refresh())
    await theirs.put(b"a", b"2")
    assert {b"a": b"2"} == _as_map(await mine.refresh())
    assert [] == list(await elsewhere.refresh())


def _as_map(rows: Sequence[TableRow]) -> Mapping[bytes, bytes | None]:
    newest = {row.key: row.value for row in rows}
    return {key: value for key, value in newest.items() if value is not None}
