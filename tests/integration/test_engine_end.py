"""An engine process ends when it is told to, whenever that is."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from tests.processes import die_with_parent

pytestmark = pytest.mark.e2e

EARLY = """
import os, sys, uvicorn
from kvlog.engines.__main__ import main

serve = uvicorn.Server.run

def run(self, sockets=None):
    os.kill(os.getpid(), {number})  # before the server has handlers of its own
    serve(self, sockets)

uvicorn.Server.run = run
sys.exit(main(["synthetic"]))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_engine_told_to_end_before_its_server_listens_to_signals_ends(number: int) -> None:
    """A signal that comes between `ready` and the server's own handlers is not lost."""
    program = EARLY.format(number=int(number))
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=die_with_parent,
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout.startswith("ready ")
