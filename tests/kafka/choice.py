"""Where the tests get a real Kafka from: the first of these that works.

1. KVLOG_TEST_KAFKA=host:port, a cluster that is there.
2. KVLOG_KAFKA_HOME, a folder with Kafka's jars, and Java 17.
3. A container engine (unproven).
4. Maven and Java 17: the jars of pom.xml, into a cache folder.

Tests that kill or damage a broker need one of their own: with 1, that is the first of the others that works.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.kafka.broker import BrokerFailed, JarCluster, JarTools, jars_in
from tests.kafka.container import IMAGE, ContainerCluster, why_no_engine
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.kafka.broker import Cluster

    Make = Callable[[Path, int, Mapping[str, str]], Cluster]

__all__ = ["CLUSTER_VARIABLE", "HOME_VARIABLE", "Choice", "WrongSetting", "choose"]

CLUSTER_VARIABLE = "KVLOG_TEST_KAFKA"
HOME_VARIABLE = "KVLOG_KAFKA_HOME"
JAVA_MIN = 17
MAVEN_SECONDS = 90.0
POM = Path(__file__).with_name("pom.xml")


class WrongSetting(Exception):
    """A variable is set and what it names does not work: the run must not go on as if it were not set."""


@dataclass(frozen=True)
class Choice:
    """What was chosen.

    Args:
        said: One line for the test header.
        cluster: Address of a cluster that is there; None: start one.
        make: Makes a cluster in a folder, of so many brokers with these settings, not started; None: there is no way
            to start one.
        is_asked_for: One of the variables is set, so a skipped test is a failed run.
    """

    said: str
    cluster: str | None
    make: Make | None
    is_asked_for: bool

    @property
    def has_broker(self) -> bool:
        """Whether tests against a real Kafka can run at all."""
        return self.cluster is not None or self.make is not None


def java_version() -> int:
    """Reads Java's major version; 0 without Java."""
    java = shutil.which("java")
    if java is None:
        return 0
    said = subprocess.run(
        [java, "-version"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=die_with_parent,
    ).stderr
    found = re.search(r'version "(\d+)', said)
    return int(found[1]) if found else 0


def choose(environment: Mapping[str, str] = os.environ) -> Choice:
    """Chooses.

    Raises:
        WrongSetting: HOME_VARIABLE is set and has no jars, or there is no Java for it.
    """
    cluster = environment.get(CLUSTER_VARIABLE) or None
    make, said = _own(environment)
    if cluster is not None:
        return Choice(
            f"{CLUSTER_VARIABLE}={cluster}; brokers to kill: {said}", cluster, make, is_asked_for=True
        )
    return Choice(said, None, make, is_asked_for=bool(environment.get(HOME_VARIABLE)))


def _own(environment: Mapping[str, str]) -> tuple[Make | None, str]:
    home = environment.get(HOME_VARIABLE)
    java = java_version()
    if home:
        jars = jars_in(Path(home))
        if jars is None or java < JAVA_MIN:
            raise WrongSetting(
                f"{HOME_VARIABLE}={home}: jars {jars}, Java {java or 'not found'}; needs Java {JAVA_MIN}"
            )
        return _from(jars), f"{HOME_VARIABLE} (jars, Java {java})"
    no_engine = why_no_engine()
    if no_engine is None:
        return ContainerCluster, f"container {IMAGE} (unproven)"
    maven = shutil.which("mvn")
    if maven is None or java < JAVA_MIN:
        return None, f"none: no {HOME_VARIABLE}; {no_engine}; no Maven with Java {JAVA_MIN}"
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlog-tests" / "kafka-4.3.1"

    def make(folder: Path, brokers: int, extra: Mapping[str, str]) -> Cluster:
        return JarCluster(folder, JarTools(_fetched(maven, cache)), brokers, extra)

    return make, f"the jars that Maven puts into {cache} (Java {java})"


def _from(jars: Path) -> Make:
    return lambda folder, brokers, extra: JarCluster(folder, JarTools(jars), brokers, extra)


def _fetched(maven: str, cache: Path) -> Path:
    """Fetches the jars of pom.xml unless they are in the cache."""
    jars = jars_in(cache)
    if jars is not None:
        return jars
    copy = ["dependency:copy-dependencies", f"-DoutputDirectory={cache}"]
    command = [maven, "-q", "-B", "-f", str(POM), *copy]
    try:
        subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=MAVEN_SECONDS,
            check=True,
            preexec_fn=die_with_parent,
        )
    except subprocess.CalledProcessError as error:
        first = next((line for line in error.stdout.splitlines() if line.strip()), "")
        raise BrokerFailed(f"Maven cannot fetch the jars: {first[:200]}") from error
    except subprocess.TimeoutExpired as error:
        raise BrokerFailed(f"Maven did not fetch the jars within {MAVEN_SECONDS} s") from error
    jars = jars_in(cache)
    if jars is None:
        raise BrokerFailed(f"Maven fetched no Kafka into {cache}")
    return jars
