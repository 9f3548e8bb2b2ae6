"""What every test has: a real Kafka where one can be had."""

from __future__ import annotations

pytest_plugins = ["pytester", "tests.kafka.plugin"]
