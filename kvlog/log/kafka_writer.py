"""An idempotent producer with acks=all that never gives a message up by itself, on one KafkaLink.

- One produce request a broker at a time holds the next batch of every partition that it leads, so batches grow while
  the broker is busy (linger 0), and one partition's order needs nothing else.
- Whatever may pass is tried again with the same bytes and sequence numbers, for as long as it takes: a broker that has
  them already says so. Deadlines are the caller's.
- Whatever may not pass (sequence gap after a log lost its tail, fenced, a right taken away, a topic recreated) ends
  every pending append as OutcomeUnknown, and a fresh producer id serves the appends after it.
- A topic that takes smaller messages than ours, or has another number of partitions, is refused as it would be at the
  start: nothing is sent, `append` says why, and an operator's change is seen within seconds.
- Every failed batch is fatal, even one that the broker surely refused: a later batch of the partition would meet a
  sequence gap, and a later append must not survive an earlier one that was lost.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from aiokafka.protocol.transaction import InitProducerIdRequest

from kvlog.errors import ConfigError, KvlogError, LogUnavailable, RowTooLarge
from kvlog.ids import Partition
from kvlog.log.kafka_batches import Batch, Lane, Message, ProducerId, Room, message_bytes
from kvlog.log.kafka_errors import PRODUCE, Code, Then, code_name, denied, unavailable
from kvlog.log.kafka_link import NO_LEADER
from kvlog.log.kafka_protocol import ProduceBatches, show_topic_id
from kvlog.log.kafka_topics import TopicKeeper
from kvlog.log.topics import MESSAGE_OVERHEAD_BYTES, records_topic, too_small

if TYPE_CHECKING:
    from collections.abc import Coroutine, Mapping

    from kvlog.ids import Offset
    from kvlog.log.base import AppendRequest
    from kvlog.log.kafka_link import KafkaLink, TopicBound
    from kvlog.log.kafka_options import KafkaOptions

__all__ = ["KafkaWriter"]

_REQUEST_BYTES_MAX = 16 << 20
"""One produce request; far below a broker's socket.request.max.bytes (100 MiB), and sixteen full batches."""

_PAUSE_SECONDS = 0.05
_PAUSE_SECONDS_MAX = 1.0
"""Between tries: short, because a new leader is elected in tens of milliseconds; at most a second in a long outage."""

_LOOK_SECONDS = 10.0
"""Between looks while all is well: partitions that an operator added must not stay unnoticed (P never changes)."""

_LOOK_REFUSED_SECONDS = 1.0
"""Between looks while the topic is refused: an operator waits for what he has set."""

_NEVER_TIMES_OUT_MS = (1 << 31) - 1
_CLOSE_SECONDS = 1.0
_TOO_LARGE = {Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE}
_NO_ANSWER = (int(Code.NETWORK_EXCEPTION), -1)


class KafkaWriter:
    """A LogWriter over Kafka; see base.LogWriter for what is promised."""

    def __init__(self, link: KafkaLink, topic: TopicBound, options: KafkaOptions) -> None:
        self._link = link
        self._topic = topic
        self._options = options
        self._keeper = TopicKeeper(link, options)
        self._batch_bytes_max = min(options.batch_bytes_max, topic.message_bytes_max)
        self._room = Room(options.pending_bytes_max)
        self._lanes = {Partition(p): Lane(Partition(p)) for p in range(topic.partitions)}
        self._leaders: Mapping[int, int] = {}
        self._busy: Counter[int] = Counter()
        self._producer: ProducerId | None = None
        self._asking = asyncio.Lock()
        self._other_partitions: ConfigError | None = None
        self._too_small: ConfigError | None = None
        self._trouble: KvlogError | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._looking = False
        self._looked_at = 0.0
        self._pump_due: asyncio.TimerHandle | asyncio.Handle | None = None
        self._closed = False

    @property
    def trouble(self) -> KvlogError | None:
        """See base.LogWriter.trouble."""
        return self._refused or self._trouble

    @property
    def _refused(self) -> ConfigError | None:
        return self._other_partitions or self._too_small

    @property
    def pending_bytes(self) -> int:
        """Bytes appended and not yet durable."""
        return self._room.taken

    async def start(self) -> None:
        """Get leaders and a producer id.

        Raises:
            LogUnavailable: not within `timeout_seconds`.
            ConfigError: we may not write.
        """
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                await self._look()
                while self._producer is None:
                    await self._ask_producer_id()
        except TimeoutError:
            problem = f"no producer id: {self._trouble}" if self._trouble else "no producer id in time"
            raise LogUnavailable(where=self._link.where, problem=problem) from None

    async def append(self, request: AppendRequest) -> asyncio.Future[Offset]:
        """See base.LogWriter.append.

        Raises:
            LogUnavailable: no room within `append_wait_seconds`, or closed; nothing was sent.
            ConfigError: the topic has another number of partitions now; nothing is written any more.
        """
        message = Message.of_record(request.key, request.value, kind=request.kind, epoch=request.epoch)
        limit = self._options.records.record_bytes_max
        if message.value_bytes > limit:
            return _refused(message.value_bytes, limit)
        return await self.append_message(request.partition, message)

    async def append_message(self, partition: Partition, message: Message) -> asyncio.Future[Offset]:
        """`append` for any key and value, a tombstone too."""
        self._refuse_if_stopped()
        size = message_bytes(message)
        if size > self._topic.message_bytes_max:
            return _refused(size, self._topic.message_bytes_max)
        await self._take_room(size)
        future = self._lanes[partition].place(message, size, self._batch_bytes_max)
        self._pump_soon()
        return future

    async def flush(self) -> None:
        """Return when every append so far is durable or has failed."""
        pending = [batch.settled for lane in self._lanes.values() for batch in lane.batches()]
        if pending:
            await asyncio.wait(pending)

    async def close(self) -> None:
        """Stop at once; what is not durable ends as OutcomeUnknown, so `flush` first."""
        if self._closed:
            return
        self._closed = True
        if self._pump_due is not None:
            self._pump_due.cancel()
        self._lose_all("the writer was closed", silently=True)
        for task in self._tasks:
            task.cancel()
        await self._link.close()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=_CLOSE_SECONDS)

    def _refuse_if_stopped(self) -> None:
        if self._refused is not None:
            if asyncio.get_running_loop().time() - self._looked_at > _LOOK_REFUSED_SECONDS:
                self._look_soon()
            raise self._refused.with_traceback(None)
        if self._closed:
            raise LogUnavailable(where=self._link.where, problem="the writer is closed")

    async def _take_room(self, size: int) -> None:
        try:
            async with asyncio.timeout(self._options.append_wait_seconds):
                await self._room.take(size)
        except TimeoutError:
            said = f": {self._trouble}" if self._trouble else ""
            problem = f"{self._room.taken} bytes wait for the broker{said}"
            raise LogUnavailable(where=self._link.where, problem=problem) from None
        try:
            self._refuse_if_stopped()
        except KvlogError:
            self._room.give_back(size)
            raise

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        # Not a TaskGroup: nobody awaits the writer's work, and one failed task must not end the others.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._bury)

    def _bury(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._closed:
            # A fault of ours: what was pending cannot be told any more. The loop's handler shows the traceback.
            asyncio.get_running_loop().call_exception_handler(
                {"message": "fault in KafkaWriter", "exception": error}
            )
            self._give_up(f"fault in the writer: {error!r}")

    def _pump_soon(self, seconds: float = 0.0) -> None:
        """Pump once after what runs now: appends of one step of the loop share a batch."""
        loop = asyncio.get_running_loop()
        if self._closed:
            return
        if self._pump_due is not None:
            if (
                isinstance(self._pump_due, asyncio.TimerHandle)
                and self._pump_due.when() > loop.time() + seconds
            ):
                self._pump_due.cancel()
            else:
                return
        self._pump_due = loop.call_later(seconds, self._pump) if seconds else loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Send what can be sent."""
        self._pump_due = None
        if self._closed or self._producer is None:
            return
        now = asyncio.get_running_loop().time()
        if now - self._looked_at > _LOOK_SECONDS:
            self._look_soon()
        ready: dict[int, list[Lane]] = {}
        for lane in self._lanes.values():
            if not lane.waiting or lane.flying is not None:
                continue
            leader = self._leaders.get(lane.partition, NO_LEADER)
            if lane.not_before > now:
                self._pump_soon(lane.not_before - now)
            elif leader == NO_LEADER:
                self._look_soon()
            elif not self._busy[leader]:
                ready.setdefault(leader, []).append(lane)
        for node, lanes in ready.items():
            self._launch(node, lanes, self._producer)

    def _launch(self, node: int, lanes: list[Lane], producer: ProducerId) -> None:
        taken: list[tuple[Lane, Batch]] = []
        size = 0
        # Who waits longest goes first when not all fit into one request.
        for lane in sorted(lanes, key=lambda lane: lane.not_before):
            if taken and size + lane.waiting[0].room_bytes > _REQUEST_BYTES_MAX:
                break
            batch = lane.take(producer)
            lane.not_before = asyncio.get_running_loop().time()
            size += batch.room_bytes
            taken.append((lane, batch))
        self._busy[node] += 1
        self._spawn(self._send(node, taken))

    async def _send(self, node: int, taken: list[tuple[Lane, Batch]]) -> None:
        payloads: dict[int, bytes | bytearray] = {
            batch.partition: batch.payload for _, batch in taken if batch.payload is not None
        }
        timeout_ms = int(self._options.timeout_seconds * 1000)
        try:
            response = await self._link.send(
                node, ProduceBatches(self._topic.name, payloads, timeout_ms=timeout_ms)
            )
            answers = {p: (code, base) for _, rows in response.topics for p, code, base, *_ in rows}
        except KvlogError as error:
            self._trouble = unavailable(error, where=self._link.where)
            answers = {}
        finally:
            self._busy[node] -= 1
        if any(code in _TOO_LARGE for code, _ in answers.values()):
            await self._see_limit()  # before anything more is sent: it would be too large as well
        # What is durable first: a fatal answer for one partition must not make the others' outcome unknown.
        for lane, batch in sorted(
            taken, key=lambda pair: answers.get(pair[1].partition, _NO_ANSWER)[0] != Code.NONE
        ):
            if not batch.settled.done():  # else it was given up while it was on its way
                self._settle(lane, batch, *answers.get(batch.partition, _NO_ANSWER))
        self._pump_soon()

    def _settle(self, lane: Lane, batch: Batch, code: int, base: int) -> None:
        then = PRODUCE.get(code, Then.FATAL)
        # DONE without an offset: the broker has the batch but forgot where, so it is at an offset that nobody can tell.
        if then is Then.DONE and base >= 0:
            lane.land()
            self._room.give_back(batch.room_bytes)
            batch.succeed(base)
            self._trouble = None
        elif then in {Then.AGAIN, Then.TOPIC}:
            self._try_again(lane, code)
        else:
            self._give_up(self._reason(batch, code))

    def _try_again(self, lane: Lane, code: int) -> None:
        lane.return_to_front()
        pause = min(_PAUSE_SECONDS * 2 ** min(lane.failures - 1, 8), _PAUSE_SECONDS_MAX)
        lane.not_before = asyncio.get_running_loop().time() + pause
        if code != Code.NETWORK_EXCEPTION:
            problem = f"partition {lane.partition}: {code_name(code)}"
            self._trouble = LogUnavailable(where=self._link.where, problem=problem)
        self._look_soon()

    def _reason(self, batch: Batch, code: int) -> str:
        if code == Code.TOPIC_AUTHORIZATION_FAILED:
            return str(denied(right="Write", resource=f"topic {self._topic.name}"))
        if code in _TOO_LARGE:
            self._learn_limit(batch)
        return f"partition {batch.partition}: {code_name(code)}"

    async def _see_limit(self) -> None:
        """Read the topic's max.message.bytes again; below what our messages need, nothing is sent any more."""
        try:
            limit = await self._keeper.message_bytes_max(self._topic.name)
        except KvlogError as error:
            self._trouble = unavailable(error, where=self._link.where)
            return
        if limit is None:
            return
        options, needed = self._options, self._options.records.record_bytes_max + MESSAGE_OVERHEAD_BYTES
        self._topic = replace(self._topic, message_bytes_max=limit)
        self._batch_bytes_max = min(options.batch_bytes_max, limit)
        is_ours = self._topic.name == records_topic(options.topic_prefix)
        self._too_small = (
            too_small(self._topic.name, limit=limit, needed=needed, bootstrap=options.bootstrap)
            if is_ours and limit < needed
            else None
        )

    def _learn_limit(self, batch: Batch) -> None:
        """The topic's max.message.bytes was lowered under us: never send such a batch again."""
        size = len(batch.payload or b"")
        if size > self._topic.message_bytes_max:
            return  # the limit itself is known by now
        self._batch_bytes_max = min(self._batch_bytes_max, size // 2 if batch.count > 1 else size - 1)
        if batch.count == 1:
            self._topic = replace(self._topic, message_bytes_max=min(self._topic.message_bytes_max, size - 1))

    def _give_up(self, problem: str) -> None:
        """End everything that is pending, and begin anew under a fresh producer id."""
        self._lose_all(problem, silently=False)
        self._producer = None
        self._spawn(self._renew())

    def _lose_all(self, problem: str, *, silently: bool) -> None:
        lost = [batch for lane in self._lanes.values() for batch in lane.batches()]
        self._lanes = {p: Lane(p) for p in self._lanes}
        for batch in lost:
            batch.lose(problem, silently=silently)
            self._room.give_back(batch.room_bytes)

    async def _renew(self) -> None:
        while self._producer is None and not self._closed:
            try:
                await self._ask_producer_id()
            except KvlogError as error:
                self._trouble = unavailable(error, where=self._link.where)
                await asyncio.sleep(_PAUSE_SECONDS_MAX)
        self._pump_soon()

    async def _ask_producer_id(self) -> None:
        # One at a time: a second id would meet sequence numbers that were begun under the first.
        async with self._asking:
            if self._producer is None:
                await self._ask_producer_id_once()

    async def _ask_producer_id_once(self) -> None:
        try:
            response = await self._link.send(None, InitProducerIdRequest(None, _NEVER_TIMES_OUT_MS))
        except LogUnavailable as error:
            self._trouble = error
            await asyncio.sleep(_PAUSE_SECONDS)
            return
        match response.error_code:
            case Code.NONE:
                self._producer = ProducerId(response.producer_id, response.producer_epoch)
            case Code.CLUSTER_AUTHORIZATION_FAILED:
                raise denied(right="IdempotentWrite", resource="cluster")
            case code:
                self._trouble = LogUnavailable(
                    where=self._link.where, problem=f"no producer id: {code_name(code)}"
                )
                await asyncio.sleep(_PAUSE_SECONDS)

    def _look_soon(self) -> None:
        if not self._looking and not self._closed:
            self._looking = True
            self._spawn(self._look_and_pump())

    async def _look_and_pump(self) -> None:
        try:
            await asyncio.sleep(_PAUSE_SECONDS)
            await self._look()
        except KvlogError as error:
            self._trouble = unavailable(error, where=self._link.where)
        finally:
            self._looking = False
        self._pump_soon(_PAUSE_SECONDS)

    async def _look(self) -> None:
        """See who leads the partitions, and whether the topic is still the one we know."""
        self._looked_at = asyncio.get_running_loop().time()
        seen = await self._link.describe(self._topic.name)
        if seen is None:
            self._leaders = {}
            raise LogUnavailable(where=self._link.where, problem=f"topic {self._topic.name} does not exist")
        if len(seen.leaders) != self._topic.partitions:
            self._stop_for_partitions(len(seen.leaders))
        elif seen.topic_id != self._topic.topic_id:
            old = show_topic_id(self._topic.topic_id)
            self._topic = replace(self._topic, topic_id=seen.topic_id)
            new = show_topic_id(seen.topic_id)
            self._other_partitions = None
            self._give_up(f"topic {self._topic.name} was recreated: its id was {old} and is {new}")
        else:
            self._other_partitions = None
            if self._too_small is not None:
                await self._see_limit()
        self._leaders = seen.leaders

    def _stop_for_partitions(self, partitions: int) -> None:
        """Nothing is taken until the number is ours again; then under a fresh producer, as the sequences begin anew."""
        if self._other_partitions is not None:
            return
        self._other_partitions = ConfigError(
            setting="log.partitions",
            problem=f"topic {self._topic.name} has {partitions} partitions, had {self._topic.partitions}",
            fix="set another log.topic_prefix on all nodes; P never changes for a topic",
        )
        self._give_up(str(self._other_partitions))


def _refused(row_bytes: int, record_bytes_max: int) -> asyncio.Future[Offset]:
    """What `append` answers for a message that is too large."""
    future: asyncio.Future[Offset] = asyncio.get_running_loop().create_future()
    future.set_exception(RowTooLarge(row_bytes=row_bytes, record_bytes_max=record_bytes_max))
    return future
