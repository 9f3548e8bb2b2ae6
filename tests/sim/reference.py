"""The reference: DESIGN chapter 4's fold, written a second time and read by a reader that sees everything.

It shares no code with kvlog.core, so that a fault there is not also the yardstick. It is slow and simple: token lists,
no re-reading, no limits. It says what each message is at the moment when it lands.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog import checksums
from kvlog.core.inputs import UnreadableRead
from kvlog.core.session import Standing
from kvlog.ids import Offset, Partition
from kvlog.records import Claim, Delta, End, Snapshot, Truncate

if TYPE_CHECKING:
    from kvlog.ids import SessionId
    from kvlog.records import Entry, Record
    from tests.sim.modellog import Message, PartitionLog


@dataclass(slots=True)
class Known:
    """What the reference knows of a session."""

    claim: Claim
    claim_chain: int
    standing: Standing = Standing.UNROOTED
    next_seq: int = 0
    chain: int | None = None
    shards: list[list[int]] = field(default_factory=list)
    healable: bool = False
    root: int = 0

    @property
    def length(self) -> int:
        return min((len(shard) for shard in self.shards), default=0)

    @property
    def tokens(self) -> list[int]:
        return self.shards[0][: self.length] if self.shards else []


class Reference:
    """The fold of one partition, from its first message on."""

    def __init__(self, partition: Partition) -> None:
        self.partition = partition
        self.known: dict[SessionId, Known] = {}
        self._since: dict[SessionId, int] = {}
        self._read_from = 0

    @classmethod
    def of(cls, partition: Partition, log: PartitionLog, *, first: int = 0) -> Reference:
        """Fold a partition anew, after its tail was lost, or as a reader does that begins at `first`."""
        fresh = cls(partition)
        fresh._read_from = first
        for offset, message in enumerate(log.messages[first:], first):
            fresh.read(Offset(offset), message)
        return fresh

    def read(self, offset: Offset, message: Message | None) -> str:
        """Fold what stands at `offset`: `admitted`, `refused`, `broke` (that, and its session broke) or `lost`."""
        if message is None:
            self._drop_all(offset + 1)
            return "lost"
        happened = message.as_input(self.partition, offset)
        if isinstance(happened, UnreadableRead):
            if happened.key is None:
                self._drop_all(offset + 1)
            else:
                self.known.pop(happened.key, None)
                self._since[happened.key] = offset + 1
            return "lost"
        entry = happened.entry
        known = self.known.get(message.session)
        if isinstance(entry.record, Claim):
            return self._claim(entry.record, entry.header, offset, known)
        if isinstance(entry.record, Snapshot):
            return "admitted"
        if known is None or (known.claim.epoch, known.claim.writer) != (
            entry.record.epoch,
            entry.record.writer,
        ):
            return "refused"
        return self._written(known, entry)

    def _drop_all(self, since: int) -> None:
        self.known.clear()
        self._since.clear()
        self._read_from = since

    def _claim(self, claim: Claim, header: bytes, offset: Offset, known: Known | None) -> str:
        if claim.epoch > offset + 1:
            return "refused"
        fresh_chain = checksums.chain(0, header, 0)
        if known is None:
            if max(self._read_from, self._since.get(claim.session, 0)) > claim.epoch - 1:
                return "refused"
            self.known[claim.session] = Known(claim, fresh_chain)
            return "admitted"
        if claim.epoch <= known.claim.epoch:
            return "refused"
        known.claim, known.claim_chain, known.next_seq = claim, fresh_chain, 0
        known.chain = None if known.chain is None else checksums.chain(known.chain, header, 0)
        known.healable = known.standing is Standing.BROKEN
        if known.standing is Standing.ENDED:
            known.standing = Standing.WHOLE
        return "admitted"

    def _written(self, known: Known, entry: Entry) -> str:
        record = entry.record
        assert isinstance(record, Delta | Truncate | End), "claims and snapshots go elsewhere"
        if record.seq < known.next_seq:
            return "refused"
        restarts = isinstance(record, Truncate) and record.seq == 0 and record.length == 0
        if known.standing is Standing.UNROOTED and not restarts:
            known.next_seq = record.seq + 1
            return "refused"
        heals = known.healable and isinstance(record, Truncate) and record.seq == 0
        if known.standing is Standing.BROKEN and not (heals and self._fits(known, entry, restarts=restarts)):
            known.healable = False
            return "refused"
        if known.standing is Standing.ENDED or not self._fits(known, entry, restarts=restarts):
            known.standing, known.healable = Standing.BROKEN, False
            return "broke"
        self._carry_out(known, record, restarts=restarts)
        known.next_seq, known.chain = record.seq + 1, entry.chain
        return "admitted"

    def _fits(self, known: Known, entry: Entry, *, restarts: bool) -> bool:
        record = entry.record
        previous = known.claim_chain if restarts else known.chain
        rows = record.payload_checksum if isinstance(record, Delta) else 0
        if previous is None or checksums.chain(previous, entry.header, rows) != entry.chain:
            return False
        match record:
            case Truncate():
                shards_fit = (
                    len(known.shards) == known.claim.identity.shards and record.length <= known.length
                )
                return record.seq == known.next_seq and (record.seq != 0 or restarts or shards_fit)
            case Delta():
                return (
                    record.seq == known.next_seq != 0
                    and record.shard < len(known.shards)
                    and record.start == len(known.shards[record.shard])
                    and checksums.checksum(entry.payload) == record.payload_checksum
                )
            case End():
                return record.seq == known.next_seq != 0
            case _:
                raise AssertionError(record)

    @staticmethod
    def _carry_out(known: Known, record: Record, *, restarts: bool) -> None:
        match record:
            case Truncate():
                if restarts:
                    known.shards = [[] for _ in range(known.claim.identity.shards)]
                    known.root = known.claim.epoch
                for shard in known.shards:
                    del shard[record.length :]
                known.standing, known.healable = Standing.WHOLE, False
            case Delta():
                known.shards[record.shard].extend(record.tokens)
            case _:
                known.shards = []
                known.standing = Standing.ENDED
