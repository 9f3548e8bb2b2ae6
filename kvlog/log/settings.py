"""The settings that say where a log is and what it should be like, for kvlogd and the tools; and the log they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator

from kvlog.errors import ConfigError
from kvlog.limits import DEFAULT
from kvlog.log.kafka_options import KafkaOptions, SaslMechanism, Security, SecurityProtocol
from kvlog.log.local import LocalLogOptions
from kvlog.log.locate import kafka_log, local_log, parse_log_url
from kvlog.log.topics import RecordsWanted

if TYPE_CHECKING:
    from kvlog.log.base import Log

__all__ = ["KafkaSettings", "LogSettings", "make_log"]

MIB = 1 << 20


class KafkaSettings(BaseModel):
    """How to reach the cluster, and what its records topic should be like."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    client_id: str = Field("kvlog", description="How we appear in the broker's logs and quotas.")
    security_protocol: SecurityProtocol = Field(
        SecurityProtocol.PLAINTEXT, description="What the listener speaks."
    )
    ssl_cafile: Path | None = Field(
        None, description="PEM file with trusted authorities; none: the system's."
    )
    ssl_certfile: Path | None = Field(
        None, description="PEM file with our certificate, where brokers ask for one."
    )
    ssl_keyfile: Path | None = Field(None, description="PEM file with its key; none: it is in ssl_certfile.")
    ssl_key_password: SecretStr | None = Field(None, description="Opens the key file.")
    ssl_check_hostname: bool = Field(
        default=True, description="The certificate must name the host that we called."
    )
    sasl_mechanism: SaslMechanism = Field(
        SaslMechanism.PLAIN, description="With SASL_PLAINTEXT and SASL_SSL."
    )
    username: str | None = Field(None, description="SASL user.")
    password: SecretStr | None = Field(
        None, description="SASL password; better by KVLOG_LOG__KAFKA__PASSWORD."
    )
    replication: int = Field(
        3, ge=1, description="Copies of each partition; fewer brokers mean fewer copies."
    )
    insync_min: int = Field(2, ge=1, description="Copies that must have a record before it is acknowledged.")
    segment_bytes: int = Field(256 * MIB, ge=1 << 14, description="A log segment, the unit of deletion.")


class LogSettings(BaseModel):
    """The replicated log."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: str = Field(
        "file:///var/lib/kvlog/log", description="file:///DIR for one machine, kafka://host:port[,...]."
    )
    topic_prefix: str = Field(
        "kvlog",
        pattern=r"^[a-zA-Z0-9._-]{1,200}$",
        description="What our topics' names begin with. One prefix a model.",
    )
    partitions: int = Field(16, ge=1, le=10_000, description="P; fixed when the log is made, never changed.")
    max_record_bytes: int = Field(
        DEFAULT.record_bytes,
        ge=128 << 10,
        le=64 * MIB,
        description="The largest record; 900 KiB fits a broker's default.",
    )
    format_version: Literal[1] = Field(1, description="What writers emit; raised after every node reads it.")
    retention_seconds: int = Field(3600, ge=60, description="How long records stay at least.")
    retention_bytes: int | None = Field(
        None, ge=1 << 20, description="Most bytes a partition keeps; none: no limit."
    )
    kafka: KafkaSettings = Field(default_factory=KafkaSettings, description="Only with a kafka URL.")

    @field_validator("url")
    @classmethod
    def _url_is_known(cls, value: str) -> str:
        try:
            parse_log_url(value)
        except ConfigError as error:
            raise ValueError(f"{error.problem}; {error.fix}") from error
        return value


_READ_ONLY_SECONDS = 10.0
"""Of one request of a tool: a person waits for it, and sees a broker that hangs by nothing else."""


def make_log(settings: LogSettings, *, client_id: str | None = None, read_only: bool = False) -> Log:
    """The log that the settings name; nothing is opened yet.

    Args:
        settings: checked.
        client_id: how a Kafka broker sees us; None: as set.
        read_only: for tools: the log must be there, its P is taken as it is, nothing of it is changed.

    Raises:
        ConfigError: the Kafka client is not installed.
    """
    place = parse_log_url(settings.url)
    if place.directory is not None:
        return local_log(
            place.directory,
            LocalLogOptions(
                partitions=settings.partitions,
                record_bytes_max=settings.max_record_bytes,
                retention_seconds=settings.retention_seconds,
                retention_bytes=settings.retention_bytes,
                read_only=read_only,
            ),
        )
    assert place.bootstrap is not None, "a place is a directory or a cluster"
    options = _kafka_options(settings, place.bootstrap, client_id or settings.kafka.client_id)
    return kafka_log(
        replace(options, read_only=True, timeout_seconds=_READ_ONLY_SECONDS) if read_only else options
    )


def _kafka_options(settings: LogSettings, bootstrap: str, client_id: str) -> KafkaOptions:
    kafka = settings.kafka
    return KafkaOptions(
        bootstrap=bootstrap,
        topic_prefix=settings.topic_prefix,
        client_id=client_id,
        records=RecordsWanted(
            partitions=settings.partitions,
            replication=kafka.replication,
            insync_min=kafka.insync_min,
            retention_seconds=settings.retention_seconds,
            retention_bytes=-1 if settings.retention_bytes is None else settings.retention_bytes,
            segment_bytes=kafka.segment_bytes,
            record_bytes_max=settings.max_record_bytes,
        ),
        security=_security(kafka),
    )


def _security(kafka: KafkaSettings) -> Security:
    return Security(
        protocol=kafka.security_protocol,
        ssl_cafile=kafka.ssl_cafile,
        ssl_certfile=kafka.ssl_certfile,
        ssl_keyfile=kafka.ssl_keyfile,
        ssl_key_password=_revealed(kafka.ssl_key_password),
        ssl_check_hostname=kafka.ssl_check_hostname,
        sasl_mechanism=kafka.sasl_mechanism,
        username=kafka.username,
        password=_revealed(kafka.password),
    )


def _revealed(secret: SecretStr | None) -> str | None:
    return secret.get_secret_value() if secret else None
