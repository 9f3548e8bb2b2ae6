"""A daemon that has nothing to do: how often it wakes."""

from __future__ import annotations

import time
from pathlib import Path

from tests.nodes import Node, daemon_config

_SECONDS = 2.0
_WAKES_A_SECOND_MAX = 28
"""Of its event loop; 17 on a quiet machine. Looking at every claim each 50 ms made it 37."""


def _wakes(pid: int) -> int:
    """How often a process's first thread has gone to sleep. Source: proc(5), voluntary_ctxt_switches."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("\nvoluntary_ctxt_switches:")[2].split()[0])


def test_daemon_without_work_sleeps(tmp_path: Path) -> None:
    """It runs on the engine's cores: each time that it wakes costs a step something."""
    node = Node(tmp_path, "a", daemon_config(tmp_path, "a", f"file://{tmp_path}/log"))
    node.start_daemon()
    try:
        node.wait_log()
        assert node.daemon is not None, "it was started"
        time.sleep(1.0)  # its first rounds of everything
        began, before = time.monotonic(), _wakes(node.daemon.pid)
        time.sleep(_SECONDS)
        wakes = (_wakes(node.daemon.pid) - before) / (time.monotonic() - began)
    finally:
        node.close()
    assert wakes < _WAKES_A_SECOND_MAX, f"{wakes:.0f} a second"
