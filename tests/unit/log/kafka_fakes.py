"""A link whose brokers answer what a test says."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from aiokafka.protocol.admin import DescribeConfigsRequest
from aiokafka.protocol.transaction import InitProducerIdRequest
from aiokafka.record.default_records import DefaultRecordBatch

from kvlog.errors import LogUnavailable
from kvlog.log.kafka_errors import Code
from kvlog.log.kafka_link import Right, TopicBound, TopicSeen
from kvlog.log.kafka_options import KafkaOptions
from kvlog.log.kafka_protocol import FetchById, ProduceBatches

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["BOUND", "OPTIONS", "TOPIC_ID", "FakeLink", "Produced", "fetched", "seen"]

TOPIC_ID = bytes(range(16))
BOUND = TopicBound("t.records", TOPIC_ID, 3, 1_048_588)
OPTIONS = KafkaOptions(bootstrap="fake:9092", topic_prefix="t", timeout_seconds=1.0, append_wait_seconds=0.05)


def seen(*leaders: int, topic_id: bytes = TOPIC_ID) -> TopicSeen:
    """A topic whose partitions have these leaders."""
    return TopicSeen(topic_id, dict(enumerate(leaders)), 1, Right.READ | Right.WRITE)


@dataclass(frozen=True)
class Produced:
    """One batch that reached a broker."""

    node: int
    partition: int
    producer: int
    sequence: int
    values: tuple[bytes | None, ...]


def fetched(
    partition: int, code: int = 0, records: bytes = b"", *, end: int = 0, tags: Any = None
) -> tuple[Any, ...]:
    """One partition of a fetch's answer."""
    return (partition, code, end, end, 0, None, -1, records, tags or {})


@dataclass
class FakeLink:
    """Acts as a KafkaLink.

    Args:
        topic: What `describe` answers; None: the topic does not exist; an error is raised.
        produce: Gives (error code, base offset) for a batch, or raises.
        fetch: Gives the rows of an answer to a fetch, or raises.
        bounds: Log start offset and high watermark of every partition.
        limit: The topic's max.message.bytes; None: we may not read it.
    """

    topic: TopicSeen | Exception | None = field(default_factory=lambda: seen(0, 0, 1))
    produce: Callable[[Produced], tuple[int, int]] = lambda _: (0, 0)
    fetch: Callable[[FetchById], list[tuple[Any, ...]]] = lambda _: []
    bounds: tuple[int, int] = (0, 0)
    limit: int | None = None
    producer_codes: list[int] = field(default_factory=list)
    produced: list[Produced] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)
    producers: int = 0
    drops: int = 0
    closed: bool = False
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    where: str = "kafka://fake:9092"

    def __post_init__(self) -> None:
        """Opens the gate: a test closes it to hold answers back."""
        self.gate.set()

    async def describe(self, topic: str) -> TopicSeen | None:
        """See KafkaLink.describe."""
        await asyncio.sleep(0)
        if isinstance(self.topic, Exception):
            raise self.topic
        return self.topic

    async def send(self, node: int | None, request: Any) -> Any:
        """See KafkaLink.send."""
        await asyncio.sleep(0)
        if self.closed:
            raise LogUnavailable(where=self.where, problem="closed")
        self.requests.append(request)
        if isinstance(request, InitProducerIdRequest):
            self.producers += 1
            code = self.producer_codes.pop(0) if self.producer_codes else 0
            return SimpleNamespace(error_code=code, producer_id=self.producers, producer_epoch=0)
        await self.gate.wait()
        if isinstance(request, DescribeConfigsRequest):
            settings = [("max.message.bytes", str(self.limit))]
            code = Code.NONE if self.limit is not None else Code.TOPIC_AUTHORIZATION_FAILED
            return SimpleNamespace(resources=[(code, "", 2, "t.records", settings)])
        assert node is not None
        if isinstance(request, ProduceBatches):
            parts = [
                (p, *self.produce(self._note(node, p, data)), -1, 0) for p, data in request._batches.items()
            ]
            return SimpleNamespace(topics=[("t.records", parts)])
        if isinstance(request, FetchById):
            rows = self.fetch(request)
            if not rows:
                await asyncio.sleep(0.01)
            return SimpleNamespace(error_code=0, topics=[(request._topic_id, rows, {})])
        ((_, [(partition, timestamp)]),) = request._topics
        offset = self.bounds[0] if timestamp == -2 else self.bounds[1]
        return SimpleNamespace(topics=[("t.records", [(partition, 0, -1, offset)])])

    def drop(self) -> None:
        """See KafkaLink.drop."""
        self.drops += 1

    async def close(self) -> None:
        """See KafkaLink.close."""
        self.closed = True

    def _note(self, node: int, partition: int, data: bytes | bytearray) -> Produced:
        batch = DefaultRecordBatch(bytes(data))
        values = tuple(record.value for record in batch)
        produced = Produced(node, partition, batch.producer_id, batch.base_sequence, values)
        self.produced.append(produced)
        return produced
