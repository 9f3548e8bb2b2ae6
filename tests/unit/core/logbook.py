"""One partition's log as a list, and honest and dishonest writers for it: what the tests of the cores share.

A record is made from the state that its writer sees (`truncate`, `delta`, `end`, each field replaceable) and sealed
with the chain that an honest writer would give it, or any other. `Logbook` keeps the state of a reader that has read
everything, so that a test says `book.truncate("s", 2)` and gets the record that fits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.checksums import checksum, digest
from kvlog.core.session import SessionState, fold, judge, next_chain
from kvlog.core.verdicts import Verdict
from kvlog.ids import (
    Digest,
    Epoch,
    NodeId,
    Nonce,
    Offset,
    Partition,
    Position,
    Seq,
    SessionId,
    Shard,
    Writer,
)
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import TINY
from kvlog.records import Claim, Codec, Delta, End, EndReason, Entry, Record, Snapshot, Truncate
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.core.effects import ReadEffect
    from kvlog.core.standby import StandbyCore

__all__ = [
    "CONTEXT",
    "IDENTITY",
    "LAYOUT",
    "NO_PAYLOAD",
    "ONE_SHARD",
    "OTHER_CONTEXT",
    "OTHER_WEIGHTS",
    "PARTITION",
    "Logbook",
    "claim",
    "delta",
    "end",
    "payload_of",
    "read_to",
    "seal",
    "sixteen",
    "snapshot",
    "truncate",
    "writer",
]

PARTITION = Partition(0)
NO_PAYLOAD = memoryview(b"")
FEEDS_MAX = 1000
"""More than any test feeds: a reader that asks for ever to read again is an error, not a hang."""


def sixteen(name: str) -> bytes:
    """Makes 16 bytes that stand for a name."""
    return bytes(digest(name.encode()))


def writer(name: str) -> Writer:
    """The incarnation of the process that a test calls by this name."""
    return Writer(sixteen(f"writer {name}"))


LAYOUT = Layout(layers=1, planes=2, kv_heads=1, head_dim=1, dtype=DType.FLOAT16)
IDENTITY = Identity(Digest(sixteen("model")), Digest(sixteen("weights")), LAYOUT, shards=2)
OTHER_WEIGHTS = Identity(Digest(sixteen("model")), Digest(sixteen("newer weights")), LAYOUT, shards=2)
ONE_SHARD = Identity(Digest(sixteen("model")), Digest(sixteen("weights")), LAYOUT, shards=1)
CONTEXT = Digest(sixteen("context"))
OTHER_CONTEXT = Digest(sixteen("another context"))


def claim(
    epoch: int, by: str = "A", *, session: str = "s", nonce: str = "", identity: Identity = IDENTITY
) -> Claim:
    """A claim; unless a nonce is named, one claim for each writer and epoch."""
    return Claim(
        session=SessionId(session),
        epoch=Epoch(epoch),
        writer=writer(by),
        nonce=Nonce(sixteen(f"nonce {nonce or f'{by} {epoch}'}")),
        node=NodeId(f"node-{by}"),
        identity=identity,
        context=CONTEXT,
    )


def truncate(state: SessionState, length: int, *, seq: int | None = None) -> Truncate:
    """The owner's next record, if it is a Truncate."""
    return Truncate(state.session, state.epoch, state.writer, _seq(state, seq), Position(length))


def end(state: SessionState, *, seq: int | None = None) -> End:
    """The owner's next record, if it is an End."""
    return End(state.session, state.epoch, state.writer, _seq(state, seq), EndReason.REQUEST)


def delta(state: SessionState, tokens: Sequence[int], *, shard: int = 0, start: int | None = None) -> Delta:
    """The owner's next record, if it is a Delta; its payload is `payload_of(tokens)`."""
    if start is None:
        start = state.shards[shard].length if shard < len(state.shards) else 0
    return Delta(
        session=state.session,
        epoch=state.epoch,
        writer=state.writer,
        seq=state.next_seq,
        shard=Shard(shard),
        start=Position(start),
        tokens=tuple(tokens),
        context=CONTEXT,
        codec=Codec.RAW,
        payload_checksum=checksum(payload_of(tokens)),
    )


def snapshot(of: Claim) -> Snapshot:
    """Somebody's snapshot of the session under this claim."""
    return Snapshot(
        of, Seq(1), 7, (Position(2),) * of.identity.shards, Offset(3), "file:///snap", Digest(sixteen("snap"))
    )


def payload_of(tokens: Sequence[int]) -> bytes:
    """The rows that go with these tokens."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


def seal(
    state: SessionState | None, record: Record, *, chain: int | None = None, payload: bytes | None = None
) -> Entry:
    """The record with its bytes; unless a chain is given, the one that its writer would compute in this state."""
    header = header_bytes(record)
    rows = (
        memoryview(payload_of(record.tokens) if payload is None else payload)
        if isinstance(record, Delta)
        else NO_PAYLOAD
    )
    if isinstance(record, Claim | Snapshot):
        return Entry(record, header, 0, rows)
    if chain is None:
        fitting = next_chain(state, record, header) if state is not None else None
        chain = 1 if fitting is None else fitting
    return Entry(record, header, chain, rows)


def _seq(state: SessionState, seq: int | None) -> Seq:
    return state.next_seq if seq is None else Seq(seq)


@dataclass(slots=True)
class Logbook:
    """One partition's log, its offsets beginning at 0, and what a reader of all of it knows."""

    entries: list[Entry] = field(default_factory=list)
    states: dict[SessionId, SessionState] = field(default_factory=dict)

    @property
    def high_watermark(self) -> Offset:
        """The offset of the next record."""
        return Offset(len(self.entries))

    def state(self, session: str = "s") -> SessionState:
        """What a reader of all of it knows of the session."""
        return self.states[SessionId(session)]

    def append(self, entry: Entry) -> Offset:
        """Append anything, and let the reader of everything see it."""
        offset, record = self.high_watermark, entry.record
        self.entries.append(entry)
        state = self.states.get(record.session)
        if state is None:
            if isinstance(record, Claim) and record.epoch <= offset + 1:
                self.states[record.session] = SessionState.from_claim(record, entry.header, offset)
        elif judge(state, offset, entry, TINY).verdict is Verdict.ADMITTED:
            fold(state, offset, entry)
        return offset

    def claim(
        self, by: str = "A", *, session: str = "s", epoch: int | None = None, identity: Identity = IDENTITY
    ) -> Offset:
        """Append a claim whose epoch follows from the high watermark, or another one."""
        epoch = self.high_watermark + 1 if epoch is None else epoch
        return self.append(seal(None, claim(epoch, by, session=session, identity=identity)))

    def truncate(self, length: int, *, session: str = "s") -> Offset:
        """Append the owner's Truncate."""
        state = self.state(session)
        return self.append(seal(state, truncate(state, length)))

    def delta(self, *tokens: int, shard: int = 0, session: str = "s") -> Offset:
        """Append the owner's Delta."""
        state = self.state(session)
        return self.append(seal(state, delta(state, tokens, shard=shard)))

    def rows(self, *tokens: int, session: str = "s") -> Offset:
        """Append one Delta a shard, so that the session is longer by these tokens."""
        shards = range(len(self.state(session).shards))
        return [self.delta(*tokens, shard=shard, session=session) for shard in shards][-1]

    def end(self, *, session: str = "s") -> Offset:
        """Append the owner's End."""
        state = self.state(session)
        return self.append(seal(state, end(state)))


def read_to(core: StandbyCore, book: Logbook, *, until: int | None = None) -> list[ReadEffect]:
    """Feeds a reader from where it stands to the end (or `until`), over again where it asks for that."""
    effects: list[ReadEffect] = []
    end_at = book.high_watermark if until is None else until
    for _ in range(FEEDS_MAX):
        if core.position >= end_at:
            return effects
        effects += core.read(core.position, book.entries[core.position])
    raise AssertionError("the reader reads again for ever")
