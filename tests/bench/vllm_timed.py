"""Runs inside vLLM's processes: kvlog's connector and one that does nothing, each with the time of its calls by step.

Each process appends to a file of its own, KVLOG_BENCH_STEPS-ROLE: two float64 a step, seconds of wall and of processor
time in all calls of the connector. Only steps that compute something: an engine turns over empty ones as long as a
request waits. `save_kv_layer` and `wait_for_layer_load`, which neither uses, are not timed; the latter tells the worker
that this step computes.
"""

from __future__ import annotations

import os
import time
from array import array
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from kvlog.engines.vllm import KvlogConnector

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["TimedKvlog", "TimedNull"]

_LAST: Final = {"build_connector_worker_meta": "worker", "build_connector_meta": "scheduler"}
"""The call that ends a step in each process: what a scheduler is told afterwards counts for its next one."""

_CALLS: Final = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "get_block_ids_with_load_errors",
    "build_connector_worker_meta",
    "on_new_request",
    "get_num_new_matched_tokens",
    "update_state_after_alloc",
    "build_connector_meta",
    "request_finished",
    "request_finished_all_groups",
    "update_connector_output",
)
_STEPS_AT_ONCE: Final = 16


class _Meter:
    """Times of one process."""

    def __init__(self) -> None:
        self._wall = self._busy = 0.0
        self._steps = array("d")
        self.computes = False

    def add(self, wall: float, busy: float, role: str | None) -> None:
        """Add a call; the last one of a step ends it."""
        self._wall += wall
        self._busy += busy
        if role is None:
            return
        if self.computes:
            self._steps.extend((self._wall, self._busy))
        self._wall = self._busy = 0.0
        self.computes = False
        if len(self._steps) >= 2 * _STEPS_AT_ONCE:
            with Path(f"{os.environ['KVLOG_BENCH_STEPS']}-{role}").open("ab") as file:
                self._steps.tofile(file)
            del self._steps[:]


_METER = _Meter()


def _timed(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    role = _LAST.get(name)

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        if role == "scheduler":
            _METER.computes = args[1].total_num_scheduled_tokens > 0
        busy, wall = time.thread_time(), time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            wall = time.perf_counter() - wall
            _METER.add(wall, time.thread_time() - busy, role)

    return call


def _metered(connector: type) -> type:
    for name in _CALLS:
        setattr(connector, name, _timed(name, getattr(connector, name)))
    return connector


@_metered
class TimedKvlog(KvlogConnector):
    """Ours."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """This step computes."""
        _METER.computes = True


@_metered
class TimedNull(KVConnectorBase_V1, SupportsHMA):
    """The least that vLLM calls a connector."""

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """This step computes."""
        _METER.computes = True

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """None."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing."""

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Nothing to do."""
        return KVConnectorMetadata()

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        """Free them."""
        return False, None
