"""What `KafkaLog.open` makes, checks, reports and refuses, and what operators do to topics while we run."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from contextlib import suppress
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import ConfigError, LogReplaced, LogUnavailable, OutcomeUnknown
from kvlog.ids import Offset
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted, records_topic, table_topic, wanted_records
from tests.contract.log_steps import (
    P0,
    P1,
    P2,
    ZERO,
    append,
    collect,
    outlast_unavailable,
    request,
    until,
    values_of,
)
from tests.kafka.admin import Admin
from tests.kafka.broker import free_ports

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.kafka.broker import Cluster

pytestmark = pytest.mark.kafka

RECORDS = RecordsWanted(partitions=3, replication=1)


def options(bootstrap: str, prefix: str, records: RecordsWanted = RECORDS) -> KafkaOptions:
    """Options with deadlines for a busy machine."""
    return KafkaOptions(bootstrap=bootstrap, topic_prefix=prefix, records=records, timeout_seconds=20)


@pytest.fixture
async def admin(kafka_broker: str) -> AsyncIterator[Admin]:
    """An administrator."""
    connected = Admin(kafka_broker)
    yield connected
    await connected.close()


async def said_by_open(bootstrap: str, prefix: str, records: RecordsWanted = RECORDS) -> list[str]:
    """Opens, closes, and returns the differences."""
    log = KafkaLog(options(bootstrap, prefix, records))
    try:
        return list(await log.open())
    finally:
        await log.close()


async def test_open_makes_topics_as_they_should_be(
    kafka_broker: str, kafka_prefix: str, admin: Admin
) -> None:
    """What is missing is made with the right settings, so a second open has nothing to say."""
    assert [] == await said_by_open(kafka_broker, kafka_prefix)
    assert [] == await said_by_open(kafka_broker, kafka_prefix)
    config = await admin.config(records_topic(kafka_prefix))
    expected = {
        "cleanup.policy": "delete",
        "retention.ms": "3600000",
        "segment.bytes": str(256 << 20),
        "message.timestamp.type": "LogAppendTime",
        "unclean.leader.election.enable": "false",
        "min.insync.replicas": "1",
        "max.message.bytes": "1048588",
    }
    assert expected == {setting: config[setting] for setting in expected}
    assert 3 == await admin.partitions(records_topic(kafka_prefix))
    for table in ("sessions", "nodes"):
        topic = table_topic(kafka_prefix, table)
        assert "compact" == (await admin.config(topic))["cleanup.policy"]
        assert 1 == await admin.partitions(topic)


async def test_open_by_two_at_once_makes_one_log(kafka_broker: str, kafka_prefix: str) -> None:
    """Two nodes that start together make the topics once and see the same identity."""
    logs = [KafkaLog(options(kafka_broker, kafka_prefix)) for _ in range(2)]
    try:
        await asyncio.gather(*(log.open() for log in logs))
        first, second = [await log.identity() for log in logs]
        assert first == second
    finally:
        for log in logs:
            await log.close()


async def test_open_with_another_number_of_partitions_is_refused(
    kafka_broker: str, kafka_prefix: str
) -> None:
    """P never changes: the error names both numbers and what to set."""
    await said_by_open(kafka_broker, kafka_prefix)
    with pytest.raises(ConfigError) as refused:
        await said_by_open(kafka_broker, kafka_prefix, RecordsWanted(partitions=5, replication=1))
    assert "log.partitions" == refused.value.setting
    assert {"3", "5"} <= set(re.findall(r"\b\d\b", str(refused.value.problem)))


async def test_open_with_too_small_messages_is_refused(
    kafka_broker: str, kafka_prefix: str, admin: Admin
) -> None:
    """A topic that cannot take our records is refused, with the command that mends it."""
    topic = records_topic(kafka_prefix)
    await admin.create(topic, 3, {"max.message.bytes": "100000"})
    with pytest.raises(ConfigError) as refused:
        await said_by_open(kafka_broker, kafka_prefix)
    assert "100000" in str(refused.value.problem)
    assert f"--entity-name {topic} --add-config max.message.bytes=925696" in str(refused.value.fix)


async def test_open_reports_each_difference_in_a_sentence(
    kafka_broker: str, kafka_prefix: str, admin: Admin
) -> None:
    """What differs but does not stop us is said: what is, what should be, the command; one sentence each."""
    topic = records_topic(kafka_prefix)
    config = dict(wanted_records(kafka_prefix, RECORDS, brokers=1).config)
    wrong = {
        "retention.ms": "60000",
        "message.timestamp.type": "CreateTime",
        "unclean.leader.election.enable": "true",
    }
    await admin.create(topic, 3, config | wrong)
    said = await said_by_open(kafka_broker, kafka_prefix)
    assert 3 == len(said)
    for setting, value in wrong.items():
        (sentence,) = [one for one in said if f"{setting}={value} " in one]
        assert f"should have {setting}={config[setting]}" in sentence
        assert f"--bootstrap-server {kafka_broker}" in sentence


async def test_open_with_huge_messages_reports_it(kafka_broker: str, kafka_prefix: str, admin: Admin) -> None:
    """A topic that takes larger messages than a reader means to hold is said; it can be read all the same."""
    config = dict(wanted_records(kafka_prefix, RECORDS, brokers=1).config) | {"max.message.bytes": "99000000"}
    await admin.create(records_topic(kafka_prefix), 3, config)
    (sentence,) = await said_by_open(kafka_broker, kafka_prefix)
    assert "99000000 bytes, more than a reader means to hold" in sentence


async def test_open_with_fewer_brokers_than_copies_reports_it(kafka_broker: str, kafka_prefix: str) -> None:
    """Three copies on one broker become one, and that is said for each topic."""
    said = await said_by_open(kafka_broker, kafka_prefix, RecordsWanted(partitions=3, replication=30))
    assert 3 == len([one for one in said if " of the 30 copies " in one])


async def test_open_without_broker_is_unavailable_and_names_the_address() -> None:
    """An absent broker is said at once, with where it should be; opening again is all that is needed."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    began = time.monotonic()
    with pytest.raises(LogUnavailable) as refused:
        await said_by_open(address, "t")
    assert address in str(refused.value)
    assert time.monotonic() - began < 5


async def test_open_of_a_silent_port_ends_at_its_deadline() -> None:
    """Something that accepts connections and never answers costs the deadline, no more."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        log = KafkaLog(KafkaOptions(bootstrap=address, timeout_seconds=1.0))
        began = time.monotonic()
        with pytest.raises(LogUnavailable) as refused:
            await log.open()
        assert address in str(refused.value)
        assert time.monotonic() - began < 5
        await log.close()


async def test_deleted_topic_is_not_made_by_asking_for_it(
    kafka_log: KafkaLog, kafka_prefix: str, admin: Admin
) -> None:
    """Brokers make topics for whoever asks; our readers and writers never ask like that, and wait for the operator."""
    topic = records_topic(kafka_prefix)
    writer, reader = await kafka_log.writer(), await kafka_log.reader()
    reader.assign({P0: ZERO})
    await append(writer, P0, b"old")
    await collect(reader, 1)
    await admin.delete(topic)
    pending = await writer.append(request(P0, b"pending"))
    with pytest.raises(LogUnavailable):
        await collect(reader, 1)
    with pytest.raises(LogUnavailable):
        await kafka_log.identity()
    with pytest.raises(LogUnavailable):
        await kafka_log.bounds(P0)
    assert not pending.done()
    assert not await admin.exists(topic)
    await admin.create(topic, 3)
    with pytest.raises(OutcomeUnknown) as unknown:
        await asyncio.wait_for(pending, 20)
    assert "was recreated" in str(unknown.value.problem)
    assert [0] == await append(writer, P0, b"new")


async def test_topic_recreated_and_grown_past_our_position_is_replaced(
    kafka_log: KafkaLog, kafka_prefix: str, admin: Admin
) -> None:
    """A reader that did not look while the topic was recreated and refilled gets nothing of it before it is told."""
    writer, reader = await kafka_log.writer(), await kafka_log.reader()
    await append(writer, P0, *(b"old %d" % n for n in range(5)))
    await append(writer, P1, b"old")
    reader.assign({P0: ZERO, P1: ZERO})
    await collect(reader, 6)
    before = await kafka_log.identity()
    await admin.recreate(records_topic(kafka_prefix), 3)
    other = await outlast_unavailable(kafka_log.writer)
    await asyncio.wait_for(_appended(other), 20)
    assert before != await kafka_log.identity()
    for partition in (P0, P1):
        with pytest.raises(LogReplaced) as replaced:
            await outlast_unavailable(lambda: collect(reader, 1))
        assert partition == replaced.value.fields["partition"]
        reader.seek(partition, ZERO)
    assert [b"new %d" % n for n in range(9)] == values_of(await collect(reader, 9))


async def _appended(writer) -> None:
    """The writer was made for the old topic: it says unknown once, then writes to the new one."""
    values = [b"new %d" % n for n in range(9)]
    try:
        await append(writer, P0, *values)
    except OutcomeUnknown:
        await append(writer, P0, *values)


async def test_added_partitions_stop_the_writer(kafka_log: KafkaLog, kafka_prefix: str, admin: Admin) -> None:
    """With another P sessions would be looked for in the wrong partitions: nothing is written any more."""
    topic = records_topic(kafka_prefix)
    writer = await kafka_log.writer()
    await append(writer, P0, b"0")
    await admin.add_partitions(topic, 5)
    with pytest.raises(ConfigError):
        await kafka_log.identity()
    other = await kafka_log.writer()
    with pytest.raises(ConfigError) as refused:
        await other.append(request(P0, b"1"))
    assert "log.partitions" == refused.value.setting


async def test_message_limit_lowered_under_us_refuses_all_until_it_is_raised(
    kafka_log: KafkaLog, kafka_prefix: str, admin: Admin
) -> None:
    """The first batch that the broker refuses is unknown; from then on nothing is sent, until the operator's change."""
    writer = await kafka_log.writer()
    await append(writer, P0, bytes(500_000))
    await admin.set_config(records_topic(kafka_prefix), {"max.message.bytes": "100000"})
    with pytest.raises(OutcomeUnknown) as unknown:
        await append(writer, P0, bytes(500_000))
    assert "MESSAGE_TOO_LARGE" in str(unknown.value.problem)
    with pytest.raises(ConfigError) as refused:
        await append(writer, P0, bytes(50_000))
    said = str(refused.value)
    assert all(word in said for word in (records_topic(kafka_prefix), "100000", "925696", "kafka-configs.sh"))
    await admin.set_config(records_topic(kafka_prefix), {"max.message.bytes": "925696"})
    async with asyncio.timeout(20):
        while writer.trouble is not None:
            await asyncio.sleep(0.1)
            with suppress(ConfigError):
                assert [1] == await append(writer, P0, bytes(500_000))


async def test_messages_larger_than_the_fetch_are_read(kafka_broker: str, kafka_prefix: str) -> None:
    """However small the fetch, one message always comes: nothing gets stuck."""
    log = KafkaLog(
        KafkaOptions(
            bootstrap=kafka_broker,
            topic_prefix=kafka_prefix,
            records=RECORDS,
            timeout_seconds=20,
            fetch_bytes_max=1000,
            fetch_partition_bytes=1000,
        )
    )
    await log.open()
    writer, reader = await log.writer(), await log.reader()
    for partition in (P0, P1, P2):
        await append(writer, partition, bytes(800_000), b"small", bytes(900 << 10))
    reader.assign(dict.fromkeys((P0, P1, P2), ZERO))
    read = await collect(reader, 9)
    assert [[800_000, 5, 900 << 10]] * 3 == [[len(v) for v in values_of(read, p)] for p in (P0, P1, P2)]
    await log.close()


async def test_committed_offsets_show_as_lag_in_kafkas_own_tool(
    kafka_cluster: Cluster, kafka_broker: str, kafka_prefix: str
) -> None:
    """`kafka-consumer-groups --describe` shows what we applied, the end of the log and the lag."""
    log = KafkaLog(options(kafka_broker, kafka_prefix))
    await log.open()
    group = f"{kafka_prefix}.node-a"
    writer, reader = await log.writer(), await log.reader(group=group)
    await append(writer, P0, *(b"%d" % n for n in range(10)))
    await append(writer, P1, b"x")
    reader.assign({P0: ZERO, P1: ZERO})
    await reader.commit({P0: Offset(7), P1: Offset(1)})
    arguments = ("--bootstrap-server", kafka_cluster.bootstrap, "--describe", "--group", group)
    rows = [
        line.split() for line in kafka_cluster.tools.run("groups", *arguments).splitlines() if group in line
    ]
    shown = {
        int(row[2]): tuple(int(cell) for cell in row[3:6])
        for row in rows
        if row[1] == records_topic(kafka_prefix)
    }
    assert {0: (7, 10, 3), 1: (1, 1, 0)} == shown
    await log.close()


async def test_table_after_compaction_has_newest_values_and_ends(
    kafka_cluster: Cluster, kafka_prefix: str, admin: Admin
) -> None:
    """Compaction leaves gaps in the offsets and takes tombstones away; a refresh reads over them to the end."""
    topic = table_topic(kafka_prefix, "sessions")
    eager = {"cleanup.policy": "compact", "segment.ms": "50", "min.cleanable.dirty.ratio": "0.0"}
    await admin.create(topic, 1, eager | {"delete.retention.ms": "0", "max.compaction.lag.ms": "100"})
    log = KafkaLog(options(kafka_cluster.bootstrap, kafka_prefix))
    await log.open()
    table = await log.table("sessions")
    for n in range(20):
        await table.put(b"a", b"%d" % n)
        await table.put(b"b", b"%d" % n)
    await table.put(b"b", None)
    await asyncio.sleep(0.1)
    await table.put(b"c", b"0")

    async def compacted() -> bool:
        await table.put(b"c", b"1")
        fresh = await log.table("sessions")
        rows = {row.key: row.value for row in await fresh.refresh()}
        await fresh.close()
        assert b"19" == rows[b"a"]
        return b"b" not in rows

    await until(compacted)
    assert {b"a": b"19", b"c": b"1"} == {
        row.key: row.value for row in await table.refresh() if row.value is not None
    }
    assert [] == list(await table.refresh())
    await log.close()
