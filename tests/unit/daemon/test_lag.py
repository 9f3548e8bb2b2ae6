"""What the daemon says of its lag: figures of Prometheus and of the heartbeat, from known offsets and sessions."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from daemon.lag import LagWatch
from daemon.telemetry import Telemetry
from kvlog.core.session import Standing
from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import PartitionBounds

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from daemon.index import NodeIndex
    from daemon.node import NodeShell
    from kvlog.log.base import Log


@dataclass
class FakeState:
    """A session as far as retention matters to it."""

    first_needed_offset: Offset | None
    standing: Standing = Standing.WHOLE


class FakeCore:
    """One partition, that knows four sessions."""

    def __init__(self) -> None:
        self.applied = Offset(90)
        self.states = [
            FakeState(Offset(40)),
            FakeState(Offset(35), Standing.ENDED),
            FakeState(None, Standing.UNROOTED),
            FakeState(Offset(10)),
        ]

    def sessions(self) -> Iterator[FakeState]:
        return iter(self.states)


class FakeLog:
    """Has its bounds, or is away, or does not answer."""

    def __init__(self, start: int, end: int) -> None:
        self.is_up, self.hangs = True, False
        self.found = PartitionBounds(Offset(start), Offset(end))

    async def bounds(self, _partition: Partition) -> PartitionBounds:
        if self.hangs:
            await asyncio.Event().wait()
        if not self.is_up:
            raise LogUnavailable(where="here", problem="away")
        return self.found


class Watched:
    """A watch over one fake partition, with what it shows."""

    def __init__(self, log: FakeLog) -> None:
        self.core, self.log = FakeCore(), log
        self.index = SimpleNamespace(needed={}, truncated=0)
        self.telemetry = Telemetry("a")
        shell = SimpleNamespace(core=SimpleNamespace(partitions={Partition(3): self.core}))
        self.watch = LagWatch(cast("NodeShell", shell), self.telemetry, cast("NodeIndex", self.index))

    def look(self) -> dict[str, float]:
        """Measure once; the figures that there are."""
        asyncio.run(self.watch.look(cast("Log", self.log)))
        return {
            sample.name.removeprefix("kvlog_"): sample.value
            for metric in self.telemetry.metrics.registry.collect()
            for sample in metric.samples
            if sample.labels.get("partition") == "3" or sample.name == "kvlog_sessions_truncated"
        }


def test_retention_is_measured_from_the_first_record_that_a_session_needs() -> None:
    """Not from the applied offset: whoever does not know the session yet reads from its root on.

    What has ended needs nothing, and what is lost already is counted instead.
    """
    watched = Watched(FakeLog(start=30, end=100))
    figures = watched.look()
    assert (10, 10, 1) == (
        figures["lag_records"],
        figures["retention_records"],
        figures["sessions_truncated"],
    )
    assert ({3: 40}, 1) == (watched.index.needed, watched.index.truncated)


def test_records_lost_unread_make_the_distance_negative() -> None:
    """A reader that retention has overtaken."""
    figures = Watched(FakeLog(start=95, end=100)).look()
    assert (-5, 2) == (figures["retention_records"], figures["sessions_truncated"])


def test_lag_seconds_are_those_since_the_oldest_record_that_is_not_applied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen at the watermarks: ten records were there for four seconds, ten more came since."""
    watched = Watched(FakeLog(start=0, end=90))
    for at_ms, end in ((0, 90), (2_000, 100), (4_000, 110), (6_000, 110)):
        monkeypatch.setattr("daemon.lag._now_ms", lambda at_ms=at_ms: at_ms)
        watched.log.found = PartitionBounds(Offset(0), Offset(end))
        figures = watched.look()
    assert (20, 6.0) == (figures["lag_records"], figures["lag_seconds"])


def test_figures_that_an_outage_hides_are_absent_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown is never 0, nor what it was before."""
    watched = Watched(FakeLog(start=30, end=100))
    watched.look()
    watched.log.is_up = False
    assert {"sessions_truncated"} == set(watched.look())
    watched.log.is_up = True
    assert 10 == watched.look()["lag_records"]
    monkeypatch.setattr("daemon.lag._ANSWER_SECONDS", 0.01)
    watched.log.hangs = True
    assert {"sessions_truncated"} == set(watched.look())
