"""The scheduler's side of a paged engine: which turns to open, what to load, and how far each request's rows go.

    new ── matched: OpenAsk ─▶ asked ── Ready ─▶ ready ── allocated: LoadAsk ─▶ running ── finished ─▶ closed
     ▲                           │ late: computes, the turn may still open        │ preempted: CloseAsk
     └───────────────────────────┴──────────────── a new turn ◀───────────────────┘

The watermark of a step is min(computed + scheduled, known tokens): it covers chunked prefill, prefix hits (rows that
were not computed here are logged too) and preemption, and leaves out drafts that nobody has verified.

A scheduler that works one step ahead (vLLM's async scheduling, the rule on GPUs) plans a step before it knows the token
that the step before has drawn. The watermark copes by itself: that token's row is not among the known ones, and is
written with the next plan, one step later. What is counted as computed by then includes a step in flight; it is carried
out before the plan's own. The last rows have no next plan: `finished` sends them with the blocks that are held.

No I/O, no clock: time is passed in. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlog.checksums import digest
from kvlog.engines.step_plan import (
    CloseAsk,
    LoadAsk,
    OpenAsk,
    Ready,
    RowsAt,
    StepPlan,
    StepReport,
    TurnKey,
    UnloggedCause,
)
from kvlog.link.messages import UnloggedReason, pack_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvlog.engines.turn_state import TurnRequest
    from kvlog.ids import SessionId

__all__ = ["FinishedRequest", "NewRequest", "PlannerOptions", "Scheduled", "StepPlanner", "watermark"]

_NO_TURN = TurnKey(0)

_SEEN_MAX = 4096
"""Sessions that were served here, the last ones; of a forgotten one no turn is closing any more."""


def watermark(computed: int, scheduled: int, known: int) -> int:
    """Positions that have KV of known tokens once a step is computed.

    Args:
        computed: positions that have KV before it.
        scheduled: positions that it computes, drafts included.
        known: tokens of the request, drafts not included.
    """
    return min(computed + scheduled, known)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannerOptions:
    """How long a request waits, and what it may hold.

    Args:
        wait_seconds: for the daemon's answer and the verified copy, before a request is computed instead.
        ranks: workers that must say ready.
        held_blocks_max: blocks of finished requests that are kept for the log at a time.
        rows_at_once_max: rows that are loaded within one step; a load that would make them more is done beside it.
        compute_tokens: who has no more than so many to compute does not wait for its session's first turn here, unless
            it takes over.
        instance: random bytes that no other engine has; what the workers call a turn, or new weights, begins with it.
    """

    wait_seconds: float = 2.0
    ranks: int = 1
    held_blocks_max: int = 0
    rows_at_once_max: int = 1 << 62
    compute_tokens: int = 0
    instance: bytes = b""


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the engine took it.

    Args:
        name: the engine's id of it.
        turn: what its turn asks for, or why it has none.
        tokens: its ids, growing; read, never changed.
        named: a client named the session; else it ends with the request.
    """

    name: str
    turn: TurnRequest | UnloggedCause
    tokens: Sequence[int]
    named: bool


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One request's part of a step.

    Args:
        name: the engine's id of it.
        computed: positions that have KV before the step.
        scheduled: positions that the step computes.
        blocks: those it got with this step; `anew`: its whole table.
        anew: see there.
    """

    name: str
    computed: int
    scheduled: int
    blocks: Sequence[int]
    anew: bool


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """What becomes of a finished request's blocks, and what was done for it.

    Args:
        hold: its blocks are kept until the workers have read them.
        loaded: rows that were loaded instead of computed.
        cause: why it was not logged; None: it was, as far as is known.
    """

    hold: bool
    loaded: int
    cause: str | None


@dataclass(slots=True)
class _Tracked:
    """One request.

    `running`: it holds blocks under `key`. `late`: it began without waiting, or without waiting any longer. `loading`:
    its blocks are being filled beside the steps, and are not free before the workers say so, whatever becomes of the
    request. `sent`: tokens that the workers know; `told`: the last watermark. `asked_rows`: what this turn loads.
    `spoilt`: a load of it has failed, so nothing is loaded for it any more: it would come back to the scheduler, and
    fail, again and again.
    """

    request: NewRequest
    key: TurnKey = _NO_TURN
    previous: TurnKey = _NO_TURN
    deadline: float = 0.0
    ready: dict[int, Ready] = field(default_factory=dict)
    late: bool = False
    running: bool = False
    loading: bool = False
    local: int = 0
    sent: int = 0
    told: int = 0
    asked_rows: int = 0
    loaded: int = 0
    spoilt: bool = False
    cause: str | None = None

    def turn_anew(self) -> None:
        """Its blocks are gone: what follows is another turn."""
        self.previous, self.key = self.key or self.previous, _NO_TURN
        self.ready, self.late, self.running, self.loading = {}, False, False, False
        self.sent = self.told = self.asked_rows = 0


class StepPlanner:
    """Follows all requests of one scheduler; makes one StepPlan a step."""

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._requests: dict[str, _Tracked] = {}
        self._by_key: dict[TurnKey, _Tracked] = {}
        self._keys = 0
        self._held: dict[str, int] = {}
        self._closes: list[CloseAsk] = []
        self._opens: list[OpenAsk] = []
        self._loads: list[LoadAsk] = []
        self._last: list[RowsAt] = []
        self._seen: OrderedDict[SessionId, None] = OrderedDict()
        self._renewals = 0
        self._renewal = b""
        self.unlogged: dict[str, int] = {}

    def add(self, request: NewRequest) -> None:
        """Take a request; it asks for its turn when the scheduler first looks at it."""
        tracked = self._requests[request.name] = _Tracked(request)
        if isinstance(request.turn, str):
            self._drop(tracked, request.turn)

    def matched(self, name: str, local: int, now: float) -> int | None:
        """Rows that can be loaded beyond `local`, which the engine has; None: ask again.

        May be asked any number of times; only the first one after an admission asks the daemon.
        """
        tracked = self._requests.get(name)
        if tracked is None or tracked.cause is not None:
            return 0
        if tracked.running:  # it was preempted, or its load has failed: it comes back without blocks
            self._give_up_turn(tracked)
        tracked.local = local
        if tracked.key == _NO_TURN:
            tracked.late = self._is_quickly_computed(tracked)
            self._ask(tracked, now)
            return 0 if tracked.late else None
        if tracked.late or tracked.spoilt:
            return 0
        if len(tracked.ready) < self._options.ranks:
            tracked.late = now > tracked.deadline
            return 0 if tracked.late else None
        if any(ready.start > local for ready in tracked.ready.values()):
            return 0  # what was in blocks when it was asked has left them: there would be a hole
        length = min(ready.length for ready in tracked.ready.values())
        return max(0, min(length, len(tracked.request.tokens) - 1) - local)

    def is_beside(self, external: int) -> bool:
        """A load of so many rows, beside those that are due in this step, is done beside the steps."""
        due = sum(load.length - load.start for load in self._loads if not load.beside)
        return due + external > self._options.rows_at_once_max

    def allocated(self, name: str, blocks: Sequence[int], external: int) -> None:
        """The request got blocks, and will be computed from `local + external` on."""
        tracked = self._requests.get(name)
        if tracked is None or tracked.key == _NO_TURN:
            return
        tracked.running = True
        if external:
            tracked.loading = self.is_beside(external)
            beside = name if tracked.loading else ""
            length = tracked.local + external
            self._loads.append(LoadAsk(tracked.key, tracked.local, length, tuple(blocks), beside))
            tracked.asked_rows = external
            tracked.loaded += external

    def plan(self, scheduled: Iterable[Scheduled], preempted: Iterable[str]) -> StepPlan:
        """Everything that the workers must know of this step."""
        for name in preempted:
            tracked = self._requests.get(name)
            if tracked is not None and tracked.running:
                self._give_up_turn(tracked)
        rows = (*self._last, *(self._rows(each) for each in scheduled if self._is_followed(each.name)))
        plan = StepPlan(
            tuple(self._closes), tuple(self._opens), tuple(self._loads), rows, renew=self._renewal
        )
        self._closes, self._opens, self._loads, self._last, self._renewal = [], [], [], [], b""
        return plan

    def plan_loads(self) -> StepPlan:
        """Only what must not be lost: rows that the scheduler counts as loaded from this step on, and held blocks."""
        closes, self._closes = tuple(self._closes), []
        loads, self._loads = tuple(self._loads), []
        return StepPlan(closes=closes, loads=loads)

    def take(self, report: StepReport) -> list[str]:
        """Take what the workers say. Returns: requests that were fenced: another node has their session."""
        fenced = []
        for ready in report.ready:
            tracked = self._by_key.get(ready.key)
            if tracked is not None:
                tracked.ready[ready.rank] = ready
        for key in report.failed:
            tracked = self._by_key.get(key)
            if tracked is not None:
                tracked.loaded, tracked.asked_rows = tracked.loaded - tracked.asked_rows, 0
                tracked.spoilt = True
        for dropped in report.dropped:
            tracked = self._by_key.get(dropped.key)
            if tracked is not None:
                is_fenced = dropped.cause == UnloggedReason.FENCED
                if is_fenced and tracked.cause is None:
                    fenced.append(tracked.request.name)
                if tracked.cause is None and self._options.ranks > 1:
                    # What one worker cannot log is of no use to the others; `finished` comes too late for them to
                    # forget the session then. One that is another node's is not ours to end.
                    forget = not tracked.request.named and not is_fenced
                    self._closes.append(CloseAsk(dropped.key, forget=forget))
                self._drop(tracked, dropped.cause)
        return fenced

    def released(self, names: Iterable[str]) -> None:
        """The workers have read the blocks of these finished requests."""
        for name in names:
            self._held.pop(name, None)

    def finished(self, name: str, blocks: int, computed: int = 0) -> FinishedRequest:
        """A request is over, or was aborted.

        Args:
            name: the engine's id of it.
            blocks: that it still holds.
            computed: positions that have KV of its tokens, or of drafts behind them, once all that is in flight is
                carried out; refused drafts are not counted.
        """
        tracked = self._requests.pop(name, None)
        if tracked is None:
            return FinishedRequest(hold=False, loaded=0, cause=None)
        self._by_key.pop(tracked.key, None)
        followed = tracked.key != _NO_TURN and tracked.cause is None
        room = sum(self._held.values()) + blocks <= self._options.held_blocks_max
        lasts = tracked.request.named  # else its last rows would be written to be forgotten
        hold = lasts and followed and tracked.running and not tracked.loading and blocks > 0 and room
        if tracked.key != _NO_TURN:
            self._closes.append(CloseAsk(tracked.key, name if hold else "", forget=not tracked.request.named))
        if hold:
            self._held[name] = blocks
            self._follow_last(tracked, computed)
        return FinishedRequest(hold, tracked.loaded, tracked.cause)

    def renew(self) -> None:
        """The weights may be others from now on: whoever holds rows of the old ones stays unlogged for good."""
        for tracked in self._requests.values():
            if tracked.running:
                self._give_up_turn(tracked)
                self._drop(tracked, UnloggedCause.OLD_WEIGHTS)
            elif tracked.key != _NO_TURN:
                self._give_up_turn(tracked)
            tracked.previous = _NO_TURN
        self._renewals += 1
        self._opens, self._loads, self._last = [], [], []
        self._renewal = self._named("weights", self._renewals)

    def _is_followed(self, name: str) -> bool:
        tracked = self._requests.get(name)
        return tracked is not None and tracked.running and tracked.cause is None

    def _rows(self, each: Scheduled) -> RowsAt:
        tracked = self._requests[each.name]
        tracked.loading = False
        tokens = tracked.request.tokens
        known = len(tokens)
        new = tuple(tokens[tracked.sent : known])
        tracked.sent = max(tracked.sent, known)
        length = tracked.told = watermark(each.computed, each.scheduled, known)
        return RowsAt(tracked.key, tuple(each.blocks), each.anew, new, length)

    def _follow_last(self, tracked: _Tracked, computed: int) -> None:
        """Rows that no step's plan has said: their tokens became known after the request's last one was made."""
        tokens = tracked.request.tokens
        length = watermark(computed, 0, len(tokens))
        if length > tracked.told:
            new = tuple(tokens[tracked.sent :])
            self._last.append(RowsAt(tracked.key, blocks=(), anew=False, tokens=new, length=length))

    def _is_quickly_computed(self, tracked: _Tracked) -> bool:
        """To wait costs a step at least: not worth it for little, and the log has nothing of a request's own session.

        Whoever takes over waits, however little there is: what was shown already is to go on from the same bytes. So
        does who comes after a turn of the session's here: that one may still be closing, and its own turn open late.
        """
        request = tracked.request
        assert not isinstance(request.turn, str), "dropped when it was added"
        if request.turn.take_over or request.turn.session in self._seen:
            return False
        return not request.named or len(request.tokens) - tracked.local <= self._options.compute_tokens

    def _ask(self, tracked: _Tracked, now: float) -> None:
        self._keys += 1
        tracked.key = TurnKey(self._keys)
        tracked.deadline = now + self._options.wait_seconds
        tokens = list(tracked.request.tokens)
        tracked.sent = len(tokens)
        self._by_key[tracked.key] = tracked
        turn = tracked.request.turn
        assert not isinstance(turn, str), "dropped when it was added"
        self._seen[turn.session] = None
        self._seen.move_to_end(turn.session)
        if len(self._seen) > _SEEN_MAX:
            self._seen.popitem(last=False)
        if self._options.ranks > 1:
            turn = replace(turn, group=self._named("turn", tracked.key))
        self._opens.append(OpenAsk(tracked.key, turn, pack_tokens(tokens), tracked.local, tracked.previous))

    def _named(self, kind: str, number: int) -> bytes:
        return digest(self._options.instance, kind.encode(), number.to_bytes(8, "little"))

    def _give_up_turn(self, tracked: _Tracked) -> None:
        """End the log at the cursor: the blocks belong to somebody else soon."""
        self._by_key.pop(tracked.key, None)
        self._closes.append(CloseAsk(tracked.key))
        tracked.turn_anew()

    def _drop(self, tracked: _Tracked, cause: str) -> None:
        if tracked.cause is None:
            tracked.cause = str(cause)
            self.unlogged[tracked.cause] = self.unlogged.get(tracked.cause, 0) + 1
