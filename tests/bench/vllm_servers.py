"""vLLM servers as the benchmarks start them, with a daemon beside them, and what the kernel says of their work."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tests.nodes import Node, daemon_config

if TYPE_CHECKING:
    from tests.vllm.servers import VllmServer

__all__ = ["COMPUTE_CORE", "ROW_BYTES", "launch_timed", "processor_seconds", "start_daemon"]

ROW_BYTES: Final = 30 * 2 * 3 * 64 * 4
"""SmolLM2-135M in float32: layers, K and V, heads, dimensions, bytes."""

COMPUTE_CORE: Final = "0"
"""Where each server's one computing thread is pinned."""

_STEPS: Final = "KVLOG_BENCH_STEPS"
_UTIME_AT, _GROUP_AT = 11, 2
"""In /proc/PID/stat, counted from behind the name. Source: proc(5)"""


def start_daemon(folder: Path, name: str) -> Node:
    """A daemon over the folder's log, with room for everything here, off the core that the servers compute on."""
    sections: dict[str, dict[str, object]] = {
        "link": {"ring_bytes": 64 << 20},
        "pool": {"bytes": 1 << 30, "block_bytes": 1 << 20},
        "diagnostics": {"level": "info", "format": "json"},
    }
    node = Node(folder, name, daemon_config(folder, name, f"file://{folder}/log", **sections))
    daemon = node.start_daemon()
    others = os.sched_getaffinity(0) - {int(COMPUTE_CORE)}
    for thread in Path(f"/proc/{daemon.pid}/task").iterdir() if others else ():
        with suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(int(thread.name), others)
    node.wait_log()
    return node


def launch_timed(server: VllmServer, connector: str, link: Path | None) -> None:
    """Start a server with a connector of tests.bench.vllm_timed; its times go to files beside its log."""
    transfer = {
        "kv_connector": connector,
        "kv_connector_module_path": "tests.bench.vllm_timed",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {} if link is None else {"link": str(link)},
    }
    os.environ[_STEPS] = str(server.folder / f"{server.name}-steps")
    options = ("--kv-transfer-config", json.dumps(transfer), "--dtype", "float32", "--max-num-seqs", "16")
    server.launch(None, *options)


def processor_seconds(server: VllmServer) -> float:
    """What all processes of a server have used so far."""
    assert server._process is not None, "it was started"
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[_GROUP_AT]) == server._process.pid:
                ticks += int(fields[_UTIME_AT]) + int(fields[_UTIME_AT + 1])
    return ticks / os.sysconf("SC_CLK_TCK")
