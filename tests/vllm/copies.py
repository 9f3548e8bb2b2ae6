"""A session's log copied under other names, one copy with a byte changed: the control of every scenario of loading."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from consumers.demo_log import DemoLog
from kvlog.ids import FIRST_OFFSET, SessionId
from kvlog.log.settings import LogSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from consumers.demo_log import SessionStory

__all__ = ["copy_whole_and_damaged", "whole_story"]


@asynccontextmanager
async def whole_story(url: str, session: str) -> AsyncIterator[tuple[DemoLog, SessionStory]]:
    """Give a log that can be copied in, and all that it has of a session from its first record on."""
    log = await DemoLog.open(LogSettings(url=url, partitions=4))
    log._starts = dict.fromkeys(log._starts, FIRST_OFFSET)
    try:
        yield log, await log.story(SessionId(session))
    finally:
        await log.close()


async def copy_whole_and_damaged(url: str, origin: str) -> int:
    """Make ORIGIN-whole and ORIGIN-damaged. Returns: the position where the damage begins."""
    async with whole_story(url, origin) as (log, story):
        await log.copy(story, SessionId(f"{origin}-whole"), damaged=None)
        damaged = await log.copy(story, SessionId(f"{origin}-damaged"), damaged=len(story.entries) - 5)
        assert damaged.damaged is not None
        return int(damaged.damaged[1])
