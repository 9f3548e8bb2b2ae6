"""Resume against re-prefill on the real model: the same request on the same warm node, with and without the log.

Node A answers, node B has followed its log. Resume: B is asked to go on under A's session: it claims, attaches and
computes what is missing. Re-prefill: B is asked the same under a session that nobody knows (token ids only, so that
nothing else is on its way). Between two resumes A takes the session back, so each is a take-over. float32, one thread.
"""

from __future__ import annotations

import random
import re
import statistics
import time
import urllib.request
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tests.bench.client import Stream
from tests.bench.report import Row, paired
from tests.kafka.broker import free_ports
from tests.nodes import Node, until

if TYPE_CHECKING:
    from pathlib import Path

    from tests.bench.client import Told
    from tests.bench.setting import Setting

__all__ = ["measure_resume"]

_LENGTHS = ((512, 3), (2048, 3), (4096, 2), (7168, 2))
"""Tokens of the prompt, and rounds: a prefill of the longest takes a minute and more."""
_LENGTHS_QUICK = ((512, 1),)
_ANSWERED = 64
"""Tokens that A has answered: while it does, its prefill's rows go out."""
_IDS = range(1000, 40_000)
_MIB = 1 << 20
_APPLIED_SECONDS = 120.0


def measure_resume(setting: Setting) -> list[Row]:
    """Each length."""
    folder = setting.fresh_folder("resume")
    place = setting.local_log(folder)
    port = free_ports(1)[0]
    nodes: list[Node] = []
    try:
        nodes.append(_node(folder, "a", place.sections, None))
        nodes.append(_node(folder, "b", place.sections, port))
        both = _Nodes(nodes[0], nodes[1], port)
        both.warm()
        lengths = _LENGTHS_QUICK if setting.quick else _LENGTHS
        rows = [_row(length, both.rounds(length, rounds)) for length, rounds in lengths]
        agreed: dict[str, float | str] = {"same next token": f"{both.agreed} of {both.resumed}"}
        return [replace(row, also=row.also | agreed) for row in rows]
    finally:
        for node in nodes:
            node.close()


def _node(folder: Path, name: str, sections: dict[str, dict[str, object]], port: int | None) -> Node:
    more: dict[str, dict[str, object]] = {
        **sections,
        "link": {"ring_bytes": 512 * _MIB},
        "pool": {"bytes": 1536 * _MIB, "block_bytes": _MIB},
        "sync": {"codec": "raw"},
        "diagnostics": {"level": "info", "format": "json"},
    }
    if port is not None:
        more["metrics"] = {"port": port}
    engine = ("transformers", "--model", "small", "--dtype", "float32", "--threads", "1")
    url = str(sections["log"]["url"])
    return Node.start(folder, name, url, engine=engine, **more)


@dataclass
class _Nodes:
    a: Node
    b: Node
    metrics_port: int
    resumed: int = 0
    agreed: int = 0

    def warm(self) -> None:
        """The first forward of a process is not like the others."""
        for node in (self.a, self.b):
            Stream(node.url).whole(prompt=list(range(1000, 1064)), max_tokens=4, temperature=0)

    def rounds(self, length: int, rounds: int) -> list[tuple[float, float]]:
        """Milliseconds to the next token of (resume, re-prefill)."""
        session = f"session-{length}"
        stored = self._rows_stored()
        prompt = [random.SystemRandom().choice(_IDS) for _ in range(length)]
        answer = self._ask(self.a, prompt, [], session, _ANSWERED).tokens
        assert len(answer) == _ANSWERED, "the model has ended its answer to random token ids: run it again"
        until(
            lambda: self._rows_stored() >= stored + length + _ANSWERED - 1,
            seconds=_APPLIED_SECONDS,
            what="A's rows at B",
        )
        pairs = []
        for _ in range(rounds):
            prefill = self._timed(prompt, answer, f"nobody-{length}-{self.resumed}", mode="ids")
            resume = self._timed(prompt, answer, session)
            known = length + len(answer)
            assert prefill[1].kvlog["attached"] == 0, "that was no prefill"
            assert resume[1].kvlog["attached"] >= known - 2, f"that was no resume: {resume[1].kvlog}"
            self.agreed += prefill[1].tokens == resume[1].tokens
            pairs.append((resume[0], prefill[0]))
            self._ask(self.a, prompt, answer, session, len(answer) + 1)
            time.sleep(0.5)
            self.resumed += 1
        return pairs

    def _timed(
        self, prompt: list[int], answer: list[int], session: str, mode: str = "full"
    ) -> tuple[float, Told]:
        stream = Stream(self.b.url)
        body = _body(prompt, answer, session, len(answer) + 1)
        began = time.monotonic()
        told = stream.whole(**body, sync=mode)
        assert told.first_token_at is not None, "it has a token"
        return 1000 * (told.first_token_at - began), told

    def _ask(self, node: Node, prompt: list[int], answer: list[int], session: str, tokens: int) -> Told:
        return Stream(node.url).whole(**_body(prompt, answer, session, tokens))

    def _rows_stored(self) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=10) as page:
            found = re.search(r"^kvlog_rows_stored_total (\S+)", page.read().decode(), re.MULTILINE)
        return float(found[1]) if found else 0.0


def _body(prompt: list[int], answer: list[int], session: str, tokens: int) -> dict[str, object]:
    return {
        "prompt": prompt,
        "resume_token_ids": answer,
        "session": session,
        "max_tokens": tokens,
        "temperature": 0,
    }


def _row(length: int, pairs: list[tuple[float, float]]) -> Row:
    bare = Row(
        measure="resume",
        case=f"attach and go on, SmolLM2-135M float32, {length} + {_ANSWERED} tokens",
        unit="ms",
        values=(),
        against="re-prefill on the same node",
        also={"times faster": statistics.median(prefill / resume for resume, prefill in pairs)},
    )
    return paired(bare, pairs)
