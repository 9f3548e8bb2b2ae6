"""A session's log copied under other names, one copy with a byte changed: the control of every scenario of loading."""

from __future__ import annotations

from consumers.demo_log import DemoLog
from kvlog.ids import FIRST_OFFSET, SessionId
from kvlog.log.settings import LogSettings

__all__ = ["copy_whole_and_damaged"]


async def copy_whole_and_damaged(url: str, origin: str) -> int:
    """Make ORIGIN-whole and ORIGIN-damaged. Returns: the position where the damage begins."""
    log = await DemoLog.open(LogSettings(url=url, partitions=4))
    log._starts = dict.fromkeys(log._starts, FIRST_OFFSET)
    try:
        story = await log.story(SessionId(origin))
        await log.copy(story, SessionId(f"{origin}-whole"), damaged=None)
        damaged = await log.copy(story, SessionId(f"{origin}-damaged"), damaged=len(story.entries) - 5)
        assert damaged.damaged is not None
        return int(damaged.damaged[1])
    finally:
        await log.close()
