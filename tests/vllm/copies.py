"""A session's log copied under other names, one copy with a byte changed: the control of every scenario of loading."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from consumers.demo_log import DemoLog
from kvlog.ids import FIRST_OFFSET, SessionId, Shard
from kvlog.log.settings import LogSettings
from kvlog.records import Claim, Delta

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from consumers.demo_log import SessionStory

__all__ = ["copy_damaged", "copy_whole_and_damaged", "rows_before", "whole_story"]

_DAMAGED_SHARE = 0.75


@asynccontextmanager
async def whole_story(url: str, session: str) -> AsyncIterator[tuple[DemoLog, SessionStory]]:
    """Give a log that can be copied in, and all that it has of a session from its first record on."""
    log = await DemoLog.open(LogSettings(url=url, partitions=4))
    log._starts = dict.fromkeys(log._starts, FIRST_OFFSET)
    try:
        yield log, await log.story(SessionId(session))
    finally:
        await log.close()


async def copy_whole_and_damaged(url: str, origin: str, shard: int = 0) -> int:
    """Make ORIGIN-whole and ORIGIN-damaged. Returns: the position where the damage begins."""
    async with whole_story(url, origin) as (log, story):
        await log.copy(story, SessionId(f"{origin}-whole"), damaged=None)
    return await copy_damaged(url, origin, shard)


async def copy_damaged(url: str, origin: str, shard: int = 0) -> int:
    """Make ORIGIN-damaged, with one flipped byte in a late record of a shard. Returns: rows of all shards before it."""
    async with whole_story(url, origin) as (log, story):
        index, rows = _late_record(story, Shard(shard))
        await log.copy(story, SessionId(f"{origin}-damaged"), damaged=index)
        return rows


def rows_before(story: SessionStory, index: int) -> int:
    """Rows that every shard has before a record; the ranks' records do not come strictly in turn."""
    ends: dict[int, int] = {}
    for entry in story.entries[:index]:
        if isinstance(entry.record, Delta):
            ends[entry.record.shard] = entry.record.start + len(entry.record.tokens)
    claim = story.entries[0].record
    assert isinstance(claim, Claim)
    return min(ends.get(shard, 0) for shard in range(claim.identity.shards))


def _late_record(story: SessionStory, shard: Shard) -> tuple[int, int]:
    """A record of a shard that some rows of all shards come before, and the number of those.

    By share, not by number: how many rows are in one record is up to how busy the daemon was.
    """
    found = [
        (index, rows)
        for index, entry in enumerate(story.entries)
        if isinstance(entry.record, Delta) and entry.record.shard == shard
        if (rows := rows_before(story, index)) > 0
    ]
    assert found, "the session is one record a shard: nothing comes before a damaged one"
    return found[int(_DAMAGED_SHARE * len(found))]
