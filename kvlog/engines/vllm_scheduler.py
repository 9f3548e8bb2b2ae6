"""The connector's half in vLLM's scheduler: vLLM's objects in, a StepPlan out. Imports nothing of vLLM.

What nobody foresaw ends replication, not the engine: from then on nothing is matched, held or followed. One thing is
not forgiven: rows that vLLM already counts as loaded are loaded, or the error goes to vLLM. Computing on blocks that
nobody has filled would be wrong in silence.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from kvlog.engines.fence_board import FenceBoard
from kvlog.engines.step_plan import UnloggedCause
from kvlog.engines.step_planner import PlannerOptions, Scheduled, StepPlanner
from kvlog.engines.vllm_adapters import AdapterDigests
from kvlog.engines.vllm_requests import describe_request
from kvlog.errors import ConfigError
from kvlog.link.messages import DIGEST_NONE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvlog.engines.step_plan import StepPlan, StepReport
    from kvlog.engines.vllm_settings import ConnectorSettings
    from kvlog.ids import Digest

__all__ = ["EngineShape", "SchedulerHalf"]

T = TypeVar("T")

_OPEN_SHARE = 0.5
"""Of the time that a request waits, the part that the daemon may take to become primary; the rest is for the copy."""


_COMPUTE_TOKENS = 128
"""What is computed at once unless a setting says otherwise, if a block is no less: blocks may be large."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineShape:
    """What the scheduler's half has to know of its engine.

    Args:
        engine: vLLM's id of it.
        blocks: of the whole cache.
        row_bytes: of one position, all layers, on one rank.
        block_size: positions of a block.
        ranks: of it.
    """

    engine: str
    blocks: int
    row_bytes: int
    block_size: int
    ranks: int = 1


class SchedulerHalf:
    """One per engine.

    Args:
        settings: of the connector.
        shape: of the engine.
        adapters: digests of LoRA adapters; None: of those in folders.
    """

    def __init__(
        self, settings: ConnectorSettings, shape: EngineShape, adapters: AdapterDigests | None = None
    ) -> None:
        self._board = FenceBoard(shape.engine)
        self._board.start()
        self._adapters = adapters or AdapterDigests()
        self._undescribed: dict[str, float] = {}
        self._broken = False
        self.faults = 0
        self._wait_seconds = settings.wait_seconds
        self._counted: dict[str, int] = {}
        few = settings.compute_tokens
        self._planner = StepPlanner(
            PlannerOptions(
                wait_seconds=settings.wait_seconds,
                ranks=shape.ranks,
                instance=os.urandom(16),
                held_blocks_max=int(settings.hold_blocks_share * shape.blocks),
                rows_at_once_max=settings.load_step_bytes // shape.row_bytes,
                compute_tokens=min(shape.block_size, _COMPUTE_TOKENS) if few is None else few,
            )
        )

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - theirs
        """Take a request; one whose adapter is not known yet is taken when that has been read."""

        def add() -> None:
            if request.lora_request is not None:
                self._adapters.begin(request.lora_request)
                self._undescribed[request.request_id] = time.monotonic() + self._wait_seconds
            self._describe(request)

        self._guarded(add, lambda: None)

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:  # noqa: ANN401 - theirs
        """Rows that can be loaded beyond the local ones, None: ask again; and whether beside the steps."""

        def matched() -> tuple[int | None, bool]:
            if request.request_id in self._undescribed and not self._describe(request):
                return None, False
            external = self._planner.matched(request.request_id, local, time.monotonic())
            if (
                request.skip_reading_prefix_cache
            ):  # vLLM computes all of it, whatever we say: it need not wait
                return 0, False
            return external, external is not None and self._planner.is_beside(external)

        return self._guarded(matched, lambda: (0, False))

    def _describe(self, request: Any) -> bool:  # noqa: ANN401 - theirs
        """Have the planner take a request, once all that its rows depend on is known."""
        adapter = self._adapter(request)
        if adapter is None:
            return False
        self._undescribed.pop(request.request_id, None)
        wait_seconds = _OPEN_SHARE * self._wait_seconds
        self._planner.add(describe_request(request, request.all_token_ids, wait_seconds, adapter))
        return True

    def _adapter(self, request: Any) -> Digest | UnloggedCause | None:  # noqa: ANN401 - theirs
        """The request's adapter, or why it is not known; None: it is being read."""
        if request.lora_request is None:
            return DIGEST_NONE
        late = time.monotonic() > self._undescribed[request.request_id]
        try:
            return self._adapters.of(request.lora_request) or (UnloggedCause.ADAPTER if late else None)
        except ConfigError:
            return UnloggedCause.ADAPTER

    def allocated(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ANN401 - theirs
        """The request got blocks."""
        if external or not self._broken:
            self._planner.allocated(request.request_id, blocks.get_block_ids()[0], external)

    def plan(self, output: Any) -> StepPlan:  # noqa: ANN401 - theirs
        """The step's plan, of a SchedulerOutput."""
        return self._guarded(
            lambda: self._planner.plan(_scheduled(output), output.preempted_req_ids or ()),
            self._planner.plan_loads,
        )

    def take(self, report: StepReport | None, released: set[str] | None) -> None:
        """What the workers said of the last step."""

        def take() -> None:
            for name in () if report is None else self._planner.take(report):
                self._board.say(name)
            self._planner.released(released or ())

        self._guarded(take, lambda: None)

    def close(self) -> None:
        """The engine ends."""
        self._adapters.close()
        self._board.close()

    def renew(self) -> None:
        """The weights may be others from now on."""
        self._guarded(self._planner.renew, lambda: None)

    def take_increments(self) -> dict[str, float]:
        """Requests that were served unlogged since this was asked for, by cause."""
        total, before = dict(self._planner.unlogged), self._counted
        self._counted = total
        found = {cause: count - before.get(cause, 0) for cause, count in total.items()}
        increments: dict[str, float] = {f"unlogged:{cause}": count for cause, count in found.items() if count}
        faults, self.faults = self.faults, 0
        return increments | ({"faults": faults} if faults else {})

    def finished(self, request: Any, blocks: int) -> tuple[bool, dict[str, Any]]:  # noqa: ANN401 - theirs
        """Whether to hold the blocks, and what the answer says of its session."""

        def finished() -> tuple[bool, dict[str, Any]]:
            self._undescribed.pop(request.request_id, None)
            over = self._planner.finished(request.request_id, blocks, request.num_computed_tokens)
            return over.hold, {"kvlog": {"loaded": over.loaded, "unlogged": over.cause}}

        return self._guarded(finished, lambda: (False, {"kvlog": {"loaded": 0, "unlogged": "fault"}}))

    def _guarded(self, do: Callable[[], T], instead: Callable[[], T]) -> T:
        if not self._broken:
            try:
                return do()
            except Exception:  # noqa: BLE001  # the adapter's top: generation never fails by it
                self._broken = True
                self.faults += 1
        return instead()


def _scheduled(output: Any) -> Iterator[Scheduled]:  # noqa: ANN401 - theirs
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        yield Scheduled(new.req_id, new.num_computed_tokens, counts[new.req_id], new.block_ids[0], anew=True)
    cached = output.scheduled_cached_reqs
    for name, computed, blocks in zip(
        cached.req_ids, cached.num_computed_tokens, cached.new_block_ids, strict=True
    ):
        anew = name in cached.resumed_req_ids
        yield Scheduled(name, computed, counts.get(name, 0), () if blocks is None else blocks[0], anew=anew)
