"""One connection to the daemon as the replicator uses it: control, ring, doorbell, and the pool to attach from.

It lives from welcome to the link's end, and is never revived: a new link brings a new ring. What a step writes after
the end goes nowhere. Two locks: the ring's, held for one entry at a time, and the pool's, held for one attach; so an
attach never makes a step wait.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Self

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.doorbell import Doorbell
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.buffers.memory import attach
from kvlog.buffers.ring import RingWriter
from kvlog.engines.stepwrite import Written, write_step
from kvlog.errors import DecodeError, LinkClosed, RowTooLarge
from kvlog.link.messages import unpack_checksums

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.buffers.memory import SealedMemory
    from kvlog.engines.stepwrite import RowSource, StepBudget
    from kvlog.engines.turn_state import TurnState
    from kvlog.ids import Shard, Turn
    from kvlog.link.client import LinkClient
    from kvlog.link.messages import TurnOpened

__all__ = ["EngineLink"]

_NOTHING = Written(0, full=False)


class EngineLink:
    """A started link and its shared memory; made by `open`."""

    def __init__(
        self, client: LinkClient, memories: tuple[SealedMemory, SealedMemory | None], doorbell: Doorbell
    ) -> None:
        self.client = client
        self.turns: dict[Turn, TurnState] = {}
        self._ring_memory, self._pool = memories
        self._doorbell = doorbell
        self._ring: RingWriter | None = RingWriter(self._ring_memory, doorbell)
        self._ring_lock = threading.Lock()
        self._pool_lock = threading.Lock()

    @classmethod
    def open(cls, client: LinkClient) -> Self:
        """Map what came with the welcome; takes over the client's descriptors.

        Raises:
            LinkClosed: the memory is not what the welcome says; try again with another link.
        """
        welcome = client.welcome
        ring_fd, pool_fd, doorbell_fd = client.fds
        doorbell = Doorbell(doorbell_fd)
        opened: list[SealedMemory] = []
        try:
            opened.append(attach(ring_fd, writable=True, bytes_min=welcome.ring_bytes))
            if welcome.pool_bytes:
                opened.append(attach(pool_fd, writable=False, bytes_min=welcome.pool_bytes))
            return cls(client, (opened[0], opened[1] if welcome.pool_bytes else None), doorbell)
        except BaseException as error:
            client.close()
            doorbell.close()
            for memory in opened:
                memory.close()
            if isinstance(error, DecodeError):
                raise LinkClosed(problem=f"the daemon's memory is refused: {error.problem}") from None
            raise
        finally:
            os.close(ring_fd)
            os.close(pool_fd)

    def write(
        self, sources: Sequence[RowSource], row_bytes: int, shard: Shard, budget: StepBudget
    ) -> Written:
        """Write rows of turns that are logged over this link; nothing is written when it has ended. Never raises."""
        with self._ring_lock:
            if self._ring is None:
                return _NOTHING
            try:
                return write_step(self._ring, sources, row_bytes, shard, budget)
            except (DecodeError, RowTooLarge) as error:
                self.client.close(f"the ring cannot be used: {error}")
                return _NOTHING

    def load(self, opened: TurnOpened, rows_max: int, into: Callable[[memoryview], None]) -> int:
        """Copy the first rows of an attach into private memory, verify them, hand them to `into`. Never raises.

        Returns: rows that were verified and handed on; fewer than `rows_max` if a row did not verify.
        """
        welcome = self.client.welcome
        geometry = PoolGeometry(welcome.block_bytes, welcome.blocks, welcome.device)
        blocks = tuple(PinnedBlock(block.index, block.rows) for block in opened.blocks)
        attachment = Attachment(opened.row_bytes, blocks, unpack_checksums(opened.row_checksums))
        with self._pool_lock:
            if self._pool is None:
                return 0
            try:
                return copy_attached(self._pool.view, geometry, attachment.first(rows_max), into)
            except DecodeError as error:
                self.client.close(f"an attach cannot be used: {error}")
                return 0

    def close(self) -> None:
        """Give everything back; waits for a step or an attach that is being copied."""
        self.client.close()
        with self._ring_lock:
            if self._ring is not None:
                self._ring.close()
                self._ring = None
        with self._pool_lock:
            pool, self._pool = self._pool, None
        self._ring_memory.close()
        self._doorbell.close()
        if pool is not None:
            pool.close()
