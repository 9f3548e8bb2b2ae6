"""From the command line and the environment to a log that is open to read only.

Order of precedence: `--log`, then KVLOG_LOG__..., then the [log] section of `--config`, then the defaults. The file may
be kvlogd's own: its other sections are kvlogd's business. A tool never makes, changes or trims a log.
"""

from __future__ import annotations

import os
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from kvlog.errors import ConfigError
from kvlog.log.settings import LogSettings, make_log

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Mapping

    from kvlog.log.base import Log

__all__ = ["add_log_arguments", "log_settings", "opened"]

_CLIENT_ID = "kvlog-tools"
"""How a Kafka broker sees us: apart from the daemons, so that its quotas and logs tell tools from them."""

_PREFIX = "KVLOG_LOG__"


def add_log_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say where the log is."""
    group = parser.add_argument_group("where the log is")
    group.add_argument(
        "--log", metavar="URL", help="file:///DIR, a path, or kafka://host:port (also KVLOG_LOG__URL)"
    )
    group.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with a [log] section, kvlogd's for example"
    )
    group.add_argument("--prefix", metavar="NAME", help="what the topics' names begin with (kvlog)")


def log_settings(arguments: argparse.Namespace, environment: Mapping[str, str] = os.environ) -> LogSettings:
    """The settings that the arguments, the environment and the file come to.

    Raises:
        ConfigError: the file cannot be read, or a setting is unknown or out of range; all are named.
    """
    values = _from_file(arguments.config) if arguments.config else {}
    _merge(values, _from_environment(environment))
    if arguments.log:
        values["url"] = arguments.log
    if arguments.prefix:
        values["topic_prefix"] = arguments.prefix
    try:
        return LogSettings(**values)
    except ValidationError as error:
        raise _refused(error) from error


@asynccontextmanager
async def opened(settings: LogSettings) -> AsyncIterator[Log]:
    """The log, open to read only, until the block ends.

    Raises:
        LogUnavailable: it cannot be reached, or is not there.
        ConfigError: the settings say another number of partitions than the log has.
    """
    log = make_log(settings, client_id=_CLIENT_ID, read_only=True)
    try:
        await log.open()
        if "partitions" in settings.model_fields_set and settings.partitions != log.partitions:
            raise ConfigError(
                setting="log.partitions",
                problem=f"{log.where} has {log.partitions} partitions, the setting says {settings.partitions}",
                fix=f"set log.partitions to {log.partitions}, or look at another log; P never changes",
            )
        yield log
    finally:
        await log.close()


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            section = tomllib.load(file).get("log", {})
    except OSError as error:
        raise ConfigError(
            setting=str(path), problem=f"cannot be read: {error.strerror}", fix="name a readable TOML file"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(
            setting=str(path), problem=f"is not TOML: {error}", fix="correct the line named"
        ) from error
    if not isinstance(section, dict):
        raise ConfigError(setting=f"{path}: log", problem="it is not a section", fix="write [log]")
    return section


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """KVLOG_LOG__KAFKA__USERNAME=u → {"kafka": {"username": "u"}}, as kvlogd reads it."""
    values: dict[str, Any] = {}
    for name, text in sorted(environment.items()):
        if name.startswith(_PREFIX):
            *sections, key = name.removeprefix(_PREFIX).lower().split("__")
            place = values
            for section in sections:
                place = place.setdefault(section, {})
            place[key] = text
    return values


def _merge(values: dict[str, Any], over: Mapping[str, Any]) -> None:
    for name, value in over.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def _refused(error: ValidationError) -> ConfigError:
    found = error.errors(include_url=False, include_input=False)
    said = [
        f"log.{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}"
        for item in found
    ]
    return ConfigError(
        setting="; ".join(said), problem=f"{len(said)} setting(s) refused", fix="correct what is named"
    )
