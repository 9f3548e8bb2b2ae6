"""Rows of the compacted tables: what is written is read back, and whatever else there is, is refused and no more."""

from __future__ import annotations

import msgpack
import pytest

from kvlog.errors import DecodeError
from kvlog.wire.tables import NodeRow, SessionRow, decode_node, decode_session, encode_row

NODE = NodeRow(node="a", incarnation="00" * 16, beat=7, applied={0: 12, 3: 4}, broken=("s",), busy=(1, 2))
SESSION = SessionRow(session="s", partition=1, first_needed=0, node="a", epoch=1)


def test_node_row_round_trips() -> None:
    """A heartbeat is read as it was written."""
    assert decode_node(encode_row(NODE)) == NODE


def test_session_row_round_trips() -> None:
    """A session's row is read as it was written."""
    assert decode_session(encode_row(SESSION)) == SESSION


def test_unknown_key_is_ignored() -> None:
    """A newer writer's key does not keep an older reader from the rest."""
    values = msgpack.unpackb(encode_row(SESSION)) | {"colour": "blue"}
    assert decode_session(msgpack.packb(values)) == SESSION


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (b"\xc1", "not msgpack"),
        (msgpack.packb([1, 2]), "not a map"),
        (msgpack.packb({"session": "s"}), "lacks a key"),
        (encode_row(SESSION).replace(b"\xa5epoch\x01", b"\xa5epoch\xa1x"), "epoch is of the wrong type"),
        (b"x" * (300 << 10), "a row of 307200 bytes"),
    ],
)
def test_row_that_is_none_is_refused(value: bytes, problem: str) -> None:
    """Junk in a table is a DecodeError, never another exception."""
    with pytest.raises(DecodeError, match=problem):
        decode_session(value)
