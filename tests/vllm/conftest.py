"""Real vLLM servers, each test on two nodes that live as long as they can: a start takes a minute or more."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.vllm.fleet import Fleet
from tests.vllm.servers import why_not

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FLEETS: list[Fleet] = []


def pytest_report_header() -> str:
    """Say at the top what this run is worth."""
    return f"vllm: {why_not() or 'found'}"


@pytest.fixture(scope="session")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Nodes A and B over one log."""
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    folder: Path = tmp_path_factory.mktemp("vllm")
    started = Fleet(folder)
    _FLEETS.append(started)
    try:
        yield started
    finally:
        started.close()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what each kill cost."""
    rows = [row for fleet in _FLEETS for row in fleet.table]
    if rows:
        terminalreporter.section("scenarios: known at the kill, loaded, computed, KV equal, tokens equal")
        for row in rows:
            terminalreporter.write_line(str(row))
    for note in [note for fleet in _FLEETS for note in fleet.notes]:
        terminalreporter.write_line(note)
