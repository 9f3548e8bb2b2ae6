"""A cap on published bytes a second."""

from __future__ import annotations

import asyncio
import time

__all__ = ["Pacer"]

_BURST_SECONDS = 0.25


class Pacer:
    """A token bucket with a quarter of a second's worth of burst; without a cap it never waits."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._level = float(bytes_per_second or 0) * _BURST_SECONDS
        self._at = time.monotonic()

    async def spend(self, size: int) -> None:
        """Wait until so many bytes may go out."""
        if self._rate is None:
            return
        now = time.monotonic()
        self._level = min(self._rate * _BURST_SECONDS, self._level + (now - self._at) * self._rate)
        self._at = now
        self._level -= size
        if self._level < 0:
            await asyncio.sleep(-self._level / self._rate)
