"""A log and two nodes that follow it, for the tests of the node's core."""

from __future__ import annotations

import pytest

from tests.unit.core.cluster import Cluster, Machine


@pytest.fixture
def cluster() -> Cluster:
    """An empty log."""
    return Cluster()


@pytest.fixture
def a(cluster: Cluster) -> Machine:
    """A node that follows it."""
    return cluster.machine("A")


@pytest.fixture
def b(cluster: Cluster) -> Machine:
    """Another one."""
    return cluster.machine("B")
