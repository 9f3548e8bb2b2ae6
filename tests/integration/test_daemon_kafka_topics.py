"""Topics that do not fit, as the daemon meets them: at its start, and changed under it while an engine works."""

from __future__ import annotations

import asyncio
import shlex
from typing import TYPE_CHECKING, TypeVar

import pytest

from kvlog.log.topics import records_topic
from tests.integration.kafka_nodes import PARTITIONS, PROMPT, Place, whole
from tests.kafka.admin import Admin
from tests.nodes import synthetic_answer, until

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from pathlib import Path

    from tests.kafka.broker import Cluster
    from tests.nodes import Process

pytestmark = [pytest.mark.kafka, pytest.mark.e2e, pytest.mark.slow]

SMALL = {"max.message.bytes": "100000"}
T = TypeVar("T")


@pytest.fixture
def place(tmp_path: Path, kafka_cluster: Cluster, kafka_prefix: str) -> Place:
    """Topics of our own."""
    return Place(tmp_path, kafka_cluster.bootstrap, kafka_prefix)


def administer(place: Place, work: Callable[[Admin], Awaitable[T]]) -> T:
    """Does what an operator would do."""

    async def do() -> T:
        admin = Admin(place.bootstrap)
        try:
            return await work(admin)
        finally:
            await admin.close()

    return asyncio.run(do())


def run_fix(cluster: Cluster, fix: object) -> None:
    """Runs the command that an error names, by Kafka's own tool."""
    script, *arguments = shlex.split(str(fix))
    assert "kafka-configs.sh" == script
    cluster.tools.run("configs", *arguments)


def refusals(daemon: Process) -> list[dict[str, object]]:
    """What the daemon said of the log that it cannot use."""
    return daemon.events("log_refused")


def test_daemon_refuses_topics_that_do_not_fit_and_serves_once_the_command_it_names_was_run(
    place: Place, kafka_cluster: Cluster
) -> None:
    """Exit code 78 with topic and both numbers; an engine serves unlogged, and is logged as soon as a daemon starts."""
    topic = records_topic(place.prefix)
    administer(place, lambda admin: admin.create(topic, PARTITIONS, SMALL))
    other = Place(place.folder, place.bootstrap, f"{place.prefix}-p")
    administer(place, lambda admin: admin.create(records_topic(other.prefix), PARTITIONS + 3))
    a, b = place.node("a"), other.node("b")
    try:
        small, parts = a.launch_daemon(), b.launch_daemon()
        assert (78, 78) == (small.wait(60), parts.wait(60))
        for process in (small, parts):
            assert "Traceback" not in process.output
        assert all(word in small.output for word in (topic, "100000", "925696", "kafka-configs.sh"))
        assert all(word in parts.output for word in (records_topic(other.prefix), "has 7", "says 4"))
        assert "log.topic_prefix" in parts.output
        a.start_engine()
        assert False is whole(a, "s").kvlog["logged"]
        line = next(each for each in small.output.splitlines() if each.startswith("kvlogd: ConfigError"))
        run_fix(kafka_cluster, line.split("fix: ")[1].split(")")[0])
        a.start_daemon()
        a.wait_log()
        until(lambda: whole(a, "s").kvlog["logged"] is True, seconds=20, what="logged")
    finally:
        a.close()
        b.close()


def test_topic_changed_under_a_daemon_is_refused_without_a_storm_of_claims(
    place: Place, kafka_cluster: Cluster
) -> None:
    """A limit below our records: said once with the command, answers come unlogged, and all goes on once it was run.

    Partitions that were added stop the writer for good: it says so, and answers still come.
    """
    topic, row_bytes = records_topic(place.prefix), 65536
    node = place.node("a", engine=("--row-bytes", str(row_bytes)), sync={"codec": "raw"})
    expected = synthetic_answer(PROMPT, 20, row_bytes=row_bytes)
    try:
        daemon = node.start_daemon()
        node.wait_log()
        node.start_engine()
        assert True is whole(node, "before").kvlog["logged"]
        administer(place, lambda admin: admin.set_config(topic, SMALL))
        for number in range(3):
            assert expected == whole(node, f"during-{number}").tokens
        until(lambda: bool(refusals(daemon)), what="log_refused")
        assert False is whole(node, "unlogged").kvlog["logged"]
        (said,) = refusals(daemon)
        assert f"topic {topic} takes messages of 100000 bytes, ours have up to 925696" == said["problem"]
        assert len(daemon.events("takeover_completed")) < 10, "no session claims again and again"
        run_fix(kafka_cluster, said["fix"])
        until(lambda: whole(node, "after").kvlog["logged"] is True, seconds=20, what="logged")
        until(lambda: place.length("after") == len(PROMPT) + 19, seconds=10, what="all of it")

        administer(place, lambda admin: admin.add_partitions(topic, PARTITIONS + 2))
        until(lambda: bool(whole(node, "later")) and len(refusals(daemon)) > 1, seconds=40, what="refused")
        assert f"topic {topic} has 6 partitions, had 4" == refusals(daemon)[1]["problem"]
        assert "log.topic_prefix" in str(refusals(daemon)[1]["fix"])
        answer = whole(node, "last")
        assert (expected, False, None) == (answer.tokens, answer.kvlog["logged"], daemon.code)
    finally:
        node.close()
