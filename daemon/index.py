"""The tables that others look at: this node's heartbeat, and a row for each session that it takes over. Only hints."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING

from daemon.neighbours import Neighbours
from daemon.telemetry import Event
from kvlog.errors import ConfigError, LogReplaced, LogUnavailable, OutcomeUnknown
from kvlog.wire.frame import FORMAT_VERSION
from kvlog.wire.tables import NODES, SESSIONS, NodeRow, SessionRow, encode_row

if TYPE_CHECKING:
    from daemon.node import NodeShell
    from daemon.telemetry import Telemetry
    from daemon.turns import TurnRegistry
    from kvlog.buffers.pool import BlockPool
    from kvlog.core.effects import SessionClaimed
    from kvlog.core.myself import Myself
    from kvlog.ids import NodeId, SessionId, Writer
    from kvlog.log.base import Log, Table
    from kvlog.records import Claim

__all__ = ["NodeIndex"]

_BEAT_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""A session whose turn has just ended on another node may be claimed so soon."""
_CLAIMS_MAX = 10_000
_BROKEN_MAX = 100
_BUSY_MAX = 1000
_GOODBYE_SECONDS = 2.0


class NodeIndex:
    """Writes the tables; a row that cannot be written is written a second later, or not."""

    def __init__(
        self, shell: NodeShell, pool: BlockPool, turns: TurnRegistry, telemetry: Telemetry, myself: Myself
    ) -> None:
        self._shell = shell
        self._pool = pool
        self._turns = turns
        self._telemetry = telemetry
        self._node: NodeId = myself.node
        self._writer: Writer = myself.writer
        self._partition_of = myself.partition_of
        self.neighbours = Neighbours(myself.node, myself.writer.hex())
        self._claims: deque[SessionRow] = deque(maxlen=_CLAIMS_MAX)
        self._broken: set[SessionId] = set()
        self._beat = 0
        self._leaving = False
        self._written_at = float("-inf")
        self._written_busy: tuple[int, ...] = ()
        self.metrics_address = ""
        self.log_identity = ""
        self.needed: dict[int, int] = {}
        self.truncated = 0

    def claimed(self, effect: SessionClaimed) -> None:
        """A claim was folded; ours is to be written down."""
        if effect.claim.writer == self._writer:
            self.note(effect.claim)

    def note(self, claim: Claim) -> None:
        """The row of a session of ours is due: it was claimed, or its root has moved."""
        partition = self._partition_of(claim.session)
        state = self._shell.core.state(claim.session)
        first = state.first_needed_offset if state else None
        self._claims.append(
            SessionRow(
                session=claim.session,
                partition=partition,
                first_needed=claim.epoch - 1 if first is None else first,
                node=claim.node,
                epoch=claim.epoch,
            )
        )

    def broke(self, session: SessionId) -> None:
        """A session is broken here."""
        self._broken.add(session)

    def mended(self, session: SessionId) -> None:
        """It is whole again, or forgotten."""
        self._broken.discard(session)

    @property
    def broken(self) -> int:
        """Sessions that are broken here."""
        return len(self._broken)

    async def run(self, log: Log) -> None:
        """Beat once a second until cancelled; between two beats say what has changed of the turns in progress.

        Raises:
            ConfigError: another daemon beats under our name: give one of them another node.id.
        """
        nodes: Table | None = None
        sessions: Table | None = None
        while True:
            try:
                nodes = nodes or await log.table(NODES)
                sessions = sessions or await log.table(SESSIONS)
                await self._look(nodes)
                await self._write_what_is_due(nodes, sessions)
            except (LogUnavailable, OutcomeUnknown, LogReplaced):
                pass  # the log's own loops say so; a row that may be there is written again
            await asyncio.sleep(_LOOK_SECONDS)

    async def say_goodbye(self, log: Log) -> None:
        """The last heartbeat; who still beats meanwhile says it as well.

        Raises:
            LogUnavailable: it is not there; others notice by the silence.
            OutcomeUnknown: it may not be there.
        """
        self._leaving = True
        async with asyncio.timeout(_GOODBYE_SECONDS):
            table = await log.table(NODES)
            self._beat += 1
            await table.put(self._node.encode(), encode_row(self._row()))

    async def _write_what_is_due(self, nodes: Table, sessions: Table) -> None:
        now, busy = time.monotonic(), self._turns.busy_hashes(_BUSY_MAX)
        if now - self._written_at >= _BEAT_SECONDS:
            self._beat += 1
            self._written_at = now
        elif busy == self._written_busy and not self._claims:
            return
        await nodes.put(self._node.encode(), encode_row(self._row()))
        self._written_busy = busy
        while self._claims:
            row = self._claims[0]
            await sessions.put(row.session.encode(), encode_row(row))
            self._claims.popleft()

    async def _look(self, nodes: Table) -> None:
        """Before we write: a table has one value a key, and what a twin wrote under ours is seen only until then."""
        rows = await nodes.refresh()
        self.neighbours.look(rows, time.monotonic(), own_beat=self._beat)
        twin = self.neighbours.twin
        if twin is not None:
            self._telemetry.say(Event.NODE_ID_TAKEN, incarnation=twin)
            raise ConfigError(
                setting="node.id",
                problem=f"{self._node!r} is used by a daemon that runs already (incarnation {twin})",
                fix="give each daemon a node.id of its own",
            )

    def _row(self) -> NodeRow:
        core = self._shell.core
        return NodeRow(
            node=self._node,
            incarnation=self._writer.hex(),
            beat=self._beat,
            leaving=self._leaving,
            pid=os.getpid(),
            host=socket.gethostname(),
            metrics=self.metrics_address,
            primary=sum(1 for _ in core.primaries()),
            known=sum(c.session_count for c in core.partitions.values()),
            broken=tuple(sorted(self._broken)[:_BROKEN_MAX]),
            busy=self._turns.busy_hashes(_BUSY_MAX),
            pool_bytes=self._pool.geometry.size_bytes,
            pool_free_bytes=self._pool.blocks.ledger.counts.free * self._pool.geometry.block_bytes,
            applied={int(p): int(c.applied) for p, c in core.partitions.items()},
            needed=self.needed,
            truncated=self.truncated,
            format_versions=(FORMAT_VERSION,),
            log=self.log_identity,
        )
