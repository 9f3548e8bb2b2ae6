"""What waits for the broker: batches in the order of their partition, and the room that they take.

Pure but for futures. A partition has one batch in flight at most, so its order is the order of `place`; sequence
numbers are given when a batch is taken, so a batch that was never sent leaves no hole.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from aiokafka.record.default_records import DefaultRecordBatchBuilder

from kvlog.errors import OutcomeUnknown
from kvlog.ids import Offset
from kvlog.log.topics import message_headers

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvlog.ids import Partition

__all__ = ["Batch", "Lane", "Message", "ProducerId", "Room", "message_bytes"]

_MAGIC = 2
_SEQUENCE_MASK = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class ProducerId:
    """What a broker knows an idempotent producer by."""

    number: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Message:
    """One message to append; `value` None deletes a key of a compacted topic."""

    key: bytes
    value: Buffer | None
    headers: list[tuple[str, bytes]]

    @property
    def value_bytes(self) -> int:
        """Size of the value."""
        return 0 if self.value is None else memoryview(self.value).nbytes

    @classmethod
    def of_record(cls, key: bytes, value: Buffer, *, kind: int, epoch: int) -> Message:
        """The message for a record: kind and epoch are repeated in its headers."""
        return cls(key, memoryview(value).cast("B"), message_headers(kind, epoch))


def message_bytes(message: Message) -> int:
    """The most bytes that the message takes as a batch of its own."""
    size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(message.key, message.value, message.headers)
    return size


class Room:
    """A number of bytes that are handed out first come, first served.

    One request larger than the whole is served when nothing else is out, so that it cannot wait for ever.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._taken = 0
        self._queue: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def taken(self) -> int:
        """Bytes that are out."""
        return self._taken

    async def take(self, size: int) -> None:
        """Wait for so many bytes."""
        if not self._queue and self._fits(size):
            self._taken += size
            return
        turn = asyncio.get_running_loop().create_future()
        self._queue.append((size, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back(size)
            raise

    def give_back(self, size: int) -> None:
        """Return bytes, and serve who waits."""
        self._taken -= size
        assert self._taken >= 0, "more bytes came back than were out"
        while self._queue:
            wanted, turn = self._queue[0]
            if turn.cancelled():
                self._queue.popleft()
            elif self._fits(wanted):
                self._queue.popleft()
                self._taken += wanted
                turn.set_result(None)
            else:
                return

    def _fits(self, size: int) -> bool:
        return self._taken == 0 or self._taken + size <= self._bytes_max


class Batch:
    """Messages of one partition that are sent, and become durable, together."""

    def __init__(self, partition: Partition, *, bytes_max: int) -> None:
        self.partition = partition
        self.room_bytes = 0
        self.settled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.payload: bytearray | None = None
        self._builder = DefaultRecordBatchBuilder(
            magic=_MAGIC,
            compression_type=0,
            is_transactional=0,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=0,
            batch_size=bytes_max,
        )
        self._futures: list[asyncio.Future[Offset]] = []

    @property
    def count(self) -> int:
        """How many messages it has."""
        return len(self._futures)

    def add(self, message: Message, room_bytes: int) -> asyncio.Future[Offset] | None:
        """Add a message; None: it is full, or was sent before. The first message always fits."""
        if self.payload is not None:
            return None
        if self._builder.append(self.count, None, message.key, message.value, message.headers) is None:
            return None
        future: asyncio.Future[Offset] = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        self.room_bytes += room_bytes
        return future

    def build(self, producer: ProducerId, sequence: int) -> None:
        """Fix its bytes: every try sends the same ones, so a broker knows a second copy."""
        assert self.payload is None, "a batch gets its sequence number once"
        self._builder.set_producer_state(producer.number, producer.epoch, sequence)
        self.payload = self._builder.build()
        del self._builder

    def succeed(self, base: int) -> None:
        """The log holds it from this offset on."""
        for n, future in enumerate(self._futures):
            if not future.done():
                future.set_result(Offset(base + n))
        self.settled.set_result(None)

    def lose(self, problem: str, *, silently: bool) -> None:
        """Nobody knows whether the log holds it. `silently`: asyncio shall not complain when nobody looks."""
        for future in self._futures:
            if not future.done():
                future.set_exception(OutcomeUnknown(partition=self.partition, problem=problem))
                if silently:
                    future.exception()
        self.settled.set_result(None)


@dataclass(slots=True)
class Lane:
    """One partition's way to the broker.

    Args:
        partition: which.
        waiting: batches in order; the last may still take messages.
        flying: the batch in flight.
        sequence: the next message's sequence number.
        not_before: loop time before which nothing is sent.
        failures: tries in a row that brought nothing; sets the pause.
    """

    partition: Partition
    waiting: deque[Batch] = field(default_factory=deque)
    flying: Batch | None = None
    sequence: int = 0
    not_before: float = 0.0
    failures: int = 0

    def place(self, message: Message, room_bytes: int, batch_bytes_max: int) -> asyncio.Future[Offset]:
        """Give the message its place in the partition's order."""
        future = self.waiting[-1].add(message, room_bytes) if self.waiting else None
        if future is not None:
            return future
        batch = Batch(self.partition, bytes_max=batch_bytes_max)
        self.waiting.append(batch)
        future = batch.add(message, room_bytes)
        assert future is not None, "a batch's first message always fits"
        return future

    def take(self, producer: ProducerId) -> Batch:
        """The next batch, on its way from now on."""
        assert self.flying is None, "one batch of a partition is in flight at a time"
        batch = self.waiting.popleft()
        if batch.payload is None:
            batch.build(producer, self.sequence)
            self.sequence = (self.sequence + batch.count) & _SEQUENCE_MASK
        self.flying = batch
        return batch

    def land(self) -> None:
        """The batch in flight is settled."""
        self.flying = None
        self.failures = 0

    def return_to_front(self) -> None:
        """The batch in flight has to be sent again."""
        assert self.flying is not None, "only what is in flight comes back"
        self.waiting.appendleft(self.flying)
        self.flying = None
        self.failures += 1

    def batches(self) -> list[Batch]:
        """Everything that is not settled, in order."""
        return ([self.flying] if self.flying is not None else []) + list(self.waiting)
