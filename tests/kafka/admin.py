"""What operators do to topics behind our back, for tests."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokafka.protocol.admin import (
    AlterConfigsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
)
from aiokafka.protocol.api import Request, RequestStruct, Response
from aiokafka.protocol.types import Array, Int8, Int16, Int32, Schema, String

from kvlog.log.kafka_link import KafkaLink
from kvlog.log.kafka_options import KafkaOptions

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

__all__ = ["Admin"]

TIMEOUT_MS = 20_000
TOPIC = 2

# Source: org.apache.kafka.common.resource.ResourceType, PatternType, org.apache.kafka.common.acl.AclOperation
RESOURCES = {"topic": 2, "group": 3}
PREFIXED = 4
ALLOW = 3
OPERATIONS = {"Read": 3, "Write": 4, "Create": 5, "Describe": 8, "DescribeConfigs": 10}


class _CreateAclsResponse(Response):
    API_KEY = 30
    API_VERSION = 1
    SCHEMA = Schema(
        ("throttle_time_ms", Int32), ("results", Array(("code", Int16), ("message", String("utf-8"))))
    )


class _CreateAclsRequest(RequestStruct):
    API_KEY = 30
    API_VERSION = 1
    RESPONSE_TYPE = _CreateAclsResponse
    SCHEMA = Schema(
        (
            "creations",
            Array(
                ("resource_type", Int8),
                ("resource_name", String("utf-8")),
                ("resource_pattern_type", Int8),
                ("principal", String("utf-8")),
                ("host", String("utf-8")),
                ("operation", Int8),
                ("permission_type", Int8),
            ),
        ),
    )


class _CreateAcls(Request[_CreateAclsRequest]):
    API_KEY = 30

    def __init__(self, rows: list[tuple[object, ...]]) -> None:
        self._rows = rows

    def build(self, request_struct_class: type[_CreateAclsRequest]) -> _CreateAclsRequest:
        return request_struct_class(self._rows)


class Admin:
    """An administrator's connection. `close` it.

    The controller answers before the brokers know of a change; who goes on waits here until it is to be seen.
    """

    def __init__(self, bootstrap: str) -> None:
        self._link = KafkaLink(KafkaOptions(bootstrap=bootstrap, client_id="admin", timeout_seconds=20))

    async def create(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Makes a topic with one copy."""
        row: tuple[object, ...] = (topic, partitions, 1, [], list((config or {}).items()))
        response = await self._link.send(None, CreateTopicsRequest([row], TIMEOUT_MS, False))
        assert response.topic_errors[0][1] == 0, response
        await self._seen(lambda: self._has_partitions(topic, partitions))

    async def delete(self, topic: str) -> None:
        """Deletes a topic."""
        response = await self._link.send(None, DeleteTopicsRequest([topic], TIMEOUT_MS))
        assert response.topic_error_codes[0][1] == 0, response
        await self._seen(lambda: self._has_partitions(topic, 0))

    async def recreate(self, topic: str, partitions: int, config: Mapping[str, str] | None = None) -> None:
        """Deletes a topic and makes an empty one under the same name."""
        await self.delete(topic)
        await self.create(topic, partitions, config)

    async def exists(self, topic: str) -> bool:
        """Tells whether there is such a topic."""
        return await self._link.describe(topic) is not None

    async def leader(self, topic: str, partition: int) -> int:
        """Finds the broker that leads a partition."""
        seen = await self._link.describe(topic)
        assert seen is not None
        return seen.leaders[partition]

    async def partitions(self, topic: str) -> int:
        """Counts a topic's partitions."""
        seen = await self._link.describe(topic)
        assert seen is not None
        return len(seen.leaders)

    async def config(self, topic: str) -> dict[str, str]:
        """Reads a topic's settings, defaults too."""
        response = await self._link.send(None, DescribeConfigsRequest([(TOPIC, topic, None)]))
        return {row[0]: row[1] for row in response.resources[0][4]}

    async def set_config(self, topic: str, config: Mapping[str, str]) -> None:
        """Replaces a topic's own settings."""
        response = await self._link.send(None, AlterConfigsRequest([(TOPIC, topic, list(config.items()))]))
        assert response.resources[0][0] == 0, response
        await self._seen(lambda: self._has_config(topic, config))

    async def add_partitions(self, topic: str, total: int) -> None:
        """Gives a topic more partitions."""
        response = await self._link.send(
            None, CreatePartitionsRequest([(topic, (total, None))], TIMEOUT_MS, False)
        )
        assert response.topic_errors[0][1] == 0, response
        await self._seen(lambda: self._has_partitions(topic, total))

    async def delete_records(self, topic: str, partition: int, before: int) -> None:
        """Deletes a partition's records below an offset."""
        seen = await self._link.describe(topic)
        assert seen is not None
        rows = [(topic, [(partition, before)])]
        response = await self._link.send(seen.leaders[partition], DeleteRecordsRequest(rows, TIMEOUT_MS))
        assert response.topics[0][1][0][2] == 0, response

    async def grant(self, user: str, prefix: str, *operations: str, on: str = "topic") -> None:
        """Gives a user rights on everything whose name begins so."""
        rows: list[tuple[object, ...]] = [
            (RESOURCES[on], prefix, PREFIXED, f"User:{user}", "*", OPERATIONS[operation], ALLOW)
            for operation in operations
        ]
        response = await self._link.send(None, _CreateAcls(rows))
        assert {0} == {code for code, _ in response.results}, response

    async def _has_partitions(self, topic: str, count: int) -> bool:
        seen = await self._link.describe(topic)
        return (0 if seen is None else len(seen.leaders)) == count

    async def _has_config(self, topic: str, wanted: Mapping[str, str]) -> bool:
        return wanted.items() <= (await self.config(topic)).items()

    async def _seen(self, condition: Callable[[], Awaitable[bool]]) -> None:
        async with asyncio.timeout(TIMEOUT_MS / 1000):
            while not await condition():  # noqa: ASYNC110  # Kafka tells nobody
                await asyncio.sleep(0.01)

    async def close(self) -> None:
        """Closes the connection."""
        await self._link.close()
