"""The values of the compacted tables `nodes` and `sessions`: msgpack maps with text keys, read leniently.

Tables are hints for people, tools and routers; no verdict ever depends on one. A reader ignores keys that it does not
know, and a row that it cannot read is no row.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import msgpack

from kvlog.errors import DecodeError

__all__ = ["NODES", "SESSIONS", "NodeRow", "SessionRow", "decode_node", "decode_session", "encode_row"]

NODES = "nodes"
SESSIONS = "sessions"

_ROW_BYTES_MAX = 256 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """One heartbeat; key: the node's name.

    Args:
        node: its name.
        incarnation: hex of the 16 bytes that its claims carry as writer.
        beat: grows by one a heartbeat.
        leaving: the last one, said at an orderly stop.
        pid: of the daemon, on its host.
        host: where it runs.
        metrics: `host:port` of its Prometheus endpoint; empty: none.
        primary: sessions that it owns.
        known: sessions that it knows.
        broken: sessions that are broken there, at most 100 of them.
        busy: xxh3_64 of the sessions with a turn in progress, at most 1,000 of them.
        pool_bytes: size of its pool.
        pool_free_bytes: of it not in use.
        applied: partition → next offset to be applied.
        needed: partition → lowest offset that the node, or a new reader of a session that it knows, may still need.
        truncated: sessions it knows of which records are gone from the log.
        format_versions: of the log, that it reads.
        log: identity of the log that it follows.
    """

    node: str
    incarnation: str
    beat: int
    leaving: bool = False
    pid: int = 0
    host: str = ""
    metrics: str = ""
    primary: int = 0
    known: int = 0
    broken: tuple[str, ...] = ()
    busy: tuple[int, ...] = ()
    pool_bytes: int = 0
    pool_free_bytes: int = 0
    applied: dict[int, int] = field(default_factory=dict)
    needed: dict[int, int] = field(default_factory=dict)
    truncated: int = 0
    format_versions: tuple[int, ...] = (1,)
    log: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """Where a session was claimed last; key: the session id.

    Args:
        session: its id.
        partition: where its records are.
        first_needed: the offset from which the log must be read to know it; -1: not known to who wrote this.
        node: its owner.
        epoch: the owner's.
    """

    session: str
    partition: int
    first_needed: int
    node: str
    epoch: int


Row = TypeVar("Row", NodeRow, SessionRow)


def encode_row(row: NodeRow | SessionRow) -> bytes:
    """The bytes of a row."""
    return bytes(msgpack.packb(asdict(row)))


def decode_node(value: bytes) -> NodeRow:
    """A heartbeat.

    Raises:
        DecodeError: it is none; skip it.
    """
    return _decode(value, NodeRow)


def decode_session(value: bytes) -> SessionRow:
    """A session's row.

    Raises:
        DecodeError: it is none; skip it.
    """
    return _decode(value, SessionRow)


def _decode(value: bytes, kind: type[Row]) -> Row:
    if len(value) > _ROW_BYTES_MAX:
        raise DecodeError(problem=f"a row of {len(value)} bytes")
    try:
        values: Any = msgpack.unpackb(value, strict_map_key=False, use_list=False)
    except (ValueError, msgpack.UnpackException) as error:
        raise DecodeError(problem=f"a row is not msgpack: {error}") from error
    if not isinstance(values, dict):
        raise DecodeError(problem="a row is not a map")
    known = {f.name: f for f in fields(kind)}
    taken = {name: value for name, value in values.items() if name in known}
    try:
        row = kind(**taken)
    except TypeError as error:
        raise DecodeError(problem=f"a row lacks a key: {error}") from error
    wrong = [
        name for name in taken if type(getattr(row, name)) is not _TYPES[str(known[name].type).split("[")[0]]
    ]
    if wrong:
        raise DecodeError(problem=f"a row's {wrong[0]} is of the wrong type")
    return row


_TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "tuple": tuple, "dict": dict}
