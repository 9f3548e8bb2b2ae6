"""How to reach a Kafka cluster and what to ask of it; checks what can be checked without a network."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError
from kvlog.limits import DEFAULT
from kvlog.log.topics import RecordsWanted

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["KafkaOptions", "SaslMechanism", "Security", "SecurityProtocol", "ssl_context"]


class SecurityProtocol(StrEnum):
    """What a listener speaks, by Kafka's own names."""

    PLAINTEXT = "PLAINTEXT"
    SSL = "SSL"
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    SASL_SSL = "SASL_SSL"


class SaslMechanism(StrEnum):
    """How we say who we are, by Kafka's own names."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """TLS and SASL settings; a password never shows in a repr.

    Args:
        protocol: what the listener at `bootstrap` speaks.
        ssl_cafile: PEM file with the authorities that we trust; None: the system's.
        ssl_certfile: PEM file with our own certificate, where brokers ask for one.
        ssl_keyfile: PEM file with its key; None: the key is in `ssl_certfile`.
        ssl_key_password: opens the key file.
        ssl_check_hostname: whether the certificate must name the host that we called.
        sasl_mechanism: used with SASL_PLAINTEXT and SASL_SSL.
        username: SASL user.
        password: SASL password.
    """

    protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    ssl_cafile: Path | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_key_password: str | None = field(default=None, repr=False)
    ssl_check_hostname: bool = True
    sasl_mechanism: SaslMechanism = SaslMechanism.PLAIN
    username: str | None = None
    password: str | None = field(default=None, repr=False)

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self.protocol in {SecurityProtocol.SSL, SecurityProtocol.SASL_SSL}

    @property
    def uses_sasl(self) -> bool:
        """Whether we have to say who we are."""
        return self.protocol in {SecurityProtocol.SASL_PLAINTEXT, SecurityProtocol.SASL_SSL}


@dataclass(frozen=True, slots=True, kw_only=True)
class KafkaOptions:
    """One cluster, one topic prefix.

    Args:
        bootstrap: `host:port`, or several with commas; one that answers is enough.
        topic_prefix: what our topics' names begin with.
        client_id: how we appear in the broker's logs and quotas.
        records: what the records topic should be like.
        security: TLS and SASL.
        timeout_seconds: how long one request, one connection attempt and `open` may take.
        append_wait_seconds: how long `append` waits for room before it gives up with nothing sent.
        pending_bytes_max: appended and not yet durable; bounds the writer's memory.
        batch_bytes_max: one partition's part of a produce request. 1 MiB is measured: 16 KiB, Kafka's default, is 2-5
            times slower; 4 MiB is no better.
        fetch_bytes_max: one fetch response of one broker; the reader holds at most two a broker.
        fetch_partition_bytes: one partition's part of it; raised to the topic's max.message.bytes.
        fetch_wait_seconds: how long a broker holds an empty fetch; bounds how late a `seek` takes effect.
        stuck_seconds: a partition with data but without progress for so long gets a new connection.
        read_only: take the topics as they are, their P too, and change nothing: no topic is made, no right to write is
            asked for, and writers and table rows are refused. For tools.
    """

    bootstrap: str
    topic_prefix: str = "kvlog"
    client_id: str = "kvlog"
    records: RecordsWanted = field(default_factory=RecordsWanted)
    security: Security = field(default_factory=Security)
    timeout_seconds: float = 30.0
    append_wait_seconds: float = 30.0
    pending_bytes_max: int = DEFAULT.publish_queue_bytes
    batch_bytes_max: int = 1 << 20
    fetch_bytes_max: int = 8 << 20
    fetch_partition_bytes: int = 2 << 20
    fetch_wait_seconds: float = 0.1
    stuck_seconds: float = 20.0
    read_only: bool = False

    @property
    def where(self) -> str:
        """The URL for people."""
        return f"kafka://{self.bootstrap}"

    def addresses(self) -> tuple[tuple[str, int], ...]:
        """The bootstrap addresses.

        Raises:
            ConfigError: one of them is not `host:port`.
        """
        return tuple(_address(part.strip()) for part in self.bootstrap.split(","))


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
        raise ConfigError(setting="log.url", problem=f"{text!r} is not host:port", fix="write host:9092")
    return host.strip("[]"), int(port)


def ssl_context(security: Security) -> ssl.SSLContext | None:
    """The TLS side of a connection; None without TLS.

    Raises:
        ConfigError: a file is missing or is not what it should be, or a setting lacks its partner.
    """
    if security.uses_sasl and (security.username is None or security.password is None):
        raise ConfigError(
            setting="log.kafka.username, log.kafka.password",
            problem=f"{security.protocol} needs both",
            fix="set both, or another log.kafka.security_protocol",
        )
    if not security.uses_tls:
        return None
    context = _trusting(security)
    context.check_hostname = security.ssl_check_hostname
    if security.ssl_certfile is None:
        return context
    try:
        context.load_cert_chain(security.ssl_certfile, security.ssl_keyfile, security.ssl_key_password or "")
    except (OSError, ValueError) as error:
        raise _bad_file("log.kafka.ssl_certfile", security.ssl_certfile, error) from error
    return context


def _trusting(security: Security) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=security.ssl_cafile)
    except (OSError, ValueError) as error:
        raise _bad_file("log.kafka.ssl_cafile", security.ssl_cafile, error) from error


def _bad_file(setting: str, path: Path | None, error: Exception) -> ConfigError:
    return ConfigError(
        setting=setting,
        problem=f"{path}: {error}",
        fix="name a PEM file that this process may read",
    )
