"""Real vLLM servers, each test on nodes that live as long as they can: a start takes half a minute or more."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from consumers.process_group import shared_files_of
from tests.leftovers import Leftovers
from tests.nodes import until
from tests.vllm.fleet import Fleet
from tests.vllm.servers import VllmServer, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

_FLEETS: list[Fleet] = []
_THEIRS = ("vllm", "torch", "psm_", "sem.")


def pytest_report_header() -> str:
    """Say at the top what this run is worth."""
    return f"vllm: {why_not() or 'found'}"


@pytest.fixture(scope="session", autouse=True)
def nothing_left(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """After all tests: no process, socket, nameless memory or folder of this run; nor shared memory that nobody holds.

    Servers have folders of their own for temporary files; what goes past those is found by vLLM's names for it.
    """
    before, held_before = _left(), Leftovers.of(())
    yield
    held = shared_files_of(
        int(path.name) for path in Path("/proc").glob("[0-9]*")
    )  # by servers of somebody else, which live
    assert set() == _left() - before - held
    of_the_run = [tmp_path_factory.getbasetemp(), *VllmServer.folders, *(fleet.folder for fleet in _FLEETS)]
    # A thread of a process that was killed may still be letting go of its sockets.
    until(lambda: Leftovers.of(of_the_run) == held_before, seconds=10, what=f"{held_before} and no more")
    kept = (
        [] if request.session.testsfailed else [fleet.folder for fleet in _FLEETS]
    )  # a failed run's is looked at
    assert [] == [folder for folder in (*VllmServer.folders, *kept) if folder.exists()]


def _left() -> set[Path]:
    temporary = Path(tempfile.gettempdir()).iterdir()
    return {*Path("/dev/shm").iterdir(), *(path for path in temporary if path.name.startswith(_THEIRS))}


@pytest.fixture(scope="session")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest, nothing_left: None
) -> Iterator[Fleet]:
    """Nodes over one log."""
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    folder: Path = tmp_path_factory.mktemp("vllm")
    started = Fleet(folder)
    _FLEETS.append(started)
    try:
        yield started
    finally:
        started.close()
        if not request.session.testsfailed:
            shutil.rmtree(folder)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each kill cost."""
    rows = [row for fleet in _FLEETS for row in fleet.table]
    if rows:
        terminalreporter.section(
            "kills: tokens known, acknowledged, loaded, computed, which took s; KV equal, tokens equal"
        )
        for row in rows:
            terminalreporter.write_line(str(row))
    for note in [note for fleet in _FLEETS for note in fleet.notes]:
        terminalreporter.write_line(note)
