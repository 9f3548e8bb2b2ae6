"""kvlogd: `kvlogd run --config FILE`, `kvlogd check-config --config FILE`.

Exit codes: 0 stopped in order, 1 failed, 78 (EX_CONFIG) the configuration must be changed, 2 wrong arguments.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.settings import load_settings
from daemon.telemetry import Event, configure_diagnostics
from kvlog.errors import ConfigError, KvlogError
from kvlog.log.allocator import tune_allocator

if TYPE_CHECKING:
    from collections.abc import Sequence

    from daemon.settings import Settings

__all__ = ["main"]

EX_CONFIG = 78


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        settings = load_settings(options.config)
        if options.verb == "check-config":
            return _check(settings)
        return _run(settings)
    except ConfigError as error:
        sys.stderr.write(f"kvlogd: {error}\n")
        return EX_CONFIG
    except KvlogError as error:
        sys.stderr.write(f"kvlogd: {error}\n")
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlogd", description="Replicates the KV caches of this node's sessions."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    for verb, text in (
        ("run", "run the daemon in the foreground"),
        ("check-config", "read the settings, say what they come to, start nothing"),
    ):
        sub = verbs.add_parser(verb, help=text)
        sub.add_argument(
            "--config", type=Path, help="TOML file; environment variables KVLOG_SECTION__NAME win over it"
        )
    return parser


def _check(settings: Settings) -> int:
    """Print every setting as it is in force; secrets stay stars."""
    for section, values in settings.model_dump(mode="json").items():
        sys.stdout.write(f"[{section}]\n")
        _print_values(values, prefix="")
    sys.stdout.write(f"# memory: {_memory_text(settings)}\n")
    return 0


def _print_values(values: dict[str, object], *, prefix: str) -> None:
    for name, value in values.items():
        if isinstance(value, dict):
            _print_values(value, prefix=f"{prefix}{name}.")
        elif value is not None:
            sys.stdout.write(f"{prefix}{name} = {value!r}\n")


def _memory_text(settings: Settings) -> str:
    rings = settings.link.engines_max * settings.link.ring_bytes
    return (
        f"pool {settings.pool.bytes >> 20} MiB + up to {settings.link.engines_max} rings of "
        f"{settings.link.ring_bytes >> 20} MiB ({rings >> 20} MiB)"
    )


def _run(settings: Settings) -> int:
    tune_allocator()  # before the first large allocation
    configure_diagnostics(settings.diagnostics.level, settings.diagnostics.format)
    from daemon.service import Service  # noqa: PLC0415  # torch and the Kafka client: not for check-config
    from daemon.wiring import wire  # noqa: PLC0415

    parts = wire(settings)
    parts.telemetry.say(Event.DAEMON_STARTED, log=settings.log.url, pool_bytes=settings.pool.bytes)
    asyncio.run(_serve(Service, parts))
    return 0


async def _serve(service: type, parts: object) -> None:
    await service(parts).run()


if __name__ == "__main__":
    sys.exit(main())
