"""The demo's nodes: a kvlogd and an engine each, in one process group; and an engine that has no daemon, or not yet."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from consumers.demo_client import EngineClient
from consumers.demo_error import DemoError
from consumers.plain_http import plain_client
from kvlog.log.local import write_lock_holder
from kvlog.log.locate import parse_log_url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from consumers.demo_client import Client
    from consumers.demo_process import Processes, Program, ProgramGroup
    from kvlog.log.settings import LogSettings

__all__ = [
    "Engine",
    "Engines",
    "LoneEngine",
    "Node",
    "NodePlan",
    "OwnEngines",
    "Starting",
    "add_daemon",
    "link_of",
    "start_engine",
    "start_node",
]

_DAEMON_SECONDS = 60.0
_ENGINE_SECONDS = 240.0
"""It loads a model: 5 s on two idle cores, a minute on busy ones."""

_LINK_SECONDS = 30.0
_POLL_SECONDS = 0.02
_STOPS_MAX = 200
"""How often a node is continued for a moment because it was stopped while it held the local log's write lock."""

_STOP_PAUSE_SECONDS = 0.003


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine, and how to ask it."""

    program: Program
    client: Client


class Starting(Protocol):
    """An engine that has been started and does not serve yet."""

    async def serving(self) -> Engine:
        """Wait until it takes requests. DemoError: it does not start; see the sentence."""
        ...

    async def linked(self) -> None:
        """Wait until it has found its daemon, once both serve. DemoError: it does not find it."""
        ...


class Engines(Protocol):
    """How the engines of one demo are started.

    `word`: what one is called. `in_turn`: one is started after the other, since each takes all cores to start.
    """

    @property
    def word(self) -> str:
        """What one is called."""
        ...

    @property
    def in_turn(self) -> bool:
        """One is started after the other, since each takes all cores to start."""
        ...

    def launch(self, group: ProgramGroup, name: str, *, has_daemon: bool) -> Starting:
        """Start one in a group; it looks for its daemon at `link_of(group)`, if it has one."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What all nodes of one demo have in common.

    Args:
        log: where it is.
        prefix: what the nodes' names begin with in the log.
        engines: how they are started.
        pool_bytes: of each daemon.
    """

    log: LogSettings
    prefix: str
    engines: Engines
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class LoneEngine:
    """A running engine without a daemon: it can have got no row from anywhere."""

    name: str
    group: ProgramGroup
    engine: Engine


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    name: str
    group: ProgramGroup
    daemon: Program
    engine: Engine

    @property
    def client(self) -> Client:
        """How to ask its engine."""
        return self.engine.client

    async def stop_daemon(self, log: LogSettings) -> None:
        """SIGSTOP to the daemon, at a moment when nobody else has to wait for it.

        A writer of the local log that is stopped within a transaction would hold up all others, as with any lock: it is
        continued for a moment then. DemoError: it holds the lock whenever it is stopped.
        """
        directory = parse_log_url(log.url).directory
        for _ in range(_STOPS_MAX):
            self.daemon.send(signal.SIGSTOP)
            await asyncio.sleep(_STOP_PAUSE_SECONDS)
            holder = write_lock_holder(directory) if directory else None
            if holder is None or holder.pid != self.daemon.pid:
                return
            self.daemon.send(signal.SIGCONT)
            await asyncio.sleep(_STOP_PAUSE_SECONDS)
        raise DemoError(f"{self.daemon.name} cannot be stopped without the log's write lock.")


async def start_node(processes: Processes, name: str, plan: NodePlan) -> Node:
    """Start a daemon and an engine and wait until both work together.

    DemoError: one of them did not start; see the sentence.
    """
    group = processes.group(name)
    daemon = _start_daemon(group, name, plan)
    starting = plan.engines.launch(group, name, has_daemon=True)
    await _log_opened(daemon)
    node = Node(name, group, daemon, await starting.serving())
    await starting.linked()
    return node


async def start_engine(processes: Processes, name: str, plan: NodePlan) -> LoneEngine:
    """Start an engine without a daemon.

    DemoError: it did not start; see the sentence.
    """
    group = processes.group(name)
    return LoneEngine(name, group, await plan.engines.launch(group, name, has_daemon=False).serving())


async def add_daemon(lone: LoneEngine, plan: NodePlan) -> Node:
    """Start a daemon for an engine that had none; the engine must look for one.

    DemoError: it did not start; see the sentence.
    """
    daemon = _start_daemon(lone.group, lone.name, plan)
    await _log_opened(daemon)
    return Node(lone.name, lone.group, daemon, lone.engine)


def link_of(group: ProgramGroup) -> Path:
    """Where a node's engine finds its daemon."""
    return group.folder / "link.sock"


@dataclass(frozen=True, slots=True)
class OwnEngines:
    """Engines of `python -m kvlog.engines`.

    Args:
        arguments: without link and port.
    """

    arguments: tuple[str, ...]

    @property
    def word(self) -> str:
        """What one is called."""
        return "engine"

    @property
    def in_turn(self) -> bool:
        """They start side by side."""
        return False

    def launch(self, group: ProgramGroup, name: str, *, has_daemon: bool) -> Starting:
        """Start one."""
        link = ("--link", str(link_of(group))) if has_daemon else ()
        return _OwnStarting(
            group.start(f"engine {name}", ["kvlog.engines", *self.arguments, *link, "--port", "0"])
        )


@dataclass(frozen=True, slots=True)
class _OwnStarting:
    program: Program

    async def serving(self) -> Engine:
        what = f"the start of {self.program.name}"
        await self.program.wait_for(lambda: bool(self._url()), seconds=_ENGINE_SECONDS, what=what)
        return Engine(self.program, EngineClient(self._url()))

    async def linked(self) -> None:
        deadline = time.monotonic() + _LINK_SECONDS
        async with plain_client() as client:
            while not (await client.get(f"{self._url()}/health", timeout=_LINK_SECONDS)).json()["connected"]:
                if time.monotonic() > deadline:
                    raise DemoError(f"{self.program.name} found no daemon: {self.program.last_words()}")
                await asyncio.sleep(_POLL_SECONDS)

    def _url(self) -> str:
        """Its address; empty: it does not serve yet."""
        lines = [line for line in self.program.output() if line.startswith("ready ")]
        return lines[0].split()[1] if lines else ""


def _start_daemon(group: ProgramGroup, name: str, plan: NodePlan) -> Program:
    config = _write_config(group, name, plan)
    return group.start(f"kvlogd {name}", ["daemon", "run", "--config", str(config)])


async def _log_opened(daemon: Program) -> None:
    await daemon.wait_for(
        lambda: bool(daemon.events("log_opened")), seconds=_DAEMON_SECONDS, what=f"the start of {daemon.name}"
    )


def _write_config(group: ProgramGroup, name: str, plan: NodePlan) -> Path:
    """Only what differs from the defaults. Secrets come by the environment."""
    log = plan.log.model_dump(
        mode="json", exclude={"kafka": {"password", "ssl_key_password"}}, exclude_none=True
    )
    kafka = log.pop("kafka")
    sections: dict[str, Mapping[str, object]] = {
        "node": {"id": f"{plan.prefix}-{name}"},
        "log": log,
        "log.kafka": kafka,
        "link": {"socket": str(link_of(group))},
        "pool": {"bytes": plan.pool_bytes},
        "diagnostics": {"level": "debug", "format": "json"},
    }
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + "\n"
        for section, values in sections.items()
    )
    config = group.folder / "kvlogd.toml"
    config.write_text(text)
    return config
