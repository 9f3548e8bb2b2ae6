"""Where the demo's log is: a directory of its own, one that the user names, or topics of its own on a cluster.

A log that is there already is taken as it is: its number of partitions, and nothing that is in it is trimmed.
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from consumers.access import log_settings
from consumers.demo_error import DemoError
from kvlog.errors import ConfigError, KvlogError
from kvlog.log.locate import parse_log_url
from kvlog.log.settings import make_log

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.log.settings import LogSettings

__all__ = ["log_settings_of", "passes_setting"]

_PREFIX = "kvlog-demo"
"""Of topics on a cluster: a demo's sessions are nothing for the log of a fleet."""

_PARTITIONS = 4
_HOUR_SECONDS = 3600
_NEVER_SECONDS = 100 * 365 * 24 * _HOUR_SECONDS
"""A directory's log is trimmed by whoever has it open; a demo must not trim what it did not write."""


def passes_setting(name: str) -> bool:
    """Whether a variable of kvlog is also for the demo's daemons: how to reach a cluster is, and nothing else."""
    return name.startswith("KVLOG_LOG__KAFKA__")


async def log_settings_of(url: str | None, folder: Path) -> LogSettings:
    """The settings of the demo's log.

    Args:
        url: as given; None: a new directory in `folder`.
        folder: of this demo, gone afterwards.

    DemoError: it names no log.
    """
    try:
        place = parse_log_url(url or str(folder / "log"), setting="--log")
        address = (
            f"kafka://{place.bootstrap}" if place.directory is None else place.directory.absolute().as_uri()
        )
        given = argparse.Namespace(log=address, config=None, prefix=_PREFIX)
        environment = {name: value for name, value in os.environ.items() if passes_setting(name)}
        settings = log_settings(given, environment)
    except ConfigError as error:
        raise DemoError.of(error, f"{error.fields['setting']}:") from error
    retention = _HOUR_SECONDS if place.directory is None else _NEVER_SECONDS
    partitions = await _partitions(settings)
    return settings.model_copy(update={"retention_seconds": retention, "partitions": partitions})


async def _partitions(settings: LogSettings) -> int:
    """P of a log that is there already, else our own."""
    log = make_log(settings, read_only=True)
    try:
        await log.open()
    except KvlogError:
        return _PARTITIONS  # it is not there, or cannot be read: opening it to write says which
    else:
        return log.partitions
    finally:
        await log.close()
