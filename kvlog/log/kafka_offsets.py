"""Offsets that the cluster keeps: where a partition begins and ends, and what a consumer group has committed."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.offset import OffsetRequest

from kvlog.errors import LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.kafka_errors import Code, code_name, denied
from kvlog.log.kafka_link import NO_LEADER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvlog.log.kafka_link import KafkaLink

__all__ = ["GroupOffsets", "bounds_of"]

_EARLIEST = -2
_LATEST = -1
_CONSUMER = -1
_READ_UNCOMMITTED = 0
_GROUP = 0
_NO_GENERATION = -1
_NO_MEMBER = ""
_RETENTION_OF_BROKER = -1
_TRIES = 5
_PAUSE_SECONDS = 0.1


async def bounds_of(
    link: KafkaLink, topic: str, partition: int, leaders: Mapping[int, int]
) -> tuple[Offset, Offset]:
    """Log start offset and high watermark of a partition, as its leader says now.

    Raises:
        LogUnavailable: there is no leader, or it does not answer, or it is no longer the leader.
    """
    leader = leaders.get(partition, NO_LEADER)
    if leader == NO_LEADER:
        raise LogUnavailable(where=link.where, problem=f"partition {partition} of {topic} has no leader")
    # One after the other, so that start ≤ end.
    start = await _offset_at(link, leader, (topic, partition), _EARLIEST)
    return start, await _offset_at(link, leader, (topic, partition), _LATEST)


async def _offset_at(link: KafkaLink, leader: int, at: tuple[str, int], timestamp: int) -> Offset:
    topic, partition = at
    request = OffsetRequest(_CONSUMER, _READ_UNCOMMITTED, [(topic, [(partition, timestamp)])])
    response = await link.send(leader, request)
    _, code, _, offset = response.topics[0][1][0]
    if code != Code.NONE:
        raise LogUnavailable(where=link.where, problem=f"partition {partition} of {topic}: {code_name(code)}")
    return Offset(offset)


class GroupOffsets:
    """One consumer group's committed offsets, written without being a member, as Kafka's tools expect them."""

    def __init__(self, link: KafkaLink, group: str) -> None:
        self._link = link
        self._group = group
        self._coordinator: int | None = None

    async def commit(self, topic: str, applied: Mapping[Partition, Offset]) -> None:
        """Store offsets.

        Raises:
            LogUnavailable: not stored.
            ConfigError: we lack the right Read on the group or the topic.
        """
        if not applied:
            return
        rows = [(partition, offset, "") for partition, offset in applied.items()]
        request = OffsetCommitRequest(
            self._group, _NO_GENERATION, _NO_MEMBER, _RETENTION_OF_BROKER, [(topic, rows)]
        )
        await self._ask(
            request, topic, lambda response: [code for _, rows in response.topics for _, code in rows]
        )

    async def committed(self, topic: str, partitions: Sequence[Partition]) -> dict[Partition, Offset]:
        """The stored offsets; a partition without one is missing.

        Raises:
            LogUnavailable: nobody can say now.
            ConfigError: we lack the right Describe on the group.
        """
        request = OffsetFetchRequest(self._group, [(topic, list(partitions))])
        response = await self._ask(
            request, topic, lambda r: [row[-1] for _, rows in r.topics for row in rows]
        )
        rows = [row for _, rows in response.topics for row in rows]
        return {Partition(partition): Offset(offset) for partition, offset, *_ in rows if offset >= 0}

    async def _ask(self, request: Any, topic: str, codes: Any) -> Any:  # noqa: ANN401 - aiokafka's structs have no types
        last = Code.NONE.value
        for _ in range(_TRIES):
            response = await self._link.send(await self._find(), request)
            last = next((code for code in codes(response) if code != Code.NONE), Code.NONE)
            match last:
                case Code.NONE:
                    return response
                case Code.GROUP_AUTHORIZATION_FAILED:
                    raise denied(right="Read", resource=f"group {self._group}")
                case Code.TOPIC_AUTHORIZATION_FAILED:
                    raise denied(right="Read", resource=f"topic {topic}")
                case _:
                    self._coordinator = None
                    await asyncio.sleep(_PAUSE_SECONDS)
        raise LogUnavailable(where=self._link.where, problem=f"group {self._group}: {code_name(last)}")

    async def _find(self) -> int:
        if self._coordinator is not None:
            return self._coordinator
        code = 0
        for _ in range(_TRIES):
            response = await self._link.send(None, FindCoordinatorRequest(self._group, _GROUP))
            code = response.error_code
            if code == Code.NONE:
                self._coordinator = int(response.coordinator_id)
                return self._coordinator
            if code == Code.GROUP_AUTHORIZATION_FAILED:
                raise denied(right="Describe", resource=f"group {self._group}")
            await asyncio.sleep(_PAUSE_SECONDS * 5)
        raise LogUnavailable(where=self._link.where, problem=f"group {self._group}: {code_name(code)}")
