"""The connector's half in vLLM's scheduler: vLLM's objects in, a StepPlan out. Imports nothing of vLLM."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from kvlog.engines.fence_board import FenceBoard
from kvlog.engines.step_planner import PlannerOptions, Scheduled, StepPlanner
from kvlog.engines.vllm_requests import describe_request

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlog.engines.step_plan import StepPlan, StepReport
    from kvlog.engines.vllm_settings import ConnectorSettings

__all__ = ["SchedulerHalf"]

_OPEN_SHARE = 0.5
"""Of the time that a request waits, the part that the daemon may take to become primary; the rest is for the copy."""


class SchedulerHalf:
    """One per engine.

    Args:
        settings: of the connector.
        blocks: of the whole cache.
        row_bytes: of one position, all layers.
        engine: vLLM's id of this engine.
    """

    def __init__(self, settings: ConnectorSettings, *, blocks: int, row_bytes: int, engine: str) -> None:
        self._board = FenceBoard(engine)
        self._board.start()
        self._wait_seconds = settings.wait_seconds
        self._counted: dict[str, int] = {}
        self._planner = StepPlanner(
            PlannerOptions(
                wait_seconds=settings.wait_seconds,
                held_blocks_max=int(settings.hold_blocks_share * blocks),
                rows_at_once_max=settings.load_step_bytes // row_bytes,
            )
        )

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401 - theirs
        """Take a request."""
        tokens = request.all_token_ids
        self._planner.add(describe_request(request, tokens, _OPEN_SHARE * self._wait_seconds))

    def matched_tokens(self, request: Any, local: int) -> tuple[int | None, bool]:  # noqa: ANN401 - theirs
        """Rows that can be loaded beyond the local ones, None: ask again; and whether beside the steps."""
        external = self._planner.matched(request.request_id, local, time.monotonic())
        if request.skip_reading_prefix_cache:  # vLLM computes all of it, whatever we say: it need not wait
            return 0, False
        return external, external is not None and self._planner.is_beside(external)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:  # noqa: ANN401 - theirs
        """The request got blocks."""
        self._planner.allocated(request.request_id, blocks.get_block_ids()[0], external)

    def plan(self, output: Any) -> StepPlan:  # noqa: ANN401 - theirs
        """The step's plan, of a SchedulerOutput."""
        return self._planner.plan(_scheduled(output), output.preempted_req_ids or ())

    def take(self, report: StepReport | None, released: set[str] | None) -> None:
        """What the workers said of the last step."""
        if report is not None:
            for name in self._planner.take(report):
                self._board.say(name)
        self._planner.released(released or ())

    def close(self) -> None:
        """The engine ends."""
        self._board.close()

    def renew(self) -> None:
        """The weights may be others from now on."""
        self._planner.renew()

    def take_increments(self) -> dict[str, float]:
        """Requests that were served unlogged since this was asked for, by cause."""
        total, before = dict(self._planner.unlogged), self._counted
        self._counted = total
        found = {cause: count - before.get(cause, 0) for cause, count in total.items()}
        return {f"unlogged:{cause}": count for cause, count in found.items() if count}

    def finished(self, request: Any, blocks: int) -> tuple[bool, dict[str, Any]]:  # noqa: ANN401 - theirs
        """Whether to hold the blocks, and what the answer says of its session."""
        over = self._planner.finished(request.request_id, blocks)
        return over.hold, {"kvlog": {"loaded": over.loaded, "unlogged": over.cause}}


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
