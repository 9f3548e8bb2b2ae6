"""The rows of the compacted tables that can be read; a row that cannot is no row."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.errors import DecodeError
from kvlog.wire.tables import NODES, SESSIONS, decode_node, decode_session

if TYPE_CHECKING:
    from kvlog.log.base import Log, Table
    from kvlog.wire.tables import NodeRow, SessionRow

__all__ = ["NodeWatch", "session_rows"]


async def session_rows(log: Log) -> list[SessionRow]:
    """Every session that a node has claimed and written down, by id; a hint, never proof."""
    rows: dict[bytes, SessionRow] = {}
    table = await log.table(SESSIONS)
    try:
        found = await table.refresh()
    finally:
        await table.close()
    for row in found:
        rows.pop(row.key, None)
        if row.value is not None:
            try:
                rows[row.key] = decode_session(row.value)
            except DecodeError:
                continue
    return sorted(rows.values(), key=lambda row: row.session)


class NodeWatch:
    """The nodes' newest heartbeats, as they come in."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self.rows: dict[str, NodeRow] = {}

    @classmethod
    async def open(cls, log: Log) -> NodeWatch:
        """Watch a log's nodes."""
        return cls(await log.table(NODES))

    async def refresh(self) -> set[str]:
        """Read what has come in. Returns: the nodes of which something came.

        Raises:
            LogUnavailable: the table cannot be read now.
        """
        changed = set()
        for row in await self._table.refresh():
            name = row.key.decode(errors="replace")
            self.rows.pop(name, None)
            if row.value is not None:
                try:
                    self.rows[name] = decode_node(row.value)
                except DecodeError:
                    continue
                changed.add(name)
        return changed

    async def close(self) -> None:
        """Stop watching."""
        await self._table.close()
