"""The head of a replay file: a session's cache, rebuilt from the log, as a safetensors file.

    offset       size  field
         0          8  length J of the JSON, u64 LE; a multiple of 8
         8          J  JSON: `__metadata__` (text to text, see METADATA), and of each tensor dtype, shape, data_offsets
     8 + J          …  the tensors, C-contiguous, little endian:
                       tokens           I64 [length]                                    token ids
                       shard.S.layer.L  of the cache's dtype [positions, planes, kv_heads, head_dim]

`positions` ≤ `length`: rows that the log holds as token ids only, or whose bytes were lost, are not there; an engine
computes them from the token ids. `checksum` is xxh3_64 over everything behind the JSON. Pure: the caller does the I/O.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvlog.errors import DecodeError, InvalidSessionId
from kvlog.ids import Digest, Epoch, Position, SessionId, parse_session_id
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT, Limits

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvlog.ids import Shard

__all__ = ["HEAD_BYTES_MAX", "METADATA", "PREFIX_BYTES", "Replayed", "read_head", "write_head"]

PREFIX_BYTES = 8
"""What stands before the JSON: its length."""

HEAD_BYTES_MAX = 16 << 20
"""64 shards of 1,000 layers come to 9 MB; more than this is no replay file."""

FORMAT = "kvlog-replay/1"

METADATA = (
    *(
        "format",
        "session",
        "epoch",
        "chain",
        "checksum",
        "length",
        "positions",
        "model",
        "weights",
        "context",
    ),
    *("shards", "layers", "planes", "kv_heads", "head_dim", "dtype"),
)
"""The keys of `__metadata__`; digests, chain and checksum in hex, numbers in decimal."""

_TOKEN_BYTES = 8
_DIGEST_BYTES = 16
_NAMES = {DType.BFLOAT16: "BF16", DType.FLOAT16: "F16", DType.FLOAT32: "F32", DType.UINT8: "U8"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """What a replay file holds.

    Args:
        session: whose cache.
        epoch: under which it was owned last.
        chain: after its last record; equal chains, equal caches.
        checksum: xxh3_64 of all tensor bytes.
        length: token ids.
        positions: rows, in each shard.
        identity: of the cache that the rows were written for.
        context: digest of what else the rows depend on.
    """

    session: SessionId
    epoch: Epoch
    chain: int
    checksum: int
    length: Position
    positions: Position
    identity: Identity
    context: Digest

    @property
    def layer_bytes(self) -> int:
        """Size of one layer's tensor."""
        return self.positions * self.identity.layout.row_bytes // self.identity.layout.layers

    @property
    def tokens_bytes(self) -> int:
        """Size of the tensor of token ids, which stands first."""
        return self.length * _TOKEN_BYTES

    @property
    def data_bytes(self) -> int:
        """Size of all tensors."""
        return self.tokens_bytes + self.identity.shards * self.identity.layout.layers * self.layer_bytes

    def layer_at(self, shard: Shard, layer: int) -> int:
        """Where a layer's tensor begins, counted from the end of the head."""
        return self.tokens_bytes + (shard * self.identity.layout.layers + layer) * self.layer_bytes


def write_head(replayed: Replayed) -> bytes:
    """The bytes before the tensors; their size does not depend on the checksum."""
    layout = replayed.identity.layout
    head: dict[str, object] = {
        "__metadata__": _metadata(replayed),
        "tokens": {"dtype": "I64", "shape": [replayed.length], "data_offsets": [0, replayed.tokens_bytes]},
    }
    shape = [replayed.positions, layout.planes, layout.kv_heads, layout.head_dim]
    at = replayed.tokens_bytes
    for shard in range(replayed.identity.shards):
        for layer in range(layout.layers):
            head[f"shard.{shard}.layer.{layer}"] = {
                "dtype": _NAMES[layout.dtype],
                "shape": shape,
                "data_offsets": [at, at + replayed.layer_bytes],
            }
            at += replayed.layer_bytes
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % PREFIX_BYTES)
    return len(text).to_bytes(PREFIX_BYTES, "little") + text


def read_head(head: bytes, limits: Limits = DEFAULT) -> Replayed:
    """What a file says that it holds.

    Args:
        head: prefix and JSON, as `write_head` made them; the tensors' own entries must be those that it would write.
        limits: of a session and its shards.

    Raises:
        DecodeError: not a replay file, or of another version.
    """
    try:
        values: Any = json.loads(head[PREFIX_BYTES:])
        replayed = _replayed(values["__metadata__"], limits)
    except (ValueError, KeyError, TypeError, RecursionError, InvalidSessionId) as error:
        raise DecodeError(problem=f"not the head of a replay file: {error!r}") from error
    if write_head(replayed) != head:
        raise DecodeError(problem="its tensors are not those of a replay file")
    return replayed


def _metadata(replayed: Replayed) -> dict[str, str]:
    identity, layout = replayed.identity, replayed.identity.layout
    values = (
        *(
            FORMAT,
            replayed.session,
            str(replayed.epoch),
            f"{replayed.chain:016x}",
            f"{replayed.checksum:016x}",
        ),
        *(str(replayed.length), str(replayed.positions)),
        *(identity.model.hex(), identity.weights.hex(), replayed.context.hex(), str(identity.shards)),
        *(str(layout.layers), str(layout.planes), str(layout.kv_heads), str(layout.head_dim)),
        layout.dtype.value,
    )
    return dict(zip(METADATA, values, strict=True))


def _replayed(values: Mapping[str, str], limits: Limits) -> Replayed:
    if values["format"] != FORMAT:
        raise ValueError(f"format {values['format']!r}, this build reads {FORMAT!r}")
    layers, planes, heads, dim = (
        _number(values[name], limits.session_tokens) for name in ("layers", "planes", "kv_heads", "head_dim")
    )
    layout = Layout(layers, planes, heads, dim, DType(values["dtype"]))
    shards = _number(values["shards"], limits.shards)
    if not layers * planes * heads * dim * shards:
        raise ValueError("a layout without elements")
    model, weights, context = (_digest(values[name]) for name in ("model", "weights", "context"))
    length = _number(values["length"], limits.session_tokens)
    return Replayed(
        session=parse_session_id(values["session"]),
        epoch=Epoch(_number(values["epoch"], 1 << 63)),
        chain=int(values["chain"], 16),
        checksum=int(values["checksum"], 16),
        length=Position(length),
        positions=Position(_number(values["positions"], length)),
        identity=Identity(model, weights, layout, shards),
        context=context,
    )


def _number(text: str, most: int) -> int:
    value = int(text)
    if not 0 <= value <= most:
        raise ValueError(f"{value} is not from 0 to {most}")
    return value


def _digest(text: str) -> Digest:
    value = bytes.fromhex(text)
    if len(value) != _DIGEST_BYTES:
        raise ValueError(f"a digest of {len(value)} bytes")
    return Digest(value)
