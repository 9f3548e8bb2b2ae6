"""How far a reader is behind, in each unit that people ask for, how fast that closes, and how near retention is. Pure.

    log start          needed          applied                     high watermark
        ├────────────────┼────────────────┼──────────────────────────────┤
        ◀ records_to_loss▶                ◀────── lag in records ───────▶

Records are the difference of two offsets, exact at once. Bytes and tokens need the records themselves (`Backlog`); of
those only so many are read, and past that the figures are lower bounds and say so. Seconds are the age of the oldest
record that was not applied: from the record itself where it was read, else from when the watermark was seen to pass
it (`LagMeter`). So silence costs nothing: without a record there is no age, however long nothing was written.

None is "not known", never 0. Figures of a pace may be infinite: "never, at this pace".

Source: seconds from observed watermarks as kafka-lag-exporter does, https://github.com/seglo/kafka-lag-exporter
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from kvlog.records import Delta

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvlog.ids import Offset, SessionId
    from kvlog.records import Record

__all__ = [
    "NO_LAG",
    "Backlog",
    "Lag",
    "LagMeter",
    "LagSample",
    "Needed",
    "PartitionLag",
    "Waiting",
    "needed_of",
    "total",
]

MARKS_MAX = 256
"""Watermarks that a meter remembers. Past it every second one of the older half goes: the further back, the coarser."""

PACE_SAMPLES_MAX = 16
"""Samples that a pace is taken over: half a minute at one in two seconds, long enough to smooth a burst."""

_Number = TypeVar("_Number", int, float)


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind somebody is.

    Args:
        records: high watermark minus applied offset.
        size_bytes: of keys and values; None: not known.
        tokens: positions in deltas, of one shard; None: not known.
        seconds: age of the oldest record that is not applied; 0 without lag; None: not known.
        is_exact: everything was looked at; else `size_bytes` and `tokens` are lower bounds.
    """

    records: int
    size_bytes: int | None
    tokens: int | None
    seconds: float | None
    is_exact: bool = True

    def figures(self) -> dict[str, object]:
        """The same as JSON values."""
        return {
            "records": self.records,
            "bytes": self.size_bytes,
            "tokens": self.tokens,
            "seconds": self.seconds,
            "exact": self.is_exact,
        }


NO_LAG = Lag(0, 0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Waiting:
    """One record of a backlog, with what is counted of it. `tokens`: of shard 0, so that no position counts twice.

    `session` is None where it is in doubt; `timestamp_ms` is the log's own, Unix milliseconds.
    """

    offset: Offset
    session: SessionId | None
    size_bytes: int
    tokens: int
    timestamp_ms: int

    @staticmethod
    def tokens_of(record: Record | None) -> int:
        """What counts as tokens of a record."""
        return len(record.tokens) if isinstance(record, Delta) and record.shard == 0 else 0


class Backlog:
    """One partition's records from some offset on, as many as were read.

    Args:
        waiting: in offset order, without a hole.
        high_watermark: where the backlog ends, read or not.
        now_ms: when that watermark was read, on a clock that agrees with the log's within what one cares about.
    """

    __slots__ = ("_high_watermark", "_now_ms", "_waiting")

    def __init__(self, waiting: Sequence[Waiting], high_watermark: Offset, now_ms: int) -> None:
        """Nothing is counted before it is asked for."""
        self._waiting = waiting
        self._high_watermark = high_watermark
        self._now_ms = now_ms

    def after(self, applied: Offset) -> Lag:
        """The lag of who has applied every record below this offset."""
        records = self._high_watermark - applied
        if records <= 0:
            return NO_LAG
        rest = [one for one in self._waiting if one.offset >= applied]
        if not rest:
            return Lag(records, None, None, None, is_exact=False)
        return self._lag(rest, records, is_exact=len(rest) == records)

    def sessions_after(self, applied: Offset) -> dict[SessionId, Lag]:
        """The same for each session by itself; records whose session is in doubt are in none."""
        rest = [one for one in self._waiting if one.offset >= applied]
        is_exact = len(rest) == self._high_watermark - applied
        by_session: dict[SessionId, list[Waiting]] = {}
        for one in rest:
            if one.session is not None:
                by_session.setdefault(one.session, []).append(one)
        return {
            session: self._lag(listed, len(listed), is_exact=is_exact)
            for session, listed in by_session.items()
        }

    def _lag(self, rest: Sequence[Waiting], records: int, *, is_exact: bool) -> Lag:
        return Lag(
            records=records,
            size_bytes=sum(one.size_bytes for one in rest),
            tokens=sum(one.tokens for one in rest),
            seconds=max(0.0, (self._now_ms - rest[0].timestamp_ms) / 1000),
            is_exact=is_exact,
        )


def total(lags: Iterable[Lag]) -> Lag:
    """One lag for several partitions: counts are added, the oldest record decides the seconds.

    A figure that is not known for one of them makes the sum a lower bound, or unknown if it is known for none.
    """
    listed = list(lags)
    if not listed:
        return NO_LAG
    sizes = [lag.size_bytes for lag in listed if lag.size_bytes is not None]
    tokens = [lag.tokens for lag in listed if lag.tokens is not None]
    seconds = [lag.seconds for lag in listed if lag.seconds is not None]
    return Lag(
        records=sum(lag.records for lag in listed),
        size_bytes=sum(sizes) if sizes else None,
        tokens=sum(tokens) if tokens else None,
        seconds=max(seconds, default=None),
        is_exact=all(lag.is_exact for lag in listed),
    )


@dataclass(frozen=True, slots=True)
class Needed:
    """What somebody may still have to read of a partition.

    Args:
        offset: the lowest such offset: of the reader itself, and of the sessions that a new reader can still know.
        sessions_truncated: sessions of which records are gone already: who does not know them yet, prefills.
    """

    offset: Offset
    sessions_truncated: int


def needed_of(first_needed: Iterable[Offset], *, applied: Offset, log_start: Offset) -> Needed:
    """What is needed of a partition by its reader and by the sessions that it knows.

    Args:
        first_needed: first needed offset of each session that goes on.
        applied: every offset below was folded by the reader.
        log_start: sessions below it are counted and no longer hold the figure down: they cannot be lost again.
    """
    lowest, truncated = applied, 0
    for first in first_needed:
        if first < log_start:
            truncated += 1
        elif first < lowest:
            lowest = first
    return Needed(lowest, truncated)


@dataclass(frozen=True, slots=True)
class LagSample:
    """What was seen of one partition and one reader at one moment.

    Args:
        at_ms: when, Unix milliseconds; samples come in this order.
        log_start: log start offset; None: not known.
        high_watermark: None: not known.
        applied: every offset below was folded by the reader; None: not known.
        needed: the lowest offset that somebody may still have to read; None: `applied`.
        backlog: the records that were not applied, as far as they were read; None: none were read.
    """

    at_ms: int
    log_start: Offset | None
    high_watermark: Offset | None
    applied: Offset | None
    needed: Offset | None = None
    backlog: Backlog | None = None


@dataclass(frozen=True, slots=True)
class PartitionLag:
    """One reader's lag in one partition, and where it is heading. None: not known; infinite: never, at this pace.

    Args:
        lag: how far behind.
        appended_per_second: records that the log took, lately.
        applied_per_second: records that the reader applied, lately.
        seconds_to_close: until the reader has caught up; 0 without lag.
        records_to_loss: records between the log start and what is still needed; negative: so many are lost.
        seconds_to_loss: until retention takes what is still needed; 0 if it has; infinite if nothing is.
    """

    lag: Lag | None
    appended_per_second: float | None
    applied_per_second: float | None
    seconds_to_close: float | None
    records_to_loss: int | None
    seconds_to_loss: float | None


@dataclass(slots=True)
class _Mark:
    """The watermark stood here from the first to the last of these moments, as far as was seen."""

    high_watermark: int
    first_ms: int
    last_ms: int


class LagMeter:
    """Follows one reader in one partition by samples, which it is given in order of time."""

    __slots__ = ("_marks", "_recent")

    def __init__(self) -> None:
        """Nothing is known before the first sample; a pace, and seconds without a backlog, before the second."""
        self._marks: list[_Mark] = []
        self._recent: deque[LagSample] = deque(maxlen=PACE_SAMPLES_MAX)

    def observe(self, sample: LagSample) -> PartitionLag:
        """Take a sample in, and say what follows from it and those before."""
        if self._is_another_log(sample):
            self._marks.clear()
            self._recent.clear()
        if sample.high_watermark is not None:
            self._mark(sample.high_watermark, sample.at_ms)
        self._recent.append(sample)
        lag = self._lag(sample)
        appended = self._pace([(s.at_ms, s.high_watermark) for s in self._recent])
        applied = self._pace([(s.at_ms, s.applied) for s in self._recent])
        return PartitionLag(
            lag=lag,
            appended_per_second=appended,
            applied_per_second=applied,
            seconds_to_close=_seconds_to_close(lag, _difference(applied, appended)),
            records_to_loss=_difference(_needed(sample), sample.log_start),
            seconds_to_loss=_seconds_to_loss(sample, self._approach()),
        )

    def _is_another_log(self, sample: LagSample) -> bool:
        """A watermark or log start that goes back is another log's, or one that has lost its tail."""
        before = self._recent[-1] if self._recent else sample
        return any(
            now is not None and was is not None and now < was
            for now, was in (
                (sample.high_watermark, self._marks[-1].high_watermark if self._marks else None),
                (sample.log_start, before.log_start),
            )
        )

    def _mark(self, high_watermark: int, at_ms: int) -> None:
        if self._marks and self._marks[-1].high_watermark == high_watermark:
            self._marks[-1].last_ms = at_ms
            return
        self._marks.append(_Mark(high_watermark, at_ms, at_ms))
        if len(self._marks) > MARKS_MAX:
            self._marks[: MARKS_MAX // 2] = self._marks[: MARKS_MAX // 2 : 2]

    def _lag(self, sample: LagSample) -> Lag | None:
        if sample.high_watermark is None or sample.applied is None:
            return None
        if sample.applied >= sample.high_watermark:
            return NO_LAG
        if sample.backlog is None:
            records = sample.high_watermark - sample.applied
            return Lag(records, None, None, self._age(sample.applied, sample.at_ms), is_exact=False)
        lag = sample.backlog.after(sample.applied)
        return (
            lag if lag.seconds is not None else replace(lag, seconds=self._age(sample.applied, sample.at_ms))
        )

    def _age(self, offset: int, now_ms: int) -> float | None:
        """How long ago the record at `offset` was appended, by when the watermark was seen to pass it.

        Between two sightings records are taken to have come evenly. None if it had passed before the first one.
        """
        for before, after in zip(self._marks, self._marks[1:], strict=False):
            if before.high_watermark <= offset < after.high_watermark:
                share = (offset - before.high_watermark) / (after.high_watermark - before.high_watermark)
                appended_ms = before.last_ms + share * (after.first_ms - before.last_ms)
                return max(0.0, (now_ms - appended_ms) / 1000)
        return None

    @staticmethod
    def _pace(seen: list[tuple[int, Offset | None]]) -> float | None:
        """Offsets a second between the first and the last sighting; None with less than two at different times."""
        known = [(at_ms, offset) for at_ms, offset in seen if offset is not None]
        if not known or known[-1][0] <= known[0][0]:
            return None
        (from_ms, first), (to_ms, last) = known[0], known[-1]
        return (last - first) * 1000 / (to_ms - from_ms)

    def _approach(self) -> float | None:
        """Records a second by which the log start comes nearer to what is needed."""
        return _difference(
            self._pace([(s.at_ms, s.log_start) for s in self._recent]),
            self._pace([(s.at_ms, _needed(s)) for s in self._recent]),
        )


def _needed(sample: LagSample) -> Offset | None:
    return sample.needed if sample.needed is not None else sample.applied


def _difference(left: _Number | None, right: _Number | None) -> _Number | None:
    return None if left is None or right is None else left - right


def _seconds_to_close(lag: Lag | None, closing: float | None) -> float | None:
    if lag is None:
        return None
    return 0.0 if lag.records == 0 else _seconds(lag.records, closing)


def _seconds_to_loss(sample: LagSample, approach: float | None) -> float | None:
    """Nothing can be lost of which nothing is needed; what is lost already is lost now."""
    needed, distance = _needed(sample), _difference(_needed(sample), sample.log_start)
    if needed is None or distance is None:
        return None
    if distance < 0:
        return 0.0
    if sample.high_watermark is not None and needed >= sample.high_watermark:
        return math.inf
    return _seconds(distance, approach)


def _seconds(records: int, per_second: float | None) -> float | None:
    """How long so many records take at this pace: never, if it does not lead there."""
    if per_second is None:
        return None
    return records / per_second if per_second > 0 else math.inf
