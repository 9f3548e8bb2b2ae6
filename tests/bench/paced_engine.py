"""An engine process without a model: rows at a steady rate through the real adapter, link and ring.

    python -m tests.bench.paced_engine JSON      (a Pace)

All its sessions make one row a step, as a batch does. It prints `ready`, and at the end one JSON object: when each
step's rows were made (CLOCK_MONOTONIC, the same for all processes of a machine), by session. A Pace with `turn_rows`
ends each session after so many rows and begins another: churn; every second one is forgotten, the others stay until the
pools evict them. SIGTERM ends it early, in order.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.engines.turn_state import TurnRequest
from kvlog.ids import parse_session_id

if TYPE_CHECKING:
    from kvlog.engines.turns import TurnHandle

__all__ = ["Pace", "RepeatedRows"]

_SOURCE_ROWS = 64
_OPEN_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """What it does.

    Args:
        socket: of its daemon.
        name: its sessions' names begin with it.
        row_bytes: of one position.
        sessions: at once.
        steps_a_second: rows are sessions times that.
        seconds: for how long.
        turn_rows: rows of one session; 0: all.
    """

    socket: str
    name: str
    row_bytes: int
    sessions: int
    steps_a_second: float
    seconds: float
    turn_rows: int = 0


class RepeatedRows:
    """A RowCache of any length whose rows come round again. Shape of `source`: [rows, row_bytes]."""

    def __init__(self, source: np.ndarray) -> None:
        self._source = source
        self.length = 0

    def copy_rows(self, start: int, out: memoryview) -> None:
        """RowCache: copy rows."""
        count, row_bytes = self._source.shape
        for at in range(0, len(out), row_bytes):
            out[at : at + row_bytes] = self._source[(start + at // row_bytes) % count].data

    def load_rows(self, rows: memoryview) -> None:
        """RowCache: nothing is ever attached."""
        raise AssertionError("no session is taken over here")

    def cut(self, length: int) -> None:
        """RowCache: forget."""
        self.length = length


class _Session:
    def __init__(self, name: str, number: int, source: np.ndarray) -> None:
        self.name = f"{name}-{number}"
        self.number = number
        self.cache = RepeatedRows(source)
        self.tokens = [1]
        self.made_ns: list[int] = []
        self.handle: TurnHandle | None = None


class _Engine:
    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        model = SyntheticModel(SyntheticOptions(row_bytes=pace.row_bytes))
        options = ReplicatorOptions(socket=Path(pace.socket), engine="paced")
        self._replicator = Replicator(options, model.identity)
        random = np.random.default_rng(11)
        self._sources = [
            random.integers(0, 255, (_SOURCE_ROWS, pace.row_bytes), np.uint8) for _ in range(pace.sessions)
        ]
        self._made = 0
        self._stopping = False
        self._sessions: list[_Session] = []
        self.made_ns: dict[str, list[int]] = {}
        self.unlogged = 0

    def run(self) -> None:
        """Until the time is over, or SIGTERM."""
        signal.signal(signal.SIGTERM, lambda *_: setattr(self, "_stopping", True))
        self._replicator.start()
        assert self._replicator.wait_connected(_OPEN_SECONDS), self._replicator.counts.refusal
        self._sessions = [self._opened(source) for source in self._sources]
        print("ready", flush=True)
        began, step = time.monotonic(), 0
        while not self._stopping and time.monotonic() - began < self._pace.seconds:
            self._step()
            step += 1
            left = began + step / self._pace.steps_a_second - time.monotonic()
            if left > 0:
                time.sleep(left)
        for session in self._sessions:
            self._close(session)
        self._replicator.close()

    def said(self) -> dict[str, object]:
        """What happened."""
        counts = self._replicator.counts
        return {
            "made_ns": self.made_ns,
            "rows": counts.rows,
            "ring_full": counts.ring_full,
            "reopened": counts.turns_reopened,
            "unlogged": self.unlogged,
        }

    def _step(self) -> None:
        now = time.monotonic_ns()
        for index, session in enumerate(self._sessions):
            if self._pace.turn_rows and session.cache.length >= self._pace.turn_rows:
                self._close(session)
                session = self._sessions[index] = self._opened(self._sources[index])  # noqa: PLW2901
            session.cache.length += 1
            session.tokens.append(1)
            session.made_ns.append(now)
        self._replicator.after_step(
            [(s.handle, s.cache, s.tokens) for s in self._sessions if s.handle is not None]
        )

    def _opened(self, source: np.ndarray) -> _Session:
        session = _Session(self._pace.name, self._made, source)
        self._made += 1
        request = TurnRequest(session=parse_session_id(session.name), wait_seconds=_OPEN_SECONDS)
        session.handle = self._replicator.open_turn(request, session.tokens)
        self.unlogged += not session.handle.logged
        return session

    def _close(self, session: _Session) -> None:
        assert session.handle is not None, "it was opened"
        self._replicator.close_turn(session.handle, session.cache, session.tokens)
        if not self._pace.turn_rows:
            self.made_ns[session.name] = session.made_ns
        elif session.number % 2:
            self._replicator.forget(parse_session_id(session.name))


def main() -> None:
    """Runs a Pace."""
    engine = _Engine(Pace(**json.loads(sys.argv[1])))
    engine.run()
    print(json.dumps(engine.said()))


if __name__ == "__main__":
    main()
