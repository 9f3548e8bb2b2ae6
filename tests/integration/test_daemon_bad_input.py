"""What must not work, ends in a sentence that names it; what should not be in the log, is counted and hurts nobody."""

from __future__ import annotations

import asyncio
import resource
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvlog.checksums import digest
from kvlog.errors import ConfigError
from kvlog.ids import Offset, Partition, Writer
from kvlog.layout import DType, Identity, Layout
from kvlog.link.client import ClientOptions, connect
from kvlog.link.messages import PROTOCOL, EngineRank, Hello
from kvlog.log.base import AppendRequest
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.records import Delta, kind_of
from kvlog.wire.frame import frame
from kvlog.wire.header import header_bytes
from kvlog.wire.message import decode
from kvlog.wire.tables import NODES, decode_node
from tests.nodes import Node, Process, ask, daemon_config, last, until, whole_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvlog.log.base import LogMessage

pytestmark = pytest.mark.e2e

PROMPT = "The cache is the conversation. " * 8
PARTITIONS = 4

whole = partial(whole_answer, prompt=PROMPT, max_tokens=20)
"""A whole answer."""


@dataclass
class Refused:
    """A living daemon, and those that were started beside it and cannot work."""

    living: Process
    others: dict[str, Process]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Refused]:
    """All of them at once: an interpreter's start is what they cost."""
    folder = tmp_path_factory.mktemp("refused")
    url = f"file://{folder}/log"
    stale = socket.socket(socket.AF_UNIX)
    stale.bind(str(folder / "living.sock"))
    stale.close()  # its file stays, as after kill -9
    living = Node(folder, "living", daemon_config(folder, "living", url))
    living.start_daemon()
    living.wait_log()
    (folder / "file").write_text("no directory")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cases: dict[str, dict[str, dict[str, object]]] = {
            "pool": {"pool": {"bytes": 1 << 50}},
            "directory": {"log": {"url": f"file://{folder}/file/log"}},
            "partitions": {"log": {"partitions": PARTITIONS + 1}},
            "port": {"metrics": {"port": port}},
            "socket": {"link": {"socket": str(folder / "living.sock")}},
            "twin": {"node": {"id": "living"}},
        }
        others = {
            name: Process(
                ["daemon", "run", "--config", str(daemon_config(folder, name, url, **sections))],
                folder / f"{name}.log",
            )
            for name, sections in cases.items()
        }
        try:
            for process in others.values():
                process.wait(60)
            assert living.daemon is not None
            yield Refused(living.daemon, others)
        finally:
            living.close()
            for process in others.values():
                process.send(9)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pool", ["pool.bytes", "memory"]),
        ("directory", ["log.url", "file/log"]),
        ("partitions", ["log.partitions", "4", "5"]),
        ("port", ["metrics.port", "in use"]),
        ("socket", ["link.socket", "living.sock", "pid"]),
        ("twin", ["node.id", "'living'"]),
    ],
)
def test_daemon_that_cannot_work_as_configured_exits_78_and_names_the_setting(
    refused: Refused, name: str, words: list[str]
) -> None:
    """EX_CONFIG, so that systemd does not start it again, and one sentence instead of a traceback."""
    process = refused.others[name]
    assert (78, []) == (process.code, [word for word in words if word not in process.output]), process.output
    assert "Traceback" not in process.output


def test_daemon_whose_name_a_later_one_takes_goes_on(refused: Refused) -> None:
    """Of two daemons with one node id the later one stops; a stale socket file was no reason not to start."""
    assert refused.living.code is None
    assert refused.others["twin"].events("node_id_taken")


def test_daemon_started_again_under_its_own_name_is_no_twin(tmp_path: Path) -> None:
    """The heartbeats of the one that was killed are history: what counts is that they go on."""
    node = Node(tmp_path, "a", daemon_config(tmp_path, "a", f"file://{tmp_path}/log", metrics={"port": 0}))
    try:
        node.start_daemon().stop(9)
        daemon = node.start_daemon()
        node.wait_log()
        until(lambda: _beats(tmp_path) >= 6, seconds=30, what="six heartbeats")
        assert daemon.code is None
    finally:
        node.close()


def _beats(folder: Path) -> int:
    return asyncio.run(_newest_beat(folder / "log"))


async def _newest_beat(directory: Path) -> int:

    log = LocalLog(directory, LocalLogOptions(partitions=PARTITIONS, read_only=True))
    await log.open()
    rows = await (await log.table(NODES)).refresh()
    await log.close()
    return max((decode_node(row.value).beat for row in rows if row.value), default=0)


def test_engine_with_rows_too_large_is_refused_with_both_sizes_and_serves_unlogged(tmp_path: Path) -> None:
    """Over a block, or over a record: told at hello, by the daemon and at the engine, and requests are answered."""
    node = Node(tmp_path, "a", daemon_config(tmp_path, "a", f"file://{tmp_path}/log"))
    engines = []
    try:
        daemon = node.start_daemon()
        node.wait_log()
        for row_bytes in (1 << 19, 1 << 20):
            node.engine_arguments = ("synthetic", "--row-bytes", str(row_bytes))
            engines.append(node.start_engine())
            answer = whole(node, f"s{row_bytes}", max_tokens=3)
            assert False is answer.kvlog["logged"]
            assert str(row_bytes) in engines[-1].output
        hints = [event["hint"] for event in daemon.events("engine_rejected")]
        assert any("pool.block_bytes is 262144" in hint for hint in hints)
        assert any("row_bytes: 1048576" in hint and "921600" in hint for hint in hints)
    finally:
        node.close()
        for engine in engines:
            engine.stop(9)


def test_engine_of_an_impossible_layout_is_refused_and_others_are_served(tmp_path: Path) -> None:
    """What no claim can carry is refused at hello: it must not end the daemon at the engine's first turn."""
    node = Node.start(tmp_path, "a", f"file://{tmp_path}/log")
    try:
        layout = Layout(layers=2, planes=3, kv_heads=1, head_dim=64, dtype=DType.FLOAT16)
        hello = Hello(PROTOCOL, "odd", 1, Identity(digest(b"m"), digest(b"w"), layout, 1), EngineRank())
        with pytest.raises(ConfigError, match="No claim can carry it"):
            connect(tmp_path / "a.sock", hello, ClientOptions())
        assert True is whole(node, "s", max_tokens=3).kvlog["logged"]
    finally:
        node.close()


def test_session_of_other_weights_is_not_attached_and_the_field_is_named(tmp_path: Path) -> None:
    """Another model cannot use the cache: it computes its own answer, and the daemon says what differs."""
    url = f"file://{tmp_path}/log"
    nodes = [
        Node.start(tmp_path, name, url, engine=("synthetic", "--weights", str(number)))
        for number, name in enumerate("ab")
    ]
    try:
        a, b = nodes
        reference = whole(b, "reference")
        first = whole(a, "s")
        answer = whole(b, "s")
        assert first.tokens != reference.tokens
        assert (reference.tokens, 0, True) == (
            answer.tokens,
            answer.kvlog["attached"],
            answer.kvlog["logged"],
        )
        assert b.daemon is not None
        assert "weights" == b.daemon.events("identity_differed")[0]["field"]
    finally:
        for node in nodes:
            node.close()


def test_disk_that_fills_up_under_load_costs_nothing_but_lag(tmp_path: Path) -> None:
    """Generation goes on; the daemon lives, and what was behind reaches the log when there is room again."""
    node = Node.start(tmp_path, "a", f"file://{tmp_path}/log")
    try:
        daemon = node.daemon
        assert daemon is not None
        reference = whole(node, "reference", max_tokens=300)
        stream = ask(node.url, prompt=PROMPT, max_tokens=300, session="s")
        while len(next(stream).tokens) < 20:
            pass
        _, hard = resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(
            daemon.pid, resource.RLIMIT_FSIZE, (1 << 16, hard)
        )  # its log is larger: no write succeeds
        until(lambda: len(next(stream).tokens) >= 150, what="generation goes on")
        resource.prlimit(daemon.pid, resource.RLIMIT_FSIZE, (hard, hard))
        answer = last(stream)
        assert (reference.tokens, None) == (answer.tokens, answer.error)
        until(
            lambda: (
                whole(node, "s", max_tokens=300, resume_token_ids=answer.tokens[:-1]).kvlog["recomputed"] <= 1
            ),
            seconds=30,
            what="everything logged",
        )
        assert daemon.code is None
        assert daemon.events("append_failed"), "the limit was met"
    finally:
        node.close()


def test_junk_in_the_log_is_counted_and_never_attached(tmp_path: Path) -> None:
    """A foreign producer repeats, reorders, forges and damages records while two nodes work: no answer changes."""
    url = f"file://{tmp_path}/log"
    nodes = [Node.start(tmp_path, name, url) for name in "ab"]
    try:
        a, b = nodes
        assert a.daemon is not None
        assert b.daemon is not None
        reference = whole(b, "reference", max_tokens=60)
        stream = ask(a.url, prompt=PROMPT, max_tokens=60, session="s")
        while len(next(stream).tokens) < 20:
            pass
        asyncio.run(_spoil(tmp_path / "log", _well_formed))
        answer = last(stream)
        assert reference.tokens == answer.tokens
        resumed = whole(b, "s", max_tokens=60, resume_token_ids=answer.tokens[:30])
        assert reference.tokens[30:] == resumed.tokens
        assert resumed.kvlog["attached"] > len(PROMPT), (
            "what is well formed and not the owner's harms nothing"
        )
        asyncio.run(_spoil(tmp_path / "log", _well_formed))
        asyncio.run(_spoil(tmp_path / "log", _damaged))
        for node in nodes:
            again = whole(node, "s", max_tokens=60, resume_token_ids=answer.tokens[:50])
            assert reference.tokens[50:] == again.tokens
            until(lambda: whole(node, "s").kvlog["logged"] is True, seconds=30, what="logged again")  # noqa: B023
            assert node.daemon is not None
            verdicts = {event["verdict"] for event in node.daemon.events("record_refused")}
            assert {"duplicate", "stale", "foreign", "unknown"} <= verdicts
    finally:
        for node in nodes:
            node.close()


async def _spoil(directory: Path, kind: Callable[[bytes], Sequence[bytes]]) -> None:
    """Appends what a broken or hostile producer could, as messages of the sessions that are there, newest first."""
    log = LocalLog(directory, LocalLogOptions(partitions=PARTITIONS))
    await log.open()
    reader, writer = await log.reader(), await log.writer()
    reader.assign({Partition(p): Offset(0) for p in range(PARTITIONS)})
    messages: list[LogMessage] = []
    while found := await reader.poll(bytes_max=1 << 22, timeout_seconds=0):
        messages += [m for m in found if m.key == b"s"]
    for message in reversed([*messages[:6], *messages[-20:]]):
        for value in kind(bytes(message.value)):
            await (await writer.append(AppendRequest(message.partition, b"s", value, 1, 1)))
    for key in (b"", b"\xff\xfe", b"x" * 10_000):
        await (await writer.append(AppendRequest(Partition(0), key, bytes(messages[0].value), 1, 1)))
    await writer.close()
    await log.close()


def _well_formed(value: bytes) -> list[bytes]:
    """The record again, and the same one of another writer."""
    entry = decode(value)
    if not isinstance(entry.record, Delta):
        return [value]
    forged = entry.record._replace(writer=Writer(bytes(16)))
    return [
        value,
        bytes(frame(kind_of(forged), header_bytes(forged), chain=entry.chain, payload=entry.payload)),
    ]


def _damaged(value: bytes) -> list[bytes]:
    """Cut, flipped, of another format version, with more behind it, and nothing at all."""
    flipped, version = bytearray(value), bytearray(value)
    flipped[len(flipped) // 2] ^= 1
    version[4] ^= 0x40
    return [value[: len(value) // 2], bytes(flipped), bytes(version), value + b"more", b"", b"junk"]
