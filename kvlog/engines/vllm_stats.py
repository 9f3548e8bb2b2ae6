"""What the connector has done, in vLLM's own metrics protocol: its log line and its Prometheus endpoint.

Counters only, as increments since the last time they were asked for: vLLM adds them up over workers and intervals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["COUNTERS", "KvlogPromMetrics", "KvlogStats"]

COUNTERS: Final = {
    "saved_tokens": "Rows that went into the ring.",
    "skipped_steps": "Steps that left rows out because the ring had no room.",
    "loaded_tokens": "Rows that were verified and put into blocks instead of being computed.",
    "stage_seconds": "Time in copying rows out of the pool and verifying them, beside the steps.",
    "load_seconds": "Time in putting verified rows into blocks.",
    "load_failures_unverified": "Attaches cut short by a row that did not verify.",
    "load_failures_staging": "Attaches that the bound on verified rows in waiting left out.",
    "load_failures_blocks": "Loads whose blocks were given back to be computed.",
    "turns_cut": "Turns closed with rows that the ring had not taken.",
    "turns_fenced": "Turns that another node took over.",
    "faults": "Errors that nobody foresaw, in carrying out a step.",
    "link_faults": "Errors that nobody foresaw, of the link to the daemon.",
    "steps": "Steps that the hook was called in.",
    "hook_seconds": "Time in the hook after each step.",
}
_UNLOGGED: Final = "unlogged:"


class KvlogStats(KVConnectorStats):
    """Increments by name; `unlogged:REASON` counts requests that were served unlogged."""

    data: dict[str, Any]

    def reset(self) -> None:
        """Begin anew."""
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up."""
        for name, value in other.data.items():
            self.data[name] = self.data.get(name, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """The log line: what is not 0, and the hook's mean time."""
        said: dict[str, int | float] = {
            name: value
            for name, value in self.data.items()
            if value and name not in {"steps", "hook_seconds"}
        }
        if self.data.get("steps"):
            said["hook_us_mean"] = round(1e6 * self.data.get("hook_seconds", 0.0) / self.data["steps"], 1)
        return said

    def is_empty(self) -> bool:
        """Nothing has happened."""
        return not any(self.data.values())


class KvlogPromMetrics(KVConnectorPromMetrics):
    """The same as Prometheus counters, vllm:kvlog_NAME_total, one a vLLM engine."""

    def __init__(self, *args: Any) -> None:  # noqa: ANN401 - theirs
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:kvlog_{name}", documentation=text, labelnames=list(self._labelnames)
            )
            for name, text in COUNTERS.items()
        }
        self._unlogged = self._counter_cls(
            name="vllm:kvlog_unlogged_requests",
            documentation="Requests that were served and not replicated.",
            labelnames=[*self._labelnames, "reason"],
        )

    def observe(self, transfer_stats_data: Mapping[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's increments."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.items():
            if name.startswith(_UNLOGGED):
                self._unlogged.labels(*labels, name.removeprefix(_UNLOGGED)).inc(value)
            elif name in self._counters:
                self._counters[name].labels(*labels).inc(value)
