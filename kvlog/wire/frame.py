"""The frame of a message: a fixed preamble of 28 bytes, the header, the payload; integers little endian.

    offset  size  field
         0     4  magic, b"KVLG"
         4     1  format version, u8
         5     1  kind, u8
         6     2  reserved, u16, 0
         8     4  header length H in bytes, u32
        12     8  chain after this record, u64; 0 in Claim and Snapshot
        20     8  header checksum, u64: xxh3_64(bytes 0..20 ‖ the H header bytes)
        28     H  header, msgpack (kvlog.wire.header)
    28 + H     …  payload, to the end of the message (kvlog.wire.codec)

The preamble is the same in every format version, its checksum included: so a damaged message (DecodeError)
is told from a newer one (UnknownVersion) before anything in it is believed. The chain stands here and not
in the header, so that the header bytes that the chain runs over are the header bytes as they stand.

The payload is not under the header checksum: it has its own in the header of its Delta, which is verified
where the bytes are used. So reading a header never costs a pass over the rows.

Cost: one copy of the payload to frame it, none to read it.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvlog.checksums import checksum
from kvlog.errors import DecodeError

if TYPE_CHECKING:
    from typing_extensions import Buffer

__all__ = ["FORMAT_VERSION", "MAGIC", "PREAMBLE_BYTES", "Frame", "Peek", "frame", "peek", "read_frame"]

FORMAT_VERSION = 1
"""The newest format version that this build writes; it reads this one and the one before it."""

MAGIC = b"KVLG"

PREAMBLE_BYTES = 28

_PREAMBLE = struct.Struct("<4sBBHIQQ")
_COVERED_BYTES = 20
"""Bytes of the preamble that the header checksum covers: all before the checksum itself."""
_COVERED = struct.Struct("<4sBBHIQ")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class Peek:
    """What a preamble says, believed or not: for tools that look at damaged messages.

    Args:
        version: the format version, known to us or not.
        kind: the kind byte, known to us or not.
        reserved: 0 in every message that we write.
        chain: the chain after the record, as written.
        header_bytes: the length that the header is said to have; may reach past the message's end.
        header_ok: the header is whole and agrees with its checksum.
    """

    version: int
    kind: int
    reserved: int
    chain: int
    header_bytes: int
    header_ok: bool


class Frame(NamedTuple):
    """A message's parts, header checksum verified, nothing else.

    Args:
        version: as it stands, known to us or not.
        kind: as it stands, known to us or not.
        chain: the chain after the record.
        header: a copy of the header bytes.
        payload: a view of the message, format B.
    """

    version: int
    kind: int
    chain: int
    header: bytes
    payload: memoryview


def frame(
    kind: int, header: bytes, *, chain: int, payload: Buffer = b"", version: int = FORMAT_VERSION
) -> bytes:
    """Put a message together; the only copy of the payload on its way out.

    Args:
        kind: the kind byte, 0 to 255.
        header: from `kvlog.wire.header.header_bytes`, of the same version.
        chain: the chain after the record, 0 ≤ value < 2**64; 0 for Claim and Snapshot.
        payload: the encoded rows of a Delta, C-contiguous.
        version: the format version in which the header was written.
    """
    covered = _COVERED.pack(MAGIC, version, kind, 0, len(header), chain)
    return b"".join((covered, _U64.pack(checksum(covered + header)), header, payload))


def peek(value: bytes | memoryview) -> Peek:
    """Look at a preamble without believing it.

    Raises:
        DecodeError: shorter than a preamble, or not our magic: not a kvlog message at all.
    """
    version, kind, reserved, length, chain, expected = _preamble(value)
    whole = length <= len(value) - PREAMBLE_BYTES
    header = value[PREAMBLE_BYTES : PREAMBLE_BYTES + length]
    ok = whole and expected == checksum(b"".join((value[:_COVERED_BYTES], header)))
    return Peek(version=version, kind=kind, reserved=reserved, chain=chain, header_bytes=length, header_ok=ok)


def read_frame(value: bytes | memoryview) -> Frame:
    """Take a message apart.

    Args:
        value: the whole message; a view must be C-contiguous. The payload stays a view of it.

    Raises:
        DecodeError: cut short, damaged, or not a kvlog message; the header cannot be believed.
    """
    view = memoryview(value).cast("B")
    version, kind, reserved, length, chain, expected = _preamble(view)
    end = PREAMBLE_BYTES + length
    if end > len(view):
        raise DecodeError(
            problem=f"the header is said to have {length} bytes, the message has {len(view)} in all"
        )
    header = bytes(view[PREAMBLE_BYTES:end])
    if expected != checksum(b"".join((view[:_COVERED_BYTES], header))):
        raise DecodeError(problem="the header does not agree with its checksum")
    # A newer version may give these bytes a meaning: then it is newer, not damaged.
    if reserved != 0 and version <= FORMAT_VERSION:
        raise DecodeError(problem=f"the reserved bytes hold {reserved}, not 0")
    return Frame(version, kind, chain, header, view[end:])


def _preamble(value: bytes | memoryview) -> tuple[int, int, int, int, int, int]:
    """All that stands behind the magic: version, kind, reserved, header length, chain, header checksum."""
    if len(value) < PREAMBLE_BYTES:
        raise DecodeError(problem=f"it has {len(value)} bytes, a preamble alone has {PREAMBLE_BYTES}")
    magic, version, kind, reserved, length, chain, expected = _PREAMBLE.unpack_from(value)
    if magic != MAGIC:
        raise DecodeError(problem=f"it begins with {magic.hex()}, a kvlog message with {MAGIC.hex()}")
    return version, kind, reserved, length, chain, expected
