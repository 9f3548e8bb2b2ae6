"""Real Kafka brokers (KRaft) on 127.0.0.1, started from Kafka's jars: what the tests against a real log run on.

A folder of jars is all it takes: `libs/` of a Kafka distribution, of a Maven `dependency:copy-dependencies`, or the
folder itself. Java 17 or newer. Brokers die with the process that started them (tests.processes), however it ends.

Each broker has two listeners: PLAINTEXT, whose anonymous user may do everything, and SASL_SSL, where `alice` with the
password `secret` may do what the ACLs say (nothing, at first).
"""

from __future__ import annotations

import base64
import os
import shutil
import signal
import socket
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from tests.kafka.certificate import AUTHORITY, KEYSTORE, make_certificate
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = [
    "USERS",
    "Broker",
    "BrokerFailed",
    "Cluster",
    "JarCluster",
    "JarTools",
    "Tools",
    "free_ports",
    "jars_in",
]

START_SECONDS = 90.0
STOP_SECONDS = 15.0
LOG4J = """<Configuration status="WARN"><Appenders>
<Console name="out"><PatternLayout pattern="%d %p %c %m%n"/></Console></Appenders>
<Loggers><Root level="INFO"><AppenderRef ref="out"/></Root></Loggers></Configuration>"""
USERS = {"alice": "secret"}
TOOLS = {
    "producer-perf": "org.apache.kafka.tools.ProducerPerformance",
    "consumer-perf": "org.apache.kafka.tools.ConsumerPerformance",
    "e2e-latency": "org.apache.kafka.tools.EndToEndLatency",
    "configs": "kafka.admin.ConfigCommand",
    "groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
}


class BrokerFailed(Exception):
    """A broker or a tool did not do its work; the text has its last words."""


class Tools(Protocol):
    """Kafka's own command line tools."""

    def run(self, tool: str, *arguments: str) -> str:
        """Runs one of TOOLS and returns what it printed."""
        ...


class Broker(Protocol):
    """One broker, as the crash tests need it."""

    @property
    def data(self) -> Path:
        """Its log directory."""
        ...

    def kill(self) -> None:
        """Ends it as a power cut would."""
        ...

    def pause(self) -> None:
        """Stops it in the middle of whatever it does."""
        ...

    def resume(self) -> None:
        """Lets it go on."""
        ...

    def start_again(self) -> None:
        """Starts it on its data; returns before it serves."""
        ...

    @property
    def is_serving(self) -> bool:
        """Whether it accepts connections."""
        ...

    def restore(self) -> None:
        """Makes it serve again, whatever was done to it, and waits for that."""
        ...


class Cluster(Protocol):
    """Some brokers that know each other."""

    @property
    def tools(self) -> Tools:
        """Kafka's tools, of the same version."""
        ...

    @property
    def brokers(self) -> Sequence[Broker]:
        """Its brokers."""
        ...

    @property
    def authority(self) -> Path:
        """The PEM file with the authority that signed the brokers."""
        ...

    @property
    def bootstrap(self) -> str:
        """Where the PLAINTEXT listeners are."""
        ...

    @property
    def secure_bootstrap(self) -> str:
        """Where the SASL_SSL listeners are."""
        ...

    def start(self) -> None:
        """Starts all brokers and waits until each serves."""
        ...

    def stop(self) -> None:
        """Ends all brokers."""
        ...


def free_ports(count: int) -> list[int]:
    """Finds ports that nobody listens on just now."""
    probes = [socket.socket() for _ in range(count)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def jars_in(home: Path) -> Path | None:
    """Finds the folder with Kafka's jars under a home: `libs/`, or the home itself."""
    for folder in (home / "libs", home):
        if any(folder.glob("kafka-clients-*.jar")) and any(folder.glob("kafka_2*.jar")):
            return folder
    return None


def is_open(port: int) -> bool:
    """Tells whether somebody accepts connections."""
    try:
        socket.create_connection(("127.0.0.1", port), 0.2).close()
    except OSError:
        return False
    return True


def settings_of(number: int, ports: Sequence[int], data: Path, folder: Path) -> dict[str, str]:
    """A broker's server.properties, but for the quorum and the number of copies.

    Args:
        number: Its node id.
        ports: Of PLAINTEXT, SASL_SSL and the controller.
        data: Its log directory.
        folder: Where `make_certificate` wrote.
    """
    plain, secure, controller = ports
    jaas = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    users = " ".join(f'user_{name}="{password}"' for name, password in USERS.items())
    return {
        "process.roles": "broker,controller",
        "node.id": str(number),
        "listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{secure},CONTROLLER://127.0.0.1:{controller}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{plain},SASL_SSL://127.0.0.1:{secure}",
        "controller.listener.names": "CONTROLLER",
        "inter.broker.listener.name": "PLAINTEXT",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_SSL:SASL_SSL",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.sasl_ssl.plain.sasl.jaas.config": f"{jaas} {users};",
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(folder / KEYSTORE),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(folder / AUTHORITY),
        # A client without a certificate is let in; one with a certificate must have it from our authority.
        "listener.name.sasl_ssl.ssl.client.auth": "requested",
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "log.dirs": str(data),
        # Kafka's default, and a trap: asking for a topic makes it, with the wrong settings. We must not fall into it.
        "auto.create.topics.enable": "true",
        "group.initial.rebalance.delay.ms": "0",
        "offsets.topic.num.partitions": "4",
        "num.network.threads": "2",
        "num.io.threads": "4",
        "log.cleaner.dedupe.buffer.size": "20971520",
        "log.cleaner.backoff.ms": "500",
        "log.retention.check.interval.ms": "500",
        "log.initial.task.delay.ms": "500",
    }


def copies_of(count: int) -> dict[str, str]:
    """The number of copies of Kafka's own topics on so many brokers."""
    copies = str(min(count, 3))
    return {
        "offsets.topic.replication.factor": copies,
        "transaction.state.log.replication.factor": copies,
        "transaction.state.log.min.isr": "1",
        "default.replication.factor": copies,
    }


@dataclass(frozen=True)
class JarTools:
    """The tools from a folder of jars.

    Args:
        jars: The folder.
        compiler_level: Of the JVM: 1 starts in two thirds of the time, 4 is what a measured broker needs.
    """

    jars: Path
    compiler_level: int = 1

    def java(
        self, main: str, arguments: Sequence[str], *, heap: str = "512m", log4j: Path | None = None
    ) -> list[str]:
        """Builds a command line."""
        logging = [f"-Dlog4j2.configurationFile={log4j}"] if log4j is not None else []
        flags = [
            f"-Xmx{heap}",
            "-XX:+UseSerialGC",
            f"-XX:TieredStopAtLevel={self.compiler_level}",
            "-Djava.awt.headless=true",
            *logging,
        ]
        return [shutil.which("java") or "java", *flags, "-cp", f"{self.jars}/*", main, *arguments]

    def run(self, tool: str, *arguments: str) -> str:
        """See Tools.run."""
        command = self.java(TOOLS[tool], arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, check=False, preexec_fn=die_with_parent
        )
        if done.returncode:
            raise BrokerFailed(f"{tool} {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout


@dataclass
class JarBroker:
    """One broker and controller, as a process of ours."""

    number: int
    port: int
    folder: Path
    tools: JarTools
    cluster_id: str
    properties: dict[str, str]
    process: subprocess.Popen[bytes] | None = None

    @property
    def data(self) -> Path:
        """See Broker.data."""
        return self.folder / "data"

    def spawn(self) -> None:
        """Formats the storage if it is new, and starts the broker."""
        self.folder.mkdir(parents=True, exist_ok=True)
        settings, log4j = self.folder / "server.properties", self.folder / "log4j2.xml"
        settings.write_text(
            "".join(f"{key}={value}\n" for key, value in self.properties.items()), encoding="utf-8"
        )
        log4j.write_text(LOG4J, encoding="utf-8")
        with (self.folder / "log").open("ab") as log:
            if not (self.data / "meta.properties").exists():
                form = ["format", "-t", self.cluster_id, "-c", str(settings)]
                command = self.tools.java("kafka.tools.StorageTool", form, heap="128m", log4j=log4j)
                subprocess.run(command, check=True, stdout=log, stderr=log, preexec_fn=die_with_parent)
            self.process = subprocess.Popen(
                self.tools.java("kafka.Kafka", [str(settings)], log4j=log4j),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                process_group=0,  # not a session: see tests.processes
                preexec_fn=die_with_parent,  # tests start brokers from the main thread
            )

    def wait(self) -> None:
        """Waits until it serves; raises BrokerFailed when it does not."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_serving:
            if not self.is_alive or time.monotonic() > deadline:
                raise BrokerFailed(self._last_words())
            time.sleep(0.05)

    @property
    def is_alive(self) -> bool:
        """Whether its process runs."""
        return self.process is not None and self.process.poll() is None

    def kill(self) -> None:
        """See Broker.kill."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(STOP_SECONDS)

    def pause(self) -> None:
        """See Broker.pause."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """See Broker.resume."""
        self.signal(signal.SIGCONT)

    def start_again(self) -> None:
        """See Broker.start_again."""
        self.spawn()

    @property
    def is_serving(self) -> bool:
        """See Broker.is_serving."""
        return is_open(self.port)

    def restore(self) -> None:
        """See Broker.restore."""
        self.resume()
        if not self.is_alive:
            self.spawn()
        self.wait()

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal to this broker's own process."""
        if self.is_alive:
            assert self.process is not None
            os.kill(self.process.pid, number)

    def _last_words(self) -> str:
        lines = (self.folder / "log").read_text(encoding="utf-8", errors="replace").splitlines()
        return f"broker {self.number} does not serve; the end of its log:\n" + "\n".join(lines[-20:])


@dataclass
class JarCluster:
    """Brokers from a folder of jars."""

    folder: Path
    tools: JarTools
    count: int = 1
    extra: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Chooses ports and writes down what each broker is to be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        make_certificate(self.folder)
        self.authority = self.folder / AUTHORITY
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode().replace("-", "A")
        ports = free_ports(3 * self.count)
        triples = [ports[3 * n : 3 * n + 3] for n in range(self.count)]
        voters = ",".join(f"{n}@127.0.0.1:{triple[2]}" for n, triple in enumerate(triples))
        shared = copies_of(self.count) | {"controller.quorum.voters": voters} | dict(self.extra)
        self._triples = triples
        self.brokers = [
            JarBroker(
                n,
                triple[0],
                self.folder / str(n),
                self.tools,
                cluster_id,
                settings_of(n, triple, self.folder / str(n) / "data", self.folder) | shared,
            )
            for n, triple in enumerate(triples)
        ]

    @property
    def bootstrap(self) -> str:
        """See Cluster.bootstrap."""
        return ",".join(f"127.0.0.1:{plain}" for plain, _, _ in self._triples)

    @property
    def secure_bootstrap(self) -> str:
        """See Cluster.secure_bootstrap."""
        return ",".join(f"127.0.0.1:{secure}" for _, secure, _ in self._triples)

    def start(self) -> None:
        """See Cluster.start."""
        try:
            for broker in self.brokers:
                broker.spawn()
            for broker in self.brokers:
                broker.wait()
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """See Cluster.stop."""
        for broker in self.brokers:
            if broker.is_alive:
                broker.kill()  # its data goes with it, and an orderly end takes seconds
