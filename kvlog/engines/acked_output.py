"""`acked` mode on an answer's way out: waits, on the event loop, until the next token may be shown; never on a step."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING, assert_never

from kvlog.engines.acked_gate import Passage
from kvlog.engines.jobs import FENCED, Failed

if TYPE_CHECKING:
    from kvlog.engines.acked_gate import AckedGate
    from kvlog.engines.generation import NewToken
    from kvlog.engines.turns import TurnHandle

__all__ = ["AckedOutput"]


class AckedOutput:
    """Made on the event loop that shows the answer, when its first token is there."""

    def __init__(self, gate: AckedGate, handle: TurnHandle) -> None:
        self._gate = gate
        self._handle = handle
        self._changed = asyncio.Event()
        loop = asyncio.get_running_loop()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended before the link
                loop.call_soon_threadsafe(self._changed.set)

        handle.watch(wake)

    async def wait(self, token: NewToken, drawn: float) -> NewToken | Failed | None:
        """Wait until the next token may be shown.

        Returns: the token; or what the answer ends with, instead of it; None: never, its answer's end is on its way.

        Args:
            token: the next one.
            drawn: when the token was drawn, monotonic seconds.
        """
        gate = self._gate
        while True:
            self._changed.clear()
            now = time.monotonic()
            passage = gate.judge(self._handle, drawn, now)
            match passage:
                case Passage.SHOW:
                    return token
                case Passage.DROP:
                    return None
                case Passage.FENCED:
                    return FENCED
                case Passage.LATE:
                    return Failed("not_acked", f"The log does not acknowledge this answer: {gate.late}.")
                case Passage.HOLD:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(self._changed.wait(), gate.deadline(drawn) - now)
                case _:
                    assert_never(passage)
