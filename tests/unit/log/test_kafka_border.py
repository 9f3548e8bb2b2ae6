"""Errors, options and requests: what crosses the border to aiokafka."""

from __future__ import annotations

import asyncio
import io
import ssl
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from aiokafka import errors as kafka
from aiokafka.protocol.produce import ProduceRequest_v7

from kvlog.errors import ConfigError, DecodeError, LogUnavailable
from kvlog.log.kafka_errors import FETCH, PRODUCE, Code, Then, code_name, denied, translate, unavailable
from kvlog.log.kafka_options import KafkaOptions, Security, SecurityProtocol, ssl_context
from kvlog.log.kafka_protocol import (
    FetchById,
    FetchPart,
    ProduceBatches,
    TopicMetadata,
    show_topic_id,
    unpack_epoch_end,
)
from tests.processes import die_with_parent

VERSIONS = {0: (3, 11), 1: (4, 17), 3: (0, 13)}


# --------------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("error", "setting"),
    [
        (kafka.SaslAuthenticationFailed("no"), "log.kafka.username, log.kafka.password"),
        (kafka.IllegalSaslStateError(), "log.kafka.username, log.kafka.password"),
        (kafka.UnsupportedSaslMechanismError("PLAIN"), "log.kafka.sasl_mechanism"),
        (ssl.SSLCertVerificationError("self-signed"), "log.kafka.ssl_cafile"),
        (ssl.SSLError("wrong version number"), "log.kafka.security_protocol, log.kafka.ssl_certfile"),
        (NotImplementedError("Fetch v11"), "log.url"),
        (kafka.IncompatibleBrokerVersion("old"), "log.url"),
    ],
)
def test_error_that_only_the_operator_can_mend_names_the_setting(error: Exception, setting: str) -> None:
    """A wrong password does not become right by waiting."""
    told = translate(error, where="b:9092")
    assert (ConfigError, setting) == (type(told), told.setting)
    assert "b:9092" in str(told.problem)
    assert told.fix


@pytest.mark.parametrize(
    "error",
    [
        ConnectionRefusedError(111, "Connection refused"),
        ConnectionResetError(),
        TimeoutError(),
        OSError("no route"),
        EOFError(),
        ssl.SSLEOFError("closed"),
        kafka.KafkaConnectionError("closed"),
        kafka.CorrelationIdError(),
        asyncio.IncompleteReadError(b"", 4),
    ],
)
def test_error_that_may_pass_is_unavailable_with_its_address(error: Exception) -> None:
    """Everything of the network is worth another try, and says something, whatever little the error said."""
    told = translate(error, where="b:9092")
    assert (LogUnavailable, "b:9092") == (type(told), told.where)
    assert told.problem


def test_cause_of_an_error_is_said() -> None:
    """Aiokafka hides why a connection closed in the cause."""
    error = kafka.KafkaConnectionError("Connection at b:9092 closed")
    error.__cause__ = ConnectionResetError(104, "reset by peer")
    assert "reset by peer" in str(translate(error, where="b:9092").problem)


def test_our_own_errors_pass_unchanged() -> None:
    """What was translated is not translated again."""
    ours = DecodeError(problem="x")
    assert ours is translate(ours, where="b")


def test_operators_trouble_is_worth_waiting_for_while_we_run() -> None:
    """A password that is refused in mid-run may be one that is being changed."""
    refused = translate(kafka.SaslAuthenticationFailed("no"), where="b")
    told = unavailable(refused, where="kafka://b")
    assert (LogUnavailable, "kafka://b") == (type(told), told.where)
    assert "log.kafka.password" in str(told.problem)
    assert told is unavailable(told, where="elsewhere")


def test_denied_names_right_resource_and_command() -> None:
    """The operator can copy the command."""
    told = denied(right="Write", resource="topic kvlog.records")
    assert "the right Write on topic kvlog.records" in str(told.problem)
    assert "--operation Write --topic kvlog.records" in str(told.fix)
    assert str(denied(right="IdempotentWrite", resource="cluster").fix).endswith("--cluster")


def test_codes_have_kafkas_names() -> None:
    """Also those that mean nothing to us, and those that nobody knows."""
    assert "NOT_LEADER_OR_FOLLOWER" == code_name(6)
    assert "InvalidGroupIdError (24)" == code_name(24)
    assert "9999" in code_name(9999)


def test_every_code_that_we_name_is_where_kafka_has_it() -> None:
    """Our numbers are aiokafka's, where it knows them."""
    for code in Code:
        known = kafka.kafka_errors.get(int(code))
        words = "".join(part.capitalize() for part in code.name.split("_")[:2])
        if known is not None:
            assert words[:5].lower() in known.__name__.lower() or code in {0, 2, 6, 8, 10, 13, 14, 18, 47, -1}


def test_a_sequence_gap_is_fatal_and_a_missing_leader_is_not() -> None:
    """The two ends of the produce table; a fetch treats nothing as fatal."""
    assert Code.OUT_OF_ORDER_SEQUENCE_NUMBER not in PRODUCE
    assert PRODUCE[Code.LEADER_NOT_AVAILABLE] is Then.AGAIN
    assert Then.FATAL not in FETCH.values()


# -------------------------------------------------------------------------------------------------------- options


def test_passwords_do_not_show() -> None:
    """Options may be printed."""
    security = Security(
        protocol=SecurityProtocol.SASL_SSL, username="u", password="hunter2", ssl_key_password="hunter3"
    )
    assert "hunter" not in repr(KafkaOptions(bootstrap="b:9092", security=security))


@pytest.mark.parametrize(
    "bootstrap", ["", "host", "host:", ":9092", "host:0", "host:99999", "a:1,", "a:1,b", "a:b:c"]
)
def test_bootstrap_that_is_no_address_is_refused(bootstrap: str) -> None:
    """It says which part, and what to write."""
    with pytest.raises(ConfigError) as refused:
        KafkaOptions(bootstrap=bootstrap).addresses()
    assert "log.url" == refused.value.setting


def test_bootstrap_may_name_several_brokers() -> None:
    """With commas, spaces, and IPv6 in brackets."""
    assert (("a", 1), ("b.c", 9092), ("::1", 9)) == KafkaOptions(
        bootstrap="a:1, b.c:9092,[::1]:9"
    ).addresses()


@pytest.mark.parametrize(
    ("security", "setting"),
    [
        (
            Security(protocol=SecurityProtocol.SASL_SSL, username="u"),
            "log.kafka.username, log.kafka.password",
        ),
        (Security(protocol=SecurityProtocol.SASL_PLAINTEXT), "log.kafka.username, log.kafka.password"),
        (Security(protocol=SecurityProtocol.SSL, ssl_cafile=Path("/nowhere.pem")), "log.kafka.ssl_cafile"),
        (
            Security(protocol=SecurityProtocol.SSL, ssl_certfile=Path("/nowhere.pem")),
            "log.kafka.ssl_certfile",
        ),
    ],
)
def test_security_that_cannot_work_is_refused(security: Security, setting: str) -> None:
    """Before anything is connected."""
    with pytest.raises(ConfigError) as refused:
        ssl_context(security)
    assert setting == refused.value.setting


def test_file_that_is_no_certificate_is_refused(tmp_path: Path) -> None:
    """It names the file."""
    file = tmp_path / "authority.pem"
    file.write_text("no certificate", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        ssl_context(Security(protocol=SecurityProtocol.SSL, ssl_cafile=file))
    assert str(file) in str(refused.value.problem)


def test_plaintext_needs_no_tls() -> None:
    """No context without TLS, a checking one with it."""
    assert ssl_context(Security()) is None
    context = ssl_context(Security(protocol=SecurityProtocol.SSL))
    assert context is not None
    assert (True, ssl.CERT_REQUIRED) == (context.check_hostname, context.verify_mode)


# ------------------------------------------------------------------------------------------------------- requests


def test_produce_request_is_aiokafkas_byte_for_byte() -> None:
    """We join the parts once; the bytes are the same."""
    batches = {3: bytearray(b"three"), 1: bytearray(b"")}
    ours = ProduceBatches("töpic", batches, timeout_ms=1234).prepare(VERSIONS)
    rows = [(partition, bytes(data)) for partition, data in batches.items()]
    theirs = ProduceRequest_v7(None, -1, 1234, [("töpic", rows)])
    assert theirs.encode() == ours.encode()
    assert "töpic" in repr(ours)


def test_fetch_request_bytes_are_as_the_protocol_says() -> None:
    """Fetch v13: fields in order, compact lengths one larger, no tags."""
    request = FetchById(
        bytes(range(16)), [FetchPart(2, 7, 5)], bytes_max=100, partition_bytes_max=50, wait_ms=10
    )
    part = struct.pack(">iiqiqi", 2, -1, 7, 5, -1, 50) + b"\0"
    topics = b"\x02" + bytes(range(16)) + b"\x02" + part + b"\0"
    expected = struct.pack(">iiiibii", -1, 10, 1, 100, 0, 0, -1) + topics + b"\x01" + b"\x01" + b"\0"
    assert expected == request.prepare(VERSIONS).encode()


def test_metadata_request_makes_no_topic() -> None:
    """Metadata v12: topic by name, auto creation off, our rights asked for."""
    expected = b"\x02" + bytes(16) + b"\x02t" + b"\0" + b"\0" + b"\x01" + b"\0"
    assert expected == TopicMetadata("t").prepare(VERSIONS).encode()
    assert b"\x01\0\x01\0" == TopicMetadata(None).prepare(VERSIONS).encode()


def test_fetch_response_is_read_as_the_protocol_says() -> None:
    """Fetch v13: each field is where Kafka writes it, the diverging epoch's tag too."""
    diverging = struct.pack(">iq", 4, 99) + b"\0"
    tags = b"\x01\0" + bytes([len(diverging)]) + diverging
    row = struct.pack(">ihqqq", 1, 0, 10, 11, 2) + b"\0" + struct.pack(">i", -1) + b"\x04abc" + tags
    data = struct.pack(">ihi", 0, 0, 0) + b"\x02" + bytes(range(16)) + b"\x02" + row + b"\0" + b"\0"
    response = (
        FetchById(b"", [], bytes_max=1, partition_bytes_max=1, wait_ms=1).prepare(VERSIONS).RESPONSE_TYPE
    )
    decoded = response.decode(io.BytesIO(data))
    ((topic_id, ((partition, code, high, _, start, aborted, _, records, found),), _),) = decoded.topics
    assert (bytes(range(16)), 1, 0, 10, 2, None, b"abc") == (
        topic_id,
        partition,
        code,
        high,
        start,
        aborted,
        records,
    )
    assert (4, 99) == unpack_epoch_end(found[0])


@pytest.mark.parametrize(
    "request_", [TopicMetadata("t"), FetchById(b"", [], bytes_max=1, partition_bytes_max=1, wait_ms=1)]
)
def test_broker_that_is_too_old_is_refused(request_: TopicMetadata | FetchById) -> None:
    """A broker that does not have the request's version is named as too old by the border."""
    with pytest.raises(NotImplementedError) as refused:
        request_.prepare({1: (0, 11), 3: (0, 9)})
    assert "Kafka 3.1 or newer" in str(translate(refused.value, where="b").fix)


def test_topic_id_shows_as_in_kafkas_tools() -> None:
    """URL-safe base64 without padding, 22 characters."""
    assert "AAECAwQFBgcICQoLDA0ODw" == show_topic_id(bytes(range(16)))


def test_allocator_is_tuned_once_in_a_process_of_its_own() -> None:
    """On glibc both thresholds are taken, and the process goes on."""
    script = (
        "from kvlog.log.allocator import tune_allocator; print(tune_allocator(), len(bytearray(64 << 20)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, preexec_fn=die_with_parent
    )
    assert done.stdout in {"True 67108864\n", "False 67108864\n"}
