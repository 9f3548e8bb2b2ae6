"""Sessions of ours that nobody has used for `primary.ttl_seconds` are ended: an End record, and their bytes are free.

Only the node that owns a session ends it; one whose owner died is gone when retention takes its records. A session that
is wanted again after its End begins anew, with prefill.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from daemon.telemetry import Event
from kvlog.core.inputs import EndSession
from kvlog.core.takeover import Claimant
from kvlog.records import EndReason

if TYPE_CHECKING:
    from daemon.intake import IntakeParts

__all__ = ["Expirer"]

_LOOK_SECONDS = 1.0
_ENDED_A_LOOK = 64
"""After a long pause of the process not all sessions end in one go: each is a record and a pass over the pool."""


class Expirer:
    """Looks for owned sessions that were not used for too long.

    Args:
        parts: the daemon's core, turns and telemetry.
        ttl_seconds: since a session's last turn ended; 0: never.
    """

    def __init__(self, parts: IntakeParts, ttl_seconds: float) -> None:
        self._parts = parts
        self._ttl_seconds = ttl_seconds

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            self.look(time.monotonic())

    def look(self, now: float) -> None:
        """End what is due now.

        Args:
            now: monotonic seconds.
        """
        if not self._ttl_seconds:
            return
        parts, ended = self._parts, 0
        core = parts.shell.core
        asked_for = core.sessions_being_claimed
        for primary in core.primaries():
            if primary.turn is not None or primary.ended or primary.session in asked_for:
                continue
            idle = now - parts.turns.used_at(primary.session)
            # Infinity: so many sessions were used since that nobody remembers when; retention will take it.
            if not self._ttl_seconds <= idle < float("inf"):
                continue
            own = primary.claim
            claimant = Claimant(own.node, own.writer, own.identity, own.context)
            parts.shell.step(EndSession(primary.session, EndReason.TTL, claimant))
            parts.telemetry.say(Event.SESSION_EXPIRED, session=primary.session, idle_seconds=round(idle, 1))
            ended += 1
            if ended == _ENDED_A_LOOK:
                return
