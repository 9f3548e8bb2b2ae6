"""`kvlog lag`: how far each node is behind, by its heartbeats and by the records themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from consumers.__main__ import main
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.wire.tables import NODES, NodeRow, encode_row
from tests.unit.consumers.written_log import LAYOUT, PARTITIONS, WrittenLog, home_of, kvlog

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TOKENS = [11, 12, 13, 14]
QUICK = ("--patience", "0.3")


def written(directory: Path, *rows: NodeRow) -> None:
    """One session of four positions, six records; and what nodes have said of themselves."""

    async def write() -> None:
        log = await WrittenLog.make(directory)
        await log.claim("s")
        await log.turn("s", TOKENS)
        table = await log.log.table(NODES)
        for row in rows:
            await table.put(row.node.encode(), encode_row(row))
        await log.close()

    asyncio.run(write())


def node(name: str, *, applied: int, beat: int = 1, leaving: bool = False) -> NodeRow:
    """A node's heartbeat; `applied` is of the session's partition, the other one is applied to its end."""
    offsets = dict.fromkeys(range(PARTITIONS), 0) | {int(home_of("s")): applied}
    return NodeRow(node=name, incarnation="00", beat=beat, leaving=leaving, applied=offsets)


@contextmanager
def beating(directory: Path, row: NodeRow) -> Iterator[None]:
    """A node that goes on to beat from another thread, as another process would."""
    stop = threading.Event()

    async def beat() -> None:
        log = LocalLog(directory, LocalLogOptions(partitions=PARTITIONS))
        await log.open()
        table = await log.table(NODES)
        while not stop.is_set():
            await table.put(row.node.encode(), encode_row(row))
            await asyncio.sleep(0.05)
        await log.close()

    thread = threading.Thread(target=lambda: asyncio.run(beat()))
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def nodes_of(said: dict[str, object]) -> dict[str, dict[str, object]]:
    """Nodes by name."""
    nodes = said["nodes"]
    assert isinstance(nodes, list)
    return {one["node"]: one for one in nodes}


def test_lag_is_the_difference_of_offsets_and_what_lies_between(tmp_path: Path) -> None:
    """Claim and Truncate were applied, one delta too: three records, their bytes, three tokens, their age."""
    before = time.time()
    written(tmp_path, node("b", applied=3))
    code, said = kvlog("lag", "--log", tmp_path, *QUICK)
    assert 0 == code
    lag = nodes_of(said)["b"]["lag"]
    assert isinstance(lag, dict)
    assert (3, 3, True) == (lag["records"], lag["tokens"], lag["exact"])
    assert 3 * LAYOUT.row_bytes < lag["bytes"] < 3 * (LAYOUT.row_bytes + 250)
    assert 0 <= lag["seconds"] <= time.time() - before + 0.1


def test_lag_names_the_session(tmp_path: Path) -> None:
    """Each session's part of a node's lag."""
    written(tmp_path, node("a", applied=6), node("b", applied=0))
    _, said = kvlog("lag", "--log", tmp_path, *QUICK)
    sessions = said["sessions"]
    assert isinstance(sessions, list)
    assert [("s", "b", home_of("s"), 6, 4)] == [
        tuple(one[key] for key in ("session", "node", "partition", "records", "tokens")) for one in sessions
    ]


def test_lag_of_an_idle_log_is_zero(tmp_path: Path) -> None:
    """However long ago the last record was written: all of it is applied."""
    written(tmp_path, node("a", applied=6))
    _, said = kvlog("lag", "--log", tmp_path, *QUICK)
    assert {"records": 0, "bytes": 0, "tokens": 0, "seconds": 0, "exact": True} == nodes_of(said)["a"]["lag"]
    assert [] == said["sessions"]


def test_node_that_beats_is_live_and_one_that_does_not_is_silent(tmp_path: Path) -> None:
    """Liveness is what was heard while we listened; a silent node's lag is that of its last heartbeat."""
    written(tmp_path, node("a", applied=6), node("b", applied=0), node("c", applied=0, leaving=True))
    with beating(tmp_path, node("a", applied=6, beat=2)):
        _, said = kvlog("lag", "--log", tmp_path, "--patience", "1.5")
    nodes = nodes_of(said)
    assert {"a": "live", "b": "silent", "c": "left"} == {name: one["state"] for name, one in nodes.items()}
    assert nodes["c"]["lag"] is None


def test_lag_waits_no_longer_than_all_nodes_are_heard(tmp_path: Path) -> None:
    """Patience is for the silent."""
    written(tmp_path, node("a", applied=6))
    began = time.monotonic()
    with beating(tmp_path, node("a", applied=6, beat=2)):
        _, said = kvlog("lag", "--log", tmp_path, "--patience", "30")
    assert "live" == nodes_of(said)["a"]["state"]
    assert time.monotonic() - began < 20


def test_lag_past_the_bound_is_a_lower_bound_and_says_so(tmp_path: Path) -> None:
    """Records are exact at once; what was not read is not counted, and never taken for zero."""
    written(tmp_path, node("b", applied=0))
    _, said = kvlog("lag", "--log", tmp_path, "--read-mib", "0", *QUICK)
    partitions = nodes_of(said)["b"]["partitions"]
    assert isinstance(partitions, list)
    unknown = {"records": 6, "bytes": None, "tokens": None, "seconds": None, "exact": False}
    assert unknown.items() <= partitions[home_of("s")].items()
    lag = nodes_of(said)["b"]["lag"]
    assert isinstance(lag, dict)
    assert (6, None, False) == (lag["records"], lag["seconds"], lag["exact"])


def test_lag_of_a_node_that_lost_records_to_retention_says_so(tmp_path: Path) -> None:
    """What it had not applied is gone: it will drop its sessions there."""
    written(tmp_path, node("b", applied=1))

    async def cut() -> None:
        log = LocalLog(tmp_path, LocalLogOptions(partitions=PARTITIONS))
        await log.open()
        await log.delete_records(home_of("s"), before=4)  # type: ignore[arg-type]
        await log.close()

    asyncio.run(cut())
    _, said = kvlog("lag", "--log", tmp_path, *QUICK)
    partitions = nodes_of(said)["b"]["partitions"]
    assert isinstance(partitions, list)
    (mine,) = (one for one in partitions if one["partition"] == home_of("s"))
    assert (True, 5, False) == (mine["truncated"], mine["records"], mine["exact"])


def test_lag_of_a_log_without_nodes_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An empty table is not good news."""
    written(tmp_path)
    assert 0 == main(["lag", "--log", str(tmp_path)])
    assert "no node has ever written a heartbeat" in capsys.readouterr().out


@pytest.mark.parametrize("columns", ["80", "120"])
def test_lag_for_a_person_fits_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    """Every figure is there, and no line is too wide."""
    monkeypatch.setenv("COLUMNS", columns)
    written(tmp_path, node("node-a", applied=6), node("node-b", applied=0))
    assert 0 == main(["lag", "--log", str(tmp_path), *QUICK])
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= int(columns)
    assert all(word in shown for word in ("node-a", "silent", "lag by session: 1 behind", "PARTITION"))


def test_lag_on_a_narrow_terminal_cuts_nothing_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal breaks lines; we do not leave figures out."""
    monkeypatch.setenv("COLUMNS", "40")
    written(tmp_path, node("node-a", applied=6), node("node-b", applied=0))
    assert 0 == main(["lag", "--log", str(tmp_path), *QUICK])
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(word in shown for word in ("node-a", "RECORDS", "SECONDS"))
