"""What the log's contract suite needs of an implementation, and the local log's.

To put another implementation under the suite: write a class with LogFactory's methods, and a fixture in conftest.py
that yields one; add the fixture's name to LOG_FACTORIES there.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvlog.log.local import LocalLog, LocalLogOptions

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.ids import Offset, Partition
    from kvlog.log.base import Log

__all__ = ["PARTITIONS", "RECORD_BYTES_MAX", "Capabilities", "LocalLogFactory", "LogFactory"]

PARTITIONS = 3
"""Of every log that a factory makes."""

RECORD_BYTES_MAX = 100_000
"""The largest value that every log of a factory takes."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an implementation can do in a test, and how fast.

    Args:
        recreates: `recreate` works.
        retains_at_once: retention deletes within seconds (a broker looks every few minutes).
        wake_seconds: an append is seen by a waiting reader at least so soon, on a busy machine.
    """

    recreates: bool = True
    retains_at_once: bool = True
    wake_seconds: float = 1.0


class LogFactory(Protocol):
    """One log, and any number of handles on it."""

    capabilities: Capabilities

    async def open(self, *, retention_bytes: int | None = None) -> Log:
        """Opens another handle on the same log, as another process would; `close` closes it.

        Args:
            retention_bytes: of a partition; only when the capability says that it works.
        """
        ...

    async def truncate(self, log: Log, partition: Partition, before: Offset) -> None:
        """Deletes a partition's messages below an offset."""
        ...

    async def recreate(self) -> None:
        """Deletes the log and makes an empty one under the same name."""
        ...

    async def committed(self, log: Log, group: str) -> dict[Partition, Offset]:
        """The offsets of a group, as tools see them."""
        ...

    async def close(self) -> None:
        """Closes every handle."""
        ...


class LocalLogFactory:
    """The local log, in a directory of its own."""

    capabilities = Capabilities(wake_seconds=0.25)  # half a tick of the local log: the bell, not the timer

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._logs: list[LocalLog] = []

    async def open(self, *, retention_bytes: int | None = None) -> LocalLog:
        options = LocalLogOptions(
            partitions=PARTITIONS, record_bytes_max=RECORD_BYTES_MAX, retention_bytes=retention_bytes
        )
        log = LocalLog(self._directory, options)
        self._logs.append(log)
        await log.open()
        return log

    async def truncate(self, log: Log, partition: Partition, before: Offset) -> None:
        assert isinstance(log, LocalLog)
        await log.delete_records(partition, before=before)

    async def recreate(self) -> None:
        shutil.rmtree(self._directory)
        await self.open()

    async def committed(self, log: Log, group: str) -> dict[Partition, Offset]:
        assert isinstance(log, LocalLog)
        return dict(await log.committed(group))

    async def close(self) -> None:
        while self._logs:
            with suppress(FileNotFoundError):
                await self._logs.pop().close()
