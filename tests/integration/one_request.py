"""A started replicator, and one request of a synthetic engine over it, step by step."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import SessionId
from kvlog.link.client import ClientOptions
from kvlog.link.messages import EngineRank
from tests.integration.fake_daemon import FakeDaemon, Knobs

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from kvlog.engines.turns import TurnHandle

__all__ = [
    "MODEL",
    "ROW_BYTES",
    "SECONDS",
    "Engine",
    "S",
    "assert_logged",
    "linked",
    "replicating",
    "wait_for",
]

SECONDS = 5.0
ROW_BYTES = 4096
MODEL = SyntheticModel(SyntheticOptions(row_bytes=ROW_BYTES))
S = SessionId("s")
ONLY = EngineRank()


@contextmanager
def replicating(path: Path, rank: EngineRank = ONLY, **options):
    """A started replicator."""
    client = ClientOptions(connect_seconds=0.5, ping_seconds=0.05, dead_seconds=0.3)
    defaults = {"backoff_seconds_min": 0.01, "backoff_seconds_max": 0.05, "client": client}
    replicator = Replicator(ReplicatorOptions(socket=path, **{**defaults, **options}), MODEL.identity, rank)
    replicator.start()
    try:
        yield replicator
    finally:
        replicator.close()


@contextmanager
def linked(path: Path, knobs: Knobs | None = None, **options):
    """A daemon and a replicator that has found it."""
    with FakeDaemon.running(path, knobs) as running, replicating(path, **options) as replicator:
        assert replicator.wait_connected(SECONDS)
        yield running, replicator


class Engine:
    """One request, step by step."""

    def __init__(
        self, replicator: Replicator, session: SessionId = S, tokens: list[int] | None = None
    ) -> None:
        self.replicator = replicator
        self.tokens = MODEL.encode("a prompt of twenty-odd bytes") if tokens is None else tokens
        self.cache = MODEL.new_cache()
        self.handle: TurnHandle = replicator.open_turn(TurnRequest(session=session), self.tokens)
        self.loaded = self.handle.load_into(self.cache)

    def compute(self) -> None:
        """One step without its hook."""
        logits = MODEL.forward(self.cache, self.tokens[self.cache.length :])
        self.tokens.append(int(logits.argmax()))

    def step(self, count: int = 1) -> None:
        """Steps with their hooks."""
        for _ in range(count):
            self.compute()
            self.replicator.after_step([(self.handle, self.cache, self.tokens)])

    def close(self) -> None:
        """The request is over."""
        self.replicator.close_turn(self.handle, self.cache, self.tokens)

    def rows(self) -> list[bytes]:
        """All its rows."""
        return [self.cache.view_row(position).tobytes() for position in range(self.cache.length)]


def wait_for(
    condition: Callable[[], object], what: str = "it never came", *, seconds: float = SECONDS
) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


def assert_logged(daemon: FakeDaemon, engine: Engine, session: str = S) -> None:
    """The daemon comes to have exactly the rows and ids of the engine's cache."""
    length = engine.cache.length
    wait_for(
        lambda: len(daemon.sessions[session].tokens) >= length, f"{len(daemon.sessions[session].tokens)} rows"
    )
    assert engine.tokens[:length] == daemon.sessions[session].tokens
    assert engine.rows() == daemon.sessions[session].rows
