"""The connector with a witness that tells tests more, and lets them have loads fail.

It tells a turn's tokens, the log's cursor, counts, and how long calls took; and after each step, with one write, what
is acknowledged: that survives SIGKILL of its process.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvlog.engines.kv_digests import layer_digests
from kvlog.engines.vllm_witness import WitnessConnector
from tests.vllm.call_times import CallTimes

if TYPE_CHECKING:
    from kvlog.engines.turn_evidence import TurnEvidence

__all__ = ["WatchedConnector"]

_ACKED_BYTES = 4096


class WatchedConnector(WitnessConnector):
    """Takes the time of its calls too; each rank has files of its own."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Bear witness, and take the time of the rest."""
        self.bear_witness(kv_connector_metadata)
        self._timed("handle_preemptions", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take the time; while the test says so, nothing can be put into blocks."""
        store = self._working.worker._store
        if os.path.exists(os.environ["KVLOG_TEST_FAIL_LOADS"]):  # noqa: PTH110 - at each step
            vars(store)["scatter"] = _fail
        else:
            vars(store).pop("scatter", None)
        self._timed("start_load_kv", forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Take the time, then say what is acknowledged."""
        self._timed("wait_for_save")
        entries = self._working.worker._entries.values()
        acked = {
            entry.ask.request.session: entry.handle.acked_length
            for entry in entries
            if entry.handle is not None
        }
        if "acked_file" not in self.__dict__:
            self.acked_file = os.open(os.environ["KVLOG_TEST_ACKED"], os.O_CREAT | os.O_WRONLY, 0o600)
        os.pwrite(self.acked_file, json.dumps(acked).encode().ljust(_ACKED_BYTES, b"\0"), 0)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        """Take the time."""
        return self._timed("get_finished", finished_req_ids)

    def build_connector_worker_meta(self) -> Any:
        """Take the time."""
        return self._timed("build_connector_worker_meta")

    def _timed(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(self, "call_times"):
            self.call_times = CallTimes()
        with self.call_times.timed(name):
            return getattr(super(WitnessConnector, self), name)(*args, **kwargs)

    def testimony(self, turn: TurnEvidence) -> dict[str, Any]:
        """Tell more."""
        told = super().testimony(turn)
        handle, worker = turn.handle, self._working.worker
        sure = _sure_from(turn)
        return told | {
            "sure_from": sure,
            "sure_digests": layer_digests(turn.rows, turn.layout, turn.rows.length, first=sure),
            "tokens": turn.tokens[: turn.rows.length],
            "digests": told["kv_digests"].get(turn.rows.length, []),
            "log_from": None if handle is None else handle.log_from,
            "attach_length": None if handle is None else handle.attach_length,
            "worker": asdict(worker.counts),
            "replicator": asdict(worker.replicator.counts),
            "loads": asdict(worker.replicator.loads),
            "longest_ms": self.call_times.longest_ms,
            "call_times": self.call_times.told(),
        }


def _sure_from(turn: TurnEvidence) -> int:
    """From here on each row was loaded from the log, or is logged by this turn: the log's byte for byte.

    Before it are rows of the engine's own: found in its prefix cache, or computed again where a load would have come
    too late, or behind a hole. They may differ from the log's by rounding.
    """
    length, handle = turn.rows.length, turn.handle
    if handle is None or handle.log_from is None:
        return length
    attached = handle.attach_length
    loaded_from = attached - turn.loaded if turn.loaded and attached >= handle.log_from else length
    return min(length, handle.log_from, loaded_from)


def _fail(*_: Any) -> None:
    raise OSError
