"""What a process group uses in /dev/shm is known while it lives; others' files are never taken for its own."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from consumers.process_group import living_members, shared_files
from tests.processes import die_with_parent

_CHILD = r"""
import mmap, os, subprocess, sys
open_file, mapped, gone = sys.argv[1:]
grandchild = "import sys; f = open(sys.argv[1]); print(1, flush=True); sys.stdin.read()"
process = subprocess.Popen([sys.executable, "-c", grandchild, open_file], stdin=sys.stdin)
with open(mapped, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 0)
os.rename(mapped, mapped + "-renamed")
still = open(gone)
os.unlink(gone)
print(2, flush=True)
process.wait()
"""


def test_files_of_a_group_are_those_that_its_members_map_or_have_open():
    """Those of processes that its programs have started count too; a file without a name, or of another group, not."""
    made = [Path(tempfile.mkstemp(prefix="kvlog-test-", dir="/dev/shm")[1]) for _ in range(4)]
    for file in made:
        file.write_bytes(b"x" * 4096)
    renamed = made[1].with_name(f"{made[1].name}-renamed")
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, *map(str, made[:3])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,
        preexec_fn=die_with_parent,
    )
    try:
        assert child.stdout is not None
        assert child.stdin is not None
        assert {"1", "2"} == {child.stdout.readline().decode().strip() for _ in range(2)}
        assert 2 == len(living_members(child.pid))
        assert {made[0], renamed} == shared_files(child.pid)
        child.stdin.close()
        child.wait(10)
        assert [] == living_members(child.pid)
        assert set() == shared_files(child.pid)
    finally:
        child.kill()
        child.wait()
        assert child.stdout is not None
        child.stdout.close()
        for file in (*made, renamed):
            file.unlink(missing_ok=True)


def test_member_that_has_ended_and_was_not_reaped_is_not_alive():
    """A zombie keeps its number, and nothing else."""
    child = subprocess.Popen([sys.executable, "-c", ""], process_group=0, preexec_fn=die_with_parent)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert [] == living_members(child.pid)
    child.wait()
