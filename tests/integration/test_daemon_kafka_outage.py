"""Daemons whose broker is not there yet, or hangs: generation goes on, what waits is bounded and shown."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from consumers.plain_http import NO_AUTHORITIES
from tests.integration.kafka_nodes import PROMPT, Notified, Place, figures, whole
from tests.nodes import Process, ask, synthetic_answer, until
from tests.unit.consumers.written_log import kvlog

if TYPE_CHECKING:
    from tests.kafka.broker import Cluster
    from tests.nodes import Node

pytestmark = [pytest.mark.kafka, pytest.mark.e2e, pytest.mark.slow]

MIB = 1 << 20


@pytest.fixture
def place(tmp_path: Path, fragile_kafka: Cluster, kafka_prefix: str) -> Place:
    """Topics of our own on a broker that may be harmed."""
    return Place(tmp_path, fragile_kafka.bootstrap, kafka_prefix)


def tools(place: Place) -> dict[str, Process]:
    """Every tool at once against the same log."""
    verbs = {
        "lag": ["lag", "--json"],
        "show": ["show", "s", "--json"],
        "verify": ["verify"],
        "replay": ["replay", "s", "--out", str(place.folder / "s.safetensors")],
    }
    started = {
        verb: Process(["consumers", *rest, *place.arguments], place.folder / f"{verb}.out")
        for verb, rest in verbs.items()
    }
    started["demo"] = Process(["consumers", "demo", "--log", place.url], place.folder / "demo.out")
    return started


def test_tools_without_a_broker_say_where_they_looked_and_exit_3(
    place: Place, fragile_kafka: Cluster
) -> None:
    """At once where nobody listens, and one sentence instead of a traceback."""
    fragile_kafka.brokers[0].kill()
    running = tools(place)
    try:
        codes = {verb: process.wait(30) for verb, process in running.items()}
    finally:
        for process in running.values():
            process.send(9)
    assert dict.fromkeys(running, 3) == codes, {verb: each.output for verb, each in running.items()}
    for process in running.values():
        assert place.bootstrap in process.output
        assert "Traceback" not in process.output
    assert "LogUnavailable" == json.loads(running["lag"].output)["error"]


def test_daemon_started_without_its_broker_serves_at_once_and_logs_when_it_comes(
    place: Place, fragile_kafka: Cluster
) -> None:
    """READY with pool and socket; it says for which address it waits. What began meanwhile is logged whole."""
    broker = fragile_kafka.brokers[0]
    broker.kill()
    node = place.node("a", engine=("--tokens-per-second", "20"))
    with Notified(place.folder, watchdog_seconds=3) as notified:
        try:
            daemon = node.start_daemon(notified.environment)
            node.start_engine()
            stream = ask(node.url, prompt=PROMPT, max_tokens=2000, session="s")
            assert not next(stream).kvlog.get("logged")
            until(lambda: bool(daemon.events("log_unavailable")), what="log_unavailable")
            problem = daemon.events("log_unavailable")[0]["problem"]
            assert place.bootstrap in problem
            assert "check the broker" in problem
            assert 0.0 == figures(node)["kvlog_log_up"]
            assert f"READY=1\nSTATUS=waiting for the log at {place.url}" in notified.said()
            broker.start_again()
            shown = next(answer.tokens for answer in stream if daemon.events("turn_opened"))
            stream.close()  # type: ignore[attr-defined]  # a generator
            known = len(PROMPT) + len(shown)
            until(lambda: place.length("s") >= known - 1, seconds=20, what="all logged")
            resumed = whole(node, "s", max_tokens=len(shown) + 5, resume_token_ids=shown)
            assert synthetic_answer(PROMPT, len(shown) + 5) == shown + resumed.tokens
            assert (True, known - 1) == (resumed.kvlog["logged"], resumed.kvlog["attached"])
            assert 1.0 == figures(node)["kvlog_log_up"]
            notified.said()  # its queue was full of older ones, which held nothing up
            until(lambda: any("log up" in said for said in notified.said()), what="status")
        finally:
            node.close()


def test_broker_that_hangs_under_load_costs_nothing_but_lag(place: Place, fragile_kafka: Cluster) -> None:
    """Tokens come as fast as before, memory is bounded, the figures answer, the watchdog is fed; then all is logged."""
    broker = fragile_kafka.brokers[0]
    row_bytes, tokens, streams = 65536, 600, 4
    engine = ("--row-bytes", str(row_bytes), "--tokens-per-second", "30")
    room: dict[str, object] = {"bytes": 256 * MIB, "block_bytes": MIB}
    a = place.node("a", engine=engine, sync={"codec": "raw"}, pool=room)
    b = place.node("b", engine=engine, pool=room)
    with Notified(place.folder, watchdog_seconds=3) as notified, ThreadPoolExecutor(streams) as clients:
        try:
            daemon = a.start_daemon(notified.environment)
            b.start_daemon()
            a.wait_log()
            b.wait_log()
            a.start_engine()
            answers = [clients.submit(whole, a, f"s{n}", max_tokens=tokens) for n in range(streams)]
            until(lambda: steps(a) > 30, seconds=30, what="load")
            pace = steps_a_second(a, 2.0)
            resident = resident_bytes(daemon.pid)
            broker.pause()
            notified.said()
            slowed = steps_a_second(a, 11.0)
            shown = figures(a)
            assert slowed > 0.8 * pace
            assert resident_bytes(daemon.pid) - resident < 96 * MIB, (
                "32 wait, and as many may be in a request"
            )
            assert shown["kvlog_append_oldest_seconds"] > 8
            assert 28 * MIB < shown["kvlog_append_queue_bytes"] < 36 * MIB
            assert not [name for name in shown if name.startswith("kvlog_lag_")], "not known, not what it was"
            assert len(["WATCHDOG=1" for said in notified.said() if said.startswith("WATCHDOG=1")]) >= 8
            broker.resume()
            for number, each in enumerate(answers):
                assert synthetic_answer(PROMPT, tokens, row_bytes=row_bytes) == each.result().tokens, number
            rows = len(PROMPT) + tokens - 1
            until(lambda: [rows] * streams == [place.length(f"s{n}") for n in range(streams)], seconds=30)
            assert daemon.events("append_late")
            assert [] == daemon.events("append_failed") + daemon.events("loop_stuck")
            code, _ = kvlog("verify", *place.arguments)
            assert 0 == code
            until(lambda: figures(b).get("kvlog_rows_stored_total") == rows * streams, seconds=20, what="b")
            lag = {name: value for name, value in figures(b).items() if name.startswith("kvlog_lag_records")}
            assert {0.0} == set(lag.values())
        finally:
            broker.resume()
            a.close()
            b.close()


def steps(node: Node) -> int:
    """Steps that the engine has made."""
    made: int = httpx.get(f"{node.url}/health", verify=NO_AUTHORITIES).json()["replication"]["steps"]
    return made


def steps_a_second(node: Node, seconds: float) -> float:
    """How fast tokens come."""
    before, began = steps(node), time.monotonic()
    time.sleep(seconds)
    return (steps(node) - before) / (time.monotonic() - began)


def resident_bytes(pid: int) -> int:
    """Private memory that a process holds; its pool is shared."""
    line = next(
        each for each in Path(f"/proc/{pid}/status").read_text().splitlines() if each.startswith("RssAnon:")
    )
    return int(line.split()[1]) << 10
