"""What every test has: a real Kafka where one can be had; and which tests begin."""

from __future__ import annotations

import pytest
from hypothesis import settings

pytest_plugins = ["pytester", "tests.kafka.plugin"]

# A test has two minutes in all; how long one example takes says how busy the machine is.
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.load_profile("unhurried")

_LONG = ("model", "e2e")
_ONE_TRY = ("tests/unit", "tests/property", "tests/golden", "tests/sim", "tests/tidy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: one of them at the end would leave all workers but its own with nothing to do.

    A second try, where the command line gives one, is for tests of real processes.
    """
    items.sort(key=lambda item: not any(map(item.get_closest_marker, _LONG)))
    for item in items:
        if item.nodeid.startswith(_ONE_TRY):
            item.add_marker(pytest.mark.flaky(reruns=0))
