"""The replicated log on Apache Kafka 3.1 or newer: opens a cluster's topics and hands out writers and readers.

The topics and their settings are in kvlog.log.topics, the connections and the reasons for our own requests in
kvlog.log.kafka_link.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from kvlog.errors import ConfigError, LocalProtocolError, LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import PartitionBounds
from kvlog.log.kafka_link import KafkaLink, Right, TopicBound
from kvlog.log.kafka_offsets import GroupOffsets, bounds_of
from kvlog.log.kafka_protocol import show_topic_id
from kvlog.log.kafka_reader import KafkaReader
from kvlog.log.kafka_table import KafkaTable, ReadOnlyWriter
from kvlog.log.kafka_topics import TopicKeeper
from kvlog.log.kafka_writer import KafkaWriter
from kvlog.log.topics import records_topic, table_topic, wanted_records, wanted_table

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlog.log.base import LogReader, LogWriter, Table
    from kvlog.log.kafka_options import KafkaOptions
    from kvlog.log.topics import TopicWanted

__all__ = ["TABLES", "KafkaLog"]

TABLES = ("sessions", "nodes")
"""The tables that `open` makes and checks; any other is made when it is first asked for."""

_BOUNDS_TRIES = 3
_BOUNDS_PAUSE_SECONDS = 0.2


class _Closable(Protocol):
    async def close(self) -> None: ...


class KafkaLog:
    """A Log over Kafka; see base.Log for what is promised. Belongs to one event loop."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._link = KafkaLink(options)
        self._keeper = TopicKeeper(self._link, options)
        self._partitions = options.records.partitions
        self._bound: dict[str, TopicBound] = {}
        self._leaders: dict[str, Mapping[int, int]] = {}
        self._handed_out: list[_Closable] = []

    @property
    def partitions(self) -> int:
        """See base.Log.partitions."""
        return self._partitions

    @property
    def where(self) -> str:
        """See base.Log.where."""
        return self._options.where

    @property
    def _records(self) -> str:
        return records_topic(self._options.topic_prefix)

    async def open(self) -> Sequence[str]:
        """See base.Log.open."""
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                await self._link.look()
                if self._options.read_only:
                    await self._find(self._records)
                    self._partitions = self._bound[self._records].partitions
                    return ()
                said = list(await self._bind(self._wanted_records()))
                for table in TABLES:
                    said += await self._bind(self._wanted_table(table))
                return said
        except TimeoutError:
            problem = (
                f"not open within {self._options.timeout_seconds} s; {self._keeper.trouble or 'no answer'}"
            )
            raise LogUnavailable(where=self.where, problem=problem) from None

    async def identity(self) -> str:
        """See base.Log.identity.

        Raises:
            LogUnavailable: nobody can say now, or the topic is gone.
            ConfigError: it has another number of partitions: nothing may be written.
        """
        seen = await self._link.describe(self._records)
        if seen is None:
            raise LogUnavailable(where=self.where, problem=f"topic {self._records} does not exist")
        if len(seen.leaders) != self.partitions:
            raise ConfigError(
                setting="log.partitions",
                problem=f"topic {self._records} has {len(seen.leaders)} partitions, and should have {self.partitions}",
                fix="choose another topic prefix; P never changes for a topic",
            )
        return show_topic_id(seen.topic_id)

    async def bounds(self, partition: Partition) -> PartitionBounds:
        """See base.Log.bounds."""
        return await self._bounds(self._records, partition)

    async def writer(self) -> LogWriter:
        """See base.Log.writer.

        Raises:
            LocalProtocolError: the log was opened to read only.
            LogUnavailable: the cluster cannot be reached now; call again.
            ConfigError: we may not write.
        """
        if self._options.read_only:
            raise LocalProtocolError(problem="this log was opened to read only")
        return await self._writer(self._records)

    async def reader(self, *, group: str | None = None) -> LogReader:
        """See base.Log.reader."""
        return self._reader(self._records, group)

    async def table(self, name: str) -> Table:
        """See base.Log.table.

        Raises:
            LogUnavailable: the cluster cannot be reached now; call again.
            ConfigError: its topic cannot be made or used.
        """
        topic = table_topic(self._options.topic_prefix, name)
        writer: KafkaWriter | ReadOnlyWriter
        if self._options.read_only:
            await self._find(topic)
            writer = ReadOnlyWriter()
        else:
            if topic not in self._bound:
                await self._bind(self._wanted_table(name))
            writer = await self._writer(topic)
        reader = self._reader(topic, None)
        return KafkaTable(
            writer,
            reader,
            lambda: self._bounds(topic, Partition(0)),
            timeout_seconds=self._options.timeout_seconds,
        )

    async def committed(self, group: str) -> Mapping[Partition, Offset]:
        """The offsets that a group has committed for the records; a partition without one is missing.

        Raises:
            LogUnavailable: nobody can say now.
            ConfigError: we lack the right Describe on the group.
        """
        partitions = [Partition(p) for p in range(self.partitions)]
        return await GroupOffsets(self._link, group).committed(self._records, partitions)

    async def close(self) -> None:
        """See base.Log.close."""
        while self._handed_out:
            await self._handed_out.pop().close()
        await self._link.close()

    def _wanted_records(self) -> TopicWanted:
        options = self._options
        return wanted_records(options.topic_prefix, options.records, brokers=self._link.brokers)

    def _wanted_table(self, table: str) -> TopicWanted:
        options = self._options
        return wanted_table(options.topic_prefix, table, options.records, brokers=self._link.brokers)

    async def _bind(self, wanted: TopicWanted) -> Sequence[str]:
        """Make or check a topic, and remember which one it is."""
        seen, limit, said = await self._keeper.keep(wanted)
        self._keeper.refuse_without_rights(wanted.name, seen.rights, Right.READ | Right.WRITE)
        self._bound[wanted.name] = TopicBound(wanted.name, seen.topic_id, wanted.partitions, limit)
        self._leaders[wanted.name] = seen.leaders
        return said

    async def _find(self, topic: str) -> None:
        """Remember a topic as it is; it is neither made nor compared with what is wanted."""
        seen, limit = await self._keeper.find(topic)
        self._keeper.refuse_without_rights(topic, seen.rights, Right.READ)
        self._bound[topic] = TopicBound(topic, seen.topic_id, len(seen.leaders), limit)
        self._leaders[topic] = seen.leaders

    async def _writer(self, topic: str) -> KafkaWriter:
        writer = KafkaWriter(KafkaLink(self._options), self._bound[topic], self._options)
        try:
            await writer.start()
        except BaseException:
            await writer.close()
            raise
        self._handed_out.append(writer)
        return writer

    def _reader(self, topic: str, group: str | None) -> KafkaReader:
        offsets = GroupOffsets(self._link, group) if group is not None else None
        reader = KafkaReader(KafkaLink(self._options), self._bound[topic], self._options, offsets)
        self._handed_out.append(reader)
        return reader

    async def _bounds(self, topic: str, partition: Partition) -> PartitionBounds:
        problem = LogUnavailable(where=self.where, problem=f"{topic}: no answer in time")
        with suppress(TimeoutError):
            async with asyncio.timeout(self._options.timeout_seconds):
                for _ in range(_BOUNDS_TRIES):
                    try:
                        start, end = await bounds_of(
                            self._link, topic, partition, self._leaders.get(topic, {})
                        )
                        return PartitionBounds(start, end)
                    except LogUnavailable as error:
                        problem = error
                    seen = await self._link.describe(topic)
                    self._leaders[topic] = seen.leaders if seen is not None else {}
                    await asyncio.sleep(_BOUNDS_PAUSE_SECONDS)
        raise problem
