"""The implementations that run under the contract suites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contract.kafka_factory import KafkaLogFactory
from tests.contract.log_factories import LocalLogFactory
from tests.kafka.plugin import CHOICE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.contract.log_factories import LogFactory

LOG_FACTORIES = [
    pytest.param("local_log_factory", id="local"),
    pytest.param("kafka_log_factory", id="kafka", marks=pytest.mark.kafka),
]
"""Names of fixtures; another implementation is one more line here and its fixture."""


@pytest.fixture
async def local_log_factory(tmp_path: Path) -> AsyncIterator[LogFactory]:
    """The local log in a temporary directory."""
    factory = LocalLogFactory(tmp_path / "log")
    yield factory
    await factory.close()


@pytest.fixture
async def kafka_log_factory(
    pytestconfig: pytest.Config, kafka_broker: str, kafka_prefix: str
) -> AsyncIterator[LogFactory]:
    """The Kafka log on the shared broker, under a topic prefix of its own."""
    is_ours = pytestconfig.stash[CHOICE].cluster is None
    factory = KafkaLogFactory(kafka_broker, kafka_prefix, is_ours=is_ours)
    yield factory
    await factory.close()


@pytest.fixture(params=LOG_FACTORIES)
def log_factory(request: pytest.FixtureRequest) -> LogFactory:
    """One log of each implementation in turn."""
    factory: LogFactory = request.getfixturevalue(request.param)
    return factory
