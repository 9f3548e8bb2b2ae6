"""Two nodes over a real Kafka: how far a paused standby is behind, a second daemon of one name, foreign junk."""

from __future__ import annotations

import asyncio
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvlog.checksums import partition_of
from kvlog.ids import Partition, SessionId
from kvlog.log.base import AppendRequest
from kvlog.log.settings import LogSettings, make_log
from tests.integration.kafka_nodes import PARTITIONS, PROMPT, Place, figures, whole
from tests.nodes import ask, last, running, synthetic_answer, until
from tests.unit.consumers.written_log import kvlog

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.nodes import Node

pytestmark = [pytest.mark.kafka, pytest.mark.e2e, pytest.mark.slow]

ROW_BYTES = 4096
ROWS = len(PROMPT) + 19
"""What the log holds of a prompt and 20 tokens: the last one's row is never computed."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, kafka_broker: str) -> Place:
    """Topics that the tests here share."""
    return Place(tmp_path_factory.mktemp("standby"), kafka_broker, f"standby-{time.time_ns()}")


@pytest.fixture(scope="module")
def nodes(place: Place) -> Iterator[tuple[Node, Node]]:
    """Both, with their engines."""
    nodes = place.node("a"), place.node("b")
    with running(nodes):
        yield nodes


def lag_of(place: Place, name: str) -> dict[str, Any]:
    """What `kvlog lag` says of one node."""
    code, said = kvlog("lag", "--patience", "1.5", *place.arguments)
    assert 0 == code
    listed = said["nodes"]
    assert isinstance(listed, list)
    found: dict[str, Any] = next(node for node in listed if node["node"] == name)
    return found


def shown(node: Node, figure: str) -> set[float]:
    """One figure of every partition."""
    return {value for name, value in figures(node).items() if name.startswith(f"kvlog_{figure}{{")}


def test_lag_of_a_paused_standby_is_told_in_each_unit_and_closes(
    place: Place, nodes: tuple[Node, Node]
) -> None:
    """Records exact, tokens those that were made, bytes with little around the rows, seconds since the first."""
    a, b = nodes
    session = f"lagging-{time.monotonic_ns()}"  # a second try has rows of its own, too
    until(lambda: lag_of(place, "b")["lag"]["records"] == 0, what="a heartbeat without lag")
    assert b.daemon is not None
    b.daemon.send(signal.SIGSTOP)
    try:
        began = time.time()
        whole(a, session)
        until(lambda: place.length(session) == ROWS, what="logged")
        until(lambda: lag_of(place, "a")["lag"]["records"] == 0, seconds=30, what="a's heartbeat without lag")
        until(lambda: lag_of(place, "b")["state"] == "silent", seconds=30, what="b's silence")
        said = lag_of(place, "b")
        elapsed = time.time() - began
        lag = said["lag"]
        ends = {p["partition"]: p["applied"] + p["records"] for p in said["partitions"]}
        applied = {p["partition"]: p["applied"] for p in lag_of(place, "a")["partitions"]}
        assert ("silent", ROWS, True) == (said["state"], lag["tokens"], lag["exact"])
        assert ends == applied, "its lag is what the other one has applied more"
        assert ROWS * ROW_BYTES < lag["bytes"] < ROWS * (ROW_BYTES + 400)
        assert 0.2 < lag["seconds"] < elapsed + 0.5
        assert {0.0} == shown(a, "lag_records")
    finally:
        b.daemon.send(signal.SIGCONT)
    until(lambda: shown(b, "lag_records") == shown(b, "lag_seconds") == {0.0}, what="caught up")
    until(lambda: lag_of(place, "b")["state"] == "live", what="live")
    home = partition_of(SessionId(session), PARTITIONS)
    (mine,) = (p for p in lag_of(place, "b")["partitions"] if p["partition"] == home)
    assert mine["needed"] < mine["applied"], "a session's root is needed long after it was applied"
    assert (
        mine["needed"]
        == mine["records_to_loss"]
        == figures(b)[f'kvlog_retention_records{{partition="{home}"}}']
    )


def test_second_daemon_of_one_name_stops_and_the_first_goes_on(
    place: Place, nodes: tuple[Node, Node]
) -> None:
    """As on a local log: 78, the setting and the name; the one that was there is not disturbed."""
    a, _ = nodes
    twin = place.node("twin", node={"id": "a"})
    try:
        process = twin.launch_daemon()
        assert 78 == process.wait(60), process.output
        assert process.events("node_id_taken")
        assert all(word in process.output for word in ("node.id", "'a'"))
        assert True is whole(a, "after-twin").kvlog["logged"]
    finally:
        twin.close()


def test_junk_of_a_foreign_producer_is_counted_and_loses_nothing(
    place: Place, nodes: tuple[Node, Node]
) -> None:
    """What names another session touches only that one; what names none costs an attach, and never a token."""
    a, b = nodes
    expected = synthetic_answer(PROMPT, 60)
    stream = ask(a.url, prompt=PROMPT, max_tokens=60, session="live")
    while len(next(stream).tokens) < 10:
        pass
    before = [refused(node) for node in nodes]
    foreign = [f"foreign-{number}".encode() for number in range(6)]
    junk = (b"", b"junk", bytes(range(256)) * 16)
    asyncio.run(spoil(place, [(home_of(key), key, value) for key in foreign for value in junk]))
    answer = last(stream)
    assert (expected, None, True) == (answer.tokens, answer.error, answer.kvlog["logged"])
    after = [count + len(foreign) * len(junk) for count in before]
    until(lambda: [refused(node) for node in nodes] == after, seconds=20, what="counted")
    resumed = whole(b, "live", max_tokens=60, resume_token_ids=answer.tokens[:40])
    assert (expected[40:], len(PROMPT) + 39) == (resumed.tokens, resumed.kvlog["attached"])

    nameless = [b"", b"\xff\xfe", b"x" * 1000]
    asyncio.run(
        spoil(
            place,
            [(Partition(p), key, value) for p in range(PARTITIONS) for key in nameless for value in junk],
        )
    )
    for node in nodes:
        again = whole(node, "live", max_tokens=60, resume_token_ids=answer.tokens[:40])
        assert expected[40:] == again.tokens
    until(lambda: whole(b, "live", max_tokens=60).kvlog["logged"] is True, seconds=30, what="logged again")
    until(lambda: place.length("live") == len(PROMPT) + 59, what="all of it")


def refused(node: Node) -> float:
    """Records that nobody could read, or whose session is not known, as the node counts them."""
    return figures(node).get('kvlog_records_refused_total{verdict="unknown"}', 0.0)


def home_of(key: bytes) -> Partition:
    """The partition of a session."""
    return Partition(partition_of(SessionId(key.decode()), PARTITIONS))


async def spoil(place: Place, messages: Sequence[tuple[Partition, bytes, bytes]]) -> None:
    """Appends what no kvlog would."""
    settings = LogSettings(url=place.url, topic_prefix=place.prefix, partitions=PARTITIONS)
    log = make_log(settings, client_id="foreign")
    await log.open()
    writer = await log.writer()
    for partition, key, value in messages:
        await writer.append(AppendRequest(partition, key, value, 1, 1))
    await writer.flush()
    await log.close()
