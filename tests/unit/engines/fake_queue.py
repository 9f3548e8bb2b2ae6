"""A device's stream for tests on the host: work is done at once, and its marks pass when the test says so."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvlog.engines.device_queue import Mark

__all__ = ["FakeMark", "FakeQueue"]


class FakeMark:
    """A place in the stream; waiting for it makes it pass."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.passed = False
        self.waited = False

    def query(self) -> bool:
        """Whether it has passed."""
        return self.passed

    def synchronize(self) -> None:
        """Wait: it passes."""
        self.passed = self.waited = True


class FakeQueue:
    """Notes what is asked of it, in order."""

    def __init__(self) -> None:
        self.marks: list[FakeMark] = []
        self.said: list[str] = []

    def mark(self) -> FakeMark:
        """One more mark, not passed."""
        self.marks.append(FakeMark(len(self.marks)))
        self.said.append(f"mark {self.marks[-1].number}")
        return self.marks[-1]

    @contextmanager
    def beside(self, after: Mark) -> Iterator[None]:
        """Note when it is entered, and that it was waited for."""
        assert isinstance(after, FakeMark)
        self.said.append(f"beside, after {after.number}")
        yield
        self.said.append("waited")

    def arrive(self, *, but: int = 0) -> None:
        """All marks but the last so many pass."""
        for mark in self.marks[: len(self.marks) - but]:
            mark.passed = True
