"""The service's clock: the core is told the time while there are claims, and seldom else."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from daemon import service
from kvlog.core import effects as fx
from kvlog.ids import Partition, SessionId

if TYPE_CHECKING:
    from collections.abc import Callable

    import pytest

    from daemon.wiring import Parts


class FakeShell:
    """Counts ticks."""

    def __init__(self) -> None:
        self.ticks: list[float] = []
        self.core = SimpleNamespace(takeovers_in_flight=0)
        self.handlers: dict[type, Callable[[object], None]] = {}

    def handle(self, kind: type, handler: Callable[[object], None]) -> None:
        """Note it."""
        self.handlers[kind] = handler

    def tick(self) -> None:
        """Note it."""
        self.ticks.append(time.monotonic())


async def test_clock_runs_from_a_claim_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A claim's deadline is looked at from its beginning, and a daemon without claims is left asleep."""
    monkeypatch.setattr(service, "_TICK_IDLE_SECONDS", 60.0)
    shell = FakeShell()
    telemetry = SimpleNamespace(claim_times=SimpleNamespace(asked=lambda *_: None))
    of_service = service.Service(cast("Parts", SimpleNamespace(shell=shell, telemetry=telemetry)))
    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        of_service._tasks = cast(
            "asyncio.TaskGroup", SimpleNamespace(create_task=lambda coroutine: coroutine.close())
        )
        ticking = tasks.create_task(of_service._tick())
        await asyncio.sleep(0.3)
        assert 1 == len(shell.ticks)
        shell.core.takeovers_in_flight = 1
        began = time.monotonic()
        shell.handlers[fx.ReadWatermark](fx.ReadWatermark(SessionId("s"), Partition(0)))
        while len(shell.ticks) < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert time.monotonic() - began < 5.0
        shell.core.takeovers_in_flight = 0
        await asyncio.sleep(0.3)
        over = len(shell.ticks)
        await asyncio.sleep(0.3)
        assert over == len(shell.ticks)
        ticking.cancel()
