"""TLS, SASL and ACLs against a real broker: what is wrong is said with the setting or the right that mends it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from kvlog.errors import ConfigError, LogUnavailable
from kvlog.ids import Offset
from kvlog.log.kafka import KafkaLog
from kvlog.log.kafka_options import KafkaOptions, SaslMechanism, Security, SecurityProtocol
from kvlog.log.topics import RecordsWanted, records_topic
from tests.contract.log_steps import P0, ZERO, append, collect, values_of
from tests.kafka.admin import Admin
from tests.kafka.broker import USERS
from tests.kafka.certificate import AUTHORITY, KEYSTORE, make_certificate

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kafka.broker import Cluster

pytestmark = pytest.mark.kafka

USER, PASSWORD = next(iter(USERS.items()))


@pytest.fixture
def secure(kafka_cluster: Cluster, kafka_prefix: str) -> KafkaOptions:
    """Options for the SASL_SSL listener, with the right password."""
    return KafkaOptions(
        bootstrap=kafka_cluster.secure_bootstrap,
        topic_prefix=kafka_prefix,
        records=RecordsWanted(partitions=3, replication=1),
        timeout_seconds=20,
        security=Security(
            protocol=SecurityProtocol.SASL_SSL,
            ssl_cafile=kafka_cluster.authority,
            username=USER,
            password=PASSWORD,
        ),
    )


async def grant(cluster: Cluster, prefix: str, *operations: str, on: str = "topic") -> None:
    """Gives the user rights on everything under a prefix."""
    admin = Admin(cluster.bootstrap)
    await admin.grant(USER, prefix, *operations, on=on)
    await admin.close()


async def make_topics(cluster: Cluster, options: KafkaOptions) -> None:
    """Makes the topics as somebody who may."""
    log = KafkaLog(replace(options, bootstrap=cluster.bootstrap, security=Security()))
    await log.open()
    await log.close()


async def refused_open(options: KafkaOptions) -> ConfigError:
    """Opens, and returns the refusal."""
    log = KafkaLog(options)
    try:
        with pytest.raises(ConfigError) as refused:
            await log.open()
        return refused.value
    finally:
        await log.close()


async def test_log_over_tls_and_sasl_with_rights_works_whole(
    kafka_cluster: Cluster, secure: KafkaOptions
) -> None:
    """With the rights that we ask for, everything works encrypted: topics, appends, reads, commits, tables."""
    await grant(kafka_cluster, secure.topic_prefix, "Create", "Describe", "DescribeConfigs", "Read", "Write")
    await grant(kafka_cluster, secure.topic_prefix, "Read", on="group")
    log = KafkaLog(secure)
    assert [] == list(await log.open())
    writer, reader = await log.writer(), await log.reader(group=f"{secure.topic_prefix}.node")
    await append(writer, P0, b"a", bytes(900_000), b"b")
    reader.assign({P0: ZERO})
    assert [b"a", bytes(900_000), b"b"] == values_of(await collect(reader, 3))
    await reader.commit({P0: Offset(3)})
    assert {P0: 3} == dict(await log.committed(f"{secure.topic_prefix}.node"))
    table = await log.table("nodes")
    await table.put(b"k", b"v")
    assert [b"k"] == [row.key for row in await table.refresh()]
    await log.close()


async def test_wrong_password_is_refused_and_not_shown(secure: KafkaOptions) -> None:
    """A refused password names the settings; neither the right nor the wrong one shows anywhere."""
    wrong = replace(secure, security=replace(secure.security, password="hunter2"))
    refused = await refused_open(wrong)
    assert "log.kafka.username, log.kafka.password" == refused.setting
    assert "hunter2" not in str(refused) + repr(refused.fields) + repr(wrong)


async def test_mechanism_that_the_broker_lacks_is_refused(secure: KafkaOptions) -> None:
    """A mechanism that is not enabled names its setting and what is enabled."""
    refused = await refused_open(
        replace(secure, security=replace(secure.security, sasl_mechanism=SaslMechanism.SCRAM_SHA_512))
    )
    assert "log.kafka.sasl_mechanism" == refused.setting


async def test_unknown_authority_is_refused(secure: KafkaOptions, tmp_path: Path) -> None:
    """A broker that nobody we trust has signed names the setting with the authorities."""
    make_certificate(tmp_path)
    stranger = replace(secure.security, ssl_cafile=tmp_path / AUTHORITY)
    refused = await refused_open(replace(secure, security=stranger))
    assert "log.kafka.ssl_cafile" == refused.setting


async def test_certificate_of_our_own_is_shown_to_the_broker(
    kafka_cluster: Cluster, secure: KafkaOptions, tmp_path: Path
) -> None:
    """The broker takes a certificate that its authority signed, and refuses a stranger's: so ours is really sent."""
    await grant(kafka_cluster, secure.topic_prefix, "Create", "Describe", "DescribeConfigs", "Read", "Write")
    known = replace(secure.security, ssl_certfile=kafka_cluster.authority.with_name(KEYSTORE))
    log = KafkaLog(replace(secure, security=known))
    await log.open()
    await log.close()
    make_certificate(tmp_path)
    stranger = replace(secure.security, ssl_certfile=tmp_path / KEYSTORE)
    refused = await refused_open(replace(secure, security=stranger))
    assert "log.kafka.ssl_certfile" in str(refused.setting)


async def test_listener_of_another_protocol_is_unavailable_with_a_hint(
    kafka_cluster: Cluster, secure: KafkaOptions
) -> None:
    """A listener that does not speak our protocol just hangs up: the error names the address and what to check."""
    plain_to_tls = replace(secure, security=Security())
    tls_to_plain = replace(secure, bootstrap=kafka_cluster.bootstrap)
    for options in (plain_to_tls, tls_to_plain):
        log = KafkaLog(replace(options, timeout_seconds=5))
        with pytest.raises(LogUnavailable) as refused:
            await log.open()
        assert options.bootstrap in str(refused.value)
        assert f"see that the listener speaks {options.security.protocol}" in str(refused.value)
        await log.close()


async def test_right_password_without_rights_names_topic_and_right(secure: KafkaOptions) -> None:
    """Somebody who may do nothing is told the first right that is missing, and on what."""
    refused = await refused_open(secure)
    assert records_topic(secure.topic_prefix) in str(refused.problem)
    assert "the right Describe" in str(refused.problem)


@pytest.mark.parametrize(("granted", "missing"), [("Write", "Read"), ("Read", "Write")])
async def test_missing_right_on_topics_is_named(
    kafka_cluster: Cluster, secure: KafkaOptions, granted: str, missing: str
) -> None:
    """A right that is missing is found when we open, not at the first append or read."""
    await make_topics(kafka_cluster, secure)
    await grant(kafka_cluster, secure.topic_prefix, granted, "DescribeConfigs")
    refused = await refused_open(secure)
    assert f"the right {missing} on topic {records_topic(secure.topic_prefix)}" in str(refused.problem)


async def test_missing_right_to_create_is_named(kafka_cluster: Cluster, secure: KafkaOptions) -> None:
    """Topics that we may not make are for the operator to make, or to allow."""
    await grant(kafka_cluster, secure.topic_prefix, "Describe", "Read", "Write")
    refused = await refused_open(secure)
    assert f"the right Create on topic {records_topic(secure.topic_prefix)}" in str(refused.problem)


async def test_missing_rights_that_we_can_do_without_are_reported(
    kafka_cluster: Cluster, secure: KafkaOptions
) -> None:
    """Settings that we may not read are said to be unchecked; a group that we may not commit to names the right."""
    await make_topics(kafka_cluster, secure)
    await grant(kafka_cluster, secure.topic_prefix, "Read", "Write")
    log = KafkaLog(secure)
    said = await log.open()
    assert 3 == len([one for one in said if "cannot be read" in one and "DescribeConfigs" in one])
    reader = await log.reader(group=f"{secure.topic_prefix}.node")
    reader.assign({P0: ZERO})
    with pytest.raises(ConfigError) as refused:
        await reader.commit({P0: ZERO})
    assert f"on group {secure.topic_prefix}.node" in str(refused.value.problem)
    await log.close()
