"""NodeShell: feeds the core one input at a time and carries its effects out, in order, on one event loop.

Parts register a handler for each kind of effect. A handler may feed the core again; that input waits until the effects
of the current one are done, so effects of two inputs never interleave.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.core.effects import Effect
    from kvlog.core.inputs import Input
    from kvlog.core.node import NodeCore

__all__ = ["NodeShell"]

E = TypeVar("E", bound="Effect")


class NodeShell:
    """The only place that touches the core."""

    def __init__(self, core: NodeCore) -> None:
        self._core = core
        self._handlers: dict[type, Callable[..., None]] = {}
        self._first: dict[type, Callable[..., bool]] = {}
        self._inputs: deque[Input | None] = deque()
        self._running = False

    @property
    def core(self) -> NodeCore:
        """The core, to be read only; inputs go through `step`."""
        return self._core

    def handle(self, kind: type[E], handler: Callable[[E], None]) -> None:
        """Register who carries out a kind of effect; each kind has one handler, set before the first step."""
        assert kind not in self._handlers, "one handler a kind"
        self._handlers[kind] = handler

    def divert(self, kind: type[E], handler: Callable[[E], bool]) -> None:
        """Register who sees effects of a kind before its handler; what he says True to was his, and is carried out."""
        assert kind not in self._first, "one a kind"
        self._first[kind] = handler

    def step(self, happened: Input) -> None:
        """Tell the core that this has happened, and carry out what follows."""
        self._inputs.append(happened)
        self._drain()

    def tick(self) -> None:
        """Tell the core what time it is."""
        self._inputs.append(None)
        self._drain()

    def _drain(self) -> None:
        if self._running:
            return
        self._running = True
        try:
            while self._inputs:
                happened = self._inputs.popleft()
                core = self._core
                effects = core.tick(time.monotonic_ns()) if happened is None else core.step(happened)
                for effect in effects:
                    self._carry_out(effect)
        finally:
            self._running = False

    def _carry_out(self, effect: Effect) -> None:
        first = self._first.get(type(effect))
        if first is None or not first(effect):
            self._handlers[type(effect)](effect)
