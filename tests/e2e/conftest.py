"""Nodes of these tests start without the imports' time."""

from __future__ import annotations

from tests.integration.conftest import forks

__all__ = ["forks"]
