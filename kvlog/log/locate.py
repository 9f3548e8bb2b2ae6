"""From a URL to a log that is not opened yet: `file:///dir`, a plain path, or `kafka://host:port[,host:port]`.

The Kafka client is imported only when a kafka URL asks for it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlsplit

from kvlog.errors import ConfigError
from kvlog.log.local import LocalLog, LocalLogOptions

if TYPE_CHECKING:
    from kvlog.log.base import Log
    from kvlog.log.kafka_options import KafkaOptions

__all__ = ["LogPlace", "kafka_log", "local_log", "parse_log_url"]


class LogPlace(NamedTuple):
    """Where a log is: exactly one of the two is set."""

    directory: Path | None
    bootstrap: str | None


def parse_log_url(text: str, *, setting: str = "log.url") -> LogPlace:
    """Read a log's URL.

    Args:
        text: `file:///dir`, a path that begins with `/`, `./` or `~`, or `kafka://host:port[,host:port]`.
        setting: what it is called where the user wrote it, for the error.

    Raises:
        ConfigError: it is neither a directory nor a cluster.
    """
    if text.startswith("kafka://"):
        bootstrap = text.removeprefix("kafka://").rstrip("/")
        for address in bootstrap.split(","):
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit():
                raise ConfigError(
                    setting=setting,
                    problem=f"{address!r} is not host:port",
                    fix="write kafka://host:9092, several with commas",
                )
        return LogPlace(None, bootstrap)
    if text.startswith("file://"):
        parts = urlsplit(text)
        if not parts.netloc and parts.path.startswith("/"):
            return LogPlace(Path(unquote(parts.path)), None)
    elif text.startswith(("/", "./", "~")) or ("://" not in text and text):
        return LogPlace(Path(text).expanduser(), None)
    raise ConfigError(
        setting=setting,
        problem=f"{text!r} names no log",
        fix="write file:///var/lib/kvlog/log for one machine, or kafka://host:9092 for a cluster",
    )


def local_log(directory: Path, options: LocalLogOptions) -> Log:
    """A log in a directory of this machine."""
    return LocalLog(directory, options)


def kafka_log(options: KafkaOptions) -> Log:
    """A log on a Kafka cluster.

    Raises:
        ConfigError: the Kafka client is not installed.
    """
    try:
        from kvlog.log.kafka import KafkaLog  # noqa: PLC0415  # only who uses Kafka pays for its client
    except ModuleNotFoundError as error:
        raise ConfigError(
            setting="log.url", problem=f"{error.name} is not installed", fix="pip install 'kvlog[daemon]'"
        ) from error
    return KafkaLog(options)
