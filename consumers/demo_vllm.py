"""The demo's engines when they are vLLM servers: from an environment of their own, with the connector and its witness.

Nothing but kvlog can give a server a row: its own prefix cache is off. So a prefill is a prefill, what was loaded came
from the log, and an untouched copy of a session is loaded as a whole.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx

from consumers.demo_error import DemoError
from consumers.demo_nodes import Engine, link_of
from consumers.demo_process import Runtime
from consumers.demo_vllm_client import PromptTokens, VllmClient, Witness
from consumers.exits import ExitCode
from consumers.plain_http import plain_client
from consumers.vllm_server import (
    MODULE,
    check_vllm,
    find_vllm,
    free_port,
    server_arguments,
    server_environment,
    transfer_config,
    why_ended,
)
from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

    from consumers.demo_model import Model
    from consumers.demo_nodes import Starting
    from consumers.demo_process import Processes, Program, ProgramGroup
    from consumers.vllm_server import VllmInstall

__all__ = ["VllmEngines", "VllmServing", "installed_vllm"]

_CONNECTOR = "kvlog.engines.vllm_witness:WitnessConnector"
_MIDDLEWARE = "kvlog.engines.vllm_fence.FenceMiddleware"
_START_SECONDS = 400.0
"""20 to 35 s on two idle cores, minutes on busy ones."""

_POLL_SECONDS = 0.1
_WAIT_SECONDS = 10.0
"""A request waits so long for its claim and its rows: longer than the default, for machines that do something else."""

_GIB = 1 << 30
_SESSIONS = 2
"""Whole conversations that fit the cache; one is asked at a time, and a finished one's blocks may still be held."""

_SOCKET_PATH_MAX = 107
"""Source: unix(7), sun_path without its closing zero."""

_SOCKET_NAME = 37
"""A random UUID, which vLLM names its own sockets by, and the separator before it."""

_TEMPORARY = "t"
_LONGEST_NAME = "a2"
"""Of the demo's nodes."""


def installed_vllm(given: Path | None, processes: Processes) -> VllmInstall:
    """Find the vLLM that the servers are started from. DemoError: there is none that can be used, or not from here."""
    longest = processes.folder / _LONGEST_NAME / _TEMPORARY
    if len(os.fsencode(longest)) + _SOCKET_NAME > _SOCKET_PATH_MAX:
        sentence = f"vLLM's sockets in {longest} would have longer names than the system allows."
        raise DemoError(sentence, fix="Set TMPDIR to a folder with a shorter name.", code=ExitCode.USAGE)
    try:
        return check_vllm(find_vllm(given, os.environ), processes.packages())
    except ConfigError as error:
        raise DemoError.of(error, "vLLM cannot be started:") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmServing:
    """What every server of one demo serves.

    Args:
        model: its folder.
        dtype: of weights and cache.
        positions: of the longest conversation.
        row_bytes: of one position.
    """

    model: Path
    dtype: str
    positions: int
    row_bytes: int

    @classmethod
    def of(cls, model: Model, dtype: str, positions: int) -> VllmServing:
        """From what was found; a model's own limit is not exceeded."""
        assert model.folder is not None, "a model of vLLM's is a folder"
        most = min(positions, model.positions_max or positions)
        return cls(model=model.folder, dtype=dtype, positions=most, row_bytes=model.row_bytes)

    @property
    def cache_gib(self) -> int:
        """The KV cache that this takes."""
        return math.ceil(_SESSIONS * self.positions * self.row_bytes / _GIB)

    def options(self, link: Path) -> list[str]:
        """Of the server. `link`: its daemon's socket."""
        transfer = transfer_config(_CONNECTOR, link, {"wait_seconds": _WAIT_SECONDS})
        return [
            *("--dtype", self.dtype, "--max-model-len", str(self.positions), "--no-enable-prefix-caching"),
            *("--middleware", _MIDDLEWARE, "--kv-transfer-config", transfer),
        ]


class VllmEngines:
    """Starts vLLM servers.

    Args:
        install: which vLLM.
        path: folder with our packages.
        serving: what they serve.
    """

    def __init__(self, install: VllmInstall, path: Path, serving: VllmServing) -> None:
        self._install = install
        self._path = path
        self._serving = serving
        self._prompts = PromptTokens()

    @property
    def word(self) -> str:
        """What one is called."""
        return "vLLM"

    @property
    def in_turn(self) -> bool:
        """A start keeps two cores busy."""
        return True

    def launch(self, group: ProgramGroup, name: str, *, has_daemon: bool) -> Starting:  # noqa: ARG002
        """Start one; it looks for a daemon as long as it lives, whether there is one or not."""
        port, temporary = free_port(), group.folder / _TEMPORARY
        temporary.mkdir()  # of this server alone: what it leaves there goes with the demo's folder
        witness = group.folder / "witness.jsonl"
        serving, python = self._serving, self._install.python
        environment = server_environment(path=self._path, witness=witness, cache_gib=serving.cache_gib)
        runtime = Runtime(python, {**environment, "TMPDIR": str(temporary)})
        arguments = [MODULE, *server_arguments(serving.model, port, *serving.options(link_of(group)))]
        program = group.start(f"vLLM {name}", arguments, runtime)
        client = VllmClient(f"http://127.0.0.1:{port}", Witness(witness), self._prompts)
        return _VllmStarting(program, group, f"http://127.0.0.1:{port}", client)


@dataclass(frozen=True, slots=True)
class _VllmStarting:
    program: Program
    group: ProgramGroup
    url: str
    client: VllmClient

    async def serving(self) -> Engine:
        deadline = time.monotonic() + _START_SECONDS
        async with plain_client() as client:
            while not await self._is_serving(client):
                if not self.program.is_alive:
                    said = "\n".join([*self.program.output(), *self.program.complaints()])
                    raise DemoError(f"{self.program.name} did not start: {why_ended(said)}")
                if time.monotonic() > deadline:
                    sentence = f"{self.program.name} did not start within {_START_SECONDS:.0f} s."
                    raise DemoError(sentence, fix="Is this machine very busy?")
                await asyncio.sleep(_POLL_SECONDS)
        self.group.note_shared_files()  # now, because whoever is killed in an act is gone before it can be asked
        return Engine(self.program, self.client)

    async def linked(self) -> None:
        """Whether it is shows by its first answer: the warm-up asks again until one is logged."""

    async def _is_serving(self, client: httpx.AsyncClient) -> bool:
        try:
            return (await client.get(f"{self.url}/health")).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False
