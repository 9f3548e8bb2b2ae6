"""The model of the log: ordered partitions with retention, lost tails, offsets that are missing, and damage.

It keeps every message for ever, so that the reference fold can look at them; readers see those from `log_start` on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.core.inputs import RecordRead, UnreadableRead
from kvlog.ids import FIRST_OFFSET, Offset, Partition
from kvlog.records import Claim, Delta

if TYPE_CHECKING:
    from random import Random

    from kvlog.ids import Nonce, SessionId
    from kvlog.records import Entry


class Damage(StrEnum):
    """What of a message is not as it was written."""

    HEADER = "header"
    """Its key still says whose it is."""
    KEY = "header and key"
    CHAIN = "chain"
    PAYLOAD = "payload"


def damage_for(entry: Entry, rng: Random) -> Damage:
    """A kind of damage that this record can have."""
    kinds = [Damage.HEADER, Damage.KEY]
    if not isinstance(entry.record, Claim):
        kinds.append(Damage.CHAIN)
    if isinstance(entry.record, Delta) and len(entry.payload):
        kinds += [Damage.PAYLOAD, Damage.PAYLOAD]
    return rng.choice(kinds)


def damaged(entry: Entry, damage: Damage) -> Entry:
    """The entry as a reader decodes it; for damage that leaves the header readable."""
    if damage is Damage.CHAIN:
        return entry._replace(chain=entry.chain ^ 1)
    bad = bytearray(entry.payload)
    bad[len(bad) // 2] ^= 0x10
    return entry._replace(payload=memoryview(bytes(bad)))


@dataclass(slots=True)
class Message:
    """One message, with what only the simulator knows of it."""

    uid: int
    entry: Entry
    damage: Damage | None = None
    """At rest: every reader gets it so, however often it reads."""

    @property
    def session(self) -> SessionId:
        return self.entry.record.session

    def as_input(
        self, partition: Partition, offset: Offset, local: Damage | None = None
    ) -> RecordRead | UnreadableRead:
        """What a shell makes of it; `local` is damage that only this reading has."""
        damage = self.damage or local
        if damage in (Damage.HEADER, Damage.KEY):
            return UnreadableRead(partition, offset, self.session if damage is Damage.HEADER else None)
        entry = self.entry if damage is None else damaged(self.entry, damage)
        return RecordRead(partition, offset, entry)


@dataclass(slots=True)
class PartitionLog:
    """One partition. An element that is None is an offset that no message has."""

    messages: list[Message | None] = field(default_factory=list)
    log_start: Offset = FIRST_OFFSET
    generation: int = 0
    """Raised whenever messages were lost from the end."""

    @property
    def end(self) -> Offset:
        """The high watermark: what is appended is at once replicated."""
        return Offset(len(self.messages))

    def tip(self, offset: Offset) -> int:
        """Stands for everything below `offset`: two logs with the same tip there are the same log up to there."""
        for at in range(offset - 1, -1, -1):
            message = self.messages[at]
            if message is not None:
                return message.uid
        return 0


class ModelLog:
    """All partitions, and where each claim stands."""

    def __init__(self, partitions: int) -> None:
        self.partitions = [PartitionLog() for _ in range(partitions)]
        self.claims: dict[Nonce, tuple[Partition, Offset]] = {}
        self._uids = 0

    def append(self, partition: Partition, entry: Entry, damage: Damage | None = None) -> Message:
        """Land a message at the end."""
        self._uids += 1
        message = Message(self._uids, entry, damage)
        log = self.partitions[partition]
        if isinstance(entry.record, Claim):
            self.claims.setdefault(entry.record.nonce, (partition, log.end))
        log.messages.append(message)
        return message

    def skip(self, partition: Partition) -> None:
        """Use up an offset without a message, as a transaction's marker does."""
        self.partitions[partition].messages.append(None)

    def retain(self, partition: Partition, log_start: Offset) -> None:
        """Delete everything below `log_start`."""
        log = self.partitions[partition]
        log.log_start = max(log.log_start, min(log_start, log.end))

    def lose_tail(self, partition: Partition, end: Offset) -> None:
        """An unclean election: what was at `end` and behind it is gone."""
        log = self.partitions[partition]
        assert log.log_start <= end, "what is deleted cannot be the tail"
        if end >= log.end:
            return
        del log.messages[end:]
        log.generation += 1
        self.claims = {
            nonce: place for nonce, place in self.claims.items() if place[0] != partition or place[1] < end
        }
