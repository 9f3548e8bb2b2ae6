"""The one composition root: every object of a daemon is made here, and nothing is started."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from daemon.codec import CodecChooser
from daemon.control import ControlOptions, EngineControl
from daemon.eviction import Evictor
from daemon.expiry import Expirer
from daemon.index import NodeIndex
from daemon.intake import IntakeParts
from daemon.lag import LagWatch
from daemon.node import NodeShell
from daemon.notify import Notifier
from daemon.pace import Pacer
from daemon.primary import Publisher
from daemon.retention import RetentionRule
from daemon.rewrite import Rewriter
from daemon.rewrite_plan import PlannerParts, RewriteRule
from daemon.standby import LogTail, PoolApplier
from daemon.telemetry import Telemetry
from daemon.turns import TurnRegistry
from kvlog.buffers.eviction import EvictionMarks
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.checksums import partition_of
from kvlog.core.node import Myself, NodeCore
from kvlog.ids import NodeId, Nonce, Partition, Writer
from kvlog.limits import DEFAULT
from kvlog.link.server import LinkServer, ServerOptions
from kvlog.log.settings import make_log
from kvlog.modes import parse_sync_mode
from kvlog.wire.header import header_bytes

if TYPE_CHECKING:
    from daemon.settings import Settings
    from kvlog.buffers.pool import BlockPool
    from kvlog.ids import SessionId
    from kvlog.limits import Limits
    from kvlog.log.base import Log

__all__ = ["Parts", "wire"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything that a daemon consists of."""

    settings: Settings
    myself: Myself
    limits: Limits
    telemetry: Telemetry
    notifier: Notifier
    log: Log
    pool: BlockPool
    evictor: Evictor
    turns: TurnRegistry
    shell: NodeShell
    tail: LogTail
    publisher: Publisher
    control: EngineControl
    server: LinkServer
    index: NodeIndex
    lag: LagWatch
    rewriter: Rewriter
    expirer: Expirer

    @staticmethod
    def new_nonce() -> Nonce:
        """16 random bytes for one claim."""
        return Nonce(os.urandom(16))


def wire(settings: Settings) -> Parts:
    """Make a daemon's parts; allocates the pool.

    Raises:
        ConfigError: the pool does not fit this machine, or something that a setting needs is not installed.
    """
    limits = replace(DEFAULT, record_bytes=settings.log.max_record_bytes)
    node, writer = NodeId(settings.node.id), Writer(os.urandom(16))
    partitions = settings.log.partitions

    def partition(session: SessionId) -> Partition:
        return Partition(partition_of(session, partitions))

    myself = Myself(node, writer, partition, lambda record: header_bytes(record, limits=limits))
    telemetry = Telemetry(settings.node.id)
    log = make_log(settings.log)
    pool = open_pool(
        PoolOptions(
            bytes_total=settings.pool.bytes,
            block_bytes=settings.pool.block_bytes,
            device=settings.pool.device,
            pinned_share=limits.pinned_blocks_share,
        )
    )
    shell = NodeShell(NodeCore(myself, limits))
    turns = TurnRegistry()
    publisher = Publisher(
        shell,
        telemetry,
        # half of what the log's writers take, so that an append never waits inside one: see Publisher
        queue_bytes=limits.publish_queue_bytes // 2,
        format_version=settings.log.format_version,
    )
    evictor = Evictor(shell, pool, turns, _marks(settings))
    applier = PoolApplier(shell, pool, evictor, telemetry, limits)
    tail = LogTail(shell, telemetry, limits)
    parts = IntakeParts(
        shell=shell,
        publisher=publisher,
        turns=turns,
        telemetry=telemetry,
        limits=limits,
        writer=writer,
        codec=CodecChooser(settings.sync.codec, settings.sync.codec_cores, publisher, telemetry),
        pacer=Pacer(settings.sync.bandwidth_bytes_per_second),
    )
    index = NodeIndex(shell, pool, turns, telemetry, myself)
    control = EngineControl(parts, pool, index.neighbours, _control_options(settings, writer))
    planner = PlannerParts(shell, pool, evictor, turns, tail.arrivals, applier.ids_from, partition)
    return Parts(
        settings=settings,
        myself=myself,
        limits=limits,
        telemetry=telemetry,
        notifier=Notifier.from_environment(),
        log=log,
        pool=pool,
        evictor=evictor,
        turns=turns,
        shell=shell,
        tail=tail,
        publisher=publisher,
        control=control,
        server=_server(settings, control, limits),
        index=index,
        lag=LagWatch(shell, telemetry, index),
        rewriter=Rewriter(parts, planner, _rewrite_rule(settings, limits), index),
        expirer=Expirer(parts, settings.primary.ttl_seconds),
    )


def _server(settings: Settings, control: EngineControl, limits: Limits) -> LinkServer:
    link = settings.link
    options = ServerOptions(uids=link.uids, gids=link.gids, peers_max=link.engines_max, limits=limits)
    return LinkServer(link.socket, control, options)


def _marks(settings: Settings) -> EvictionMarks:
    pool = settings.pool
    return EvictionMarks(
        high_percent=pool.high_percent,
        low_percent=pool.low_percent,
        ttl_ns=pool.idle_seconds * 1_000_000_000,
    )


def _rewrite_rule(settings: Settings, limits: Limits) -> RewriteRule:
    return RewriteRule(
        retention=RetentionRule(settings.log.retention_seconds, settings.log.retention_bytes),
        when_left=settings.primary.rewrite_when_left,
        idle_seconds=settings.pool.idle_seconds,
        pinned_share=limits.pinned_blocks_share,
    )


def _control_options(settings: Settings, writer: Writer) -> ControlOptions:
    return ControlOptions(
        node=NodeId(settings.node.id),
        incarnation=writer,
        ring_bytes=settings.link.ring_bytes,
        claim_wait_ms_max=settings.link.claim_wait_ms_max,
        mode=parse_sync_mode(settings.sync.mode),
    )
