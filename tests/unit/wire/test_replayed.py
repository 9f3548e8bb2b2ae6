"""The head of a replay file: what is written is read, and nothing else is."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvlog.checksums import digest
from kvlog.errors import DecodeError
from kvlog.ids import Epoch, Position, SessionId, Shard
from kvlog.layout import DTYPE_BYTES, DType, Identity, Layout
from kvlog.wire.replayed import METADATA, PREFIX_BYTES, Replayed, read_head, write_head

LAYOUT = Layout(layers=3, planes=2, kv_heads=4, head_dim=8, dtype=DType.BFLOAT16)
REPLAYED = Replayed(
    session=SessionId("a session/with odd characters é"),
    epoch=Epoch(17),
    chain=0xFEDCBA9876543210,
    checksum=1,
    length=Position(7),
    positions=Position(5),
    identity=Identity(digest(b"model"), digest(b"weights"), LAYOUT, shards=2),
    context=digest(b"context"),
)


def changed(head: bytes, **metadata: str) -> bytes:
    """Puts other values into a head's metadata."""
    values = json.loads(head[PREFIX_BYTES:])
    values["__metadata__"] |= metadata
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


@pytest.mark.parametrize("dtype", DType)
def test_head_of_every_dtype_is_read_as_it_was_written(dtype: DType) -> None:
    """Reading is the inverse of writing."""
    identity = replace(REPLAYED.identity, layout=replace(LAYOUT, dtype=dtype))
    replayed = replace(REPLAYED, identity=identity)
    assert replayed == read_head(write_head(replayed))


def test_head_says_where_tensors_are() -> None:
    """Tokens stand first, then layers shard by shard, without a gap; data begins at a multiple of eight."""
    head = write_head(REPLAYED)
    values = json.loads(head[PREFIX_BYTES:])
    metadata = values.pop("__metadata__")
    assert set(METADATA) == set(metadata)
    assert 0 == len(head) % PREFIX_BYTES
    assert len(head) == PREFIX_BYTES + int.from_bytes(head[:PREFIX_BYTES], "little")
    at = 0
    for name, tensor in values.items():
        begin, end = tensor["data_offsets"]
        size = 8 if name == "tokens" else DTYPE_BYTES[LAYOUT.dtype]
        for side in tensor["shape"]:
            size *= side
        assert (at, at + size) == (begin, end)
        at = end
    assert REPLAYED.data_bytes == at
    assert values["shard.1.layer.2"]["data_offsets"][0] == REPLAYED.layer_at(Shard(1), 2)
    assert [5, 2, 4, 8] == values["shard.0.layer.0"]["shape"]


def test_head_is_as_long_whatever_the_checksum() -> None:
    """The checksum is known last, when the tensors stand in the file already."""
    assert len(write_head(REPLAYED)) == len(write_head(replace(REPLAYED, checksum=(1 << 64) - 1)))


def test_head_of_no_rows_and_no_tokens_is_read() -> None:
    """A session of token ids only has no rows, an empty one not even those."""
    empty = replace(REPLAYED, length=Position(0), positions=Position(0))
    assert empty == read_head(write_head(empty))
    assert 0 == empty.data_bytes


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"format": "kvlog-replay/2"}, "this build reads"),
        ({"session": ""}, "not the head"),
        ({"epoch": "x"}, "not the head"),
        ({"epoch": "-1"}, "is not from 0"),
        ({"positions": "8"}, "is not from 0 to 7"),
        ({"length": str(1 << 40)}, "is not from 0"),
        ({"shards": "65"}, "is not from 0 to 64"),
        ({"layers": "0"}, "without elements"),
        ({"model": "00"}, "a digest of 1 bytes"),
        ({"dtype": "float8"}, "not the head"),
        ({"layers": "4"}, "its tensors are not those"),
        ({"extra": "1"}, "its tensors are not those"),
    ],
)
def test_head_with_another_value_is_refused(metadata: dict[str, str], problem: str) -> None:
    """What was not written by us is refused before anything is believed."""
    with pytest.raises(DecodeError, match=problem):
        read_head(changed(write_head(REPLAYED), **metadata))


@pytest.mark.parametrize(
    "head", [b"", b"\0" * 16, b"\x08\0\0\0\0\0\0\0[1,2,3] ", b"\x08\0\0\0\0\0\0\0{}      "]
)
def test_bytes_that_are_no_head_are_refused(head: bytes) -> None:
    """Any bytes at all yield a typed refusal."""
    with pytest.raises(DecodeError):
        read_head(head)
