"""`kvlog lag`: how far each node is behind, by its heartbeats and by the records themselves."""

from __future__ import annotations

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

import pytest

from consumers.__main__ import main
from kvlog.errors import LogUnavailable
from kvlog.ids import Offset
from kvlog.log.base import PartitionBounds, TableRow
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.wire.tables import NODES, NodeRow, encode_row
from tests.unit.consumers.written_log import LAYOUT, PARTITIONS, WrittenLog, home_of, kvlog

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from kvlog.ids import Partition

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


def node(
    name: str, *, applied: int, beat: int = 1, leaving: bool = False, needed: int | None = None
) -> NodeRow:
    """A node's heartbeat; `applied` is of the session's partition, the other one is applied to its end."""
    offsets = dict.fromkeys(range(PARTITIONS), 0) | {int(home_of("s")): applied}
    said = {} if needed is None else {int(home_of("s")): needed}
    return NodeRow(
        node=name, incarnation="00", beat=beat, leaving=leaving, applied=offsets, needed=said, truncated=7
    )


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


def cut_before(directory: Path, before: int) -> None:
    """Retention takes the first records of the session's partition."""

    async def cut() -> None:
        log = LocalLog(directory, LocalLogOptions(partitions=PARTITIONS))
        await log.open()
        await log.delete_records(home_of("s"), before=before)  # type: ignore[arg-type]
        await log.close()

    asyncio.run(cut())


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

    cut_before(tmp_path, 4)
    _, said = kvlog("lag", "--log", tmp_path, *QUICK)
    partitions = nodes_of(said)["b"]["partitions"]
    assert isinstance(partitions, list)
    (mine,) = (one for one in partitions if one["partition"] == home_of("s"))
    assert (True, 5, False) == (mine["truncated"], mine["records"], mine["exact"])


@pytest.mark.parametrize(("needed", "expected"), [(5, 3), (1, -1), (None, None)])
def test_distance_to_loss_is_from_the_log_start_to_what_the_node_says_is_needed(
    tmp_path: Path, needed: int | None, expected: int | None
) -> None:
    """Not to what was applied: a session is needed from its root on. Of a node that does not say it is not known."""
    written(tmp_path, node("b", applied=6, needed=needed))
    cut_before(tmp_path, 2)
    _, said = kvlog("lag", "--log", tmp_path, *QUICK)
    one = nodes_of(said)["b"]
    partitions = one["partitions"]
    assert isinstance(partitions, list)
    (mine,) = (each for each in partitions if each["partition"] == home_of("s"))
    assert (needed, expected, 7) == (mine["needed"], mine["records_to_loss"], one["sessions_truncated"])


def test_lag_that_cannot_be_read_leaves_no_reader_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever ends the tool, it gives back what it holds."""
    log = LostLog()

    @asynccontextmanager
    async def opened(_settings: object) -> AsyncIterator[LostLog]:
        yield log

    monkeypatch.setattr("consumers.lag.opened", opened)
    code, said = kvlog("lag", *QUICK)
    assert (3, "LogUnavailable", 0) == (code, said["error"], log.open)


class LostLog:
    """A node is behind, and the log is lost when its records are wanted; counts what is open."""

    where = "here"
    partitions = 1

    def __init__(self) -> None:
        self.open = 0

    async def table(self, _name: str) -> LostLog:
        self.open += 1
        return self

    async def reader(self) -> LostLog:
        self.open += 1
        return self

    async def refresh(self) -> list[TableRow]:
        row = NodeRow(node="a", incarnation="00", beat=1, applied={0: 1})
        return [TableRow(b"a", encode_row(row))]

    async def bounds(self, _partition: Partition) -> PartitionBounds:
        return PartitionBounds(Offset(0), Offset(9))

    def assign(self, _positions: object) -> None:
        pass

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> list[object]:
        raise LogUnavailable(where=self.where, problem=f"not {bytes_max} bytes in {timeout_seconds} s")

    async def close(self) -> None:
        self.open -= 1


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
    wide = [line for line in shown.splitlines() if len(line.rstrip()) > int(columns)]
    assert [] == [line for line in wide if str(tmp_path) not in line], "a path is never cut; all else fits"
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
