"""The check of what a run has left: it finds each kind of thing, and only the run's."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.leftovers import Leftovers
from tests.nodes import until
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from pathlib import Path

SLEEP = [sys.executable, "-c", "import os, time; os.setsid(); print('here', flush=True); time.sleep(60)"]


def test_process_whose_output_is_in_a_folder_of_the_run_is_found_though_the_folder_is_gone(
    tmp_path: Path,
) -> None:
    """Whatever group or session it has made itself; another run's is nobody's business here."""
    mine, theirs = tmp_path / "mine", tmp_path / "theirs"
    children = []
    for folder in (mine, theirs):
        folder.mkdir()
        with (folder / "log").open("wb") as log:
            children.append(subprocess.Popen(SLEEP, stdout=log, preexec_fn=die_with_parent))
    try:
        until(lambda: (mine / "log").stat().st_size > 0)
        (mine / "log").unlink()
        mine.rmdir()
        found = Leftovers.of([mine])
        assert 1 == len(found.processes)
        assert found.processes[0].startswith(f"{children[0].pid} ")
    finally:
        for child in children:
            child.kill()
            child.wait()
    assert () == Leftovers.of([mine, theirs]).processes


def test_process_that_works_in_a_folder_of_the_run_is_found(tmp_path: Path) -> None:
    """It may have closed all its files."""
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE, cwd=tmp_path, preexec_fn=die_with_parent) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert [str(child.pid)] == [found.split()[0] for found in Leftovers.of([tmp_path]).processes]
        child.kill()


def test_socket_and_nameless_memory_are_found_while_they_are_held(tmp_path: Path) -> None:
    """A socket's file may be gone; the memory has never had a name."""
    before = Leftovers.of([tmp_path])
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    memory = os.memfd_create("kvlog-test-left")
    try:
        found = Leftovers.of([tmp_path])
        assert (str(tmp_path / "s"),) == found.sockets
        new = set(found.memfds) - set(before.memfds)
        assert ["/memfd:kvlog-test-left (deleted)"] == list(new)
        assert found
    finally:
        os.close(memory)
        listener.close()
    assert before == Leftovers.of([tmp_path])
