"""Two daemons over one log and a paced engine on the first: what latency, memory and soak load."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from tests.nodes import Process, daemon_config, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.paced_engine import Pace
    from tests.bench.setting import LogPlace

__all__ = ["Pair"]

_START_SECONDS = 60.0
_END_SECONDS = 60.0


@dataclass
class Pair:
    """The primary and the standby; the engine comes and goes.

    Args:
        folder: for sockets and output.
        primary: a plain kvlogd with an engine.
        standby: a kvlogd that only follows.
    """

    folder: Path
    primary: Process
    standby: Process

    @classmethod
    def start(
        cls,
        folder: Path,
        place: LogPlace,
        sections: dict[str, dict[str, object]],
        *,
        probe: Path | None = None,
    ) -> Self:
        """Start both and wait until they have their log.

        Args:
            folder: as above.
            place: the log.
            sections: further settings of both daemons.
            probe: where the standby is to write when it had applied what; None: a plain one.
        """
        settings = {**place.sections, **sections}
        first, second = (
            daemon_config(folder, name, place.url, **settings) for name in ("primary", "standby")
        )
        plain = ["daemon", "run", "--config"]
        probed = ["tests.bench.probed_daemon", "--out", str(probe), "--config"]
        primary = Process([*plain, str(first)], folder / "primary.log")
        standby = Process([*(probed if probe else plain), str(second)], folder / "standby.log")
        pair = cls(folder, primary, standby)
        try:
            for process in (primary, standby):
                until(
                    lambda process=process: bool(process.events("log_opened")) or process.code is not None,  # type: ignore[misc]
                    seconds=_START_SECONDS,
                    what="log opened",
                )
                assert process.code is None, process.output
        except BaseException:
            pair.kill()
            raise
        return pair

    @property
    def socket(self) -> str:
        """The primary's."""
        return str(self.folder / "primary.sock")

    def start_engine(self, pace: Pace) -> Process:
        """Start an engine on the primary; it has opened its sessions when this returns."""
        engine = Process(
            ["tests.bench.paced_engine", json.dumps(asdict(pace))], self.folder / f"{pace.name}.log"
        )
        until(
            lambda: "ready" in engine.output or engine.code is not None,
            seconds=_START_SECONDS,
            what="a paced engine",
        )
        assert engine.code is None, engine.output
        return engine

    def run_engine(self, pace: Pace) -> dict[str, Any]:
        """Run an engine to its end. Returns: what it said."""
        engine = self.start_engine(pace)
        try:
            code = engine.wait(pace.seconds + _END_SECONDS)
        finally:
            engine.stop()
        assert code == 0, engine.output
        said: dict[str, Any] = json.loads(engine.output.splitlines()[-1])
        assert not said["unlogged"], "sessions were not logged"
        return said

    def stop(self) -> None:
        """End both in order, the standby last: it has then read everything."""
        try:
            for process in (self.primary, self.standby):
                assert process.stop() == 0, process.output[-3000:]
        finally:
            self.kill()

    def kill(self) -> None:
        """End what still runs."""
        for process in (self.primary, self.standby):
            if process.code is None:
                process.send(9)
                process.wait()
