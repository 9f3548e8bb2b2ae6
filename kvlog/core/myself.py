"""Who a daemon is, and how it maps sessions to partitions and records to header bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.ids import NodeId, Partition, SessionId, Writer
    from kvlog.records import Record

__all__ = ["Myself"]


@dataclass(frozen=True, slots=True)
class Myself:
    """One daemon's name, incarnation and mappings.

    Args:
        node: its name, set by the operator.
        writer: 16 bytes drawn anew at every start.
        partition_of: the session's partition; the same function on every node.
        header_bytes: kvlog.wire's encoder of headers.
    """

    node: NodeId
    writer: Writer
    partition_of: Callable[[SessionId], Partition]
    header_bytes: Callable[[Record], bytes]
