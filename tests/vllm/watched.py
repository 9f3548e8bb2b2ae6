"""The connector, watched: runs inside vLLM's processes and writes what its blocks held and what it counted to a file.

Digests are taken when a turn ends, before anything is written to its blocks: production code needs no door for tests.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvlog.engines.kv_digests import layer_digests
from kvlog.engines.vllm import KvlogConnector
from tests.vllm.call_times import CallTimes

__all__ = ["WatchedConnector"]


class WatchedConnector(KvlogConnector):
    """Appends one JSON line to KVLOG_TEST_WATCH for each turn that ends."""

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Look at the blocks of turns that end, then go on."""
        for close in kv_connector_metadata.plan.closes:
            self._say(close)
        self._timed("handle_preemptions", kv_connector_metadata)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Take the time."""
        self._timed("start_load_kv", forward_context, **kwargs)

    def wait_for_save(self) -> None:
        """Take the time."""
        self._timed("wait_for_save")

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
            return getattr(super(), name)(*args, **kwargs)

    def _say(self, close: Any) -> None:
        worker = self._working.worker
        entry = worker._entries.get(close.key)
        if entry is None:
            return
        layout = worker._replicator._identity.layout
        rows, handle = entry.rows, entry.handle
        line = {
            "session": entry.ask.request.session,
            "key": close.key,
            "held": bool(close.held),
            "length": rows.length,
            "tokens": entry.tokens[: rows.length],
            "digests": layer_digests(rows, layout, rows.length),
            "logged": handle is not None and handle.logged,
            "log_from": None if handle is None else handle.log_from,
            "reason": None if handle is None else str(handle.reason),
            "attach_length": None if handle is None else handle.attach_length,
            "worker": asdict(worker.counts),
            "replicator": asdict(worker._replicator.counts),
            "loads": asdict(worker._replicator.loads),
            "longest_ms": self.call_times.longest_ms,
            "call_times": self.call_times.told(),
        }
        with Path(os.environ["KVLOG_TEST_WATCH"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
