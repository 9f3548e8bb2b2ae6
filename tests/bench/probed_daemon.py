"""A whole kvlogd that also notes when rows are in its pool.

    python -m tests.bench.probed_daemon --config FILE --out FILE

Nothing is changed but one handler, which after each StoreRows takes the time (CLOCK_MONOTONIC, the same for all
processes of a machine). SIGTERM stops it in order, and it then writes [session, start, count, nanoseconds] lines.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from daemon.service import Service
from daemon.settings import load_settings
from daemon.telemetry import configure_diagnostics
from daemon.wiring import wire
from kvlog.core.effects import StoreRows
from kvlog.log.allocator import tune_allocator

if TYPE_CHECKING:
    from daemon.wiring import Parts

__all__: list[str] = []


def _probe(parts: Parts) -> list[tuple[str, int, int, int]]:
    """Put the probe in. Returns: the list that it fills."""
    seen: list[tuple[str, int, int, int]] = []
    handlers = parts.shell._handlers  # a shell has one handler a kind, on purpose
    store = handlers[StoreRows]

    def stored(effect: StoreRows) -> None:
        store(effect)
        delta = effect.delta
        seen.append((delta.session, delta.start, len(delta.tokens), time.monotonic_ns()))

    handlers[StoreRows] = stored
    return seen


def main() -> None:
    """Runs it until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    settings = load_settings(given.config)
    tune_allocator()
    configure_diagnostics(settings.diagnostics.level, settings.diagnostics.format)
    parts = wire(settings)
    seen = _probe(parts)

    async def serve() -> None:
        await Service(parts).run()

    asyncio.run(serve())
    assert not parts.telemetry.metrics.rows_absent._value.get(), "rows had no room in the pool"
    given.out.write_text("".join(json.dumps(each) + "\n" for each in seen), encoding="utf-8")


if __name__ == "__main__":
    main()
