"""A compacted table of a local log: the newest value of each key, under change numbers that only grow."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.log.local_rows import changes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.log.base import TableRow
    from kvlog.log.local_reader import ReadThread
    from kvlog.log.local_store import Database
    from kvlog.log.local_submit import Submitter

__all__ = ["LocalTable"]


class LocalTable:
    """Implements kvlog.log.base.Table; made by LocalLog.table. In a recreated log it starts from the beginning."""

    def __init__(self, name: str, scribe: Submitter, thread: ReadThread) -> None:
        self._name = name
        self._scribe = scribe
        self._thread = thread
        self._identity = ""
        self._seen = 0

    async def put(self, key: bytes, value: bytes | None) -> None:
        """Write a key's value, or delete the key with None; durable when it returns.

        Raises:
            LogUnavailable: nothing was written; try again.
            OutcomeUnknown: it may have been written; write it again.
        """
        size = len(key) + len(value or b"")
        done = await self._scribe.submit(
            lambda transaction: transaction.put(self._name, key, value), size=size
        )
        await done

    async def refresh(self) -> Sequence[TableRow]:
        """Everything that changed since the last call, oldest first.

        Raises:
            LogUnavailable: the log cannot be read now; nothing is skipped by that.
        """

        def look(database: Database) -> tuple[str, Sequence[TableRow], int]:
            seen = self._seen if database.identity == self._identity else 0
            return database.identity, *changes(database.connection, self._name, after=seen)

        self._identity, rows, self._seen = await self._thread.run(look)
        return rows

    async def close(self) -> None:
        """Nothing is held: thread and connections are the log's."""
