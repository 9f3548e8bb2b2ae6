"""Real daemons and engines over a real Kafka, and what tests ask of them: the log's fold, figures, the watchdog."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Self

import httpx

from consumers.plain_http import NO_AUTHORITIES
from consumers.reading import PartitionFold, home_of
from kvlog.ids import Offset, SessionId
from kvlog.log.settings import LogSettings, make_log
from tests.kafka.broker import free_ports
from tests.nodes import Node, daemon_config, whole_answer

if TYPE_CHECKING:
    from pathlib import Path


__all__ = ["PARTITIONS", "PROMPT", "Notified", "Place", "figures", "whole"]

PROMPT = "The cache is the conversation. " * 4
PARTITIONS = 4

whole = partial(whole_answer, prompt=PROMPT, max_tokens=20)
"""A whole answer."""


@dataclass(frozen=True)
class Place:
    """One test's topics on a cluster."""

    folder: Path
    bootstrap: str
    prefix: str

    @property
    def url(self) -> str:
        """The log's."""
        return f"kafka://{self.bootstrap}"

    @property
    def arguments(self) -> tuple[str, ...]:
        """Of a tool."""
        return ("--log", self.url, "--prefix", self.prefix)

    def node(self, name: str, *, engine: tuple[str, ...] = (), **sections: dict[str, object]) -> Node:
        """A node with an endpoint for figures; nothing of it is started."""
        log = {"topic_prefix": self.prefix, **sections.pop("log", {})}
        metrics: dict[str, object] = {"port": free_ports(1)[0]}
        config = daemon_config(self.folder, name, self.url, log=log, metrics=metrics, **sections)
        return Node(self.folder, name, config, ("synthetic", *engine))

    def length(self, session: str) -> int:
        """Positions of a session that a reader of everything finds; 0: none of it."""

        async def read() -> int:
            settings = LogSettings(url=self.url, topic_prefix=self.prefix)
            log = make_log(settings, read_only=True)
            try:
                await log.open()
                home = home_of(SessionId(session), log)
                fold = PartitionFold(log, home, first=Offset(0), end=(await log.bounds(home)).high_watermark)
                async for _ in fold.steps():
                    pass
            finally:
                await log.close()
            state = fold.core.session(SessionId(session))
            return state.length if state else 0

        return asyncio.run(read())


def figures(node: Node) -> dict[str, float]:
    """What the daemon's endpoint says now, by name and labels; it must answer within two seconds."""
    port = next(
        line.split()[-1] for line in node.config.read_text().splitlines() if line.startswith("port = ")
    )
    said = httpx.get(f"http://127.0.0.1:{port}/metrics", verify=NO_AUTHORITIES, timeout=2.0).text
    pairs = (line.rsplit(" ", 1) for line in said.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


class Notified:
    """What a daemon tells its service manager."""

    def __init__(self, folder: Path, *, watchdog_seconds: float) -> None:
        """Listen before the daemon starts."""
        self._path = folder / "notify"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._path))
        self._socket.settimeout(0)
        self._watchdog_seconds = watchdog_seconds

    def __enter__(self) -> Self:
        """Close it with the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self._socket.close()

    @property
    def environment(self) -> dict[str, str]:
        """Of the daemon."""
        return {"NOTIFY_SOCKET": str(self._path), "WATCHDOG_USEC": str(int(self._watchdog_seconds * 1e6))}

    def said(self) -> list[str]:
        """What has come since the last call."""
        found = []
        try:
            while True:
                found.append(self._socket.recv(4096).decode())
        except BlockingIOError:
            return found
