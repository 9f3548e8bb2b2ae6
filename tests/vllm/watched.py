"""The connector, watched: runs inside vLLM's processes and writes what its blocks held and what it counted to a file.

Digests are taken when a turn ends, before anything is written to its blocks: production code needs no door for tests.
What was acknowledged is written after each step, with one write: it survives SIGKILL of its process.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlog.engines.kv_digests import layer_digests
from kvlog.engines.vllm import KvlogConnector
from tests.processes import end_with_parent

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

__all__ = ["WatchedConnector"]

_ACKED_BYTES = 4096

_CALLS = (
    "handle_preemptions",
    "start_load_kv",
    "wait_for_save",
    "get_finished",
    "build_connector_worker_meta",
)


class WatchedConnector(KvlogConnector):
    """Appends one JSON line to KVLOG_TEST_WATCH for each turn that ends; each rank has a file of its own."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Tie the engine's and the worker's process to the server's: vLLM lets them run on without it."""
        end_with_parent()
        super().__init__(vllm_config, role, kv_cache_config)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        """Look at the blocks of turns that end, then go on."""
        for close in kv_connector_metadata.plan.closes:
            self._say(close)
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

    def _timed(self, name: str, *args: Any, **kwargs: Any) -> None:
        began = time.perf_counter()
        getattr(super(), name)(*args, **kwargs)
        longest = self.__dict__.setdefault("watched_ms", dict.fromkeys(_CALLS, 0.0))
        longest[name] = max(longest[name], 1000 * (time.perf_counter() - began))

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
            "longest_ms": self.__dict__.get("watched_ms"),
        }
        watch = os.environ["KVLOG_TEST_WATCH"] + (f".{worker._shard}" if worker._shard else "")
        with Path(watch).open("a") as file:
            file.write(json.dumps(line) + "\n")


def _fail(*_: Any) -> None:
    raise OSError
