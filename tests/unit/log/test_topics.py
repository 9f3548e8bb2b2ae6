"""Names, wanted settings and differences of topics."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlog.errors import ConfigError
from kvlog.log.topics import (
    RecordsWanted,
    TopicFound,
    differences,
    message_headers,
    records_topic,
    refuse_unusable,
    table_topic,
    wanted_records,
    wanted_table,
)

WANTED = wanted_records("kvlog", RecordsWanted(), brokers=3)
FITTING = TopicFound(partitions=16, replication=3, config=WANTED.config)


def said(found: TopicFound) -> tuple[str, ...]:
    """The differences from WANTED."""
    return differences(WANTED, found, replication_wanted=3, bootstrap="b:9092")


def test_names_begin_with_the_prefix() -> None:
    """Each topic is the prefix, a dot, and what it holds."""
    assert ("kvlog.records", "kvlog.sessions") == (records_topic("kvlog"), table_topic("kvlog", "sessions"))


def test_headers_are_digits() -> None:
    """Kind and epoch are readable in a console."""
    assert [("kind", b"2"), ("epoch", b"1234567890123")] == message_headers(2, 1234567890123)


def test_wanted_records_keep_data_for_its_retention_and_a_quarter() -> None:
    """Records are deleted by time in whole segments, which roll four times a retention."""
    assert ("delete", "3600000", "900000") == tuple(
        WANTED.config[setting] for setting in ("cleanup.policy", "retention.ms", "segment.ms")
    )


@pytest.mark.parametrize(
    ("brokers", "copies", "insync"), [(1, 1, "1"), (2, 2, "1"), (3, 3, "2"), (9, 3, "2")]
)
def test_wanted_copies_follow_the_brokers(brokers: int, copies: int, insync: str) -> None:
    """There are no more copies than brokers, and one broker may always be away."""
    wanted = wanted_records("kvlog", RecordsWanted(), brokers=brokers)
    assert (copies, insync) == (wanted.replication, wanted.config["min.insync.replicas"])


def test_wanted_message_size_follows_the_record_size() -> None:
    """Small records leave the broker's default, large ones raise it by key and headers."""
    assert "1048588" == WANTED.config["max.message.bytes"]
    large = wanted_records("kvlog", RecordsWanted(record_bytes_max=4 << 20), brokers=3)
    assert str((4 << 20) + 4096) == large.config["max.message.bytes"]


def test_wanted_table_is_one_compacted_partition() -> None:
    """One order decides which value is the newest."""
    table = wanted_table("kvlog", "nodes", RecordsWanted(), brokers=3)
    assert ("kvlog.nodes", 1, "compact") == (table.name, table.partitions, table.config["cleanup.policy"])


def test_fitting_topic_has_no_differences() -> None:
    """Nothing is said of a topic that is as it should be, or has more room for a message."""
    assert () == said(FITTING)
    assert () == said(replace(FITTING, config=dict(WANTED.config) | {"max.message.bytes": "9999999"}))


@pytest.mark.parametrize("setting", sorted(set(WANTED.config) - {"max.message.bytes"}))
def test_each_differing_setting_is_one_sentence(setting: str) -> None:
    """It says what is, what should be, and the command."""
    (sentence,) = said(replace(FITTING, config=dict(WANTED.config) | {setting: "other"}))
    assert f"{setting}=other and should have {setting}={WANTED.config[setting]}" in sentence
    assert f"--entity-name kvlog.records --add-config {setting}={WANTED.config[setting]}" in sentence


def test_fewer_copies_are_one_sentence() -> None:
    """It says how many there are, and how many there should be."""
    (sentence,) = said(replace(FITTING, replication=1))
    assert "keeps 1 of the 3 copies" in sentence


def test_unreadable_settings_are_one_sentence() -> None:
    """What could not be checked is said, with the right that it takes."""
    (sentence,) = said(replace(FITTING, config=None))
    assert "were not checked" in sentence
    assert "DescribeConfigs" in sentence


@pytest.mark.parametrize(
    ("found", "setting", "numbers"),
    [
        (replace(FITTING, partitions=8), "log.partitions", ("8", "16")),
        (
            replace(FITTING, config=dict(WANTED.config) | {"max.message.bytes": "925695"}),
            "log.max_record_bytes",
            ("925695", "925696"),
        ),
        (
            replace(FITTING, config=dict(WANTED.config) | {"segment.bytes": "900000"}),
            "log.kafka.segment_bytes",
            ("900000", "925696"),
        ),
    ],
)
def test_unusable_topic_is_refused(found: TopicFound, setting: str, numbers: tuple[str, ...]) -> None:
    """Another P and sizes below our records stop us; both numbers are named, and what to do."""
    with pytest.raises(ConfigError) as refused:
        refuse_unusable(WANTED, found, bootstrap="b:9092")
    assert setting == refused.value.setting
    assert all(number in str(refused.value.problem) for number in numbers)
    assert refused.value.fix


@pytest.mark.parametrize("found", [FITTING, replace(FITTING, config=None), replace(FITTING, replication=1)])
def test_usable_topic_is_not_refused(found: TopicFound) -> None:
    """What can be used is used."""
    refuse_unusable(WANTED, found, bootstrap="b:9092")
