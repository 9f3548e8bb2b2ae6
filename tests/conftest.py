"""What every test has: a real Kafka where one can be had; and which tests begin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import settings

if TYPE_CHECKING:
    import pytest

pytest_plugins = ["pytester", "tests.kafka.plugin"]

# A test has two minutes in all; how long one example takes says how busy the machine is.
settings.register_profile("unhurried", parent=settings(), deadline=None)
settings.load_profile("unhurried")

_LONG = ("model", "e2e")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest: one of them at the end would leave all workers but its own with nothing to do."""
    items.sort(key=lambda item: not any(map(item.get_closest_marker, _LONG)))
