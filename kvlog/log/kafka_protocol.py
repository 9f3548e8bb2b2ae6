"""The requests that aiokafka does not have, or has in a form that would cost us: their schemas, nothing else.

- Metadata v12: with topic ids, and without creating a topic by asking for it.
- Fetch v13: by topic id, so that a topic recreated under the same name is never mistaken for the old one; and with the
  leader epoch of the last record that was read, so that a log that lost its tail is noticed though it has grown again.
- Produce v7: the same bytes as aiokafka's, joined once; aiokafka's nested schemas copy each batch six times.

Source: https://kafka.apache.org/protocol and the message definitions of Apache Kafka 3.1 (MetadataRequest.json,
FetchRequest.json, ProduceRequest.json).
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokafka.protocol.abstract import AbstractType
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.produce import ProduceResponse_v7
from aiokafka.protocol.types import (
    Array,
    Boolean,
    Bytes,
    CompactArray,
    CompactBytes,
    CompactString,
    Int8,
    Int16,
    Int32,
    Int64,
    Schema,
    String,
    TaggedFields,
    UnsignedVarInt32,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from io import BytesIO

__all__ = [
    "FETCH_DIVERGING_EPOCH_TAG",
    "FetchById",
    "FetchPart",
    "ProduceBatches",
    "TopicMetadata",
    "show_topic_id",
    "unpack_epoch_end",
]

FETCH_DIVERGING_EPOCH_TAG = 0
"""Tagged field of a fetched partition: the log's history parted from ours (struct: epoch int32, end offset int64)."""

_EPOCH_END = struct.Struct(">iq")
_NO_EPOCH = -1
_CONSUMER = -1
_NO_SESSION = 0
_FINAL_SESSION_EPOCH = -1
_ACKS_ALL = -1


class _Uuid(AbstractType):
    """16 bytes."""

    @classmethod
    def encode(cls, value: bytes) -> bytes:
        return value

    @classmethod
    def decode(cls, data: BytesIO) -> bytes:
        return data.read(16)


class _InPlace:
    """A stream over bytes that stay where they are, as far as aiokafka's types use one."""

    def __init__(self, data: memoryview, at: int) -> None:
        self._data = data
        self._at = at

    def view(self, size: int) -> memoryview:
        """The next bytes, fewer at the end."""
        found = self._data[self._at : self._at + size]
        self._at += len(found)
        return found

    def read(self, size: int) -> bytes:
        """A copy of the next bytes."""
        return bytes(self.view(size))


class _CompactView(AbstractType):
    """Bytes that stay where they were received: of an answer of eight MiB nothing is copied to read it."""

    @classmethod
    def encode(cls, value: memoryview | None) -> bytes:
        encoded: bytes = CompactBytes.encode(None if value is None else bytes(value))
        return encoded

    @classmethod
    def decode(cls, data: _InPlace) -> memoryview | None:
        length = UnsignedVarInt32.decode(data) - 1
        if length < 0:
            return None
        value = data.view(length)
        if len(value) != length:
            raise ValueError(length)
        return value


def show_topic_id(topic_id: bytes) -> str:
    """A topic id as Kafka's tools print it."""
    return base64.urlsafe_b64encode(topic_id).rstrip(b"=").decode()


def unpack_epoch_end(field: bytes) -> tuple[int, int]:
    """The leader epoch and its end offset of a tagged field FETCH_DIVERGING_EPOCH_TAG."""
    epoch, end = _EPOCH_END.unpack_from(field)
    return epoch, end


class _MetadataResponse(Response):
    API_KEY = 3
    API_VERSION = 12
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        (
            "brokers",
            CompactArray(
                ("node_id", Int32),
                ("host", CompactString("utf-8")),
                ("port", Int32),
                ("rack", CompactString("utf-8")),
                ("tags", TaggedFields),
            ),
        ),
        ("cluster_id", CompactString("utf-8")),
        ("controller_id", Int32),
        (
            "topics",
            CompactArray(
                ("error_code", Int16),
                ("name", CompactString("utf-8")),
                ("topic_id", _Uuid),
                ("is_internal", Boolean),
                (
                    "partitions",
                    CompactArray(
                        ("error_code", Int16),
                        ("partition", Int32),
                        ("leader", Int32),
                        ("leader_epoch", Int32),
                        ("replicas", CompactArray(Int32)),
                        ("isr", CompactArray(Int32)),
                        ("offline_replicas", CompactArray(Int32)),
                        ("tags", TaggedFields),
                    ),
                ),
                ("authorized_operations", Int32),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )


class _MetadataRequest(RequestStruct):
    API_KEY = 3
    API_VERSION = 12
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _MetadataResponse
    SCHEMA = Schema(
        (
            "topics",
            CompactArray(("topic_id", _Uuid), ("name", CompactString("utf-8")), ("tags", TaggedFields)),
        ),
        ("allow_auto_topic_creation", Boolean),
        ("include_topic_authorized_operations", Boolean),
        ("tags", TaggedFields),
    )


class TopicMetadata(Request[_MetadataRequest]):
    """Asks for the brokers, and for one topic's id, leaders and our rights on it; creates nothing."""

    API_KEY = 3

    def __init__(self, topic: str | None) -> None:
        no_tags: dict[int, bytes] = {}
        self._topics = [] if topic is None else [(bytes(16), topic, no_tags)]

    def build(self, request_struct_class: type[_MetadataRequest]) -> _MetadataRequest:
        """The request's struct."""
        return request_struct_class(self._topics, False, True, {})  # noqa: FBT003 - fields in the schema's order


class _FetchResponse(Response):
    API_KEY = 1
    API_VERSION = 13
    SCHEMA = Schema(
        ("throttle_time_ms", Int32),
        ("error_code", Int16),
        ("session_id", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", _Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("error_code", Int16),
                        ("high_watermark", Int64),
                        ("last_stable_offset", Int64),
                        ("log_start_offset", Int64),
                        (
                            "aborted_transactions",
                            CompactArray(
                                ("producer_id", Int64), ("first_offset", Int64), ("tags", TaggedFields)
                            ),
                        ),
                        ("preferred_read_replica", Int32),
                        ("records", _CompactView),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        ("tags", TaggedFields),
    )

    @classmethod
    def decode(cls, data: BytesIO) -> _FetchResponse:
        """From a stream of aiokafka's own, whose bytes are not copied."""
        return cls.decode_in_place(memoryview(data.getvalue()), data.tell())

    @classmethod
    def decode_in_place(cls, answer: memoryview, at: int) -> _FetchResponse:
        stream = _InPlace(answer, at)
        return cls(*[field.decode(stream) for field in cls.SCHEMA.fields])


class _Shown:
    """Stands for the response's type where the answer was shown: reads that, behind the head that was read."""

    def __init__(self, answer: memoryview) -> None:
        self._answer = answer

    def decode(self, head: BytesIO) -> _FetchResponse:
        return _FetchResponse.decode_in_place(self._answer, head.tell())


class _FetchRequest(RequestStruct):
    API_KEY = 1
    API_VERSION = 13
    FLEXIBLE_VERSION = True
    RESPONSE_TYPE = _FetchResponse
    SCHEMA = Schema(
        ("replica_id", Int32),
        ("max_wait_ms", Int32),
        ("min_bytes", Int32),
        ("max_bytes", Int32),
        ("isolation_level", Int8),
        ("session_id", Int32),
        ("session_epoch", Int32),
        (
            "topics",
            CompactArray(
                ("topic_id", _Uuid),
                (
                    "partitions",
                    CompactArray(
                        ("partition", Int32),
                        ("current_leader_epoch", Int32),
                        ("fetch_offset", Int64),
                        ("last_fetched_epoch", Int32),
                        ("log_start_offset", Int64),
                        ("partition_max_bytes", Int32),
                        ("tags", TaggedFields),
                    ),
                ),
                ("tags", TaggedFields),
            ),
        ),
        (
            "forgotten_topics_data",
            CompactArray(("topic_id", _Uuid), ("partitions", CompactArray(Int32)), ("tags", TaggedFields)),
        ),
        ("rack_id", CompactString("utf-8")),
        ("tags", TaggedFields),
    )

    def show(self, answer: memoryview) -> None:
        """See kafka_inflow.AnsweredInPlace."""
        self.RESPONSE_TYPE = _Shown(answer)  # type: ignore[assignment]  # aiokafka only calls its `decode`


@dataclass(frozen=True, slots=True)
class FetchPart:
    """One partition of a fetch: the next offset, and the leader epoch of the record before it (-1: not known)."""

    partition: int
    offset: int
    epoch: int


class FetchById(Request[_FetchRequest]):
    """Reads partitions of one topic, named by its id.

    Args:
        topic_id: 16 bytes.
        parts: the partitions, in the order in which the broker fills the answer.
        bytes_max: of the whole answer; the first message comes even if it is larger.
        partition_bytes_max: of one partition in it.
        wait_ms: how long the broker holds the answer while there is nothing.
    """

    API_KEY = 1

    def __init__(
        self,
        topic_id: bytes,
        parts: Sequence[FetchPart],
        *,
        bytes_max: int,
        partition_bytes_max: int,
        wait_ms: int,
    ) -> None:
        self._topic_id = topic_id
        self._parts = parts
        self._bytes_max = bytes_max
        self._partition_bytes_max = partition_bytes_max
        self._wait_ms = wait_ms

    def build(self, request_struct_class: type[_FetchRequest]) -> _FetchRequest:
        """The request's struct."""
        limit = self._partition_bytes_max
        no_tags: dict[int, bytes] = {}
        rows = [(p.partition, _NO_EPOCH, p.offset, p.epoch, -1, limit, no_tags) for p in self._parts]
        topics = [(self._topic_id, rows, no_tags)]
        limits = (self._wait_ms, 1, self._bytes_max)
        return request_struct_class(
            _CONSUMER, *limits, 0, _NO_SESSION, _FINAL_SESSION_EPOCH, topics, [], "", {}
        )


class _ProduceRequest(RequestStruct):
    """Joins its parts once; the schema is there for whoever prints it."""

    API_KEY = 0
    API_VERSION = 7
    RESPONSE_TYPE = ProduceResponse_v7
    SCHEMA = Schema(
        ("transactional_id", String("utf-8")),
        ("acks", Int16),
        ("timeout_ms", Int32),
        ("topic", String("utf-8")),
        ("partitions", Array(("partition", Int32), ("records", Bytes))),
    )

    transactional_id: str | None
    acks: int
    timeout_ms: int
    topic: str
    partitions: list[tuple[int, Any]]

    def encode(self) -> bytes:
        name = self.topic.encode()
        head = struct.pack(
            f">hhiih{len(name)}si", -1, self.acks, self.timeout_ms, 1, len(name), name, len(self.partitions)
        )
        parts: list[Any] = [head]
        for partition, records in self.partitions:
            parts += (struct.pack(">ii", partition, len(records)), records)
        return b"".join(parts)


class ProduceBatches(Request[_ProduceRequest]):
    """Appends one batch to each of some partitions of a topic; answered when all in-sync replicas have them.

    Args:
        topic: its name.
        batches: built record batches by partition; read until the answer comes.
        timeout_ms: how long the broker waits for its replicas.
    """

    API_KEY = 0

    def __init__(self, topic: str, batches: Mapping[int, bytes | bytearray], *, timeout_ms: int) -> None:
        self._topic = topic
        self._batches = batches
        self._timeout_ms = timeout_ms

    def build(self, request_struct_class: type[_ProduceRequest]) -> _ProduceRequest:
        """The request's struct."""
        return request_struct_class(
            None, _ACKS_ALL, self._timeout_ms, self._topic, list(self._batches.items())
        )
