"""`kvlog replay`: the file holds the rows that the log holds, and an engine gets exactly those."""

from __future__ import annotations

import asyncio
import stat
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors import safe_open

from kvlog.engines.replayed import load_replayed
from kvlog.errors import DecodeError, LayoutMismatch
from kvlog.layout import Layout
from kvlog.records import Codec
from kvlog.wire.tables import SESSIONS, SessionRow, encode_row
from tests.unit.consumers.written_log import (
    IDENTITY,
    LAYOUT,
    WrittenLog,
    kvlog,
    rows_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvlog.layout import Identity

TOKENS = [11, 12, 13, 14, 15]


class ListCache:
    """A RowCache that is its rows."""

    def __init__(self) -> None:
        self.rows = bytearray()

    @property
    def length(self) -> int:
        return len(self.rows) // LAYOUT.row_bytes

    def copy_rows(self, start: int, out: memoryview) -> None:
        at = start * LAYOUT.row_bytes
        out[:] = self.rows[at : at + len(out)]

    def load_rows(self, rows: memoryview) -> None:
        self.rows += rows

    def cut(self, length: int) -> None:
        del self.rows[length * LAYOUT.row_bytes :]


class ListModel:
    """As much of a StepModel as loading needs."""

    def __init__(self, identity: Identity = IDENTITY) -> None:
        self.identity = identity

    def new_cache(self) -> ListCache:
        return ListCache()


def loaded(file: Path, identity: Identity = IDENTITY) -> tuple[list[int], bytes]:
    """What an engine gets of the file."""
    tokens, cache = load_replayed(file, ListModel(identity))  # type: ignore[arg-type]  # a part of a model
    assert isinstance(cache, ListCache)
    return tokens, bytes(cache.rows)


def written(
    directory: Path, tokens: Sequence[int] = TOKENS, codec: Codec = Codec.RAW, shards: int = 1
) -> None:
    """Writes one session."""

    async def write() -> None:
        log = await WrittenLog.make(directory)
        await log.claim("s", identity=replace(IDENTITY, shards=shards))
        await log.turn("s", tokens, codec=codec)
        await log.close()

    asyncio.run(write())


def replay(log: Path, out: Path, *more: str) -> tuple[int, dict[str, object]]:
    """Runs the verb."""
    return kvlog("replay", "s", "--log", log, "--out", out, *more)


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD])
def test_replay_gives_an_engine_the_rows_that_were_logged(tmp_path: Path, codec: Codec) -> None:
    """Whatever they were encoded with."""
    written(tmp_path / "log", codec=codec)
    out = tmp_path / "s.safetensors"
    code, said = replay(tmp_path / "log", out)
    assert (0, 5, 5) == (code, said["length"], said["positions"])
    assert (TOKENS, rows_of(0, TOKENS)) == loaded(out)
    assert 0o600 == stat.S_IMODE(out.stat().st_mode)
    assert [out] == [path for path in tmp_path.iterdir() if path.is_file()]


def test_replay_file_is_read_by_safetensors(tmp_path: Path) -> None:
    """It is a plain file of the format: tensors a layer, [positions, planes, heads, head_dim]."""
    written(tmp_path / "log", shards=2)
    out = tmp_path / "s.safetensors"
    replay(tmp_path / "log", out)
    with safe_open(out, "numpy") as file:
        assert TOKENS == file.get_tensor("tokens").tolist()
        for shard in range(2):
            rows = np.frombuffer(rows_of(0, TOKENS, shard), np.float16).reshape(
                -1, LAYOUT.layers, LAYOUT.planes, LAYOUT.kv_heads, LAYOUT.head_dim
            )
            for layer in range(LAYOUT.layers):
                found = file.get_tensor(f"shard.{shard}.layer.{layer}")
                assert rows[:, layer].tobytes() == found.tobytes()
                assert rows[:, layer].shape == found.shape


def test_replay_follows_takeovers_and_truncates(tmp_path: Path) -> None:
    """What was cut is not there; what the next owner wrote is."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b")
        await log.turn("s", [11, 12, 99], "b")
        await log.turn("s", [*TOKENS, 16], "a")
        await log.close()

    asyncio.run(write())
    out = tmp_path / "s.safetensors"
    assert 0 == replay(tmp_path / "log", out)[0]
    assert ([11, 12, 99], rows_of(0, [11, 12, 99])) == loaded(out)


def test_replay_of_another_layout_keeps_no_older_row(tmp_path: Path) -> None:
    """A node that serves another model claims, and its Truncate(0) forgets the rows of the one before."""
    other = replace(IDENTITY, layout=Layout(2, 1, 1, 8, LAYOUT.dtype))

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.claim("s", "b", other)
        await log.turn("s", [7, 8], "b")
        await log.close()

    asyncio.run(write())
    out = tmp_path / "s.safetensors"
    assert 0 == replay(tmp_path / "log", out)[0]
    with pytest.raises(LayoutMismatch, match="layout"):
        loaded(out)
    assert ([7, 8], rows_of(0, [7, 8], layout=other.layout)) == loaded(out, other)


def test_replay_of_token_ids_only_has_no_rows(tmp_path: Path) -> None:
    """Mode `ids` logs no rows: the engine computes them."""
    written(tmp_path / "log", codec=Codec.IDS)
    out = tmp_path / "s.safetensors"
    code, said = replay(tmp_path / "log", out)
    assert (0, 5, 0) == (code, said["length"], said["positions"])
    assert (TOKENS, b"") == loaded(out)


def test_replay_leaves_out_what_lies_behind_rows_that_do_not_decode(tmp_path: Path) -> None:
    """A hole ends the rows; token ids go on."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.spoiled("s", [*TOKENS, 16], Codec.LZ4, b"no lz4")
        await log.turn("s", [*TOKENS, 16, 17])
        await log.close()

    asyncio.run(write())
    out = tmp_path / "s.safetensors"
    code, said = replay(tmp_path / "log", out)
    assert (0, 7, 5) == (code, said["length"], said["positions"])
    assert ([*TOKENS, 16, 17], rows_of(0, TOKENS)) == loaded(out)


def test_replay_of_a_broken_session_gives_its_last_good_length(tmp_path: Path) -> None:
    """1, and not a byte of what did not verify."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log", {4: -1})
        await log.claim("s")
        await log.turn("s", TOKENS)
        await log.close()

    asyncio.run(write())
    out = tmp_path / "s.safetensors"
    code, said = replay(tmp_path / "log", out)
    assert (1, "broken", 2) == (code, said["standing"], said["positions"])
    assert (TOKENS[:2], rows_of(0, TOKENS[:2])) == loaded(out)


@pytest.mark.parametrize("first_needed", [-1, 3, 99])
def test_replay_takes_the_table_for_a_hint(tmp_path: Path, first_needed: int) -> None:
    """A row that is wrong costs time, never rows."""
    written(tmp_path / "log")

    async def hint() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        row = SessionRow(session="s", partition=0, first_needed=first_needed, node="n", epoch=1)
        await (await log.log.table(SESSIONS)).put(b"s", encode_row(row))
        await log.close()

    asyncio.run(hint())
    out = tmp_path / "s.safetensors"
    assert 0 == replay(tmp_path / "log", out)[0]
    assert (TOKENS, rows_of(0, TOKENS)) == loaded(out)


def test_replay_does_not_replace_a_file_unless_told_to(tmp_path: Path) -> None:
    """2, before anything is read."""
    written(tmp_path / "log")
    out = tmp_path / "s.safetensors"
    out.write_text("precious")
    code, said = replay(tmp_path / "log", out)
    assert (2, "ConfigError") == (code, said["error"])
    assert "precious" == out.read_text()
    assert 0 == replay(tmp_path / "log", out, "--force")[0]
    assert (TOKENS, rows_of(0, TOKENS)) == loaded(out)


def test_replay_into_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """2, and the error says what is missing."""
    written(tmp_path / "log")
    code, said = replay(tmp_path / "log", tmp_path / "none" / "s.safetensors")
    assert (2, "ConfigError") == (code, said["error"])
    assert "no such folder" in str(said["fields"])


def test_replay_without_a_name_makes_one_of_the_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session's id may hold what a file's name may not."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        await log.claim("../a b/é")
        await log.turn("../a b/é", TOKENS)
        await log.close()

    asyncio.run(write())
    monkeypatch.chdir(tmp_path)
    code, said = kvlog("replay", "../a b/é", "--log", tmp_path / "log")
    assert (0, "_a_b__.safetensors") == (code, said["file"])
    assert (TOKENS, rows_of(0, TOKENS)) == loaded(tmp_path / "_a_b__.safetensors")


def test_replay_of_a_truncated_session_says_what_is_missing(tmp_path: Path) -> None:
    """4, and no file."""

    async def write() -> None:
        log = await WrittenLog.make(tmp_path / "log")
        await log.claim("s")
        offsets = await log.turn("s", TOKENS)
        await log.delete_before("s", offsets[2])
        await log.close()

    asyncio.run(write())
    out = tmp_path / "s.safetensors"
    code, said = replay(tmp_path / "log", out)
    assert (4, "LogTruncated") == (code, said["error"])
    assert not out.exists()


def test_replay_of_an_unknown_session_says_so(tmp_path: Path) -> None:
    """4, and no file."""
    written(tmp_path / "log")
    code, said = kvlog("replay", "t", "--log", tmp_path / "log", "--out", tmp_path / "t.safetensors")
    assert (4, "SessionUnknown") == (code, said["error"])
    assert not (tmp_path / "t.safetensors").exists()


def test_replay_prints_no_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The conversation is in the file, not on the terminal."""
    from consumers.__main__ import main

    written(tmp_path / "log", tokens=[31_337, 31_338])
    assert 0 == main(["replay", "s", "--log", str(tmp_path / "log"), "--out", str(tmp_path / "o")])
    assert "3133" not in capsys.readouterr().out


@pytest.mark.parametrize("at", [0, 9, 100, -1])
def test_damaged_replay_file_is_not_loaded(tmp_path: Path, at: int) -> None:
    """Any flipped byte, in the head or in the rows, is found before a row is used."""
    written(tmp_path / "log")
    out = tmp_path / "s.safetensors"
    replay(tmp_path / "log", out)
    data = bytearray(out.read_bytes())
    data[at] ^= 0xFF
    out.write_bytes(data)
    with pytest.raises(DecodeError):
        loaded(out)


@pytest.mark.parametrize("size", [0, 4, 8, 100, -1])
def test_cut_replay_file_is_not_loaded(tmp_path: Path, size: int) -> None:
    """A copy that was interrupted is found."""
    written(tmp_path / "log")
    out = tmp_path / "s.safetensors"
    replay(tmp_path / "log", out)
    out.write_bytes(out.read_bytes()[:size])
    with pytest.raises(DecodeError):
        loaded(out)
