"""The Kafka log under the contract suite: one topic prefix a factory, on the broker that all tests share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.log.kafka import TABLES, KafkaLog
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.topics import RecordsWanted, records_topic, table_topic, wanted_records
from tests.contract.log_factories import PARTITIONS, RECORD_BYTES_MAX, Capabilities
from tests.kafka.admin import Admin

if TYPE_CHECKING:
    from kvlog.ids import Offset, Partition
    from kvlog.log.base import Log

__all__ = ["KafkaLogFactory"]

SMALL_SEGMENT_BYTES = 30_000
"""Kafka deletes whole segments, and makes none below 1 MiB but for its own tests' internal.segment.bytes."""


class KafkaLogFactory:
    """Logs on one cluster under one topic prefix.

    Args:
        bootstrap: Where the cluster is.
        prefix: A topic prefix of its own.
        is_ours: The cluster is one that the tests started, with retention checks twice a second.
    """

    def __init__(self, bootstrap: str, prefix: str, *, is_ours: bool) -> None:
        self.capabilities = Capabilities(retains_at_once=is_ours)
        self._prefix = prefix
        self._bootstrap = bootstrap
        self._logs: list[KafkaLog] = []
        self._admin = Admin(bootstrap)

    def _options(self, retention_bytes: int | None = None) -> KafkaOptions:
        return KafkaOptions(
            bootstrap=self._bootstrap,
            topic_prefix=self._prefix,
            records=RecordsWanted(
                partitions=PARTITIONS,
                replication=1,
                record_bytes_max=RECORD_BYTES_MAX,
                retention_bytes=-1 if retention_bytes is None else retention_bytes,
            ),
            timeout_seconds=20,
            batch_bytes_max=1 << 20 if retention_bytes is None else SMALL_SEGMENT_BYTES,
        )

    async def open(self, *, retention_bytes: int | None = None) -> KafkaLog:
        """See LogFactory.open."""
        options = self._options(retention_bytes)
        if retention_bytes is not None:
            wanted = wanted_records(self._prefix, options.records, brokers=1)
            small = dict(wanted.config) | {"internal.segment.bytes": str(SMALL_SEGMENT_BYTES)}
            await self._admin.create(wanted.name, PARTITIONS, small)
        log = KafkaLog(options)
        self._logs.append(log)
        await log.open()
        return log

    async def truncate(self, log: Log, partition: Partition, before: Offset) -> None:
        """See LogFactory.truncate."""
        await self._admin.delete_records(records_topic(self._prefix), partition, before)

    async def recreate(self) -> None:
        """See LogFactory.recreate."""
        for topic in (records_topic(self._prefix), *(table_topic(self._prefix, table) for table in TABLES)):
            await self._admin.delete(topic)
        await self.open()

    async def committed(self, log: Log, group: str) -> dict[Partition, Offset]:
        """See LogFactory.committed."""
        assert isinstance(log, KafkaLog)
        return dict(await log.committed(group))

    async def close(self) -> None:
        """See LogFactory.close."""
        while self._logs:
            await self._logs.pop().close()
        await self._admin.close()
