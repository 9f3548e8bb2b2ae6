"""The demo's nodes: a kvlogd and an engine each, in one process group; and an engine that has no node at all."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from consumers.demo_error import DemoError
from kvlog.log.local import write_lock_holder
from kvlog.log.locate import parse_log_url

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from consumers.demo_process import Processes, Program, ProgramGroup
    from kvlog.log.settings import LogSettings

__all__ = ["Engine", "Node", "NodePlan", "start_engine", "start_node"]

_DAEMON_SECONDS = 60.0
_ENGINE_SECONDS = 240.0
"""It loads a model: 5 s on two idle cores, a minute on busy ones."""

_LINK_SECONDS = 30.0
_POLL_SECONDS = 0.02
_STOPS_MAX = 200
"""How often a node is continued for a moment because it was stopped while it held the local log's write lock."""

_STOP_PAUSE_SECONDS = 0.003


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """What all nodes of one demo have in common.

    Args:
        log: where it is.
        prefix: what the nodes' names begin with in the log.
        engine: arguments of `python -m kvlog.engines`, without link and port.
        pool_bytes: of each daemon.
    """

    log: LogSettings
    prefix: str
    engine: tuple[str, ...]
    pool_bytes: int


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine and its address."""

    program: Program
    url: str


@dataclass(frozen=True, slots=True)
class Node:
    """A running node."""

    name: str
    group: ProgramGroup
    daemon: Program
    engine: Engine

    @property
    def url(self) -> str:
        """Its engine's address."""
        return self.engine.url

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
    config = _write_config(group.folder, name, plan)
    daemon = group.start(f"kvlogd {name}", ["daemon", "run", "--config", str(config)])
    socket = str(group.folder / "link.sock")
    engine = group.start(f"engine {name}", ["kvlog.engines", *plan.engine, "--link", socket, "--port", "0"])
    await daemon.wait_for(
        lambda: bool(daemon.events("log_opened")), seconds=_DAEMON_SECONDS, what=f"the start of {daemon.name}"
    )
    node = Node(name, group, daemon, await _ready(engine))
    await _linked(node)
    return node


async def start_engine(processes: Processes, name: str, plan: NodePlan) -> Engine:
    """Start an engine without a daemon: it can have got no row from anywhere.

    DemoError: it did not start; see the sentence.
    """
    group = processes.group(name)
    return await _ready(group.start(f"engine {name}", ["kvlog.engines", *plan.engine, "--port", "0"]))


async def _ready(engine: Program) -> Engine:
    def lines() -> list[str]:
        return [line for line in engine.output() if line.startswith("ready ")]

    await engine.wait_for(lambda: bool(lines()), seconds=_ENGINE_SECONDS, what=f"the start of {engine.name}")
    return Engine(engine, lines()[0].split()[1])


async def _linked(node: Node) -> None:
    deadline = time.monotonic() + _LINK_SECONDS
    async with httpx.AsyncClient(trust_env=False) as client:
        while not (await client.get(f"{node.url}/health", timeout=_LINK_SECONDS)).json()["connected"]:
            if time.monotonic() > deadline:
                raise DemoError(
                    f"{node.engine.program.name} found no daemon: {node.engine.program.last_words()}"
                )
            await asyncio.sleep(_POLL_SECONDS)


def _write_config(folder: Path, name: str, plan: NodePlan) -> Path:
    """Only what differs from the defaults. Secrets come by the environment."""
    log = plan.log.model_dump(
        mode="json", exclude={"kafka": {"password", "ssl_key_password"}}, exclude_none=True
    )
    kafka = log.pop("kafka")
    sections: dict[str, Mapping[str, object]] = {
        "node": {"id": f"{plan.prefix}-{name}"},
        "log": log,
        "log.kafka": kafka,
        "link": {"socket": str(folder / "link.sock")},
        "pool": {"bytes": plan.pool_bytes},
        "diagnostics": {"level": "debug", "format": "json"},
    }
    text = "".join(
        f"[{section}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in values.items()) + "\n"
        for section, values in sections.items()
    )
    config = folder / "kvlogd.toml"
    config.write_text(text)
    return config
