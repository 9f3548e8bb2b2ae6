"""What every benchmark is given: how much to measure, a folder, and Kafka, where it can be had."""

from __future__ import annotations

import contextlib
import os
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kafka.broker import BrokerFailed, JarCluster, JarTools, jars_in
from tests.kafka.choice import HOME_VARIABLE, choose

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.kafka.broker import Cluster, Tools
    from tests.kafka.choice import Choice

__all__ = ["KafkaAt", "LogPlace", "Setting", "kafka_at"]

_COMPILER_LEVEL = 4
"""Tests start their brokers with less, to be quick; what is measured must be compiled as in production."""


@dataclass(frozen=True, slots=True)
class KafkaAt:
    """A broker, and Kafka's own tools to hold us against; None: they are not here."""

    bootstrap: str
    tools: Tools | None


@dataclass(frozen=True, slots=True)
class LogPlace:
    """A log for daemons: what it is called in the table, and the sections of their settings that name it."""

    name: str
    sections: dict[str, dict[str, object]]

    @property
    def url(self) -> str:
        """The log's URL."""
        return str(self.sections["log"]["url"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One run.

    Args:
        quick: a fraction of everything: shows that it works, not how fast.
        folder: for logs and sockets; removed at the end.
        kafka: None: what needs it is left out, and said so.
    """

    quick: bool
    folder: Path
    kafka: KafkaAt | None

    def fresh_folder(self, name: str) -> Path:
        """A folder that nobody else uses."""
        folder = self.folder / f"{name}-{uuid.uuid4().hex[:6]}"
        folder.mkdir(parents=True)
        return folder

    def local_log(self, folder: Path) -> LogPlace:
        """A log in that folder."""
        return LogPlace("local log", {"log": {"url": f"file://{folder}/log", "partitions": 4}})

    def kafka_log(self) -> LogPlace | None:
        """A log of its own on the broker, if there is one."""
        if self.kafka is None:
            return None
        log = {
            "url": f"kafka://{self.kafka.bootstrap}",
            "partitions": 4,
            "topic_prefix": f"bench-{uuid.uuid4().hex[:8]}",
        }
        return LogPlace("Kafka", {"log": log, "log.kafka": {"replication": 1, "insync_min": 1}})

    def logs(self, folder: Path) -> list[LogPlace]:
        """Both, or the one there is."""
        kafka = self.kafka_log()
        return [self.local_log(folder), *([kafka] if kafka else [])]


@contextlib.contextmanager
def kafka_at(address: str | None, folder: Path) -> Iterator[KafkaAt | None]:
    """A broker: the one at `address`, else one that is started as the tests do; None if none can be had."""
    home = os.environ.get(HOME_VARIABLE)
    jars = jars_in(Path(home)) if home else None
    tools = JarTools(jars, _COMPILER_LEVEL) if jars else None
    if address is not None:
        yield KafkaAt(address, tools)
        return
    chosen = choose()
    if chosen.cluster is not None:
        yield KafkaAt(chosen.cluster, tools)
        return
    cluster = _made(chosen, folder, tools)
    if cluster is None:
        yield None
        return
    cluster.start()
    try:
        yield KafkaAt(cluster.bootstrap, cluster.tools)
    finally:
        cluster.stop()


def _made(chosen: Choice, folder: Path, tools: JarTools | None) -> Cluster | None:
    """A cluster that is not started; None, said aloud, where none can be had and none was asked for."""
    if tools is not None:
        return JarCluster(folder, tools)
    try:
        made = None if chosen.make is None else chosen.make(folder, 1, {})
    except BrokerFailed as failed:
        if chosen.is_asked_for:
            raise
        print(f"no Kafka: {failed}", file=sys.stderr)
        return None
    if made is None:
        print(f"no Kafka: {chosen.said}", file=sys.stderr)
    return made
