"""Real Kafka brokers (KRaft) on 127.0.0.1, started from Kafka's jars: what the tests against a real log run on.

A folder of jars is all it takes: `libs/` of a Kafka distribution, of a Maven `dependency:copy-dependencies`, or the
folder itself. Java 17 or newer. Brokers die with the process that started them (PR_SET_PDEATHSIG), however it ends.
"""

from __future__ import annotations

import base64
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["Broker", "BrokerFailed", "Cluster", "Tools", "free_port", "jars_in"]

START_SECONDS = 60.0
STOP_SECONDS = 15.0
PR_SET_PDEATHSIG = 1
LOG4J = """<Configuration status="WARN"><Appenders>
<Console name="out"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
<Loggers><Root level="INFO"><AppenderRef ref="out"/></Root></Loggers></Configuration>"""
TOOLS = {
    "producer-perf": "org.apache.kafka.tools.ProducerPerformance",
    "consumer-perf": "org.apache.kafka.tools.ConsumerPerformance",
    "e2e-latency": "org.apache.kafka.tools.EndToEndLatency",
    "groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "topics": "org.apache.kafka.tools.TopicCommand",
    "configs": "org.apache.kafka.tools.ConfigCommand",
    "acls": "org.apache.kafka.tools.AclCommand",
    "dump": "kafka.tools.DumpLogSegments",
    "delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
}

_LIBC = ctypes.CDLL(None, use_errno=True)


class BrokerFailed(Exception):
    """A broker did not start, with the last lines of its log."""


def free_port() -> int:
    """Finds a port that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def jars_in(home: Path) -> Path | None:
    """Finds the folder with Kafka's jars under a home: `libs/`, `lib/`, or the home itself."""
    for folder in (home / "libs", home / "lib", home):
        if any(folder.glob("kafka-clients-*.jar")) and any(folder.glob("kafka_2*.jar")):
            return folder
    return None


def _die_with_parent() -> None:
    """Runs in the child: the kernel kills it when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


@dataclass(frozen=True)
class Tools:
    """Kafka's own command line tools, from the same jars."""

    jars: Path

    def java(
        self, main: str, arguments: Sequence[str], *, heap: str = "512m", log4j: Path | None = None
    ) -> list[str]:
        """Builds a command line."""
        logging = [f"-Dlog4j2.configurationFile={log4j}"] if log4j is not None else []
        flags = [f"-Xmx{heap}", "-XX:+UseSerialGC", "-Djava.awt.headless=true", *logging]
        return [shutil.which("java") or "java", *flags, "-cp", f"{self.jars}/*", main, *arguments]

    def run(self, tool: str, *arguments: str, timeout: float = 60.0) -> str:
        """Runs a tool and returns what it printed."""
        done = subprocess.run(
            self.java(TOOLS[tool], arguments), capture_output=True, text=True, timeout=timeout, check=False
        )
        if done.returncode:
            raise BrokerFailed(f"{tool} {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


@dataclass
class Broker:
    """One broker and controller of a cluster."""

    number: int
    port: int
    controller_port: int
    folder: Path
    tools: Tools
    properties: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """Where clients reach it."""
        return f"127.0.0.1:{self.port}"

    @property
    def data(self) -> Path:
        """Its log directory."""
        return self.folder / "data"

    def spawn(self, cluster_id: str) -> None:
        """Formats the storage if it is new, and starts the broker."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, log4j = self.folder / "server.properties", self.folder / "log4j2.xml"
        settings.write_text(
            "".join(f"{key}={value}\n" for key, value in self.properties.items()), encoding="utf-8"
        )
        log4j.write_text(LOG4J, encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            if not (self.data / "meta.properties").exists():
                form = ["format", "-t", cluster_id, "-c", str(settings)]
                command = self.tools.java("kafka.tools.StorageTool", form, heap="128m", log4j=log4j)
                subprocess.run(command, check=True, stdout=log, stderr=log)
            self.process = subprocess.Popen(
                self.tools.java("kafka.Kafka", [str(settings)], log4j=log4j),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one system call; tests start brokers from the main thread
            )

    def is_serving(self) -> bool:
        """Tells whether it accepts connections; raises when it has died."""
        assert self.process is not None
        if self.process.poll() is not None:
            raise BrokerFailed(self._last_words())
        try:
            socket.create_connection(("127.0.0.1", self.port), 0.2).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        """Ends it as a power cut would."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_SECONDS)

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this broker's own process."""
        assert self.process is not None
        if self.process.poll() is None:
            os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Ends it in order, or at least ends it."""
        if self.process is None:
            return
        self.signal(signal.SIGTERM)
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def _last_words(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return f"broker {self.number} has died; the end of its log:\n" + "\n".join(lines[-20:])


@dataclass
class Cluster:
    """Some brokers that know each other."""

    folder: Path
    tools: Tools
    count: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)
    brokers: list[Broker] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Chooses ports and writes down what each broker is to be."""
        self._id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        ports = [(free_port(), free_port()) for _ in range(self.count)]
        voters = ",".join(f"{n}@127.0.0.1:{controller}" for n, (_, controller) in enumerate(ports))
        for n, (port, controller) in enumerate(ports):
            folder = self.folder / str(n)
            settings = self._settings(n, port, controller, folder / "data") | {
                "controller.quorum.voters": voters
            }
            self.brokers.append(Broker(n, port, controller, folder, self.tools, settings | dict(self.extra)))

    @property
    def bootstrap(self) -> str:
        """The brokers' addresses."""
        return ",".join(broker.address for broker in self.brokers)

    def start(self) -> None:
        """Starts all brokers and waits until each accepts connections."""
        try:
            for broker in self.brokers:
                broker.spawn(self._id)
            for broker in self.brokers:
                self._wait(broker)
        except BaseException:
            self.stop()
            raise

    def restart(self, broker: Broker) -> None:
        """Starts a dead broker again on its data."""
        broker.spawn(self._id)
        self._wait(broker)

    def stop(self) -> None:
        """Ends all brokers."""
        for broker in self.brokers:
            broker.signal(signal.SIGTERM)
        for broker in self.brokers:
            broker.stop()

    @staticmethod
    def _wait(broker: Broker) -> None:
        deadline = time.monotonic() + START_SECONDS
        while not broker.is_serving():
            if time.monotonic() > deadline:
                raise BrokerFailed(f"broker {broker.number} does not serve after {START_SECONDS} s")
            time.sleep(0.05)

    def _settings(self, number: int, port: int, controller: int, data: Path) -> dict[str, str]:
        copies = str(min(self.count, 3))
        return {
            "process.roles": "broker,controller",
            "node.id": str(number),
            "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
            "controller.listener.names": "CONTROLLER",
            "inter.broker.listener.name": "PLAINTEXT",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SSL:SSL,"
            "SASL_SSL:SASL_SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
            "log.dirs": str(data),
            "auto.create.topics.enable": "true",
            "group.initial.rebalance.delay.ms": "0",
            "offsets.topic.replication.factor": copies,
            "offsets.topic.num.partitions": "4",
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": "1",
            "default.replication.factor": copies,
            "num.network.threads": "2",
            "num.io.threads": "4",
            "log.cleaner.dedupe.buffer.size": "20971520",
            "log.cleaner.backoff.ms": "500",
            "log.retention.check.interval.ms": "500",
            "log.initial.task.delay.ms": "500",
        }
