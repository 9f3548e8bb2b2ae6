"""Real nodes for tests and benchmarks: a kvlogd and an engine as processes, over a log, and a client that streams.

Every process dies with the test process (tests.processes), and is a group of its own: a whole node can be killed.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import httpx
import numpy as np

from consumers.plain_http import NO_AUTHORITIES
from consumers.reading import PartitionFold
from kvlog.buffers.ring import session_hash
from kvlog.checksums import partition_of
from kvlog.engines.synthetic import SyntheticModel, SyntheticOptions
from kvlog.ids import Offset, Partition, SessionId
from kvlog.log.local import LocalLog, LocalLogOptions
from kvlog.wire.tables import NODES, decode_node
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = [
    "Answer",
    "Node",
    "Process",
    "ask",
    "daemon_config",
    "last",
    "logged_length",
    "nodes_started_by",
    "running",
    "says_busy",
    "synthetic_answer",
    "until",
    "whole_answer",
]

_START_SECONDS = 60.0


def until(condition: Callable[[], bool], *, seconds: float = 10.0, what: str = "the condition") -> None:
    """Wait until it holds; fail with its name when it does not in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what} did not come true within {seconds} s")
        time.sleep(0.01)


class Process:
    """One child process with its output in a file."""

    def __init__(
        self, arguments: Sequence[str], output: Path, environment: dict[str, str] | None = None
    ) -> None:
        self._output = output
        self._from = output.stat().st_size if output.exists() else 0
        with output.open("ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,  # not a session: see tests.processes
                preexec_fn=die_with_parent,
                env={**os.environ, **(environment or {})},
            )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    @property
    def output(self) -> str:
        """What it has written."""
        with self._output.open("rb") as file:
            file.seek(self._from)
            return file.read().decode(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The diagnostics events of this name."""
        marked = f'"{name}"'
        whole = self.output.rpartition("\n")[0].splitlines()  # the last line may be half written
        lines = [json.loads(line) for line in whole if line.startswith("{") and marked in line]
        return [line for line in lines if line.get("event") == name]

    def send(self, number: int) -> None:
        """Signal it."""
        if self.code is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = 20.0) -> int:
        """Wait for its end; the exit code."""
        return self._process.wait(seconds)

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and wait; killed if it does not end."""
        self.send(number)
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.send(signal.SIGKILL)
            self.wait()
            raise AssertionError(
                f"a process did not end after signal {number}:\n{self.output[-2000:]}"
            ) from None


StartProgram: TypeAlias = "Callable[[Sequence[str], Path, dict[str, str] | None], Process]"
"""Starts `python -m ARGUMENTS` with its output in a file and more in its environment."""


@dataclass
class _Starting:
    """How nodes are started. It is of the whole test process: what starts them is, too."""

    program: StartProgram


_starting = _Starting(Process)


@contextmanager
def nodes_started_by(start: StartProgram) -> Iterator[None]:
    """Start daemons and engines otherwise than by a new interpreter."""
    before, _starting.program = _starting.program, start
    try:
        yield
    finally:
        _starting.program = before


def daemon_config(folder: Path, name: str, log_url: str, **sections: dict[str, object]) -> Path:
    """Write a daemon's TOML file with small sizes."""
    values: dict[str, dict[str, object]] = {
        "node": {"id": name},
        "log": {"url": log_url, "partitions": 4},
        "link": {"socket": str(folder / f"{name}.sock"), "ring_bytes": 8 << 20},
        "pool": {"bytes": 64 << 20, "block_bytes": 1 << 18},
        "diagnostics": {"level": "debug", "format": "json"},
    }
    for section, more in sections.items():
        values.setdefault(section, {}).update(more)
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in each.items())
        for section, each in values.items()
    )
    path = folder / f"{name}.toml"
    path.write_text(text)
    return path


@dataclass
class Node:
    """One daemon and one engine.

    Args:
        start_engine_program: None: the engine is started as the daemon is, see `nodes_started_by`.
    """

    folder: Path
    name: str
    config: Path
    engine_arguments: tuple[str, ...] = ("synthetic", "--tokens-per-second", "100")
    daemon: Process | None = None
    engine: Process | None = None
    url: str = ""
    start_engine_program: StartProgram | None = None

    @classmethod
    def start(
        cls,
        folder: Path,
        name: str,
        log_url: str,
        *,
        engine: tuple[str, ...] | None = None,
        **sections: dict[str, object],
    ) -> Self:
        """Start both and wait until the engine takes requests and the daemon has its log."""
        node = cls(folder, name, daemon_config(folder, name, log_url, **sections))
        if engine is not None:
            node.engine_arguments = engine
        node.start_daemon()
        node.wait_log()
        node.start_engine()
        return node

    def launch_daemon(self, environment: dict[str, str] | None = None) -> Process:
        """Start a daemon; it is not there yet. A process dies with the thread that started it."""
        output = self.folder / f"{self.name}-daemon.log"
        self.daemon = _starting.program(["daemon", "run", "--config", str(self.config)], output, environment)
        return self.daemon

    def start_daemon(self, environment: dict[str, str] | None = None) -> Process:
        """Start a daemon and wait for its socket."""
        daemon = self.launch_daemon(environment)
        until(
            lambda: bool(daemon.events("daemon_ready")) or daemon.code is not None,
            seconds=_START_SECONDS,
            what=f"daemon {self.name} ready",
        )
        return daemon

    def wait_log(self) -> None:
        """Wait until the daemon follows its log."""
        daemon = self.daemon
        assert daemon is not None
        until(lambda: bool(daemon.events("log_opened")), seconds=_START_SECONDS, what="log opened")

    def launch_engine(self) -> Process:
        """Start an engine; it is not there yet. A process dies with the thread that started it."""
        self.url = ""
        output = self.folder / f"{self.name}-engine-{time.monotonic_ns()}.log"
        arguments = [
            "kvlog.engines",
            *self.engine_arguments,
            "--link",
            str(self.folder / f"{self.name}.sock"),
        ]
        self.engine = (self.start_engine_program or _starting.program)(arguments, output, None)
        return self.engine

    def start_engine(self) -> Process:
        """Start an engine and wait until it takes requests."""
        engine = self.launch_engine()
        until(
            lambda: self.is_serving() or engine.code is not None, seconds=_START_SECONDS, what="engine ready"
        )
        assert engine.code is None, engine.output
        return engine

    def is_serving(self) -> bool:
        """Whether the engine takes requests; `url` says where, from then on."""
        lines = self.engine.output.splitlines() if self.engine else []
        ready = [line for line in lines if line.startswith("ready http")]
        self.url = ready[0].split()[1] if ready else ""
        return bool(ready)

    def signal(self, number: int) -> None:
        """Signal daemon and engine."""
        for process in (self.engine, self.daemon):
            if process is not None:
                process.send(number)

    def kill(self) -> None:
        """The whole node dies at once."""
        self.signal(signal.SIGKILL)
        for process in (self.engine, self.daemon):
            if process is not None:
                process.wait()

    def turns(self, session: str) -> list[dict[str, Any]]:
        """What the daemon said of a session's turns and claims, for failure messages."""
        assert self.daemon is not None
        names = (
            "turn_opened",
            "turn_unlogged",
            "turn_ended",
            "takeover_completed",
            "rows_absent",
            "session_broken",
        )
        return [e for name in names for e in self.daemon.events(name) if e.get("session") == session]

    def close(self) -> None:
        """End what still runs; SIGCONT first, since a stopped process does not end."""
        for process in (self.engine, self.daemon):
            if process is not None and process.code is None:
                process.send(signal.SIGCONT)
                process.stop(signal.SIGKILL)


@dataclass
class Answer:
    """A streamed answer."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    kvlog: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] | None = None
    done: bool = False


def synthetic_answer(prompt: Sequence[int] | str, count: int, *, row_bytes: int = 4096) -> list[int]:
    """What every synthetic engine with rows of that size must answer, computed here, from nothing."""
    model = SyntheticModel(SyntheticOptions(row_bytes=row_bytes))
    cache, answer = model.new_cache(), []
    new = model.encode(prompt) if isinstance(prompt, str) else list(prompt)
    for _ in range(count):
        new = [int(np.argmax(model.forward(cache, new)))]
        answer += new
    return answer


def logged_length(directory: Path, session: str, *, partitions: int = 4) -> int:
    """Positions of a session that a reader of everything finds in a local log; 0: none of it."""

    async def read() -> int:
        log = LocalLog(directory, LocalLogOptions(partitions=partitions, read_only=True))
        await log.open()
        home = Partition(partition_of(SessionId(session), partitions))
        fold = PartitionFold(log, home, first=Offset(0), end=(await log.bounds(home)).high_watermark)
        async for _ in fold.steps():
            pass
        await log.close()
        state = fold.core.session(SessionId(session))
        return state.length if state else 0

    return asyncio.run(read())


def says_busy(directory: Path, name: str, session: str) -> bool:
    """Whether a node's newest heartbeat in a local log says that it has a turn of the session in progress."""

    async def read() -> bool:
        log = LocalLog(directory, LocalLogOptions(read_only=True))
        await log.open()
        rows = await (await log.table(NODES)).refresh()
        await log.close()
        said = [decode_node(row.value) for row in rows if row.key == name.encode() and row.value]
        return bool(said) and session_hash(session) in said[-1].busy

    return asyncio.run(read())


def ask(url: str, *, seconds: float = 60.0, **body: object) -> Iterator[Answer]:
    """Stream a completion: yields the answer so far after each chunk; a broken stream ends with an error."""
    answer = Answer()
    request = {"stream": True, "return_token_ids": True, **body}
    try:
        with httpx.stream(
            "POST", f"{url}/v1/completions", verify=NO_AUTHORITIES, json=request, timeout=seconds
        ) as response:
            if response.status_code != httpx.codes.OK:
                answer.error = {"status": response.status_code, "body": response.read().decode()}
                yield answer
                return
            for line in response.iter_lines():
                if line.startswith("data: "):
                    _take(answer, line.removeprefix("data: "))
                    yield answer
    except httpx.HTTPError as error:
        answer.error = {"type": "connection", "message": str(error)}
        yield answer


def _take(answer: Answer, data: str) -> None:
    if data == "[DONE]":
        answer.done = True
        return
    chunk = json.loads(data)
    if "error" in chunk:
        answer.error = chunk["error"]
        return
    for choice in chunk.get("choices", []):
        answer.tokens += choice.get("token_ids") or []
        answer.text += choice.get("text") or ""
    usage = chunk.get("usage") or {}
    answer.kvlog = usage.get("kvlog") or chunk.get("kvlog") or answer.kvlog


@contextmanager
def running(nodes: Sequence[Node]) -> Iterator[None]:
    """Start daemons, then engines, all at once, and wait until every engine serves; they are gone afterwards."""
    try:
        for node in nodes:
            node.launch_daemon()
        for node in nodes:
            node.wait_log()
            node.launch_engine()
        for node in nodes:
            until(node.is_serving, seconds=60, what=node.name)
        yield
    finally:
        for node in nodes:
            node.close()


def last(stream: Iterator[Answer]) -> Answer:
    """The answer at its end."""
    *_, answer = stream
    return answer


def whole_answer(node: Node, session: str, **body: Any) -> Answer:
    """A whole answer of a session, without an error."""
    answer = last(ask(node.url, session=session, **body))
    assert (None, True) == (answer.error, answer.done)
    return answer
