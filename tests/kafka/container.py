"""A broker in a container, for machines with a container engine. Unproven: it has not run anywhere yet.

The same settings as from the jars, in the image apache/kafka, on the host's network; its folder is mounted under the
same path, so tests may damage the broker's files here as they do there.
"""

from __future__ import annotations

import gc
import time
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.kafka.broker import START_SECONDS, BrokerFailed, copies_of, free_ports, is_open, settings_of
from tests.kafka.certificate import AUTHORITY, make_certificate

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["IMAGE", "ContainerCluster", "why_no_engine"]

IMAGE = "apache/kafka:4.3.1"
SCRIPTS = {
    "producer-perf": "kafka-producer-perf-test.sh",
    "consumer-perf": "kafka-consumer-perf-test.sh",
    "e2e-latency": "kafka-e2e-latency.sh",
    "configs": "kafka-configs.sh",
    "groups": "kafka-consumer-groups.sh",
}


def why_no_engine() -> str | None:
    """Tells why no container can be started; None: one can."""
    try:
        from docker.errors import DockerException
        from testcontainers.core.container import DockerContainer
    except ImportError as error:
        return f"{error.name} is not installed"

    def probe() -> str | None:
        try:
            DockerContainer(IMAGE)
        except DockerException as error:
            return f"no container engine ({str(error).splitlines()[0][:80]})"
        return None

    with warnings.catch_warnings():
        # docker's client leaves its socket open when it cannot reach an engine: collected here, not in some test
        warnings.simplefilter("ignore", ResourceWarning)
        problem = probe()
        gc.collect()
    return problem


@dataclass
class ContainerBroker:
    """One broker and controller in a container; Tools of its own image, too."""

    folder: Path
    port: int
    container: Any

    @property
    def data(self) -> Path:
        """See Broker.data."""
        return self.folder / "data"

    def wait(self) -> None:
        """Waits until it serves."""
        deadline = time.monotonic() + START_SECONDS
        while not self.is_serving:
            if time.monotonic() > deadline:
                raise BrokerFailed(f"the container does not serve: {self.container.get_logs()}")
            time.sleep(0.1)

    def kill(self) -> None:
        """See Broker.kill."""
        self.container.get_wrapped_container().kill()

    def pause(self) -> None:
        """See Broker.pause."""
        self.container.get_wrapped_container().pause()

    def resume(self) -> None:
        """See Broker.resume."""
        self.container.get_wrapped_container().unpause()

    def start_again(self) -> None:
        """See Broker.start_again."""
        self.container.get_wrapped_container().start()

    @property
    def is_serving(self) -> bool:
        """See Broker.is_serving."""
        return is_open(self.port)

    def restore(self) -> None:
        """See Broker.restore."""
        inner = self.container.get_wrapped_container()
        inner.reload()
        if inner.status == "paused":
            inner.unpause()
        elif inner.status != "running":
            inner.start()
        self.wait()

    def run(self, tool: str, *arguments: str) -> str:
        """See Tools.run."""
        code, output = self.container.exec([f"/opt/kafka/bin/{SCRIPTS[tool]}", *arguments])
        if code:
            raise BrokerFailed(f"{tool}: {output!r}")
        return str(output.decode())


class ContainerCluster:
    """A cluster of one broker in a container."""

    def __init__(self, folder: Path, brokers: int, extra: Mapping[str, str]) -> None:
        if brokers > 1:
            raise BrokerFailed("one broker a container is all that is written")
        from testcontainers.core.container import DockerContainer

        folder.mkdir(parents=True, exist_ok=True)
        make_certificate(folder)
        self.authority = folder / AUTHORITY
        self._ports = free_ports(3)
        settings = settings_of(0, self._ports, folder / "data", folder) | copies_of(1) | dict(extra)
        settings["controller.quorum.voters"] = f"0@127.0.0.1:{self._ports[2]}"
        properties = folder / "server.properties"
        properties.write_text(
            "".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8"
        )
        form = f"/opt/kafka/bin/kafka-storage.sh format --ignore-formatted -t kvlogTestsContainerAAAA -c {properties}"
        container = (
            DockerContainer(IMAGE, user="root", network_mode="host", entrypoint="sh")
            .with_volume_mapping(str(folder), str(folder), "rw")
            .with_command(["-c", f"{form} && exec /opt/kafka/bin/kafka-server-start.sh {properties}"])
        )
        self._container = container
        broker = ContainerBroker(folder, self._ports[0], container)
        self.tools = broker
        self.brokers = [broker]

    @property
    def bootstrap(self) -> str:
        """See Cluster.bootstrap."""
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def secure_bootstrap(self) -> str:
        """See Cluster.secure_bootstrap."""
        return f"127.0.0.1:{self._ports[1]}"

    def start(self) -> None:
        """See Cluster.start."""
        self._container.start()
        self.brokers[0].wait()

    def stop(self) -> None:
        """See Cluster.stop."""
        self._container.stop()
