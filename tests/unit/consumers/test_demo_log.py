"""The demo's look at the log: what a session's story is, and that a copy differs from it in one byte or in none."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from consumers.demo_controls import _victim
from consumers.demo_error import DemoError
from consumers.demo_log import DemoLog
from consumers.exits import ExitCode
from kvlog.core.session import Standing
from kvlog.core.verdicts import Verdict, Why
from kvlog.ids import SessionId
from kvlog.log.settings import LogSettings
from kvlog.records import Claim, Delta
from kvlog.wire.message import decode
from tests.unit.consumers.written_log import CONTEXT, IDENTITY, PARTITIONS, WrittenLog, kvlog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

TOKENS = list(range(100, 120))
S = SessionId("s")


@pytest.fixture
async def written(tmp_path: Path) -> AsyncIterator[WrittenLog]:
    """A log."""
    log = await WrittenLog.make(tmp_path / "log")
    yield log
    await log.close()


@pytest.fixture
async def demo(written: WrittenLog) -> AsyncIterator[DemoLog]:
    """The demo's look at it."""
    settings = LogSettings(url=written.log.where, partitions=PARTITIONS)
    log = await DemoLog.open(settings)
    yield log
    await log.close()


async def test_story_has_what_the_first_owner_logged_and_what_came_too_late(
    demo: DemoLog, written: WrittenLog
):
    """Records of the first owner after the second claim are late; the fold refuses all of them as stale."""
    await written.claim("s", "a")
    await written.turn("s", TOKENS[:10])
    await written.claim("s", "b")
    late = await written.turn("s", TOKENS[:12], "a")
    await written.turn("s", TOKENS, "b")
    story = await demo.story(S)
    assert (10, tuple(late), tuple(late)) == (story.length, story.late, story.stale)
    assert 1 + 1 + 10 == len(story.entries)
    assert isinstance(story.entries[0].record, Claim)


async def test_story_of_an_unclaimed_session_is_an_error(demo: DemoLog):
    """It says what is missing."""
    with pytest.raises(DemoError, match="no claim of s"):
        await demo.story(S)


async def test_copy_of_a_session_folds_to_the_same_tokens_and_rows(
    demo: DemoLog, written: WrittenLog, tmp_path: Path
):
    """An untouched copy is whole, and every payload is the original's."""
    await written.claim("s")
    await written.turn("s", TOKENS)
    story = await demo.story(S)
    copied = await demo.copy(story, SessionId("copy"), damaged=None)
    assert copied.damaged is None
    state = await written.state("copy")
    assert (Standing.WHOLE, len(TOKENS)) == (state.standing, state.usable(TOKENS, CONTEXT, IDENTITY))
    again = await demo.story(SessionId("copy"))
    payloads = [[bytes(entry.payload) for entry in one.entries] for one in (story, again)]
    assert payloads[0] == payloads[1]
    assert ExitCode.WHOLE == (await asyncio.to_thread(kvlog, "verify", "copy", "--log", tmp_path / "log"))[0]


async def test_copy_with_a_flipped_byte_breaks_at_its_record(
    demo: DemoLog, written: WrittenLog, tmp_path: Path
):
    """Exactly one bit differs, every reader notices it there, and what is before it stays usable."""
    await written.claim("s")
    await written.turn("s", TOKENS)
    story = await demo.story(S)
    index = _victim(story)
    copied = await demo.copy(story, SessionId("flipped"), damaged=index)
    assert copied.damaged is not None
    offset, start = copied.damaged
    assert len(TOKENS) - 8 == start
    refusal = await demo.refusal_at(SessionId("flipped"), offset)
    assert refusal is not None
    assert (Verdict.DIVERGED, Why.PAYLOAD) == (refusal.judgement.verdict, refusal.judgement.why)
    state = await written.state("flipped")
    assert (Standing.BROKEN, start) == (state.standing, state.usable(TOKENS, CONTEXT, IDENTITY))
    assert (
        ExitCode.BROKEN == (await asyncio.to_thread(kvlog, "verify", "flipped", "--log", tmp_path / "log"))[0]
    )
    original = story.entries[index].payload
    damaged = await _payload_at(written, "flipped", offset)
    assert 1 == sum((one ^ other).bit_count() for one, other in zip(original, damaged, strict=True))


async def test_victim_of_a_log_without_rows_is_an_error(demo: DemoLog, written: WrittenLog):
    """What is not there cannot be damaged; of few rows it is the last one's record."""
    await written.claim("s")
    with pytest.raises(DemoError, match="holds no rows"):
        _victim(await demo.story(S))
    await written.turn("s", TOKENS[:3])
    story = await demo.story(S)
    assert isinstance(story.entries[_victim(story)].record, Delta)


async def test_log_with_other_sessions_is_read_from_where_the_demo_began(written: WrittenLog):
    """What was in the log before does not matter, however the partition's offsets stand."""
    await written.claim("older")
    await written.turn("older", TOKENS)
    demo = await DemoLog.open(LogSettings(url=written.log.where, partitions=PARTITIONS))
    try:
        await written.claim("s")
        await written.turn("s", TOKENS[:4])
        assert 4 == (await demo.story(S)).length
    finally:
        await demo.close()


async def _payload_at(written: WrittenLog, session: str, offset: int) -> bytes:
    reader = await written.log.reader()
    reader.assign({written.home(session): offset})  # type: ignore[dict-item]  # a plain number
    messages = await reader.poll(bytes_max=1 << 20, timeout_seconds=5)
    await reader.close()
    return bytes(decode(messages[0].value).payload)
