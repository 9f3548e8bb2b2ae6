"""What can go wrong in a simulated run, how often, and how often it did.

Each seed draws its own profile: every kind is left out with a fixed chance and otherwise scaled at random, so that
some runs have one kind of fault only and others all of them.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from random import Random


class Fault(StrEnum):
    """One kind of fault; the value is what the table calls it."""

    NODE_CRASH = "node crashed"
    DAEMON_CRASH = "daemon crashed, engine lives"
    CRASH_BETWEEN_EFFECTS = "crash between two effects"
    STOPPED = "node stopped, what it had sent drained"
    PAUSE = "node paused"
    COLD_START = "started in the middle of the log"
    REWIND = "reader went back"
    JUMP = "reader jumped ahead"
    APPEND_DELAYED = "append delayed"
    APPEND_FAILED = "append surely failed"
    APPEND_UNKNOWN = "append of unknown outcome"
    LANDED_LATE = "append landed after it was given up"
    DUPLICATE = "append landed twice"
    SILENT_LOSS = "append lost in silence"
    SWAP = "appends swapped"
    WATERMARK_FAILED = "watermark not read"
    WATERMARK_DELAYED = "watermark delayed"
    RETENTION = "log start moved"
    TAIL_LOST = "tail lost"
    OFFSET_SKIPPED = "offset without message"
    DAMAGE_AT_REST = "damage at rest"
    DAMAGE_IN_READING = "damage in one reading"
    DAMAGE_AT_ONE_READER = "damage at one reader"
    JUNK = "foreign record"
    WEIGHTS = "other weights, model or layout"
    CONTEXT = "other context"
    CONCURRENT = "concurrent request"
    PREEMPTED = "turn preempted"
    ABORTED = "request aborted"
    MOVED = "request moved to another node"
    DEADLINE = "deadline passed"
    EVICTED = "bytes evicted"
    SESSION_ENDED = "session ended"
    RING_BEHIND = "rows late in the ring"
    REWRITE = "session rewritten"


LOAD = frozenset(
    {
        *(Fault.CONTEXT, Fault.CONCURRENT, Fault.ABORTED, Fault.SESSION_ENDED),
        *(Fault.RING_BEHIND, Fault.DEADLINE, Fault.REWRITE),
    }
)
"""What users and slow daemons do to a healthy system too: it is counted and shown, but not as faults."""

ACTION_WEIGHTS: Mapping[Fault, float] = {
    Fault.NODE_CRASH: 0.6,
    Fault.DAEMON_CRASH: 0.5,
    Fault.STOPPED: 0.4,
    Fault.PAUSE: 1.0,
    Fault.REWIND: 0.3,
    Fault.JUMP: 0.4,
    Fault.APPEND_FAILED: 0.6,
    Fault.APPEND_UNKNOWN: 1.2,
    Fault.LANDED_LATE: 2.0,
    Fault.SILENT_LOSS: 0.2,
    Fault.SWAP: 0.2,
    Fault.RETENTION: 0.5,
    Fault.TAIL_LOST: 0.4,
    Fault.OFFSET_SKIPPED: 0.1,
    Fault.JUNK: 0.7,
    Fault.WEIGHTS: 0.6,
    Fault.CONCURRENT: 2.0,
    Fault.PREEMPTED: 1.5,
    Fault.ABORTED: 1.0,
    Fault.MOVED: 1.5,
    Fault.DEADLINE: 0.8,
    Fault.EVICTED: 0.8,
    Fault.SESSION_ENDED: 0.4,
    Fault.REWRITE: 8.0,
}
"""Faults that happen by themselves: weights against those of the ordinary actions, whose sum is about 60."""

CHANCES: Mapping[Fault, float] = {
    Fault.CRASH_BETWEEN_EFFECTS: 0.04,
    Fault.COLD_START: 0.6,
    Fault.APPEND_DELAYED: 0.25,
    Fault.DUPLICATE: 0.04,
    Fault.WATERMARK_FAILED: 0.1,
    Fault.WATERMARK_DELAYED: 0.4,
    Fault.DAMAGE_AT_REST: 0.01,
    Fault.DAMAGE_IN_READING: 0.02,
    Fault.DAMAGE_AT_ONE_READER: 0.006,
    Fault.CONTEXT: 0.2,
    Fault.RING_BEHIND: 0.3,
}
"""Faults that befall something: the chance at each opportunity."""


class Profile:
    """The rates of one run, and the count of what was injected."""

    def __init__(self, rates: Mapping[Fault, float]) -> None:
        self.rates = dict(rates)
        self.counts: Counter[Fault] = Counter()
        self.calm = False
        """Faults have stopped: the run is being drained."""

    @classmethod
    def drawn(cls, rng: Random, always: frozenset[Fault] = frozenset()) -> Profile:
        """Draw a profile.

        Args:
            rng: the run's.
            always: kinds that are not left out, and are twice as frequent.
        """
        rates = {}
        keep = rng.choice((0.2, 0.5, 0.9))
        intensity = rng.choice((0.15, 0.4, 1.0))
        for fault in Fault:
            base = ACTION_WEIGHTS.get(fault, CHANCES.get(fault, 0.0))
            scale = 2.0 ** rng.uniform(-1.5, 1.5) * (intensity if fault in ACTION_WEIGHTS else 1.0)
            kept = rng.random() < keep
            rates[fault] = base * 2 if fault in always else base * scale * kept
        return cls(rates)

    @classmethod
    def none(cls) -> Profile:
        """No faults at all."""
        return cls(dict.fromkeys(Fault, 0.0))

    def hit(self, fault: Fault, rng: Random) -> bool:
        """Whether it befalls this opportunity; counted if so."""
        rate = self.rates[fault]
        if self.calm or not rate or rng.random() >= rate:
            return False
        self.counts[fault] += 1
        return True

    def count(self, fault: Fault) -> None:
        """An action has injected it."""
        self.counts[fault] += 1
