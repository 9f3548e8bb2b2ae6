"""What a replicated log offers: ordered partitions with offsets, durable appends, retention, compacted tables.

Two implementations (kvlog.log.local, kvlog.log.kafka) obey one contract suite (tests/contract). All times are the log's
own (LogAppendTime). Nothing here knows what a record means.

Order: appends to one partition become durable in the order in which `append` returned, or not at all from some point on
(a later append never survives an earlier one that was lost).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Mapping, Sequence

    from typing_extensions import Buffer

    from kvlog.errors import KvlogError
    from kvlog.ids import Offset, Partition

__all__ = [
    "AppendRequest",
    "Log",
    "LogMessage",
    "LogReader",
    "LogWriter",
    "PartitionBounds",
    "Table",
    "TableRow",
]


class LogMessage(NamedTuple):
    """One message as it was read.

    Args:
        partition: where it was read.
        offset: its place in the partition.
        timestamp_ms: when the log took it, Unix milliseconds.
        key: the session id's bytes; None only for a foreign producer's message.
        value: the whole message body; a view or bytes, valid as long as it is referenced.
    """

    partition: Partition
    offset: Offset
    timestamp_ms: int
    key: bytes | None
    value: bytes | memoryview


@dataclass(frozen=True, slots=True)
class AppendRequest:
    """One message to append. `kind` and `epoch` go into the message's own headers, so that tools need not decode."""

    partition: Partition
    key: bytes
    value: Buffer
    kind: int
    epoch: int


@dataclass(frozen=True, slots=True)
class PartitionBounds:
    """log start offset ≤ high watermark; the next append gets an offset ≥ high watermark."""

    log_start: Offset
    high_watermark: Offset


class LogWriter(Protocol):
    """Appends messages. One writer a process; safe to use from many tasks of one event loop."""

    @property
    def trouble(self) -> KvlogError | None:
        """Why nothing becomes durable just now, for people; None: all is well, as far as is known yet."""
        ...

    async def append(self, request: AppendRequest) -> asyncio.Future[Offset]:
        """Give the message its place in the partition's order.

        Returns: when it has its place (it waits while the writer's buffer is full); the future is done when the log
            holds the message durably. Deadlines are the caller's; a pending append goes on through an outage.

        Raises:
            LogUnavailable: before anything was sent; nothing is in the log, try again.
        The future's errors:
            OutcomeUnknown: the message may or may not be, or become, part of the log (fatal producer error, closing).
                The writer has been replaced by a fresh one inside; appends of other sessions may go on.
            RowTooLarge: the message is larger than the log takes; nothing is in the log.
        """
        ...

    async def flush(self) -> None:
        """Return when every append so far is durable or has failed."""
        ...

    async def close(self) -> None:
        """Stop; pending appends that are not durable end as OutcomeUnknown."""
        ...


class LogReader(Protocol):
    """Reads partitions that its owner assigns; no group membership. One task uses it at a time."""

    def assign(self, positions: Mapping[Partition, Offset]) -> None:
        """Read these partitions from these offsets from now on, and no others. Offsets may be at the end."""
        ...

    def seek(self, partition: Partition, offset: Offset) -> None:
        """Continue one assigned partition at another offset; messages fetched for the old place are dropped."""
        ...

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> Sequence[LogMessage]:
        """Wait for messages, at most so long, and return some in partition order; an empty answer is no error.

        Raises:
            LogTruncated: a position lies below the log start offset (fields: partition, wanted, log_start). The reader
                stays usable: seek that partition, the others go on.
            LogReplaced: the topic was recreated, or the log now ends before a position (fields: partition, problem).
            LogUnavailable: the log cannot be reached now; call again, later.
        """
        ...

    def positions(self) -> Mapping[Partition, Offset]:
        """The next offset to be returned by `poll`, for each assigned partition."""
        ...

    async def commit(self, applied: Mapping[Partition, Offset]) -> None:
        """Store applied offsets under this node's consumer group, for lag tools; never used to decide anything."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


@dataclass(frozen=True, slots=True)
class TableRow:
    """One key's newest value; None: deleted."""

    key: bytes
    value: bytes | None


class Table(Protocol):
    """A compacted topic as a map: the newest value of each key wins."""

    async def put(self, key: bytes, value: bytes | None) -> None:
        """Write a key's value, or delete the key with None; durable when it returns."""
        ...

    async def refresh(self) -> Sequence[TableRow]:
        """Everything that changed since the last call (at first: everything there is), oldest first."""
        ...

    async def close(self) -> None:
        """Give back what it holds."""
        ...


class Log(Protocol):
    """One cluster's kvlog topics: `<prefix>.records` with P partitions, and the tables."""

    @property
    def partitions(self) -> int:
        """P, which never changes."""
        ...

    @property
    def where(self) -> str:
        """A URL for people: `file:///var/lib/kvlog/log` or `kafka://host:port`."""
        ...

    async def open(self) -> Sequence[str]:
        """Connect, create what is missing, check what is there.

        Returns: differences from the configuration that do not stop us, one sentence each.

        Raises:
            LogUnavailable: it cannot be reached now; call again.
            ConfigError: it is there and cannot be used as it is (another P, a max.message.bytes below our records, no
                permission, a directory that cannot be written).
        """
        ...

    async def identity(self) -> str:
        """The topic's own id: another one means another log, whatever its name."""
        ...

    async def bounds(self, partition: Partition) -> PartitionBounds:
        """Log start offset and high watermark, as they are now at the leader.

        Raises:
            LogUnavailable: the leader cannot be reached now; call again.
        """
        ...

    async def writer(self) -> LogWriter:
        """A started writer."""
        ...

    async def reader(self, *, group: str | None = None) -> LogReader:
        """A started reader; `group` names the consumer group that `commit` writes to."""
        ...

    async def table(self, name: str) -> Table:
        """A compacted table, for example `sessions` or `nodes`."""
        ...

    async def close(self) -> None:
        """Close everything that was handed out."""
        ...
