"""Makes and checks topics on a cluster; what they should be is said by kvlog.log.topics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from aiokafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from kvlog.errors import ConfigError, LogUnavailable
from kvlog.log.kafka_errors import Code, code_name, denied
from kvlog.log.kafka_link import NO_LEADER, Right, TopicSeen
from kvlog.log.topics import TopicFound, config_command, differences, refuse_unusable

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlog.log.kafka_link import KafkaLink
    from kvlog.log.kafka_options import KafkaOptions
    from kvlog.log.topics import TopicWanted

__all__ = ["TopicKeeper"]

_TOPIC = 2
"""The resource type of a topic. Source: org.apache.kafka.common.config.ConfigResource."""

_PAUSE_SECONDS = 0.1
_TRANSIENT = {Code.REQUEST_TIMED_OUT, Code.NOT_CONTROLLER, Code.INVALID_REPLICATION_FACTOR}
"""Codes of a cluster that is just starting: its brokers register one by one."""


class TopicKeeper:
    """Brings topics about. Waits are bounded by the caller's deadline."""

    def __init__(self, link: KafkaLink, options: KafkaOptions) -> None:
        self._link = link
        self._options = options
        self._trouble = ""

    @property
    def trouble(self) -> str:
        """What it waits for, or waited for last, for people."""
        return self._trouble

    async def keep(self, wanted: TopicWanted) -> tuple[TopicSeen, int, tuple[str, ...]]:
        """Make the topic if it is missing, then check it.

        Returns: the topic, the largest message that it takes, and what differs from `wanted`.

        Raises:
            LogUnavailable: the cluster cannot do it now.
            ConfigError: it cannot be used as it is, or we lack a right.
        """
        seen = await self._link.describe(wanted.name)
        if seen is None:
            await self._create(wanted)
        seen = await self._served(wanted.name)
        config = await self._config(wanted.name)
        found = TopicFound(len(seen.leaders), seen.replication, config)
        bootstrap = self._options.bootstrap
        refuse_unusable(wanted, found, bootstrap=bootstrap)
        limit = wanted.message_bytes_min if config is None else int(config["max.message.bytes"])
        replication = self._options.records.replication
        said = differences(wanted, found, replication_wanted=replication, bootstrap=bootstrap)
        if limit > self._options.fetch_bytes_max:
            command = config_command(
                bootstrap, wanted.name, "max.message.bytes", str(wanted.message_bytes_min)
            )
            held = f"more than a reader means to hold ({self._options.fetch_bytes_max})"
            said = (*said, f"Topic {wanted.name} takes messages of {limit} bytes, {held}: {command}.")
        return seen, limit, said

    async def find(self, topic: str) -> tuple[TopicSeen, int]:
        """Look at a topic that must be there already.

        Returns: the topic, and the largest message that it takes.

        Raises:
            LogUnavailable: there is none of this name, or the cluster cannot say now.
            ConfigError: we lack a right.
        """
        seen = await self._link.describe(topic)
        if seen is None:
            problem = f"there is no topic {topic}: no daemon has made it yet, or log.topic_prefix is another one there"
            raise LogUnavailable(where=self._link.where, problem=problem)
        config = await self._config(topic)
        limit = self._options.records.record_bytes_max if config is None else int(config["max.message.bytes"])
        return seen, limit

    async def message_bytes_max(self, topic: str) -> int | None:
        """The largest message that a topic takes now; None: we may not read that.

        Raises:
            LogUnavailable: the cluster cannot say now.
        """
        config = await self._config(topic)
        return None if config is None else int(config["max.message.bytes"])

    @staticmethod
    def refuse_without_rights(topic: str, rights: int, needed: int) -> None:
        """Refuse a topic on which we may not do what we need.

        Raises:
            ConfigError: a right is missing; it names which.
        """
        for name, bit in (("Read", Right.READ), ("Write", Right.WRITE)):
            if needed & bit and not rights & bit:
                raise denied(right=name, resource=f"topic {topic}")

    async def _create(self, wanted: TopicWanted) -> None:
        assignment: list[object] = []
        row = (wanted.name, wanted.partitions, wanted.replication, assignment, list(wanted.config.items()))
        timeout_ms = int(self._options.timeout_seconds * 1000)
        while True:
            request = CreateTopicsRequest([row], timeout_ms, False)  # noqa: FBT003 - aiokafka's own signature
            response = await self._link.send(None, request)
            _, code, message = response.topic_errors[0]
            match code:
                case Code.NONE | Code.TOPIC_ALREADY_EXISTS:
                    return
                case Code.TOPIC_AUTHORIZATION_FAILED | Code.CLUSTER_AUTHORIZATION_FAILED:
                    raise denied(right="Create", resource=f"topic {wanted.name}")
                case _ if code in _TRANSIENT:
                    self._trouble = f"topic {wanted.name}: {code_name(code)}: {message}"
                    await asyncio.sleep(_PAUSE_SECONDS)
                case _:
                    raise ConfigError(
                        setting=f"topic {wanted.name}",
                        problem=f"the cluster refuses to make it: {code_name(code)}: {message}",
                        fix="make the topic by hand, or change what the cluster forbids",
                    )

    async def _served(self, topic: str) -> TopicSeen:
        """The topic once each partition has a leader; with what there is, at the last try."""
        tries = 50
        for left in reversed(range(tries)):
            seen = await self._link.describe(topic)
            if seen is not None and seen.leaders and (NO_LEADER not in seen.leaders.values() or not left):
                return seen
            await asyncio.sleep(_PAUSE_SECONDS)
        raise LogUnavailable(where=self._link.where, problem=f"topic {topic} was made and does not appear")

    async def _config(self, topic: str) -> Mapping[str, str] | None:
        """The topic's settings; None: we may not read them."""
        response = await self._link.send(None, DescribeConfigsRequest([(_TOPIC, topic, None)]))
        code, message, _, _, rows = response.resources[0]
        match code:
            case Code.NONE:
                return {row[0]: row[1] for row in rows}
            case Code.TOPIC_AUTHORIZATION_FAILED:
                return None
            case _:
                raise LogUnavailable(
                    where=self._link.where, problem=f"topic {topic}: {code_name(code)}: {message}"
                )
