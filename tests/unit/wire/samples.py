"""Records and whole messages that the tests of the wire share: one of each kind and codec, and the odd ones."""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlog.checksums import checksum
from kvlog.ids import Digest, Epoch, NodeId, Nonce, Offset, Position, Seq, Shard, Writer, parse_session_id
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.records import Claim, Codec, Delta, End, EndReason, Record, Snapshot, Truncate

__all__ = ["CLAIM", "DELTA", "END", "ROWS", "SAMPLES", "SNAPSHOT", "TRUNCATE", "WIDEST_DELTA", "Sample"]

U64_MAX = (1 << 64) - 1
OFFSET_MAX = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Sample:
    """One message by its parts; `rows` are what the payload decodes to."""

    record: Record
    chain: int
    payload: bytes = b""
    rows: bytes = b""


def sixteen(first: int) -> bytes:
    """Makes 16 different bytes, so that a swap of fields or bytes shows."""
    return bytes(range(first, first + 16))


ROWS = bytes.fromhex("c03f803f00bfc03f" * 6)
"""Three rows of eight bfloat16 values: 1.5, 1.0, -0.5, 1.5, …"""

CLAIM = Claim(
    session=parse_session_id("user-42"),
    epoch=Epoch(7),
    writer=Writer(sixteen(0x10)),
    nonce=Nonce(sixteen(0x20)),
    node=NodeId("node-a"),
    identity=Identity(
        model=Digest(sixteen(0x40)),
        weights=Digest(sixteen(0x50)),
        layout=Layout(layers=2, planes=2, kv_heads=1, head_dim=2, dtype=DType.BFLOAT16),
        shards=2,
    ),
    context=Digest(sixteen(0x30)),
)

DELTA = Delta(
    session=CLAIM.session,
    epoch=CLAIM.epoch,
    writer=CLAIM.writer,
    seq=Seq(1),
    shard=Shard(1),
    start=Position(300),
    tokens=(0, 70_000, 49_151),
    context=CLAIM.context,
    codec=Codec.RAW,
    payload_checksum=checksum(ROWS),
)

TRUNCATE = Truncate(CLAIM.session, CLAIM.epoch, CLAIM.writer, Seq(0), Position(300))

END = End(CLAIM.session, CLAIM.epoch, CLAIM.writer, Seq(2), EndReason.TTL)

SNAPSHOT = Snapshot(
    claim=CLAIM,
    next_seq=Seq(2),
    chain=0x0123456789ABCDEF,
    lengths=(Position(303), Position(300)),
    covered=Offset(11),
    uri="s3://kv/user-42/7",
    content=Digest(sixteen(0x60)),
)

LONGEST_SESSION = parse_session_id("\N{PILE OF POO}" * 64)
"""256 bytes, the most, in 64 characters outside the basic plane."""

WIDEST_CLAIM = Claim(
    session=LONGEST_SESSION,
    epoch=Epoch(OFFSET_MAX),
    writer=Writer(b"\xff" * 16),
    nonce=Nonce(b"\xff" * 16),
    node=NodeId("n" * 255),
    identity=Identity(
        model=Digest(b"\xff" * 16),
        weights=Digest(b"\xff" * 16),
        layout=Layout(layers=128, planes=2, kv_heads=128, head_dim=512, dtype=DType.FLOAT32),
        shards=DEFAULT.shards,
    ),
    context=Digest(b"\xff" * 16),
)


WIDEST_DELTA = Delta(
    session=LONGEST_SESSION,
    epoch=Epoch(OFFSET_MAX),
    writer=Writer(b"\xff" * 16),
    seq=Seq(OFFSET_MAX),
    shard=Shard(DEFAULT.shards - 1),
    start=Position(DEFAULT.session_tokens - 2),
    tokens=((1 << 32) - 1, (1 << 32) - 1),
    context=Digest(b"\xff" * 16),
    codec=Codec.IDS,
    payload_checksum=U64_MAX,
)


def delta(codec: Codec, payload: bytes) -> Delta:
    """Makes the sample delta with another payload."""
    return DELTA._replace(codec=codec, payload_checksum=checksum(payload))


LZ4_PAYLOAD = bytes.fromhex("300000008fc03f803f00bfc03f080010503f00bfc03f")
SPLIT_PAYLOAD = bytes.fromhex(
    "300000001300000028b52ffd2018550000203f3fbf3f0100d38e08c08000c0c08000c0c08000c0c08000c0c08000c0c08000c0"
)

SAMPLES = {
    "claim": Sample(CLAIM, chain=0),
    "claim_widest": Sample(WIDEST_CLAIM, chain=0),
    "claim_mla_uint8": Sample(
        replace(
            CLAIM,
            identity=replace(CLAIM.identity, layout=Layout(61, 1, 1, 576, DType.UINT8), shards=1),
        ),
        chain=0,
    ),
    "delta_ids": Sample(delta(Codec.IDS, b""), chain=0x1111111111111111),
    "delta_raw": Sample(DELTA, chain=0x2222222222222222, payload=ROWS, rows=ROWS),
    "delta_lz4": Sample(delta(Codec.LZ4, LZ4_PAYLOAD), chain=3, payload=LZ4_PAYLOAD, rows=ROWS),
    "delta_split_zstd": Sample(
        delta(Codec.SPLIT_ZSTD, SPLIT_PAYLOAD), chain=4, payload=SPLIT_PAYLOAD, rows=ROWS
    ),
    "delta_widest": Sample(WIDEST_DELTA, chain=U64_MAX),
    "truncate": Sample(TRUNCATE, chain=0x5555555555555555),
    "truncate_zero": Sample(TRUNCATE._replace(length=Position(0)), chain=0),
    "snapshot": Sample(SNAPSHOT, chain=0),
    "snapshot_widest": Sample(
        Snapshot(
            claim=WIDEST_CLAIM,
            next_seq=Seq(OFFSET_MAX),
            chain=U64_MAX,
            lengths=(Position(DEFAULT.session_tokens),) * DEFAULT.shards,
            covered=Offset(OFFSET_MAX),
            uri="s" * 1024,
            content=Digest(b"\xff" * 16),
        ),
        chain=0,
    ),
    "end_request": Sample(END._replace(reason=EndReason.REQUEST), chain=6),
    "end_ttl": Sample(END, chain=7),
    "end_forget": Sample(END._replace(reason=EndReason.FORGET), chain=8),
}
"""By the name of their golden file. The compressed payloads are written out: another release of lz4 or zstd may
compress the same rows to other bytes, and both are right."""
