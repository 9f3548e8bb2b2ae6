"""A take-over on vLLM, and where its time goes: A's node is killed in mid-answer, the client goes on at B at once.

Nobody has to notice the kill here, so detection is 0. The daemon says how long its claim took to be in the log, and to
be read back, which is when everything before it was applied. The connector says what copying and verifying took, and
putting rows into blocks. What is left of the time to the next token is vLLM's: HTTP, steps in which the request waits,
and the last token's. Beside it the prefill of as many other tokens on the same server.
"""

from __future__ import annotations

import random
import signal
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import httpx

from consumers.plain_http import NO_AUTHORITIES
from tests.bench.report import Row
from tests.bench.vllm_servers import ROW_BYTES, launch_timed, start_daemon
from tests.nodes import Node, ask, until
from tests.vllm.servers import VllmServer

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

__all__ = ["measure_vllm_takeover"]

_LENGTHS: Final = (512, 2048)
_ANSWERED: Final = 48
_COUNTED: Final = ("loaded_tokens", "stage_seconds", "load_seconds")


def measure_vllm_takeover(folder: Path, a: tuple[Node, VllmServer], *, quick: bool) -> list[Row]:
    """One kill of A for each length; `a` is running, with kvlog's connector, and is dead or anew afterwards."""
    node, server = a
    b = VllmServer(folder, "b", server.model)
    beside = start_daemon(folder, "b")
    rows: list[Row] = []
    try:
        launch_timed(b, "TimedKvlog", folder / "b.sock")
        b.wait_ready()
        _first_ms(b, _drawn(64, 1), "warm")
        for length in _LENGTHS[:1] if quick else _LENGTHS:
            if not server.is_running:
                node.start_daemon()
                node.wait_log()
                launch_timed(server, "TimedKvlog", folder / f"{node.name}.sock")
                server.wait_ready()
            rows.append(_row(length, _kill((node, server), (beside, b), length)))
    finally:
        b.kill()
        beside.close()
    return rows


@dataclass(frozen=True)
class _Split:
    """Milliseconds, and rows."""

    total: float
    prefill: float
    claim: float
    catch_up: float
    stage: float
    scatter: float
    known: int
    loaded: int


def _kill(a: tuple[Node, VllmServer], b: tuple[Node, VllmServer], length: int) -> _Split:
    session, prompt = f"killed-{length}", _drawn(length, length)
    shown: list[int] = []
    for answer in ask(a[1].url, seconds=600.0, **_body(prompt, session, 400)):
        shown = answer.tokens
        if len(shown) >= _ANSWERED:
            a[0].signal(signal.SIGKILL)
            a[1].kill()
            a[0].kill()
            break
    known = [*prompt, *shown]
    before = _counted(b[1])
    total = _first_ms(b[1], known, session, take_over=True)
    until(lambda: _counted(b[1])[0] > before[0], what="the load in vLLM's metrics")
    loaded, stage, scatter = (now - then for now, then in zip(_counted(b[1]), before, strict=True))
    prefills = [_first_ms(b[1], _drawn(len(known), length + n), f"nobody-{length}-{n}") for n in (1, 2, 3)]
    assert b[0].daemon is not None, "it runs"
    said = [each for each in b[0].daemon.events("takeover_completed") if each["session"] == session][-1]
    times = (said.get("claim_ms", 0.0), said.get("read_back_ms", 0.0), 1000 * stage, 1000 * scatter)
    return _Split(total, statistics.median(prefills), *times, known=len(known), loaded=int(loaded))


def _row(length: int, split: _Split) -> Row:
    seconds = (split.stage + split.scatter) / 1000
    rest = split.total - split.claim - split.catch_up - split.stage - split.scatter
    return Row(
        measure="vllm",
        case=f"kill -9 of the node to next token, SmolLM2, {length} + {_ANSWERED} tokens",
        unit="ms",
        values=(split.total,),
        against="prefill of as many tokens",
        their_values=(split.prefill,),
        ratio=split.total / split.prefill,
        also={
            "detect": "0 (by hand)",
            "claim": split.claim,
            "catch up": split.catch_up,
            "copy and verify": split.stage,
            "into blocks": split.scatter,
            "vLLM and first token": rest,
            "rows loaded": split.loaded,
            "rows computed": split.known - split.loaded,
            "load GB/s": split.loaded * ROW_BYTES / seconds / 1e9 if seconds else 0.0,
        },
    )


def _drawn(count: int, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(1000, 40_000) for _ in range(count)]


def _body(prompt: Sequence[int], session: str, tokens: int) -> dict[str, object]:
    return {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "session_id": session,
    }


def _first_ms(server: VllmServer, tokens: Sequence[int], session: str, *, take_over: bool = False) -> float:
    """Milliseconds to the next token."""
    more = {"kv_transfer_params": {"kvlog": {"take_over": True}}} if take_over else {}
    began, first = time.monotonic(), 0.0
    for answer in ask(server.url, seconds=600.0, **_body(tokens, session, 4), **more):
        assert answer.error is None, answer.error
        first = first or time.monotonic() - began
    return 1000 * first


def _counted(server: VllmServer) -> list[float]:
    """What the connector has counted so far, of _COUNTED."""
    lines = httpx.get(f"{server.url}/metrics", verify=NO_AUTHORITIES, timeout=10).text.splitlines()
    return [
        sum(float(line.split()[-1]) for line in lines if line.startswith(f"vllm:kvlog_{name}_total"))
        for name in _COUNTED
    ]
