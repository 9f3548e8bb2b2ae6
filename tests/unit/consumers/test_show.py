"""`kvlog show`: a session's timeline as its records tell it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from consumers.__main__ import main
from kvlog.records import Codec
from kvlog.wire.tables import SESSIONS, SessionRow, encode_row
from tests.processes import die_with_parent
from tests.unit.consumers.written_log import WrittenLog, kvlog

if TYPE_CHECKING:
    from pathlib import Path

TOKENS = [31_337, 31_338, 31_339]


def story(directory: Path, flips: dict[int, int] | None = None) -> None:
    """A claim and a turn, a take-over and a turn, a zombie's two records, an end; and another session between them."""

    async def write() -> None:
        log = await WrittenLog.make(directory, flips)
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b")
        await log.turn("s", [*TOKENS[:2], 7], "b", Codec.IDS)
        await log.claim("t")
        await log.turn("t", [31_340, 31_341])
        await log.turn("s", [*TOKENS, 8], "a")
        await log.end("s", "b")
        await log.close()

    asyncio.run(write())


def lines(said: dict[str, object], *names: str) -> list[tuple[object, ...]]:
    """Some values of each line of a timeline."""
    timeline = said["timeline"]
    assert isinstance(timeline, list)
    return [tuple(moment.get(name) for name in names) for moment in timeline]


def test_show_tells_claims_turns_refusals_and_the_end(tmp_path: Path) -> None:
    """One line for each thing that happened, with the length after it; runs of deltas are one line."""
    story(tmp_path)
    code, said = kvlog("show", "s", "--log", tmp_path)
    assert 0 == code
    assert [
        ("claim", 1, "node-a", None, 1),
        ("truncate", 1, "node-a", 0, 1),
        ("delta", 1, "node-a", 3, 3),
        ("claim", 6, "node-b", 3, 1),
        ("truncate", 6, "node-b", 2, 1),
        ("delta", 6, "node-b", 3, 1),
        ("refused", 1, "node-a", 3, 2),
        ("end", 6, "node-b", 0, 1),
    ] == lines(said, "what", "epoch", "node", "length", "records")
    assert ("ended", "node-b", 6, 0) == tuple(said[key] for key in ("standing", "owner", "epoch", "length"))
    assert {"stale": 2} == said["refused"]


def test_show_says_why_a_record_was_refused(tmp_path: Path) -> None:
    """The verdict, the rule, and both values."""
    story(tmp_path)
    _, said = kvlog("show", "s", "--log", tmp_path)
    told = lines(said, "what", "detail")
    assert ("refused", "stale: older epoch (expected 6, is 1)") in told
    assert ("claim", "taken over from node-a, epoch 1") in told


def test_show_tells_where_a_session_broke_and_healed(tmp_path: Path) -> None:
    """Refused, broken, what followed of the epoch, and the claim that healed it."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path, {3: -1})
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b")
        await log.turn("s", TOKENS, "b")
        await log.close()

    asyncio.run(write())
    code, said = kvlog("show", "s", "--log", tmp_path)
    assert (0, "whole") == (code, said["standing"])
    told = lines(said, "what", "offset")
    assert [("refused", 3), ("broken", 3), ("refused", 4)] == told[3:6]
    assert ("healed", 6) in told
    problem = next(detail for what, detail in lines(said, "what", "detail") if what == "refused")
    assert str(problem).startswith("diverged: payload checksum (expected ")


def test_show_of_a_broken_session_exits_with_one(tmp_path: Path) -> None:
    """The exit code says how the session stands now."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path, {3: -1})
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.close()

    asyncio.run(write())
    code, said = kvlog("show", "s", "--log", tmp_path)
    assert (1, "broken", 1) == (code, said["standing"], said["length"])


def test_show_of_an_unreadable_record_tells_that_the_session_was_dropped(tmp_path: Path) -> None:
    """It may have been a claim: every reader forgets the session, until the next one with a Truncate(0)."""
    story(tmp_path, {2: 30})
    code, said = kvlog("show", "s", "--log", tmp_path)
    assert (0, "ended") == (code, said["standing"])
    assert [("refused", 2, None), ("dropped", 2, None), ("refused", 3, None)] == lines(
        said, "what", "offset", "length"
    )[2:5]


def test_show_reveals_token_ids_only_when_told_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on the terminal nor in JSON."""
    monkeypatch.setenv("COLUMNS", "200")
    story(tmp_path)
    for more in ([], ["--json"]):
        main(["show", "s", "--log", str(tmp_path), *more])
        assert "3133" not in capsys.readouterr().out
    main(["show", "s", "--log", str(tmp_path), "--reveal"])
    assert "token ids 31337 31338 31339" in capsys.readouterr().out
    _, said = kvlog("show", "s", "--log", tmp_path, "--reveal")
    assert [TOKENS, [7], [8]] == [tokens for (tokens,) in lines(said, "tokens") if tokens]


def test_show_of_the_last_lines_counts_those_before(tmp_path: Path) -> None:
    """A session with a long life is not printed whole unless one asks for it."""
    story(tmp_path)
    _, said = kvlog("show", "s", "--log", tmp_path, "--last", "2")
    assert [("refused",), ("end",)] == lines(said, "what")
    assert 6 == said["omitted"]


def test_show_of_a_truncated_session_says_so(tmp_path: Path) -> None:
    """4: what is left is told, and that nobody can judge it."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        await log.claim("s")
        offsets = await log.turn("s", TOKENS)
        await log.delete_before("s", offsets[2])
        await log.close()

    asyncio.run(write())
    code, said = kvlog("show", "s", "--log", tmp_path)
    assert (4, "truncated") == (code, said["standing"])
    assert [("refused", 2, "unknown: no claim of the session was read")] == lines(
        said, "what", "records", "detail"
    )


def test_show_of_a_session_with_a_similar_name_suggests_it(tmp_path: Path) -> None:
    """A misspelt id is the usual case at night."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path)
        row = SessionRow(session="customer-42", partition=0, first_needed=0, node="n", epoch=1)
        await (await log.log.table(SESSIONS)).put(b"customer-42", encode_row(row))
        await (await log.log.table(SESSIONS)).put(b"junk", b"\xff")
        await log.close()

    asyncio.run(write())
    code, said = kvlog("show", "customer-24", "--log", tmp_path)
    assert (4, "SessionUnknown") == (code, said["error"])
    fields = said["fields"]
    assert isinstance(fields, dict)
    assert "customer-42" == fields["similar"]


@pytest.mark.parametrize("session", ["", "a\nb", "x" * 300])
def test_show_of_what_cannot_be_a_session_is_refused(tmp_path: Path, session: str) -> None:
    """2, and the error says what an id is."""
    story(tmp_path)
    code, said = kvlog("show", session, "--log", tmp_path)
    assert (2, "InvalidSessionId") == (code, said["error"])


@pytest.mark.parametrize("more", [[], ["--json"]])
def test_show_into_a_pipe_that_is_closed_keeps_its_exit_code(tmp_path: Path, more: list[str]) -> None:
    """`kvlog show s | head -1` is no error."""
    story(tmp_path)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "consumers", "show", "s", "--log", tmp_path, *more],
            stdout=pipe,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
            preexec_fn=die_with_parent,
        )
    assert (0, b"") == (done.returncode, done.stderr)


@pytest.mark.parametrize("columns", ["80", "120"])
def test_show_for_a_person_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """No line is wider, and nothing is cut off."""
    monkeypatch.setenv("COLUMNS", columns)
    story(tmp_path)
    main(["show", "s", "--log", str(tmp_path)])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert "…" not in shown
    assert "node-b, epoch 6" in shown
