"""Nodes of these tests start without the imports' time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.forks import NODES, Forks
from tests.nodes import nodes_started_by

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session", autouse=True)
def forks() -> Iterator[None]:
    """Started by the thread that runs the tests: its processes die with it."""
    with Forks(NODES) as forks, nodes_started_by(forks.start):
        yield
