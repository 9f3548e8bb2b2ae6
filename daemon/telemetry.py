"""What the daemon says of itself: events for the diagnostics stream, figures for Prometheus.

Token ids and texts never appear here; session ids appear in events, never in labels.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from daemon.claim_times import ClaimTimes

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

    from kvlog.core.lag import PartitionLag

__all__ = ["EVENT_LEVELS", "Event", "Metrics", "Telemetry", "configure_diagnostics"]


class Event(StrEnum):
    """Everything that is ever written to the diagnostics stream, by name. WARNING and above have a runbook heading."""

    DAEMON_STARTED = "daemon_started"
    DAEMON_READY = "daemon_ready"
    DAEMON_STOPPING = "daemon_stopping"
    DAEMON_STOPPED = "daemon_stopped"
    LOG_OPENED = "log_opened"
    LOG_DIFFERS = "log_differs"
    LOG_UNAVAILABLE = "log_unavailable"
    LOG_AVAILABLE_AGAIN = "log_available_again"
    LOG_TRUNCATED = "log_truncated"
    LOG_REPLACED = "log_replaced"
    LOG_REFUSED = "log_refused"
    NODE_ID_TAKEN = "node_id_taken"
    ENGINE_CONNECTED = "engine_connected"
    ENGINE_REJECTED = "engine_rejected"
    ENGINE_GONE = "engine_gone"
    RING_CORRUPTED = "ring_corrupted"
    TURN_OPENED = "turn_opened"
    TURN_UNLOGGED = "turn_unlogged"
    TURN_ENDED = "turn_ended"
    IDENTITY_DIFFERED = "identity_differed"
    TAKEOVER_COMPLETED = "takeover_completed"
    NODE_FENCED = "node_fenced"
    SESSION_BROKEN = "session_broken"
    SESSION_HEALED = "session_healed"
    SESSION_ENDED = "session_ended"
    SESSION_DROPPED = "session_dropped"
    RECORD_REFUSED = "record_refused"
    ROWS_ABSENT = "rows_absent"
    SESSION_REWRITTEN = "session_rewritten"
    REWRITE_INTERRUPTED = "rewrite_interrupted"
    REWRITE_SKIPPED = "rewrite_skipped"
    SESSION_EXPIRED = "session_expired"
    CODEC_CHOSEN = "codec_chosen"
    OFFSETS_NOT_COMMITTED = "offsets_not_committed"
    APPEND_LATE = "append_late"
    APPEND_FAILED = "append_failed"
    LOOP_STUCK = "loop_stuck"


_WARNING, _ERROR, _INFO, _DEBUG = logging.WARNING, logging.ERROR, logging.INFO, logging.DEBUG

EVENT_LEVELS: dict[Event, int] = {
    Event.DAEMON_STARTED: _INFO,
    Event.DAEMON_READY: _INFO,
    Event.DAEMON_STOPPING: _INFO,
    Event.DAEMON_STOPPED: _INFO,
    Event.LOG_OPENED: _INFO,
    Event.LOG_DIFFERS: _WARNING,
    Event.LOG_UNAVAILABLE: _WARNING,
    Event.LOG_AVAILABLE_AGAIN: _INFO,
    Event.LOG_TRUNCATED: _WARNING,
    Event.LOG_REPLACED: _ERROR,
    Event.LOG_REFUSED: _ERROR,
    Event.NODE_ID_TAKEN: _ERROR,
    Event.ENGINE_CONNECTED: _INFO,
    Event.ENGINE_REJECTED: _WARNING,
    Event.ENGINE_GONE: _INFO,
    Event.RING_CORRUPTED: _ERROR,
    Event.TURN_OPENED: _DEBUG,
    Event.TURN_UNLOGGED: _INFO,
    Event.TURN_ENDED: _WARNING,
    Event.IDENTITY_DIFFERED: _WARNING,
    Event.TAKEOVER_COMPLETED: _INFO,
    Event.NODE_FENCED: _WARNING,
    Event.SESSION_BROKEN: _ERROR,
    Event.SESSION_HEALED: _INFO,
    Event.SESSION_ENDED: _DEBUG,
    Event.SESSION_DROPPED: _DEBUG,
    Event.RECORD_REFUSED: _DEBUG,
    Event.ROWS_ABSENT: _WARNING,
    Event.SESSION_REWRITTEN: _INFO,
    Event.REWRITE_INTERRUPTED: _INFO,
    Event.REWRITE_SKIPPED: _WARNING,
    Event.SESSION_EXPIRED: _INFO,
    Event.CODEC_CHOSEN: _INFO,
    Event.OFFSETS_NOT_COMMITTED: _WARNING,
    Event.APPEND_LATE: _WARNING,
    Event.APPEND_FAILED: _ERROR,
    Event.LOOP_STUCK: _ERROR,
}
"""ERROR: loss, corruption or unavailable; WARNING: unexpected but handled; INFO: a state changed; DEBUG: per batch."""

_MILLISECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


def configure_diagnostics(level: str, style: str) -> None:
    """Send events to standard error: text on a terminal, else one JSON object a line."""
    text = style == "text" or (style == "auto" and sys.stderr.isatty())
    renderer: Any = (
        structlog.dev.ConsoleRenderer(colors=text) if text else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


class Metrics:
    """Prometheus figures of one daemon, in a registry of their own. A figure that is not known is absent, never 0."""

    def __init__(self) -> None:
        """Register every figure."""
        self.registry = CollectorRegistry()
        r = self.registry
        self.records_read = Counter("kvlog_records_read_total", "Records fed to the fold.", registry=r)
        self.bytes_read = Counter("kvlog_read_bytes_total", "Message bytes read from the log.", registry=r)
        self.records_refused = Counter(
            "kvlog_records_refused_total", "Records that the fold refused.", ["verdict"], registry=r
        )
        self.records_appended = Counter(
            "kvlog_records_appended_total", "Records given to the log.", registry=r
        )
        self.bytes_appended = Counter(
            "kvlog_appended_bytes_total", "Message bytes given to the log.", registry=r
        )
        self.appends_failed = Counter("kvlog_appends_failed_total", "Appends of unknown outcome.", registry=r)
        self.append_seconds = Histogram(
            "kvlog_append_seconds", "From append to durable.", buckets=_MILLISECONDS, registry=r
        )
        self.append_queue_bytes = Gauge(
            "kvlog_append_queue_bytes", "Given to the log, not durable yet.", registry=r
        )
        self.append_oldest_seconds = Gauge(
            "kvlog_append_oldest_seconds",
            "Age of the oldest record given to the log and not durable: so much is lost if this node dies now.",
            registry=r,
        )
        self.rows_taken = Counter("kvlog_ring_rows_total", "Rows taken from rings.", registry=r)
        self.rows_dropped = Counter(
            "kvlog_ring_rows_dropped_total", "Rows of another turn or epoch.", registry=r
        )
        self.rows_stored = Counter("kvlog_rows_stored_total", "Rows written to the pool.", registry=r)
        self.rows_absent = Counter(
            "kvlog_rows_absent_total", "Rows folded whose bytes are not held.", registry=r
        )
        self.rewrites = Counter(
            "kvlog_rewrites_total",
            "Sessions logged again before retention takes their first records, by how it came out.",
            ["outcome"],
            registry=r,
        )
        self.rewrite_bytes = Counter(
            "kvlog_rewrite_bytes_total", "Payload bytes of sessions logged again.", registry=r
        )
        self.rewrites_skipped = Counter(
            "kvlog_rewrites_skipped_total",
            "Sessions whose first records retention takes without their being logged again.",
            ["reason"],
            registry=r,
        )
        self.turns_opened = Counter("kvlog_turns_opened_total", "Turns opened.", registry=r)
        self.turns_unlogged = Counter(
            "kvlog_turns_unlogged_total", "Requests not logged.", ["reason"], registry=r
        )
        self.turns_ended = Counter("kvlog_turns_ended_total", "Turns given up by us.", ["reason"], registry=r)
        self.claims_won = Counter("kvlog_claims_won_total", "Sessions taken over.", registry=r)
        self.fenced = Counter("kvlog_fenced_total", "Sessions lost to a newer epoch.", registry=r)
        self.takeover_seconds = Histogram(
            "kvlog_takeover_seconds", "From the request to its turn.", buckets=_MILLISECONDS, registry=r
        )
        self.sessions = Gauge("kvlog_sessions", "Sessions known, by role.", ["role"], registry=r)
        self.sessions_broken = Gauge("kvlog_sessions_broken", "Sessions that are broken here.", registry=r)
        self.engines = Gauge("kvlog_engines", "Engine processes connected.", registry=r)
        self.pool_blocks = Gauge("kvlog_pool_blocks", "Blocks of the pool, by state.", ["state"], registry=r)
        self.log_up = Gauge("kvlog_log_up", "1 while the log answers.", registry=r)
        self._register_lag(r)

    def _register_lag(self, r: CollectorRegistry) -> None:
        self.lag_records = Gauge(
            "kvlog_lag_records", "High watermark minus applied offset.", ["partition"], registry=r
        )
        self.lag_seconds = Gauge(
            "kvlog_lag_seconds", "Age of the oldest record not applied.", ["partition"], registry=r
        )
        self.retention_records = Gauge(
            "kvlog_retention_records",
            "Records between the log start and what is needed: unread, or from a session's first on. Negative: lost.",
            ["partition"],
            registry=r,
        )
        self.retention_seconds = Gauge(
            "kvlog_retention_seconds",
            "Until retention reaches what is needed, at the present pace.",
            ["partition"],
            registry=r,
        )
        self.sessions_truncated = Gauge(
            "kvlog_sessions_truncated",
            "Sessions known here of which retention has taken records: a node that starts later prefills them.",
            registry=r,
        )

    def show_lag(self, partition: int, lag: PartitionLag) -> None:
        """Set one partition's lag; a figure that is not known goes away."""
        for gauge, value in (
            (self.lag_records, lag.lag.records if lag.lag else None),
            (self.lag_seconds, lag.lag.seconds if lag.lag else None),
            (self.retention_records, lag.records_to_loss),
            (self.retention_seconds, lag.seconds_to_loss),
        ):
            if value is not None:
                gauge.labels(str(partition)).set(value)
            else:
                with contextlib.suppress(KeyError):  # older clients mind that it was never set
                    gauge.remove(str(partition))

    def serve(self, host: str, port: int) -> int:
        """Serve /metrics from a thread of its own; the port that was taken.

        OSError: the address cannot be bound.
        """
        server, _ = start_http_server(port, host, self.registry)
        return int(server.server_port)


class Telemetry:
    """Events and figures together, handed to every shell."""

    def __init__(self, node: str) -> None:
        """Figures start at zero; diagnostics must have been configured."""
        self.metrics = Metrics()
        self.claim_times = ClaimTimes()
        self._logger: FilteringBoundLogger = structlog.get_logger().bind(node=node)

    def say(self, event: Event, **fields: object) -> None:
        """Write one event at its level."""
        self._logger.log(EVENT_LEVELS[event], event.value, **fields)
