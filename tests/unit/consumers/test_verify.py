"""`kvlog verify`: the exit code is the verdict."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from consumers.__main__ import main
from kvlog.checksums import checksum
from kvlog.ids import Shard
from kvlog.records import Codec, Delta
from kvlog.wire.message import encode
from tests.unit.consumers.written_log import IDENTITY, WrittenLog, kvlog

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.ids import Offset

TOKENS = [11, 12, 13, 14]


FLIPPED = 3
"""In `two_sessions`, the second delta of `s`."""


async def two_sessions(directory: Path, flips: dict[int, int] | None = None) -> list[Offset]:
    """Two sessions in two partitions, one of them taken over. Returns: offsets of the first turn of `s`."""
    log = await WrittenLog.make(directory, flips)
    await log.claim("s")
    offsets = await log.turn("s", TOKENS)
    await log.claim("s", "b")
    await log.turn("s", [*TOKENS[:2], 99], "b", Codec.SPLIT_ZSTD)
    await log.claim("other")
    await log.turn("other", TOKENS)
    await log.end("other")
    await log.close()
    return offsets


def test_verify_of_an_honest_log_is_whole(tmp_path: Path) -> None:
    """Every record folds, every payload decodes: 0."""
    asyncio.run(two_sessions(tmp_path))
    code, said = kvlog("verify", "--log", tmp_path)
    assert 0 == code
    assert "whole" == said["verdict"]
    assert {"whole": 1, "ended": 1, "broken": 0, "truncated": 0} == said["sessions"]
    assert (16, 9, 0) == (said["records"], said["rows"], said["damaged"])


@pytest.mark.parametrize("session", ["s", "other"])
def test_verify_of_one_session_reads_its_records_only(tmp_path: Path, session: str) -> None:
    """An ended session is whole too."""
    asyncio.run(two_sessions(tmp_path))
    code, said = kvlog("verify", session, "--log", tmp_path)
    assert 0 == code
    assert {"s": 9, "other": 7}[session] == said["records"]


@pytest.mark.parametrize(
    ("at", "problem"), [(-1, "diverged: payload checksum"), (12, "unreadable"), (30, "unreadable")]
)
def test_verify_of_a_flipped_byte_is_broken(tmp_path: Path, at: int, problem: str) -> None:
    """A byte of the rows, of the chain and of the header: the record is named."""
    offset = asyncio.run(two_sessions(tmp_path, {FLIPPED: at}))[2]
    for arguments in (["verify"], ["verify", "s"]):
        code, said = kvlog(*arguments, "--log", tmp_path)
        assert 1 == code
        findings = said["findings"]
        assert isinstance(findings, list)
        assert (offset, "s") == (findings[0]["offset"], findings[0]["session"])
        assert problem in findings[0]["problem"]
        assert "broken" == said["verdict"]


def test_verify_of_another_session_is_whole_beside_a_broken_one(tmp_path: Path) -> None:
    """What is broken is one session, not the log."""
    asyncio.run(two_sessions(tmp_path, {FLIPPED: -1}))
    assert 0 == kvlog("verify", "other", "--log", tmp_path)[0]


def test_verify_of_a_healed_session_still_finds_the_record(tmp_path: Path) -> None:
    """A damaged record stays a finding for as long as the log holds it; that it was healed is said."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path, {FLIPPED: -1})
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b")
        await log.turn("s", TOKENS, "b")
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "s", "--log", tmp_path)
    assert (1, 1, 1) == (code, said["healed"], said["damaged"])
    assert {"whole": 1, "ended": 0, "broken": 0, "truncated": 0} == said["sessions"]


def test_verify_of_stale_records_is_whole(tmp_path: Path) -> None:
    """A zombie's records are fencing at work, not damage."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b")
        await log.turn("s", [*TOKENS, 15], "a")
        await log.turn("s", [*TOKENS, 16], "b")
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "--log", tmp_path)
    assert (0, {"stale": 2}) == (code, said["refused"])


def test_verify_of_rows_that_do_not_decode_is_broken(tmp_path: Path) -> None:
    """A payload whose checksum fits and that is not what its codec says is a writer's fault, and is found."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.spoiled("s", [*TOKENS, 15], Codec.LZ4, b"no lz4")
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "--log", tmp_path)
    findings = said["findings"]
    assert isinstance(findings, list)
    assert (1, 1) == (code, said["damaged"])
    assert "rows do not decode" in findings[0]["problem"]


def test_verify_of_an_unknown_session_says_so(tmp_path: Path) -> None:
    """4, and the error names the partition that it would be in."""
    asyncio.run(two_sessions(tmp_path))
    code, said = kvlog("verify", "S", "--log", tmp_path)
    assert (4, "SessionUnknown") == (code, said["error"])


def test_verify_of_a_truncated_session_says_so(tmp_path: Path) -> None:
    """Retention took the claim: nobody can judge what is left. For the whole log that is no damage."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s")
        offsets = await log.turn("s", TOKENS)
        await log.delete_before("s", offsets[1])
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "s", "--log", tmp_path)
    assert (4, "truncated") == (code, said["verdict"])
    code, said = kvlog("verify", "--log", tmp_path)
    assert 0 == code
    assert {"whole": 0, "ended": 0, "broken": 0, "truncated": 1} == said["sessions"]


def test_verify_of_a_key_that_names_another_session_is_broken(tmp_path: Path) -> None:
    """Such a record is trusted in neither session."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s")
        await log.turn("s", TOKENS)
        state = await log.state("s")
        other = next(name for name in map(str, range(9)) if log.home(name) == log.home("s"))
        record = Delta(
            session=state.session,
            epoch=state.epoch,
            writer=state.writer,
            seq=state.next_seq,
            shard=Shard(0),
            start=state.length,
            tokens=(1,),
            context=state.claim.context,
            codec=Codec.IDS,
            payload_checksum=checksum(b""),
        )
        await log.put(other, encode(record, chain=1))
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "--log", tmp_path)
    findings = said["findings"]
    assert isinstance(findings, list)
    assert 1 == code
    assert (None, "unreadable: its key names another session than its header") == (
        findings[0]["session"],
        findings[0]["problem"],
    )


def test_verify_of_several_shards_is_whole(tmp_path: Path) -> None:
    """Each shard's rows are decoded."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s", identity=replace(IDENTITY, shards=2))
        await log.turn("s", TOKENS, codec=Codec.LZ4)
        await log.close()

    asyncio.run(write())
    code, said = kvlog("verify", "--log", tmp_path)
    assert (0, 8) == (code, said["rows"])


def test_verify_for_a_person_names_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The terminal shows the verdict, and each damaged record."""
    asyncio.run(two_sessions(tmp_path, {FLIPPED: -1}))
    assert 1 == main(["verify", "--log", str(tmp_path)])
    shown = capsys.readouterr().out
    assert "broken: see `kvlog show SESSION`" in shown
    assert "diverged: payload checksum" in shown
