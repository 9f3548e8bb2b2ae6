"""Connections to a cluster's brokers: who leads what, one request and its answer, an error that says what to do.

We use aiokafka's connections (framing, TLS, SASL, version negotiation), its record batches and its request schemas, and
not its AIOKafkaProducer and AIOKafkaConsumer, because these (0.14):

- create a topic by asking for it, with the broker's default settings, on every broker that allows it;
- read by topic name, so a topic recreated under the same name is taken for the old one;
- cannot see that a log lost its tail and has grown again;
- hide a refused password in a log line and report that nothing could be reached;
- fail idempotent batches that waited for a leader, and leave a hole in the sequence numbers behind;
- can get stuck after a broker's restart without an error (aiokafka #1154, #847), or wait for ever when closed.

A link is used by one owner (the log, a writer, a reader): brokers answer one connection's requests in order, so a fetch
that waits for data would hold up everything behind it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aiokafka import conn as aiokafka_conn
from aiokafka.errors import KafkaConnectionError, KafkaError

from kvlog.errors import KvlogError, LogUnavailable
from kvlog.log.kafka_errors import Code, code_name, denied, translate
from kvlog.log.kafka_inflow import take_over
from kvlog.log.kafka_options import ssl_context
from kvlog.log.kafka_protocol import TopicMetadata

if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping

    from aiokafka.protocol.api import Request

    from kvlog.log.kafka_options import KafkaOptions

__all__ = ["NO_LEADER", "KafkaLink", "Right", "TopicBound", "TopicSeen"]

NO_LEADER = -1
"""A partition's leader while there is none."""

_IDLE_MS = 540_000
"""A minute less than a broker's connections.max.idle.ms: we close first, so no request meets a closing connection."""

_SILENT = 60
"""Above CRITICAL. What matters in the library's log lines reaches our callers as errors."""

_NETWORK = (OSError, KafkaError, TimeoutError, NotImplementedError, EOFError)


class Right:
    """The bits of a topic's authorized operations. Source: org.apache.kafka.common.acl.AclOperation."""

    READ = 1 << 3
    WRITE = 1 << 4


@dataclass(frozen=True, slots=True)
class TopicSeen:
    """A topic as the brokers described it.

    Args:
        topic_id: 16 bytes; a recreated topic has others.
        leaders: leader's node id by partition; NO_LEADER where there is none now.
        replication: copies of the partition that has the fewest.
        rights: what we may do on it, bits of Right.
    """

    topic_id: bytes
    leaders: Mapping[int, int]
    replication: int
    rights: int


@dataclass(frozen=True, slots=True)
class TopicBound:
    """The topic that a writer or reader was made for.

    Args:
        name: its name.
        topic_id: 16 bytes; another id is another topic.
        partitions: P.
        message_bytes_max: its max.message.bytes, or what we take it for when we may not read that.
    """

    name: str
    topic_id: bytes
    partitions: int
    message_bytes_max: int


class KafkaLink:
    """One owner's connections, at most one to each broker; made when they are needed.

    Every method raises LogUnavailable when a broker cannot be reached or does not answer within
    `KafkaOptions.timeout_seconds`, and ConfigError when only the operator can help (password, certificate, age of the
    cluster).
    """

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        self._ssl: ssl.SSLContext | None = ssl_context(options.security)
        # Bootstrap addresses have negative node ids: they are asked only who the brokers are.
        self._nodes = {-1 - n: address for n, address in enumerate(options.addresses())}
        self._connections: dict[int, aiokafka_conn.AIOKafkaConnection] = {}
        self._locks: dict[int, asyncio.Lock] = {}
        self._closed = False
        if not aiokafka_conn.log.level:
            aiokafka_conn.log.setLevel(_SILENT)

    @property
    def brokers(self) -> int:
        """How many brokers there are, as last seen; 0 before anyone was asked."""
        return sum(node >= 0 for node in self._nodes)

    @property
    def where(self) -> str:
        """The cluster's URL, for errors."""
        return self._options.where

    async def look(self) -> None:
        """Ask any broker who the brokers are."""
        self._remember(await self.send(None, TopicMetadata(None)))

    async def describe(self, topic: str) -> TopicSeen | None:
        """A topic as it is now; None: it does not exist.

        Raises:
            ConfigError: we may not even describe it.
            LogUnavailable: nobody can say now.
        """
        response = await self.send(None, TopicMetadata(topic))
        self._remember(response)
        code, _, topic_id, _, partitions, rights, _ = response.topics[0]
        match code:
            case Code.NONE:
                return TopicSeen(
                    topic_id,
                    {partition: leader for _, partition, leader, *_ in partitions},
                    min((len(replicas) for _, _, _, _, replicas, *_ in partitions), default=0),
                    rights,
                )
            case Code.UNKNOWN_TOPIC_OR_PARTITION | Code.UNKNOWN_TOPIC_ID:
                return None
            case Code.TOPIC_AUTHORIZATION_FAILED:
                raise denied(right="Describe", resource=f"topic {topic}")
            case _:
                raise LogUnavailable(where=self.where, problem=f"topic {topic}: {code_name(code)}")

    async def send(self, node: int | None, request: Request[Any]) -> Any:  # noqa: ANN401 - each request's own response
        """Send a request to a broker and return its answer.

        Args:
            node: a broker's id; None: any that can be reached, each is tried once.
            request: one of aiokafka's, or of kafka_protocol.
        """
        whole = self._options.timeout_seconds
        if node is not None:
            return await self._send(node, request, whole)
        last: KvlogError = LogUnavailable(where=self.where, problem="no address")
        candidates = self._candidates()
        deadline = asyncio.get_running_loop().time() + whole
        # One that hangs must leave time for another.
        share = whole if len(candidates) == 1 else whole / 2
        for candidate in candidates:
            try:
                return await self._send(candidate, request, share)
            except LogUnavailable as error:
                last = error
            share = min(share, deadline - asyncio.get_running_loop().time())
            if share <= 0:
                break
        raise last

    async def close(self) -> None:
        """Close every connection; requests that wait for an answer end as LogUnavailable."""
        self._closed = True
        closing = [connection.close() for connection in self._connections.values()]
        self._connections.clear()
        for done in closing:
            if done is not None:
                await asyncio.wait([done], timeout=1.0)

    def drop(self) -> None:
        """Close every connection at once; the next request makes a new one."""
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def _candidates(self) -> list[int]:
        """Brokers that we are connected to, the others, then the bootstrap addresses."""
        brokers = [node for node in self._nodes if node >= 0]
        random.shuffle(brokers)
        brokers.sort(key=lambda node: node not in self._connections)
        return brokers + [node for node in self._nodes if node < 0]

    def _remember(self, response: Any) -> None:  # noqa: ANN401 - aiokafka's structs have no types
        """Take over the brokers' addresses. One that moved gets a new connection; bootstrap's are done with."""
        seen = {node: (host, port) for node, host, port, *_ in response.brokers}
        if not seen:
            return
        for node in [n for n in self._connections if n < 0 or seen.get(n) != self._nodes.get(n)]:
            self._connections.pop(node).close()
        self._nodes = {n: address for n, address in self._nodes.items() if n < 0} | seen

    async def _send(self, node: int, request: Request[Any], seconds: float) -> Any:  # noqa: ANN401 - see send
        where = self._where(node)
        try:
            async with asyncio.timeout(seconds):
                connection = await self._connection(node)
                return await connection.send(request)
        except TimeoutError as error:
            # The answer may still come; a new connection keeps it apart from the next request's.
            self._discard(node)
            raise translate(error, where=where) from error
        except _NETWORK as error:
            raise translate(error, where=where) from error

    async def _connection(self, node: int) -> aiokafka_conn.AIOKafkaConnection:
        async with self._locks.setdefault(node, asyncio.Lock()):
            connection = self._connections.get(node)
            if connection is not None and connection.connected():
                return connection
            if self._closed or node not in self._nodes:
                problem = "closed" if self._closed else "the cluster does not know this broker now"
                raise LogUnavailable(where=self._where(node), problem=problem)
            try:
                connection = await self._connect(*self._nodes[node])
            except (ConnectionResetError, KafkaConnectionError, EOFError) as error:
                raise self._hung_up(node, error) from error
            if self._was_closed():  # meanwhile
                connection.close()
                raise LogUnavailable(where=self._where(node), problem="closed")
            self._connections[node] = connection
            return connection

    def _was_closed(self) -> bool:
        return self._closed

    async def _connect(self, host: str, port: int) -> aiokafka_conn.AIOKafkaConnection:
        security = self._options.security
        connection = await aiokafka_conn.create_conn(
            host,
            port,
            client_id=self._options.client_id,
            request_timeout_ms=int(self._options.timeout_seconds * 1000),
            ssl_context=self._ssl,
            security_protocol=security.protocol.value,
            max_idle_ms=_IDLE_MS,
            sasl_mechanism=security.sasl_mechanism.value if security.uses_sasl else None,
            sasl_plain_username=security.username,
            sasl_plain_password=security.password,
        )
        take_over(connection)
        return connection

    def _hung_up(self, node: int, error: Exception) -> KvlogError:
        """A listener that speaks another protocol than we do says nothing about it: it hangs up."""
        told = translate(error, where=self._where(node))
        if not isinstance(told, LogUnavailable):
            return told
        problem = (
            f"{told.problem}; if it stays so, see that the listener speaks {self._options.security.protocol}"
        )
        return LogUnavailable(where=self._where(node), problem=problem)

    def _discard(self, node: int) -> None:
        connection = self._connections.pop(node, None)
        if connection is not None:
            connection.close()

    def _where(self, node: int) -> str:
        host, port = self._nodes.get(node, (f"broker {node}", 0))
        return f"{host}:{port}" if port else host
