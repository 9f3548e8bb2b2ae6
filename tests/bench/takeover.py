"""Kill → next token: a node is killed with SIGKILL in the middle of an answer, and the client goes on at the other.

Node B is warm and stays; node A is a new one for each kill, daemon and engine, started while nothing is measured. The
synthetic engine, rows of an 8B model. What a router does is done by the client at once when its stream breaks, so
detection is that of the TCP connection. Each answer goes on to its end; what the log did not have yet is counted.
"""

from __future__ import annotations

import signal
import statistics
import time
from typing import TYPE_CHECKING

from tests.bench.client import Stream
from tests.bench.report import Row, percentile
from tests.nodes import Node

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.setting import LogPlace, Setting

__all__ = ["measure_takeover"]

_ROW_BYTES = 128 << 10
_PROMPT = "The cache is the conversation. " * 8
_TOKENS = 110
_CUT = 90
_MIB = 1 << 20
_PARTS = ("detect", "claim and catch up", "attach", "first token", "tokens computed anew")


def measure_takeover(setting: Setting) -> list[Row]:
    """Local log and Kafka."""
    kills = 3 if setting.quick else 20
    return [
        row
        for place in setting.logs(setting.fresh_folder("takeover"))
        for row in _on(setting.fresh_folder("takeover"), place, kills)
    ]


def _on(folder: Path, place: LogPlace, kills: int) -> list[Row]:
    totals: list[float] = []
    parts: list[tuple[float, ...]] = []
    b = _node(folder, "b", place, pool_bytes=2048 * _MIB)
    try:
        _answer(b, "warm")
        for kill in range(kills):
            a = _node(folder, f"a{kill}", place, pool_bytes=256 * _MIB)
            try:
                total, split = _kill(a, b, f"session-{kill}")
            finally:
                a.close()
            totals.append(total)
            parts.append(split)
    finally:
        b.close()
    return _rows(place, totals, parts)


def _node(folder: Path, name: str, place: LogPlace, *, pool_bytes: int) -> Node:
    sections: dict[str, dict[str, object]] = {
        **place.sections,
        "link": {"ring_bytes": 64 * _MIB},
        "pool": {"bytes": pool_bytes, "block_bytes": _MIB},
        "sync": {"codec": "raw"},
        "diagnostics": {"level": "info", "format": "json"},
    }
    engine = ("synthetic", "--row-bytes", str(_ROW_BYTES), "--tokens-per-second", "100")
    return Node.start(folder, name, place.url, engine=engine, **sections)


def _answer(node: Node, session: str) -> None:
    Stream(node.url).whole(prompt=_PROMPT, max_tokens=4, session=session)


def _kill(a: Node, b: Node, session: str) -> tuple[float, tuple[float, ...]]:
    """Milliseconds from the kill to the next token, and _PARTS."""
    _answer(a, f"warm-{a.name}")
    shown = Stream(a.url)
    other = Stream(b.url)
    stream = shown.ask(prompt=_PROMPT, max_tokens=_TOKENS, session=session)
    while len(next(stream).tokens) < _CUT:
        pass
    killed = time.monotonic()
    a.signal(signal.SIGKILL)
    *_, told = stream
    assert told.broken, "the answer was over before the kill"
    asked = time.monotonic()
    resumed = other.whole(
        prompt=_PROMPT, max_tokens=_TOKENS, session=session, resume_token_ids=list(told.tokens)
    )
    assert len(told.tokens) + len(resumed.tokens) == _TOKENS, "tokens were lost or repeated"
    assert resumed.kvlog["attached"] > 0, f"nothing to resume from: {resumed.kvlog}"
    assert resumed.first_token_at is not None, "it has tokens"
    opened, attached = resumed.kvlog["open_turn_ms"], resumed.kvlog["attach_ms"]
    detect = 1000 * (asked - killed)
    rest = 1000 * (resumed.first_token_at - asked) - opened - attached
    return 1000 * (resumed.first_token_at - killed), (
        detect,
        opened,
        attached,
        rest,
        resumed.kvlog["recomputed"],
    )


def _rows(place: LogPlace, totals: list[float], parts: list[tuple[float, ...]]) -> list[Row]:
    also = {
        f"p50 {name}": statistics.median(column)
        for name, column in zip(_PARTS, zip(*parts, strict=True), strict=True)
    }
    row = Row(
        measure="takeover",
        case=f"kill -9 of the node to next token, {place.name}, p50",
        unit="ms",
        values=tuple(round(total, 1) for total in totals),
        also=dict(also),
    )
    tail = Row(
        measure="takeover",
        case=f"kill -9 of the node to next token, {place.name}, p99",
        unit="ms",
        values=(round(percentile(totals, 99), 1),),
        also={"kills": len(totals)},
    )
    return [row, tail]
