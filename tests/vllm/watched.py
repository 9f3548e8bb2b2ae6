"""The connector with a witness that tells tests more: tokens, the log's cursor, counts, and how long calls took."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvlog.engines.vllm_witness import WitnessConnector

if TYPE_CHECKING:
    from kvlog.engines.turn_evidence import TurnEvidence

__all__ = ["WatchedConnector"]

_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
)


class WatchedConnector(WitnessConnector):
    """Takes the time of its calls too."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Bear witness, and take the time of the rest."""
        self.bear_witness(kv_connector_metadata)
        self._timed("handle_preemptions", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take the time."""
        self._timed("start_load_kv", forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Take the time."""
        self._timed("wait_for_save")

    def _timed(self, name: str, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        getattr(super(WitnessConnector, self), name)(*args, **kwargs)
        longest = self.__dict__.setdefault("watched_ms", dict.fromkeys(_CALLS, 0.0))
        longest[name] = max(longest[name], 1000 * (time.perf_counter() - began))

    def testimony(self, turn: TurnEvidence) -> dict[str, Any]:
        """Tell more."""
        told = super().testimony(turn)
        handle, worker = turn.handle, self._working.worker
        return told | {
            "tokens": turn.tokens[: turn.rows.length],
            "digests": told["kv_digests"].get(turn.rows.length, []),
            "log_from": None if handle is None else handle.log_from,
            "attach_length": None if handle is None else handle.attach_length,
            "worker": asdict(worker.counts),
            "replicator": asdict(worker.replicator.counts),
            "loads": asdict(worker.replicator.loads),
            "longest_ms": self.__dict__.get("watched_ms"),
        }
