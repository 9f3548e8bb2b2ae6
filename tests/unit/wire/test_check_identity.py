"""An engine whose identity no claim can carry is told so at hello, not by a daemon that dies at its first turn."""

from __future__ import annotations

import pytest

from kvlog.checksums import digest
from kvlog.errors import LocalProtocolError
from kvlog.layout import DType, Identity, Layout
from kvlog.wire.message import check_identity

LAYOUT = Layout(layers=32, planes=2, kv_heads=8, head_dim=128, dtype=DType.BFLOAT16)


def identity(layout: Layout = LAYOUT, shards: int = 1) -> Identity:
    """A model's identity."""
    return Identity(digest(b"model"), digest(b"weights"), layout, shards)


def test_identity_that_a_claim_can_carry_passes() -> None:
    """An ordinary model, also in 64 shards."""
    check_identity(identity())
    check_identity(identity(shards=64))


@pytest.mark.parametrize(
    "wrong",
    [
        identity(Layout(32, 3, 8, 128, DType.BFLOAT16)),
        identity(Layout(1 << 17, 2, 8, 128, DType.BFLOAT16)),
        identity(Layout(32, 2, 8, 0, DType.BFLOAT16)),
        identity(shards=65),
        identity(shards=0),
    ],
)
def test_identity_beyond_the_format_is_refused(wrong: Identity) -> None:
    """Three planes, 2**17 layers, empty rows, 65 or no shards: what a claim's header does not hold."""
    with pytest.raises(LocalProtocolError):
        check_identity(wrong)
