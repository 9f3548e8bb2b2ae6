"""A log that tests write as honest nodes do, with the cores and the wire: what every verb's tests look at."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from consumers.__main__ import main
from consumers.reading import PartitionFold
from kvlog.checksums import checksum, digest, partition_of
from kvlog.core.effects import AppendRecord
from kvlog.core.inputs import EncodedRows
from kvlog.core.primary import PrimaryCore
from kvlog.ids import (
    Digest,
    Epoch,
    NodeId,
    Nonce,
    Offset,
    Partition,
    Position,
    SessionId,
    Shard,
    Turn,
    Writer,
)
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.log.base import AppendRequest
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.records import Claim, Codec, EndReason, kind_of
from kvlog.wire.codec import encode_payload
from kvlog.wire.frame import frame
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvlog.core.session import SessionState
    from kvlog.log.base import Log, LogWriter

__all__ = [
    "CONTEXT",
    "IDENTITY",
    "LAYOUT",
    "PARTITIONS",
    "WrittenLog",
    "home_of",
    "kvlog",
    "rows_of",
]

PARTITIONS = 2
LAYOUT = Layout(layers=3, planes=2, kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
IDENTITY = Identity(digest(b"model"), digest(b"weights"), LAYOUT, shards=1)
CONTEXT = Digest(digest(b"context"))


def home_of(session: str) -> Partition:
    """The partition of a session in every log of these tests."""
    return Partition(partition_of(session, PARTITIONS))


def rows_of(start: int, tokens: Sequence[int], shard: int = 0, layout: Layout = LAYOUT) -> bytes:
    """The rows that every test gives these tokens at these positions: each byte matters to where it belongs."""
    rows = bytearray()
    for position, token in enumerate(tokens, start):
        seed = digest(b"%d %d %d" % (position, token, shard))
        rows += (seed * (layout.row_bytes // len(seed) + 1))[: layout.row_bytes]
    return bytes(rows)


@dataclass
class WrittenLog:
    """A log in a directory, and one honest writer for each node and session of it.

    Args:
        log: open.
        writer: of the log.
        flips: number of an appended message, from 0, and the byte of it that is flipped on its way to the log.
        primaries: by session and node.
        appended: messages so far.
    """

    log: Log
    writer: LogWriter
    flips: dict[int, int] = field(default_factory=dict)
    primaries: dict[str, PrimaryCore] = field(default_factory=dict)
    appended: int = 0

    @classmethod
    async def on(cls, log: Log) -> WrittenLog:
        """Writes to an open log of any kind."""
        return cls(log, await log.writer())

    @classmethod
    async def make(cls, directory: Path, flips: dict[int, int] | None = None) -> WrittenLog:
        """Makes a log, or goes on with it."""
        log = LocalLog(directory, LocalLogOptions(partitions=PARTITIONS, retention_seconds=None))
        await log.open()
        return cls(log, await log.writer(), flips or {})

    def home(self, session: str) -> Partition:
        """The partition of a session."""
        return Partition(partition_of(session, self.log.partitions))

    async def state(self, session: str) -> SessionState:
        """What a reader of everything knows of the session."""
        end = (await self.log.bounds(self.home(session))).high_watermark
        fold = PartitionFold(self.log, self.home(session), first=Offset(0), end=end)
        async for _ in fold.steps():
            pass
        state = fold.core.session(SessionId(session))
        assert state is not None, "the session was claimed"
        return state

    async def claim(self, session: str, node: str = "a", identity: Identity = IDENTITY) -> Offset:
        """Takes the session over for a node."""
        partition = self.home(session)
        high_watermark = (await self.log.bounds(partition)).high_watermark
        claim = Claim(
            session=SessionId(session),
            epoch=Epoch(high_watermark + 1),
            writer=Writer(digest(node.encode())),
            nonce=Nonce(digest(b"nonce %d" % high_watermark, node.encode())),
            node=NodeId(f"node-{node}"),
            identity=identity,
            context=CONTEXT,
        )
        record = AppendRecord(partition, claim, header_bytes(claim), 0, memoryview(b""))
        (offset,) = await self.append((record,))
        state = await self.state(session)
        primary = PrimaryCore.from_claim(
            partition, state, own=claim, header_bytes=header_bytes, limits=DEFAULT
        )
        self.primaries[f"{session} {node}"] = primary
        return offset

    async def turn(
        self, session: str, tokens: Sequence[int], node: str = "a", codec: Codec = Codec.RAW
    ) -> list[Offset]:
        """Logs one turn with these tokens, one delta for each that the session lacks and each shard."""
        primary = self.primaries[f"{session} {node}"]
        first = primary.begin(Turn(1), tokens, CONTEXT)
        offsets = []
        identity = primary.claim.identity
        for position in range(first, len(tokens)):
            for shard in range(identity.shards):
                rows = rows_of(position, tokens[position : position + 1], shard, identity.layout)
                payload = memoryview(encode_payload(rows, codec, identity.layout.dtype))
                delta = EncodedRows(
                    turn=Turn(1),
                    epoch=primary.claim.epoch,
                    shard=Shard(shard),
                    start=Position(position),
                    tokens=(tokens[position],),
                    codec=codec,
                    payload=payload,
                    payload_checksum=checksum(payload),
                )
                offsets += await self.append(primary.rows(delta))
        primary.close(Turn(1))
        return offsets

    async def spoiled(
        self, session: str, tokens: Sequence[int], codec: Codec, payload: bytes, node: str = "a"
    ) -> list[Offset]:
        """Logs one turn of one more token, with a payload that its codec does not give."""
        primary = self.primaries[f"{session} {node}"]
        start = primary.begin(Turn(1), tokens, CONTEXT)
        rows = EncodedRows(
            turn=Turn(1),
            epoch=primary.claim.epoch,
            shard=Shard(0),
            start=start,
            tokens=tuple(tokens[start:]),
            codec=codec,
            payload=memoryview(payload),
            payload_checksum=checksum(payload),
        )
        offsets = await self.append(primary.rows(rows))
        primary.close(Turn(1))
        return offsets

    async def end(self, session: str, node: str = "a") -> list[Offset]:
        """Ends the session."""
        return await self.append(self.primaries[f"{session} {node}"].end(EndReason.FORGET))

    async def append(self, records: Sequence[AppendRecord]) -> list[Offset]:
        """Appends records as the daemon does."""
        offsets = []
        for one in records:
            kind = kind_of(one.record)
            value = frame(kind, one.header, chain=one.chain, payload=one.payload)
            offsets.append(await self.put(one.record.session, value, kind=kind, epoch=one.record.epoch))
        return offsets

    async def put(self, session: str, value: bytes, *, kind: int = 0, epoch: int = 0) -> Offset:
        """Appends any bytes under a session's key."""
        if self.appended in self.flips:
            changed = bytearray(value)
            changed[self.flips[self.appended]] ^= 0xFF
            value = bytes(changed)
        self.appended += 1
        request = AppendRequest(self.home(session), session.encode(), value, kind, epoch)
        return await (await self.writer.append(request))

    async def delete_before(self, session: str, offset: Offset) -> None:
        """Deletes records of a session's partition, as retention does."""
        assert isinstance(self.log, LocalLog)
        await self.log.delete_records(self.home(session), before=offset)

    async def close(self) -> None:
        """Closes it; the directory stays."""
        await self.log.close()


def kvlog(*arguments: object) -> tuple[int, dict[str, object]]:
    """Runs a verb with --json. Returns: its exit code, and its one object."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main([*map(str, arguments), "--json"])
    (line,) = out.getvalue().splitlines()
    said = json.loads(line)
    assert code == said["exit_code"]
    return code, said
