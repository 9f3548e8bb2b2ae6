"""Reads partitions of one topic by fetch requests of its own: no group, no background work between polls.

- `poll` keeps at most one fetch in flight to each broker and starts the next one before it returns, so the network
  works while the caller applies. Nothing else runs; a reader that is not polled costs nothing.
- A fetch names the topic by id and says the leader epoch of the last record read. So the broker itself says that the
  topic is another one, or that its history parted from what we have read (LogReplaced), however fast it has grown.
- OFFSET_OUT_OF_RANGE below the log start is LogTruncated; at any other place it is LogReplaced.
- A partition with such an error stands still until it is sought or assigned anew. `poll` says so at once, and again
  whenever it has nothing else to return, so nothing stands still in silence.
- A partition that has data and makes no progress gets new connections (ProgressWatch).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvlog.errors import ConfigError, KvlogError, LogReplaced, LogTruncated, LogUnavailable
from kvlog.ids import Offset, Partition
from kvlog.log.base import LogMessage
from kvlog.log.kafka_errors import FETCH, Then, code_name, denied, unavailable
from kvlog.log.kafka_link import NO_LEADER
from kvlog.log.kafka_offsets import bounds_of
from kvlog.log.kafka_progress import ProgressWatch
from kvlog.log.kafka_protocol import (
    FETCH_DIVERGING_EPOCH_TAG,
    FetchById,
    FetchPart,
    show_topic_id,
    unpack_epoch_end,
)
from kvlog.log.kafka_records import FetchedMessage, read_records

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from kvlog.log.kafka_link import KafkaLink, TopicBound, TopicSeen
    from kvlog.log.kafka_offsets import GroupOffsets
    from kvlog.log.kafka_options import KafkaOptions

__all__ = ["KafkaReader", "Read"]

_PAUSE_SECONDS = 0.1
"""After a fetch that brought an error, and between looks at who leads."""

_EPOCH_UNKNOWN = -1
_RECORDS = 7
"""Where a fetched partition's row has its records."""

_CLOSE_SECONDS = 1.0


class Read(NamedTuple):
    """A message, the partition where it was read, and the bytes of its key and value."""

    partition: Partition
    message: FetchedMessage
    size_bytes: int


@dataclass(slots=True, eq=False)
class _Place:
    """Where one partition is read.

    Args:
        partition: which.
        fetch_at: the next offset to ask for.
        position: the next offset that `poll` returns.
        epoch: leader epoch of the last record read, at or behind `fetch_at`: a log without it has lost its tail.
        fault: why it stands still.
        said: whether `poll` has raised it.
        trouble: why its last fetch brought nothing.
        not_before: loop time before which it is not fetched.
        held: its messages that are fetched and not yet returned.
    """

    partition: Partition
    fetch_at: int
    position: int
    epoch: int = _EPOCH_UNKNOWN
    fault: KvlogError | None = None
    said: bool = False
    trouble: LogUnavailable | None = None
    not_before: float = 0.0
    held: int = 0

    def move(self, offset: int) -> None:
        """Go on elsewhere. A log that we read further back must still have what we have read of it."""
        if self.fault is not None or offset > self.fetch_at:
            self.epoch = _EPOCH_UNKNOWN
        self.fetch_at = self.position = offset
        self.not_before = 0.0
        self.held = 0
        self.fault = None
        self.trouble = None

    def is_at(self, offset: int | None) -> bool:
        """Whether it is read from there already."""
        return self.fault is None and self.position == offset

    def stop(self, fault: KvlogError) -> None:
        """Stand still."""
        self.fault = fault
        self.said = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """One partition of a fetch in flight."""

    place: _Place
    offset: int


class KafkaReader:
    """A LogReader over Kafka; see base.LogReader for what is promised."""

    def __init__(
        self, link: KafkaLink, topic: TopicBound, options: KafkaOptions, offsets: GroupOffsets | None
    ) -> None:
        self._link = link
        self._topic = topic
        self._options = options
        self._offsets = offsets
        self._places: dict[Partition, _Place] = {}
        self._leaders: Mapping[int, int] | None = None
        self._look_at = 0.0
        self._fetches: dict[int, asyncio.Task[None]] = {}
        self._looking: asyncio.Task[None] | None = None
        self._ready: deque[Read] = deque()
        self._ready_bytes = 0
        self._watch = ProgressWatch(options.stuck_seconds)
        self._trouble: LogUnavailable | None = None
        self._closed = False

    def assign(self, positions: Mapping[Partition, Offset]) -> None:
        """See base.LogReader.assign."""
        assert all(0 <= p < self._topic.partitions for p in positions), (
            "a partition that the topic does not have"
        )
        # Who follows one partition more does not forget what was read of the others.
        kept = {p: place for p, place in self._places.items() if place.is_at(positions.get(p))}
        self._places = {p: kept.get(p) or _Place(p, offset, offset) for p, offset in positions.items()}
        self._keep_ready(kept)
        self._watch.forget()

    def seek(self, partition: Partition, offset: Offset) -> None:
        """See base.LogReader.seek."""
        self._places[partition].move(offset)
        self._forget_ready(partition)
        self._watch.forget()

    def _forget_ready(self, partition: Partition) -> None:
        self._keep_ready(self._places.keys() - {partition})

    def _keep_ready(self, partitions: Collection[Partition]) -> None:
        self._ready = deque(read for read in self._ready if read.partition in partitions)
        self._ready_bytes = sum(read.size_bytes for read in self._ready)

    async def poll(self, *, bytes_max: int, timeout_seconds: float) -> Sequence[LogMessage]:
        """See base.LogReader.poll."""
        return [
            _as_message(read)
            for read in await self.read(bytes_max=bytes_max, timeout_seconds=timeout_seconds)
        ]

    async def read(self, *, bytes_max: int, timeout_seconds: float) -> Sequence[Read]:
        """`poll` that tells a tombstone from an empty value."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_seconds
        while True:
            self._launch()
            self._raise_fault(again=False)
            if self._ready:
                return self._take(bytes_max)
            left = deadline - loop.time()
            if left <= 0:
                break
            await self._wait(left)
            self._mend()
        await asyncio.sleep(0)
        self._raise_fault(again=True)
        self._raise_trouble()
        return []

    def positions(self) -> Mapping[Partition, Offset]:
        """See base.LogReader.positions."""
        return {p: Offset(place.position) for p, place in self._places.items()}

    async def commit(self, applied: Mapping[Partition, Offset]) -> None:
        """See base.LogReader.commit.

        Raises:
            LogUnavailable: not stored; commit again with the next offsets.
            ConfigError: we lack the right Read on the group.
        """
        assert self._offsets is not None, "a reader without a group has nowhere to commit to"
        try:
            async with asyncio.timeout(self._options.timeout_seconds):
                await self._offsets.commit(self._topic.name, applied)
        except TimeoutError:
            raise LogUnavailable(where=self._link.where, problem="offsets not stored in time") from None

    async def close(self) -> None:
        """See base.LogReader.close."""
        self._closed = True
        await self._drop_tasks()
        await self._link.close()

    async def _drop_tasks(self) -> None:
        tasks = [*self._fetches.values(), *([self._looking] if self._looking is not None else [])]
        self._fetches.clear()
        self._looking = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)

    def _take(self, bytes_max: int) -> list[Read]:
        """At least one message, then as many as fit."""
        taken: list[Read] = []
        size = 0
        while self._ready and (not taken or size + self._ready[0].size_bytes <= bytes_max):
            read = self._ready.popleft()
            taken.append(read)
            size += read.size_bytes
            place = self._places[read.partition]
            place.held -= 1
            # With nothing left to return, it is read up to where it fetches: compaction leaves gaps.
            place.position = read.message.offset + 1 if place.held else place.fetch_at
        self._ready_bytes -= size
        self._launch()
        return taken

    def _raise_fault(self, *, again: bool) -> None:
        for place in self._places.values():
            if place.fault is not None and (again or not place.said):
                place.said = True
                raise place.fault.with_traceback(
                    None
                )  # it is raised again and again, and would keep every frame

    def _raise_trouble(self) -> None:
        for trouble in (self._trouble, *(place.trouble for place in self._places.values())):
            if trouble is not None:
                raise trouble.with_traceback(None)

    async def _wait(self, seconds: float) -> None:
        """Until a fetch or a look is done, or a pause is over."""
        tasks = [*self._fetches.values(), *([self._looking] if self._looking is not None else [])]
        now = asyncio.get_running_loop().time()
        pauses = [place.not_before - now for place in self._places.values() if place.not_before > now]
        if self._leaders is None and self._looking is None:
            pauses.append(self._look_at - now)
        seconds = max(0.0, min([seconds, *pauses]))
        if not tasks:
            await asyncio.sleep(seconds if self._places else min(seconds, _PAUSE_SECONDS))
            return
        await asyncio.wait(tasks, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)

    def _mend(self) -> None:
        """New connections for a partition that has data and stands still."""
        if self._watch.stuck(asyncio.get_running_loop().time()):
            self._watch.forget()
            self._link.drop()
            self._leaders = None

    def _launch(self) -> None:
        """Start a fetch to every broker that has something for us and none in flight."""
        if self._closed:
            return
        for node in [node for node, task in self._fetches.items() if task.done()]:
            self._fetches.pop(node).result()
        if self._looking is not None and self._looking.done():
            self._looking.result()
            self._looking = None
        now = asyncio.get_running_loop().time()
        if self._leaders is None:
            if self._looking is None and self._places and now >= self._look_at:
                self._looking = self._start(self._look())
            return
        if self._ready_bytes >= self._options.fetch_bytes_max:
            return
        for node, asked in self._due(now).items():
            if node not in self._fetches:
                random.shuffle(asked)  # the broker fills its answer in this order, so nobody starves
                self._fetches[node] = self._start(self._fetch(node, asked))

    def _due(self, now: float) -> dict[int, list[_Asked]]:
        leaders = self._leaders or {}
        due: dict[int, list[_Asked]] = {}
        for partition, place in self._places.items():
            if place.fault is not None or place.not_before > now:
                continue
            leader = leaders.get(partition, NO_LEADER)
            if leader == NO_LEADER:
                problem = f"partition {partition} has no leader"
                self._pause(place, LogUnavailable(where=self._link.where, problem=problem))
            else:
                due.setdefault(leader, []).append(_Asked(place, place.fetch_at))
        return due

    def _start(self, work: Any) -> asyncio.Task[None]:  # noqa: ANN401 - a coroutine of this class
        # Not a TaskGroup: a fetch outlives the poll that began it. `_launch` takes its result.
        return asyncio.get_running_loop().create_task(work)

    async def _fetch(self, node: int, asked: list[_Asked]) -> None:
        topic_id = self._topic.topic_id
        request = FetchById(
            topic_id,
            [FetchPart(a.place.partition, a.offset, a.place.epoch) for a in asked],
            bytes_max=self._options.fetch_bytes_max,
            partition_bytes_max=max(self._options.fetch_partition_bytes, self._topic.message_bytes_max),
            wait_ms=int(self._options.fetch_wait_seconds * 1000),
        )
        began = asyncio.get_running_loop().time()
        try:
            response = await self._link.send(node, request)
        except KvlogError as error:
            for one in asked:
                self._pause(one.place, unavailable(error, where=self._link.where))
            return
        rows = {row[0]: row for _, partitions, _ in response.topics for row in partitions}
        for one in asked:
            row = rows.get(one.place.partition)
            if not self._is_current(one) or topic_id != self._topic.topic_id:
                continue
            if row is None:
                self._pause(one.place, self._unavailable(one.place.partition, response.error_code))
            else:
                await self._digest(one, row)
        if not any(row[_RECORDS] for row in rows.values()):
            self._rest(asked, began)

    def _rest(self, asked: list[_Asked], began: float) -> None:
        """A broker that answers with nothing at once, though it should wait for data, must not keep us spinning."""
        now = asyncio.get_running_loop().time()
        if now - began < self._options.fetch_wait_seconds / 2:
            for one in asked:
                one.place.not_before = max(one.place.not_before, now + self._options.fetch_wait_seconds / 2)

    def _is_current(self, asked: _Asked) -> bool:
        """Whether nobody has moved the place since the fetch was sent."""
        place = asked.place
        return (
            self._places.get(place.partition) is place
            and place.fetch_at == asked.offset
            and place.fault is None
        )

    async def _digest(self, asked: _Asked, row: tuple[Any, ...]) -> None:
        partition, code, high_watermark, _, _, _, _, records, tags = row
        place = asked.place
        match FETCH.get(code, Then.AGAIN):
            case Then.DONE if FETCH_DIVERGING_EPOCH_TAG in tags:
                epoch, end = unpack_epoch_end(tags[FETCH_DIVERGING_EPOCH_TAG])
                problem = f"it has lost its tail: epoch {epoch} ends at {end}, and we have read up to {asked.offset}"
                self._replace(place, problem)
            case Then.DONE:
                place.trouble = None
                self._keep(place, records or b"")
                now = asyncio.get_running_loop().time()
                self._watch.observe(partition, position=place.fetch_at, end=high_watermark, now=now)
            case Then.POSITION:
                await self._explain_position(asked)
            case Then.TOPIC:
                await self._explain_topic(place, code)
            case Then.DENIED:
                error = denied(right="Read", resource=f"topic {self._topic.name}")
                self._pause(place, unavailable(error, where=self._link.where))
            case _:
                self._pause(place, self._unavailable(partition, code))

    def _keep(self, place: _Place, records: bytes | memoryview) -> None:
        if not records:
            return
        found = read_records(records, place.fetch_at)
        if found.next_offset > place.fetch_at:
            place.fetch_at = found.next_offset
            place.epoch = found.epoch
        place.held += len(found.messages)
        for message in found.messages:
            size = len(message.value or b"") + len(message.key or b"")
            self._ready.append(Read(place.partition, message, size))
            self._ready_bytes += size
        if not place.held:
            place.position = place.fetch_at

    async def _explain_position(self, asked: _Asked) -> None:
        """Why a position is out of range: too old, or of another history."""
        partition = asked.place.partition
        try:
            start, end = await bounds_of(self._link, self._topic.name, partition, self._leaders or {})
        except KvlogError as error:
            self._pause(asked.place, unavailable(error, where=self._link.where))
            return
        if not self._is_current(asked):
            return
        if asked.offset < start:
            asked.place.stop(LogTruncated(partition=partition, wanted=Offset(asked.offset), log_start=start))
        else:
            problem = f"it ends at {end} and its history does not hold the record before {asked.offset}"
            self._replace(asked.place, problem)

    async def _explain_topic(self, place: _Place, code: int) -> None:
        """Whether the topic is gone, another one, or only not yet known to that broker."""
        name = self._topic.name
        try:
            seen = await self._link.describe(name)
        except KvlogError as error:
            self._pause(place, unavailable(error, where=self._link.where))
            return
        if seen is None:
            self._pause(place, LogUnavailable(where=self._link.where, problem=f"topic {name} does not exist"))
        elif seen.topic_id != self._topic.topic_id:
            self._replace_all(seen)
        else:
            self._pause(place, self._unavailable(place.partition, code))

    def _replace_all(self, seen: TopicSeen) -> None:
        """Every partition is void; from now on we read the new topic."""
        old, new = show_topic_id(self._topic.topic_id), show_topic_id(seen.topic_id)
        problem = f"topic {self._topic.name} was recreated: its id was {old} and is {new}"
        self._topic = replace(self._topic, topic_id=seen.topic_id)
        self._leaders = seen.leaders
        for place in self._places.values():
            self._replace(place, problem)

    def _replace(self, place: _Place, problem: str) -> None:
        """What was fetched and not returned is of the old log: it is dropped with it."""
        place.held = 0
        self._forget_ready(place.partition)
        place.stop(LogReplaced(partition=place.partition, problem=problem))

    def _pause(self, place: _Place, error: LogUnavailable) -> None:
        """Try again after a pause and a look at who leads."""
        place.trouble = error
        place.not_before = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        self._leaders = None

    async def _look(self) -> None:
        self._look_at = asyncio.get_running_loop().time() + _PAUSE_SECONDS
        try:
            seen = await self._link.describe(self._topic.name)
        except (LogUnavailable, ConfigError) as error:
            self._trouble = unavailable(error, where=self._link.where)
            return
        if seen is None:
            self._trouble = LogUnavailable(
                where=self._link.where, problem=f"topic {self._topic.name} does not exist"
            )
        elif seen.topic_id != self._topic.topic_id:
            self._replace_all(seen)
        else:
            self._trouble = None
            self._leaders = seen.leaders

    def _unavailable(self, partition: int, code: int) -> LogUnavailable:
        return LogUnavailable(where=self._link.where, problem=f"partition {partition}: {code_name(code)}")


def _as_message(read: Read) -> LogMessage:
    message = read.message
    # Only a foreign producer writes a null value among records; the fold refuses an empty one.
    value = message.value if message.value is not None else b""
    return LogMessage(read.partition, Offset(message.offset), message.timestamp_ms, message.key, value)
