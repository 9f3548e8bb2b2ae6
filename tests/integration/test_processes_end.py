"""Tests that are killed leave no process behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.nodes import until
from tests.processes import die_with_parent

ROOT = Path(__file__).parents[2]

TESTS = """
import subprocess, sys, time
from pathlib import Path
from tests.nodes import Process
from tests.processes import die_with_parent

def test_that_waits(tmp_path):
    plain = [sys.executable, "-c", "import time; time.sleep(60)"]
    children = [Process(["http.server", "0", "--bind", "127.0.0.1"], tmp_path / "log").pid]
    children += [subprocess.Popen(plain, preexec_fn=die_with_parent).pid]
    children += [subprocess.Popen(plain, preexec_fn=die_with_parent, start_new_session=True).pid]
    partial = Path({pids!r} + ".partial")
    partial.write_text(" ".join(map(str, children)))
    partial.rename({pids!r})
    time.sleep(60)
"""


def is_there(pid: int) -> bool:
    """Whether a process runs; one that only nobody has waited for yet does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return status.rpartition(")")[2].split()[0] not in "ZX"


def test_children_of_killed_tests_are_gone_within_a_second(tmp_path: Path) -> None:
    """Whatever ends pytest, the kernel ends what its tests have started."""
    file, pids = tmp_path / "test_waits.py", tmp_path / "pids"
    file.write_text(TESTS.format(pids=str(pids)))
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "--rootdir", str(tmp_path)]
    tests = subprocess.Popen(
        [*command, "-p", "no:cacheprovider", str(file)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        preexec_fn=die_with_parent,
    )
    try:
        until(pids.exists, seconds=30, what="a test that waits")
        children = [int(pid) for pid in pids.read_text().split()]
        assert [True] * 3 == [is_there(pid) for pid in children]
    finally:
        tests.kill()
        tests.wait()
    until(lambda: not any(map(is_there, children)), seconds=1, what="the end of the children")
