"""The order of work on an engine's GPU: marks in its stream, and work beside it. EXPERIMENTAL: never run on a device.

Everything that reads or writes the cache goes to the stream that the engine computes on, behind the step that has just
been queued and before the next one. So a gather sees the step's rows, and blocks that are given to somebody else
afterwards are overwritten after it, although nobody waits: the host asks a mark, later, whether the copy has landed.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

__all__ = ["CudaQueue", "DeviceQueue", "Mark"]


class Mark(Protocol):
    """A place in a stream."""

    def query(self) -> bool:
        """All that was queued before it is done; never waits."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


class DeviceQueue(Protocol):
    """The stream that the engine computes on, as far as it is needed here."""

    def mark(self) -> Mark:
        """The place after all that is queued by now."""
        ...

    def beside(self, after: Mark) -> AbstractContextManager[None]:
        """Work within goes to another stream, after `after`; leaving waits until it is done. From any thread."""
        ...


class CudaQueue:
    """A CUDA device's current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        """The place after all that is queued by now."""
        event: torch.cuda.Event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    @contextmanager
    def beside(self, after: Mark) -> Iterator[None]:
        """Work within goes to another stream, after `after`; leaving waits until it is done. From any thread."""
        assert isinstance(after, torch.cuda.Event), "a mark of this queue"
        stream: torch.cuda.Stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(after)
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()
