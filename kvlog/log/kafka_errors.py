"""The border: every error of aiokafka, of its sockets and of a broker's answers becomes one of kvlog's, here.

A broker answers with numbers. Each request reads them by its own table (PRODUCE, FETCH), because the same number asks
for different things: a topic that is not there yet is worth waiting for, a sequence gap is not.
Source of the numbers: https://kafka.apache.org/protocol#protocol_error_codes
"""

from __future__ import annotations

import ssl
from enum import Enum, IntEnum
from typing import TYPE_CHECKING

from aiokafka import errors as kafka

from kvlog.errors import ConfigError, KvlogError, LogUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "FETCH",
    "PRODUCE",
    "Code",
    "Then",
    "code_name",
    "denied",
    "translate",
    "unavailable",
]


class Code(IntEnum):
    """A broker's error numbers, by Kafka's names: those that mean something to us."""

    UNKNOWN_SERVER_ERROR = -1
    NONE = 0
    OFFSET_OUT_OF_RANGE = 1
    CORRUPT_MESSAGE = 2
    UNKNOWN_TOPIC_OR_PARTITION = 3
    LEADER_NOT_AVAILABLE = 5
    NOT_LEADER_OR_FOLLOWER = 6
    REQUEST_TIMED_OUT = 7
    BROKER_NOT_AVAILABLE = 8
    REPLICA_NOT_AVAILABLE = 9
    MESSAGE_TOO_LARGE = 10
    NETWORK_EXCEPTION = 13
    COORDINATOR_LOAD_IN_PROGRESS = 14
    COORDINATOR_NOT_AVAILABLE = 15
    NOT_COORDINATOR = 16
    RECORD_LIST_TOO_LARGE = 18
    NOT_ENOUGH_REPLICAS = 19
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20
    TOPIC_AUTHORIZATION_FAILED = 29
    GROUP_AUTHORIZATION_FAILED = 30
    CLUSTER_AUTHORIZATION_FAILED = 31
    TOPIC_ALREADY_EXISTS = 36
    INVALID_REPLICATION_FACTOR = 38
    NOT_CONTROLLER = 41
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45
    DUPLICATE_SEQUENCE_NUMBER = 46
    INVALID_PRODUCER_EPOCH = 47
    CONCURRENT_TRANSACTIONS = 51
    KAFKA_STORAGE_ERROR = 56
    UNKNOWN_PRODUCER_ID = 59
    FENCED_LEADER_EPOCH = 74
    UNKNOWN_LEADER_EPOCH = 75
    OFFSET_NOT_AVAILABLE = 78
    THROTTLING_QUOTA_EXCEEDED = 89
    UNKNOWN_TOPIC_ID = 100
    INCONSISTENT_TOPIC_ID = 103


class Then(Enum):
    """What an answer asks for."""

    DONE = "done"
    AGAIN = "try again, after a look at who leads the partition"
    TOPIC = "see whether the topic is still the one we know"
    POSITION = "the position is outside the log, or in another history"
    DENIED = "we lack a right"
    FATAL = "give up everything that is pending"


_AGAIN: dict[int, Then] = dict.fromkeys(
    (
        Code.LEADER_NOT_AVAILABLE,
        Code.NOT_LEADER_OR_FOLLOWER,
        Code.REQUEST_TIMED_OUT,
        Code.BROKER_NOT_AVAILABLE,
        Code.REPLICA_NOT_AVAILABLE,
        Code.NETWORK_EXCEPTION,
        Code.KAFKA_STORAGE_ERROR,
        Code.FENCED_LEADER_EPOCH,
        Code.UNKNOWN_LEADER_EPOCH,
        Code.OFFSET_NOT_AVAILABLE,
        Code.THROTTLING_QUOTA_EXCEEDED,
    ),
    Then.AGAIN,
)
_TOPIC: dict[int, Then] = dict.fromkeys(
    (Code.UNKNOWN_TOPIC_OR_PARTITION, Code.UNKNOWN_TOPIC_ID, Code.INCONSISTENT_TOPIC_ID), Then.TOPIC
)

PRODUCE: Mapping[int, Then] = {
    **_AGAIN,
    **_TOPIC,
    Code.NONE: Then.DONE,
    # The broker has the batch and no longer knows its offset.
    Code.DUPLICATE_SEQUENCE_NUMBER: Then.DONE,
    Code.NOT_ENOUGH_REPLICAS: Then.AGAIN,
    Code.NOT_ENOUGH_REPLICAS_AFTER_APPEND: Then.AGAIN,
    # Damaged on the way: the same bytes again, under the same sequence number.
    Code.CORRUPT_MESSAGE: Then.AGAIN,
}
"""What an answer to a produce request asks for; a number that is not here is fatal."""

FETCH: Mapping[int, Then] = {
    **_AGAIN,
    **_TOPIC,
    Code.NONE: Then.DONE,
    Code.OFFSET_OUT_OF_RANGE: Then.POSITION,
    Code.TOPIC_AUTHORIZATION_FAILED: Then.DENIED,
}
"""What an answer to a fetch request asks for; a number that is not here is worth another try, and is said."""


def code_name(code: int) -> str:
    """Kafka's name of an error number, for people."""
    try:
        return Code(code).name
    except ValueError:
        return f"{kafka.for_code(code).__name__} ({code})"


def denied(*, right: str, resource: str) -> ConfigError:
    """The error for a right that we lack, for example `Write` on `topic kvlog.records`."""
    kind, _, name = resource.partition(" ")
    return ConfigError(
        setting="the cluster's ACLs",
        problem=f"our principal lacks the right {right} on {resource}",
        fix=f"kafka-acls.sh --add --allow-principal User:... --operation {right} --{kind} {name}".rstrip(),
    )


def translate(error: BaseException, *, where: str) -> KvlogError:
    """The kvlog error for whatever a connection raised.

    Returns: ConfigError where only the operator can help (password, certificate, old broker), else LogUnavailable.
    """
    match error:
        case KvlogError():
            return error
        case kafka.KafkaConnectionError(__cause__=ssl.SSLError() as cause):
            # TLS 1.3 refuses a client's certificate after the handshake, when we already wait for an answer.
            return translate(cause, where=where)
        case kafka.UnsupportedSaslMechanismError():
            return _config(
                "log.kafka.sasl_mechanism", where, error, "use a mechanism that the broker enables"
            )
        case kafka.SaslAuthenticationFailed() | kafka.IllegalSaslStateError():
            return _config("log.kafka.username, log.kafka.password", where, error, "correct the credentials")
        case NotImplementedError() | kafka.IncompatibleBrokerVersion():
            return _config("log.url", where, error, "kvlog needs Kafka 3.1 or newer: use such a cluster")
        case ssl.SSLEOFError() | ssl.SSLZeroReturnError():
            return _unavailable(where, error)
        case ssl.SSLCertVerificationError():
            return _config("log.kafka.ssl_cafile", where, error, "trust the authority that signed the broker")
        case ssl.SSLError():
            return _config(
                "log.kafka.security_protocol, log.kafka.ssl_certfile", where, error, "match the listener"
            )
        case _:
            return _unavailable(where, error)


def unavailable(error: KvlogError, *, where: str) -> LogUnavailable:
    """The same trouble while we run: an operator may be changing a password just now, so we wait and say so."""
    return error if isinstance(error, LogUnavailable) else LogUnavailable(where=where, problem=str(error))


def _config(setting: str, where: str, error: BaseException, fix: str) -> ConfigError:
    return ConfigError(setting=setting, problem=f"{where}: {_said(error)}", fix=fix)


def _unavailable(where: str, error: BaseException) -> LogUnavailable:
    return LogUnavailable(where=where, problem=_said(error))


def _said(error: BaseException) -> str:
    """What the error says; many of the network's say nothing, and then their cause or their name has to do."""
    if isinstance(error, TimeoutError) and not str(error):
        return "no answer in time"
    text = str(error) or type(error).__name__
    return f"{text} ({_said(error.__cause__)})" if error.__cause__ is not None else text
