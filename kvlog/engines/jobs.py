"""One request on its way through the step loop, and what is told to whoever sent it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.engines.generation import NewToken

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvlog.engines.acked_gate import AckedGate
    from kvlog.engines.base import RowCache
    from kvlog.engines.generation import FinishReason, Generation
    from kvlog.engines.turns import TurnHandle
    from kvlog.ids import SessionId
    from kvlog.modes import SyncMode

__all__ = ["FENCED", "AnswerDetails", "AnswerEvent", "Failed", "Finished", "Job", "JobSession", "RunningJob"]


@dataclass(frozen=True, slots=True)
class JobSession:
    """Whose turn it is, and how it is asked for.

    Args:
        session: its name.
        named: by the client; a session that only its request names is forgotten at the end.
        mode: None: the daemon's setting.
        take_over: the answer was begun elsewhere; see `Replicator.open_turn`.
    """

    session: SessionId
    named: bool
    mode: SyncMode | None
    take_over: bool = False


@dataclass(frozen=True, slots=True)
class AnswerDetails:
    """How an answer came about; times are differences of a monotonic clock, None: it did not come to that.

    Args:
        attached: rows copied from the daemon and verified.
        recomputed: rows of tokens that were known at the start and had to be computed.
        log_from: the first row that this request logged; None: it is not logged now.
        logged: rows went to the log when this was said.
        reason: why not.
        open_turn_ms: asking the daemon.
        attach_ms: copying and verifying.
        first_token_ms: from the request's arrival to its first new token.
    """

    attached: int
    recomputed: int
    log_from: int | None
    logged: bool
    reason: str | None
    open_turn_ms: float
    attach_ms: float
    first_token_ms: float | None


@dataclass(frozen=True, slots=True)
class Finished:
    """The answer is complete.

    Args:
        finish: why.
        details: how it came about.
        kv_digests: of its cache, by length, one a layer; None: nobody asked.
    """

    finish: FinishReason
    details: AnswerDetails
    kv_digests: Mapping[int, list[str]] | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The answer is not complete and goes on elsewhere or not at all. `kind`: fenced, stopping, internal, not_acked."""

    kind: str
    message: str


FENCED = Failed("fenced", "Another node has taken this session over; the answer goes on there.")

AnswerEvent = NewToken | Finished | Failed


@dataclass(slots=True, eq=False)
class Job:
    """A request that waits for its place in the loop.

    Args:
        generation: its progress.
        session: whose turn it is.
        sink: gets the answer, event by event, ending with Finished or Failed; called from several threads, one at a
            time; must neither block nor raise.
        kv_digests: lengths of the cache whose rows are to be digested at the end; None: not asked.
        acked: holds the answer's tokens until the log has them; None: nobody does.
        handle: its turn; there before anything of the answer is told.
        cancelled: nobody wants the answer any more; set by anyone.
    """

    generation: Generation
    session: JobSession
    sink: Callable[[AnswerEvent], None]
    kv_digests: tuple[int, ...] | None = None
    acked: AckedGate | None = None
    handle: TurnHandle | None = None
    cancelled: bool = False
    arrived: float = field(default_factory=time.monotonic)


@dataclass(slots=True, eq=False)
class RunningJob:
    """A request in the loop: its turn and its cache are there."""

    job: Job
    handle: TurnHandle
    cache: RowCache
    open_turn_ms: float
    attach_ms: float
    attached: int
    known: int
    log_from: int | None
    first_token_ms: float | None = None
    finished_at: float = 0.0

    def details(self) -> AnswerDetails:
        """What can be said of it now."""
        reason = self.handle.reason
        return AnswerDetails(
            attached=self.attached,
            recomputed=self.known - self.attached,
            log_from=self.log_from,
            logged=self.handle.logged,
            reason=None if reason is None else str(reason),
            open_turn_ms=self.open_turn_ms,
            attach_ms=self.attach_ms,
            first_token_ms=self.first_token_ms,
        )
