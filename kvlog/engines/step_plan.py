"""What an engine's scheduler tells its workers at each step, and what they tell it back.

An engine of this kind decides in one process which requests run, and computes in others. The scheduler's side
(kvlog.engines.step_planner) knows requests, tokens and blocks; a worker's side (kvlog.engines.step_worker) has the
cache, the link to the daemon and the log cursor. Neither waits for the other: the plan goes out with the step, the
report comes back with its result. Plans and reports are pickled at every step, so they hold only what is new.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, NewType, Self

if TYPE_CHECKING:
    from kvlog.engines.turn_state import TurnRequest

__all__ = [
    "CloseAsk",
    "Dropped",
    "LoadAsk",
    "OpenAsk",
    "Ready",
    "RowsAt",
    "StepPlan",
    "StepReport",
    "TurnKey",
    "UnloggedCause",
]

TurnKey = NewType("TurnKey", int)
"""One turn of one request, numbered by the planner from 1; a request that was preempted has another one."""


class UnloggedCause(StrEnum):
    """Why a request is served and not logged, as far as the engine's side decides it."""

    NOT_NAMED = "invalid_session_id"
    PARALLEL = "n_over_1"
    BEAM_SEARCH = "beam_search"
    PROMPT_EMBEDS = "prompt_embeds"
    POOLING = "pooling"
    STREAMING_INPUT = "streaming_input"
    PARAMETERS = "invalid_parameters"
    ADAPTER = "adapter_unreadable"
    OLD_WEIGHTS = "old_weights"
    FAULT = "fault"
    """A worker has met an error that nobody foresaw, and logs nothing any more."""


@dataclass(frozen=True, slots=True)
class OpenAsk:
    """Ask the daemon for a turn; what it can attach is copied and verified at once, from `local` on.

    Args:
        key: the turn.
        request: session, context, mode, take over.
        tokens: all ids known now, as `pack_tokens` makes them.
        local: positions that the engine has in blocks already, from 0.
        previous: the turn of the same request before it was preempted; 0: none.
    """

    key: TurnKey
    request: TurnRequest
    tokens: bytes
    local: int
    previous: TurnKey


@dataclass(frozen=True, slots=True)
class LoadAsk:
    """Put verified rows [start, length) into blocks.

    Args:
        key: the turn.
        start: first position.
        length: end of the last one.
        blocks: the request's block table.
        beside: the request that waits for it while steps go on; empty: it is done before this step is computed.
    """

    key: TurnKey
    start: int
    length: int
    blocks: tuple[int, ...]
    beside: str = ""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """What a turn's request has after this step.

    Args:
        key: the turn.
        blocks: those it got with this step, in the order of positions.
        anew: they are its whole block table.
        tokens: ids that the worker does not know yet.
        length: the watermark: positions below it have KV of known tokens once this step is computed.
    """

    key: TurnKey
    blocks: tuple[int, ...]
    anew: bool
    tokens: tuple[int, ...]
    length: int


@dataclass(frozen=True, slots=True)
class CloseAsk:
    """A turn is over.

    Args:
        key: the turn.
        held: the request whose blocks are kept until the worker says that it has read them; empty: they are given up
            with this step, so nothing is read of them once it has begun.
        forget: its session is named by this request only and ends with it.
    """

    key: TurnKey
    held: str = ""
    forget: bool = False


@dataclass(frozen=True, slots=True)
class StepPlan:
    """All of one step; in this order: closes, renew, opens, loads, then, after the computation, rows.

    `renew`: the weights may be others from now on: what this engine computes fits no log written before. It is then a
    word that nobody has used before, the same for all workers; else empty.
    """

    closes: tuple[CloseAsk, ...] = ()
    opens: tuple[OpenAsk, ...] = ()
    loads: tuple[LoadAsk, ...] = ()
    rows: tuple[RowsAt, ...] = ()
    renew: bytes = b""


@dataclass(frozen=True, slots=True)
class Ready:
    """A turn was answered: verified rows [start, length) are in the memory of one worker; length ≤ start: none."""

    key: TurnKey
    rank: int
    start: int
    length: int
    logged: bool


@dataclass(frozen=True, slots=True)
class Dropped:
    """A turn is unlogged for good; `cause` is an UnloggedReason, an EndedReason or an UnloggedCause."""

    key: TurnKey
    cause: str


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one worker, or all of them together, have to say after a step.

    Args:
        ready: turns that were answered.
        dropped: turns that ended unlogged.
        failed: turns whose load has failed: their blocks are computed.
    """

    ready: tuple[Ready, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    failed: tuple[TurnKey, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Nothing has to be told."""
        return not self.ready and not self.dropped and not self.failed

    def aggregate(self, other: Self) -> Self:
        """Two workers' reports as one; the planner counts the ranks of each turn."""
        return type(self)(
            (*self.ready, *other.ready), (*self.dropped, *other.dropped), (*self.failed, *other.failed)
        )
