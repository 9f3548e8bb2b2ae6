"""PartitionFold: a partition up to its end as of now, each message once, with the fold's own re-reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from consumers.reading import PartitionFold, Step, session_of
from kvlog.core.effects import DropSession, SessionBroken
from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.limits import DEFAULT
from kvlog.log.base import LogMessage
from tests.unit.consumers.written_log import PARTITIONS, WrittenLog, home_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

TOKENS = [11, 12, 13, 14]


async def fold(log: WrittenLog, first: int = 0, end: int | None = None) -> tuple[PartitionFold, list[Step]]:
    """Reads the partition of session s."""
    bounds = await log.log.bounds(home_of("s"))
    until = bounds.high_watermark if end is None else Offset(end)
    folding = PartitionFold(log.log, home_of("s"), first=Offset(first), end=until)
    return folding, [step async for step in folding.steps()]


async def test_fold_gives_each_message_once_in_order(tmp_path: Path) -> None:
    """From the first offset to the end."""
    log = await WrittenLog.make(tmp_path)
    await log.claim("s")
    await log.turn("s", TOKENS)
    folding, steps = await fold(log)
    assert list(range(6)) == [step.offset for step in steps]
    assert [None, 0, 1, 2, 3, 4] == [step.length for step in steps]
    assert 6 == folding.core.applied
    await log.close()


async def test_fold_stops_at_the_end_it_was_given(tmp_path: Path) -> None:
    """What is appended meanwhile is left for the next time."""
    log = await WrittenLog.make(tmp_path)
    await log.claim("s")
    await log.turn("s", TOKENS)
    folding, steps = await fold(log, end=3)
    assert [0, 1, 2] == [step.offset for step in steps]
    assert 3 == folding.core.applied
    await log.close()


async def test_fold_reads_a_doubtful_record_again_and_tells_of_it_once(tmp_path: Path) -> None:
    """The core asks for it; whoever counts records does not see the same one twice."""
    log = await WrittenLog.make(tmp_path, {3: -1})
    await log.claim("s")
    await log.turn("s", TOKENS)
    _, steps = await fold(log)
    assert list(range(6)) == [step.offset for step in steps]
    assert [3] == [s.offset for s in steps if any(isinstance(e, SessionBroken) for e in s.effects)]
    await log.close()


async def test_fold_that_begins_below_the_log_start_goes_on_behind_the_hole(tmp_path: Path) -> None:
    """Retention may move on between two looks: a step says so, and nothing before it is trusted."""
    log = await WrittenLog.make(tmp_path)
    await log.claim("s")
    await log.turn("s", TOKENS)
    await log.delete_before("s", Offset(4))
    folding, steps = await fold(log)
    assert [(4, True), (4, False), (5, False)] == [(step.offset, step.message is None) for step in steps]
    assert folding.core.session(steps[1].session) is None  # type: ignore[arg-type]
    await log.close()


async def test_fold_of_a_hole_in_the_middle_drops_what_was_known(tmp_path: Path) -> None:
    """As every reader does."""
    log = await WrittenLog.make(tmp_path)
    await log.claim("s")
    await log.turn("s", TOKENS)
    bounds = await log.log.bounds(home_of("s"))
    folding = PartitionFold(log.log, home_of("s"), first=Offset(0), end=bounds.high_watermark)
    reader = _Interrupted(log, cut_at=5)
    folding._log = reader  # type: ignore[assignment]
    steps = [step async for step in folding.steps()]
    assert any(isinstance(effect, DropSession) for step in steps for effect in step.effects)
    await log.close()


async def test_fold_of_a_log_that_gives_nothing_gives_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker that answers and never delivers is not waited for without end."""
    monkeypatch.setattr("consumers.reading._SILENT_SECONDS", 0.05)
    monkeypatch.setattr("consumers.reading._POLL_SECONDS", 0.01)
    log = await WrittenLog.make(tmp_path)
    with pytest.raises(LogUnavailable, match="gives nothing at 0, below its end 9"):
        await fold(log, end=9)
    await log.close()


@pytest.mark.parametrize("key", [None, b"", b"\xff", b"a\nb"])
def test_key_that_names_no_session_is_in_doubt(key: bytes | None) -> None:
    """So is one that belongs into another partition."""
    message = LogMessage(home_of("s"), Offset(0), 0, key, b"")
    assert session_of(message, PARTITIONS) is None
    other = Partition(1 - home_of("s"))
    assert session_of(message._replace(key=b"s", partition=other), PARTITIONS) is None
    assert "s" == session_of(message._replace(key=b"s"), PARTITIONS)


class _Interrupted:
    """A log whose reader meets retention in the middle: what lies below `cut_at` is gone once one poll was answered."""

    def __init__(self, log: WrittenLog, cut_at: int) -> None:
        self._log = log
        self._cut_at = cut_at
        self.partitions = PARTITIONS
        self.where = "test"

    async def reader(self) -> _Interrupted:
        self._reader = await self._log.log.reader()
        return self

    def assign(self, positions: Mapping[Partition, Offset]) -> None:
        self._reader.assign(positions)

    def seek(self, partition: Partition, offset: Offset) -> None:
        self._reader.seek(partition, offset)

    def positions(self) -> Mapping[Partition, Offset]:
        return self._reader.positions()

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> Sequence[LogMessage]:
        messages = await self._reader.poll(bytes_max=bytes_max, timeout_seconds=timeout_seconds)
        if self._cut_at:
            await self._log.delete_before("s", Offset(self._cut_at))
            self._cut_at = 0
            messages = messages[:3]
            self.seek(home_of("s"), Offset(messages[-1].offset + 1))
        return messages

    async def close(self) -> None:
        await self._reader.close()


assert DEFAULT.reread_attempts > 0, "else nothing is read again"
