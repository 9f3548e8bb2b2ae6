"""Who takes what is to be written to a local log: its scribe, or nobody where the log was opened to read only."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from kvlog.errors import LocalProtocolError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from kvlog.log.local_rows import Transaction

__all__ = ["ReadOnly", "Submitter"]


class Submitter(Protocol):
    """Takes jobs that write; see Scribe.submit."""

    async def submit(
        self, work: Callable[[Transaction], object], *, size: int, partition: int | None = None
    ) -> asyncio.Future[Any]:
        """Queue a job; its result comes once it is durable."""
        ...


class ReadOnly:
    """Refuses every job: a tool must not change what it looks at."""

    async def submit(
        self,
        work: Callable[[Transaction], object],  # noqa: ARG002  # Submitter's parameters
        *,
        size: int,  # noqa: ARG002
        partition: int | None = None,  # noqa: ARG002
    ) -> asyncio.Future[Any]:
        """Refuse.

        Raises:
            LocalProtocolError: always.
        """
        raise LocalProtocolError(problem="this log was opened to read only")
