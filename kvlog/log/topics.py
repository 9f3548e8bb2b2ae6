"""The topics of one cluster as plain values: names, wanted settings, what differs, and how to mend it. Pure.

<prefix>.records    P partitions, deleted by time and size
<prefix>.<table>    one partition, compacted: a map of which the newest value of each key wins
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = [
    "MESSAGE_OVERHEAD_BYTES",
    "RecordsWanted",
    "TopicFound",
    "TopicWanted",
    "config_command",
    "differences",
    "message_headers",
    "records_topic",
    "refuse_unusable",
    "table_topic",
    "too_small",
    "wanted_records",
    "wanted_table",
]

MESSAGE_OVERHEAD_BYTES = 4096
"""What a message may weigh beyond its value: key (a session id, at most 256 bytes), headers, batch header (61)."""

_MESSAGE_BYTES_DEFAULT = 1_048_588
"""A broker's default for max.message.bytes: 1 MiB and a 12-byte log entry header."""

_ROLLS_A_RETENTION = 4
"""Only whole segments are deleted; so many rolls bound how long data outlives its retention (a quarter)."""

_SEGMENT_MS_MIN = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordsWanted:
    """What the operator wants of the records topic.

    Args:
        partitions: P, for ever: a session's partition is its hash modulo P.
        replication: copies of each partition; fewer brokers mean fewer copies, which `differences` says.
        insync_min: copies that must have a record before it is acknowledged.
        retention_seconds: how long a record stays at least.
        retention_bytes: most bytes a partition keeps; -1 means no such limit.
        segment_bytes: size of a log segment, the unit of deletion.
        record_bytes_max: the largest record that we write.
    """

    partitions: int = 16
    replication: int = 3
    insync_min: int = 2
    retention_seconds: int = 3600
    retention_bytes: int = -1
    segment_bytes: int = 256 << 20
    record_bytes_max: int = 900 << 10


@dataclass(frozen=True, slots=True)
class TopicWanted:
    """A topic as it should be. `message_bytes_min`: the least max.message.bytes that we can work with."""

    name: str
    partitions: int
    replication: int
    message_bytes_min: int
    config: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class TopicFound:
    """A topic as it is. `config` is None when we may not read it; `replication` is that of its weakest partition."""

    partitions: int
    replication: int
    config: Mapping[str, str] | None


def records_topic(prefix: str) -> str:
    """The name of the topic that holds the records."""
    return f"{prefix}.records"


def table_topic(prefix: str, table: str) -> str:
    """The name of a compacted table's topic."""
    return f"{prefix}.{table}"


def message_headers(kind: int, epoch: int) -> list[tuple[str, bytes]]:
    """A message's Kafka headers, in digits, so that a console consumer shows them without decoding the value."""
    return [("kind", b"%d" % kind), ("epoch", b"%d" % epoch)]


def wanted_records(prefix: str, wanted: RecordsWanted, *, brokers: int) -> TopicWanted:
    """The records topic on a cluster of so many brokers."""
    replication = min(wanted.replication, brokers)
    message_bytes = wanted.record_bytes_max + MESSAGE_OVERHEAD_BYTES
    retention_ms = wanted.retention_seconds * 1000
    return TopicWanted(
        name=records_topic(prefix),
        partitions=wanted.partitions,
        replication=replication,
        message_bytes_min=message_bytes,
        config=_durable(replication, wanted.insync_min)
        | {
            "cleanup.policy": "delete",
            "retention.ms": str(retention_ms),
            "retention.bytes": str(wanted.retention_bytes),
            "segment.bytes": str(wanted.segment_bytes),
            "segment.ms": str(max(_SEGMENT_MS_MIN, retention_ms // _ROLLS_A_RETENTION)),
            "max.message.bytes": str(max(_MESSAGE_BYTES_DEFAULT, message_bytes)),
        },
    )


def wanted_table(prefix: str, table: str, wanted: RecordsWanted, *, brokers: int) -> TopicWanted:
    """A compacted table's topic: one partition, so that one order decides which value is the newest."""
    replication = min(wanted.replication, brokers)
    return TopicWanted(
        name=table_topic(prefix, table),
        partitions=1,
        replication=replication,
        message_bytes_min=_MESSAGE_BYTES_DEFAULT,
        config=_durable(replication, wanted.insync_min)
        | {"cleanup.policy": "compact", "max.message.bytes": str(_MESSAGE_BYTES_DEFAULT)},
    )


def _durable(replication: int, insync_min: int) -> dict[str, str]:
    """The settings that every topic of ours shares. One broker may be away, so min ISR stays below the copies."""
    return {
        "min.insync.replicas": str(max(1, min(insync_min, replication - 1))),
        "unclean.leader.election.enable": "false",
        "message.timestamp.type": "LogAppendTime",
        # Payloads are compressed by us, where it pays; the broker must not do it again.
        "compression.type": "producer",
    }


def config_command(bootstrap: str, topic: str, setting: str, value: str) -> str:
    """The command with which an operator sets one topic setting."""
    return (
        f"kafka-configs.sh --bootstrap-server {bootstrap} --alter --entity-type topics --entity-name {topic}"
        f" --add-config {setting}={value}"
    )


def refuse_unusable(wanted: TopicWanted, found: TopicFound, *, bootstrap: str) -> None:
    """Refuse a topic that cannot be used as it is.

    Raises:
        ConfigError: another number of partitions (sessions would be looked for in the wrong ones), or messages or
            segments that are too small for our records.
    """
    if found.partitions != wanted.partitions:
        raise ConfigError(
            setting="log.partitions",
            problem=f"topic {wanted.name} has {found.partitions} partitions, the setting says {wanted.partitions}",
            fix=f"set log.partitions to {found.partitions}, or choose another log.topic_prefix; P never changes",
        )
    limit = None if found.config is None else found.config.get("max.message.bytes")
    if limit is not None and int(limit) < wanted.message_bytes_min:
        raise too_small(wanted.name, limit=int(limit), needed=wanted.message_bytes_min, bootstrap=bootstrap)
    segment = None if found.config is None else found.config.get("segment.bytes")
    if segment is not None and int(segment) < wanted.message_bytes_min:
        raise ConfigError(
            setting="log.kafka.segment_bytes",
            problem=f"topic {wanted.name} has segments of {segment} bytes, messages up to {wanted.message_bytes_min}",
            fix=config_command(bootstrap, wanted.name, "segment.bytes", str(RecordsWanted().segment_bytes)),
        )


def too_small(topic: str, *, limit: int, needed: int, bootstrap: str) -> ConfigError:
    """The error for a topic whose max.message.bytes is below what our messages need."""
    return ConfigError(
        setting="log.max_record_bytes",
        problem=f"topic {topic} takes messages of {limit} bytes, ours have up to {needed}",
        fix=config_command(bootstrap, topic, "max.message.bytes", str(needed)),
    )


def differences(
    wanted: TopicWanted, found: TopicFound, *, replication_wanted: int, bootstrap: str
) -> tuple[str, ...]:
    """What is not as it should be but does not stop us: one sentence each, with the command that mends it.

    Args:
        wanted: the topic as it should be on this cluster.
        found: the topic as it is.
        replication_wanted: the copies that the configuration asks for, whatever the number of brokers.
        bootstrap: the cluster's address, for the commands.
    """
    return tuple(_differences(wanted, found, replication_wanted, bootstrap))


def _differences(
    wanted: TopicWanted, found: TopicFound, replication_wanted: int, bootstrap: str
) -> Iterator[str]:
    if found.replication < replication_wanted:
        yield (
            f"Topic {wanted.name} keeps {found.replication} of the {replication_wanted} copies it should have:"
            f" start enough brokers, then kafka-reassign-partitions.sh --bootstrap-server {bootstrap}."
        )
    if found.config is None:
        yield (
            f"The settings of topic {wanted.name} cannot be read, so they were not checked:"
            f" kafka-acls.sh --bootstrap-server {bootstrap} --add --operation DescribeConfigs --topic {wanted.name}"
            " for our principal."
        )
        return
    for setting, value in wanted.config.items():
        actual = found.config.get(setting)
        if actual is None or actual == value or _is_larger(setting, actual, value):
            continue
        yield (
            f"Topic {wanted.name} has {setting}={actual} and should have {setting}={value}:"
            f" {config_command(bootstrap, wanted.name, setting, value)}."
        )


def _is_larger(setting: str, actual: str, value: str) -> bool:
    """More room for a message than we asked for is no difference."""
    return setting == "max.message.bytes" and int(actual) >= int(value)
