"""Gives tests a real Kafka, says which one, and does not let a missing one pass for a passed test."""

from __future__ import annotations

import itertools
import uuid
from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest

from tests.kafka.broker import BrokerFailed
from tests.kafka.choice import CLUSTER_VARIABLE, HOME_VARIABLE, Choice, WrongSetting, choose

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Mapping
    from pathlib import Path

    from kvlog.log.kafka import KafkaLog
    from tests.kafka.broker import Cluster

CHOICE = pytest.StashKey[Choice]()
NOT_THE_BROKERS_FAULT = "this implementation"
"""How a contract test begins its reason when an implementation cannot do something, broker or not."""

SOON_DEAD = {"broker.session.timeout.ms": "2000", "broker.heartbeat.interval.ms": "400"}
"""A killed broker may come back only when its session is over, which takes nine seconds by default."""

_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    """Chooses, unless the run leaves the Kafka tests out anyway."""
    if "not kafka" in config.getoption("markexpr", ""):
        config.stash[CHOICE] = Choice("not wanted (-m)", None, None, is_asked_for=False)
        return
    try:
        config.stash[CHOICE] = choose()
    except WrongSetting as wrong:
        raise pytest.UsageError(str(wrong)) from wrong


def pytest_report_header(config: pytest.Config) -> str:
    """Says which Kafka the tests run on."""
    return f"kafka: {config.stash[CHOICE].said}"


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Notes Kafka tests that were skipped."""
    if report.skipped and "kafka" in report.keywords:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if NOT_THE_BROKERS_FAULT not in reason:
            _skipped.append(report.nodeid)


_skipped: list[str] = []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fails the run when a broker was asked for and a test went without."""
    if _skipped and session.config.stash[CHOICE].is_asked_for and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Says loudly what was not tested."""
    if not _skipped:
        return
    choice = config.stash[CHOICE]
    verdict = "FAILED" if choice.is_asked_for else "WARNING"
    terminalreporter.section(f"{verdict}: {len(_skipped)} Kafka tests were skipped", sep="!", red=True)
    terminalreporter.line(f"kafka: {choice.said}")
    terminalreporter.line(
        f"Set {CLUSTER_VARIABLE}=host:port, or {HOME_VARIABLE}=folder with Kafka's jars and Java 17."
    )


def _started(
    choice: Choice,
    folder: Callable[[str], Path],
    name: str,
    brokers: int = 1,
    extra: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Cluster]:
    if choice.make is None:
        pytest.skip(f"no Kafka broker of our own: {choice.said}")
    try:
        cluster = choice.make(folder(name), brokers, extra)
    except BrokerFailed as error:
        if choice.is_asked_for:
            raise
        pytest.skip(str(error))
    cluster.start()
    try:
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def kafka_cluster(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster of our own that all tests share; each uses its own topic prefix."""
    yield from _started(pytestconfig.stash[CHOICE], tmp_path_factory.mktemp, "kafka")


@pytest.fixture(scope="session")
def kafka_broker(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> str:
    """The address of a real Kafka that all tests share."""
    choice = pytestconfig.stash[CHOICE]
    if choice.cluster is not None:
        return choice.cluster
    cluster: Cluster = request.getfixturevalue("kafka_cluster")
    return cluster.bootstrap


@pytest.fixture(scope="session")
def kafka_started(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster behind `fragile_kafka`."""
    yield from _started(pytestconfig.stash[CHOICE], tmp_path_factory.mktemp, "fragile", extra=SOON_DEAD)


@pytest.fixture
def fragile_kafka(kafka_started: Cluster) -> Iterator[Cluster]:
    """A cluster of one broker that a test may kill, pause and damage; it serves again before the next test."""
    yield kafka_started
    for broker in kafka_started.brokers:
        broker.restore()


@pytest.fixture
def three_brokers(pytestconfig: pytest.Config, tmp_path: Path) -> Iterator[Cluster]:
    """A cluster of three brokers for one test."""
    yield from _started(pytestconfig.stash[CHOICE], lambda _: tmp_path, "three", brokers=3, extra=SOON_DEAD)


@pytest.fixture
def kafka_prefix() -> str:
    """A topic prefix that no other test uses."""
    return f"t{next(_numbers)}-{uuid.uuid4().hex[:8]}"


@pytest.fixture
async def kafka_log(kafka_broker: str, kafka_prefix: str) -> AsyncIterator[KafkaLog]:
    """An open log of three partitions on the shared broker."""
    from kvlog.log.kafka import KafkaLog
    from kvlog.log.kafka_options import KafkaOptions
    from kvlog.log.topics import RecordsWanted

    log = KafkaLog(
        KafkaOptions(
            bootstrap=kafka_broker,
            topic_prefix=kafka_prefix,
            records=RecordsWanted(partitions=3, replication=1),
            timeout_seconds=20,
        )
    )
    await log.open()
    yield log
    await log.close()
