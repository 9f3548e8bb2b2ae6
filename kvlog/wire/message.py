"""A record and a whole message, both ways: what shells call.

Any bytes at all given to `decode` yield an Entry, or a DecodeError (UnknownVersion is one), in memory
bounded by the message and the limits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.errors import DecodeError, LocalProtocolError
from kvlog.ids import Digest, Epoch, NodeId, Nonce, SessionId, Writer
from kvlog.limits import DEFAULT, Limits
from kvlog.records import Claim, Codec, Delta, Entry, Record, Snapshot, kind_of
from kvlog.wire.frame import FORMAT_VERSION, frame, read_frame
from kvlog.wire.header import header_bytes, read_header

if TYPE_CHECKING:
    from typing_extensions import Buffer

    from kvlog.layout import Identity

__all__ = ["check_identity", "decode", "encode"]


def encode(
    record: Record,
    *,
    chain: int,
    payload: Buffer = b"",
    version: int = FORMAT_VERSION,
    limits: Limits = DEFAULT,
) -> bytes:
    """The message of a record.

    A core that has the header bytes already (it needs them for the chain) has its shell call `frame` instead.

    Args:
        record: a Delta's `payload_checksum` must be that of `payload`.
        chain: the chain after this record; 0 for Claim and Snapshot.
        payload: the encoded rows, C-contiguous; copied once.
        version: `log.format_version`, set by the operator.
        limits: the message must fit `record_bytes`.

    Raises:
        LocalProtocolError: out of bounds, or a chain or payload where none belongs; every reader would
            refuse it.
    """
    view = memoryview(payload).cast("B")
    header = header_bytes(record, version=version, limits=limits)
    problem = _misfit(record, chain, payload_bytes=len(view))
    if problem:
        raise LocalProtocolError(record=kind_of(record).name, problem=problem)
    message = frame(kind_of(record), header, chain=chain, payload=view, version=version)
    if len(message) > limits.record_bytes:
        raise LocalProtocolError(
            problem=f"a message of {len(message)} bytes, {limits.record_bytes} is the most"
        )
    return message


def decode(value: bytes | memoryview, limits: Limits = DEFAULT) -> Entry:
    """The record of a message, with its header bytes, chain, and payload as a view of `value`.

    The payload's own checksum is not looked at here: the reader that uses the rows does, and answers with a
    verdict.

    Args:
        value: the whole message; stays referenced by the Entry.
        limits: the bounds of a header; `record_bytes` is not among them (see kvlog.wire.header).

    Raises:
        UnknownVersion: undamaged, but of a version, kind, codec, dtype or reason that this build does not
            read.
        DecodeError: not a kvlog message, damaged in preamble or header, or with fields out of bounds.
    """
    parts = read_frame(value)
    record = read_header(parts.kind, parts.header, version=parts.version, limits=limits)
    problem = _misfit(record, parts.chain, payload_bytes=len(parts.payload))
    if problem:
        raise DecodeError(problem=problem)
    return Entry(record, parts.header, parts.chain, parts.payload)


def check_identity(identity: Identity, limits: Limits = DEFAULT) -> None:
    """Check at start that a claim can carry an engine's identity; later it would be too late to say no.

    Raises:
        LocalProtocolError: the layout or the number of shards is beyond what the format holds; the field is named.
    """
    sixteen = bytes(16)
    claim = Claim(
        session=SessionId("s"),
        epoch=Epoch(1),
        writer=Writer(sixteen),
        nonce=Nonce(sixteen),
        node=NodeId("n"),
        identity=identity,
        context=Digest(sixteen),
    )
    header_bytes(claim, limits=limits)


def _misfit(record: Record, chain: int, *, payload_bytes: int) -> str:
    """What is wrong between a record and the rest of its message; empty if nothing is."""
    if isinstance(record, Delta) and record.codec is not Codec.IDS:
        return "" if payload_bytes else "a DELTA's rows are missing"
    if payload_bytes:
        return f"{payload_bytes} bytes follow the header of a {kind_of(record).name} without payload"
    if chain != 0 and isinstance(record, Claim | Snapshot):
        return f"a {kind_of(record).name} carries no chain, this one {chain:#x}"
    return ""
