"""The files under deploy/ say what the code and the documents rely on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.processes import die_with_parent

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy/systemd/kvlogd.service"
COMPOSE = ROOT / "deploy/compose/compose.yaml"


def parse_unit(text: str) -> dict[str, dict[str, list[str]]]:
    """Reads a unit file: each key of a section has a list, since keys repeat."""
    sections: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in text.splitlines():
        if line.startswith("["):
            section = line.strip("[]")
            sections[section] = {}
        elif line and line[0] not in "#;":
            key, separator, value = line.partition("=")
            assert separator, f"not an assignment: {line}"
            sections[section].setdefault(key, []).append(value)
    return sections


@pytest.fixture(name="service")
def parsed_service() -> dict[str, list[str]]:
    """Gives the [Service] section."""
    return parse_unit(UNIT.read_text(encoding="utf-8"))["Service"]


def test_unit_starts_a_checked_configuration_under_a_watchdog(service: dict[str, list[str]]) -> None:
    """The configuration is checked before each start, and the daemon reports for itself."""
    assert service["Type"] == ["notify"]
    assert service["WatchdogSec"] == ["30"]
    assert service["RuntimeDirectory"] == ["kvlog"]
    assert service["ExecStartPre"][0].split()[1:] == ["check-config", "--config", "/etc/kvlog/kvlogd.toml"]
    assert service["ExecStart"][0].split()[1:] == ["run", "--config", "/etc/kvlog/kvlogd.toml"]


def test_unit_sets_both_allocator_thresholds(service: dict[str, list[str]]) -> None:
    """One threshold without the other makes the daemon slower."""
    assert service["Environment"] == [
        f"MALLOC_MMAP_THRESHOLD_={32 << 20}",
        f"MALLOC_TRIM_THRESHOLD_={512 << 20}",
    ]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("NoNewPrivileges", "yes"),
        ("CapabilityBoundingSet", ""),
        ("ProtectSystem", "strict"),
        ("ProtectHome", "yes"),
        ("LimitMEMLOCK", "infinity"),
        ("LimitCORE", "0"),
        ("SystemCallFilter", "@system-service"),
    ],
)
def test_unit_is_hardened(service: dict[str, list[str]], key: str, value: str) -> None:
    """The daemon holds users' conversations: it gets no privilege, writes where it must, and leaves no core file."""
    assert service[key] == [value]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
def test_unit_is_accepted_by_systemd(tmp_path: Path) -> None:
    """Systemd itself finds no unknown key and no bad value."""
    unit = tmp_path / UNIT.name
    unit.write_text(
        UNIT.read_text(encoding="utf-8").replace("/opt/kvlog/bin/kvlogd", "/bin/true"), encoding="utf-8"
    )
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=die_with_parent)
    assert (done.returncode, done.stderr) == (0, "")


def test_compose_cluster_loses_no_acknowledged_record() -> None:
    """Three brokers, two of which must have a record, and no election of one that has not."""
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert sorted(services) == ["kafka-1", "kafka-2", "kafka-3"]
    for number, broker in enumerate(services.values(), 1):
        settings = broker["environment"]
        assert broker["image"] == "apache/kafka:4.3.1"
        assert settings["KAFKA_NODE_ID"] == number
        assert settings["KAFKA_DEFAULT_REPLICATION_FACTOR"] == 3
        assert settings["KAFKA_MIN_INSYNC_REPLICAS"] == 2
        assert settings["KAFKA_UNCLEAN_LEADER_ELECTION_ENABLE"] == "false"
        assert settings["KAFKA_LOG_MESSAGE_TIMESTAMP_TYPE"] == "LogAppendTime"
        assert settings["KAFKA_OFFSETS_TOPIC_REPLICATION_FACTOR"] == 3


def test_compose_cluster_is_reachable_from_this_machine_only() -> None:
    """A broker without passwords listens on the loopback address."""
    services = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    assert {port.split(":")[0] for broker in services.values() for port in broker["ports"]} == {"127.0.0.1"}
