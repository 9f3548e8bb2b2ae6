"""Runs where vLLM is: imports it once, and forks a server for each line that it reads; for tests that start many.

A server is three processes (API, engine core, worker), and each of them takes 20 s of a core to import what it needs:
vLLM starts them anew on the CPU backend. Here they are forks, as they are by default elsewhere.

One JSON object a line on stdin: arguments, environment, folder, log. The answer is a line with the process id of the
server, which leads a group of its own. All of them die with this process, and this one with its parent.

python -m tests.vllm.fork_servers MODULE
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
from typing import Any, Final

from tests.processes import become, die_with_parent

__all__ = ["SAID"]

SAID: Final = "fork_servers:"
"""How a line of ours begins; what is imported says things too."""

_IMPORTED: Final = (
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.model_executor.models.llama",
    "tests.vllm.watched",
)


def main(module: str) -> None:
    """Serve until stdin ends."""
    for name in (module, *_IMPORTED):
        importlib.import_module(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whoever has ended is gone
    print(f"{SAID} ready", flush=True)
    for line in sys.stdin:
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            die_with_parent(parent)
            _serve(module, json.loads(line))
        print(f"{SAID} {pid}", flush=True)


def _serve(module: str, wanted: dict[str, Any]) -> None:
    """Become the server; does not return."""
    become(wanted["log"], wanted["environment"], wanted["folder"])
    tempfile.tempdir = None  # read anew
    real = multiprocessing.get_context
    vars(multiprocessing)["get_context"] = lambda method=None: real("fork" if method == "spawn" else method)
    sys.argv = [module, *wanted["arguments"]]
    code = 1
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    finally:
        sys.stdout.flush()
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
