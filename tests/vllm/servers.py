"""Real vLLM servers for tests: one process group each, from a virtual environment of their own, and what they leave."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from consumers.process_group import living_members, shared_files
from consumers.vllm_server import (
    MODULE,
    check_vllm,
    free_port,
    server_arguments,
    server_environment,
    transfer_config,
)
from kvlog.checksums import DIGEST_BYTES
from kvlog.errors import ConfigError
from kvlog.ids import Shard
from kvlog.wire.replayed import PREFIX_BYTES, read_head
from tests.nodes import until
from tests.processes import die_with_parent

__all__ = ["ROOT", "LoggedSession", "VllmServer", "logged_session", "vllm_python", "why_not"]

ROOT = Path(__file__).parents[2]
_START_SECONDS = 400.0


def vllm_python() -> Path:
    """Gives the interpreter of the environment that has vLLM: KVLOG_VLLM_PYTHON, or what .ci/venv-vllm has made."""
    return Path(os.environ.get("KVLOG_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))


@functools.cache
def why_not() -> str:
    """Says why vLLM cannot be run here; empty: it can."""
    python = vllm_python()
    if not python.exists():
        return f"no vLLM: {python} is not there; make venv-vllm makes it where the wheel can be had"
    try:
        check_vllm(python, ROOT)
    except ConfigError as error:
        return f"no vLLM: {error.fields['problem']}"
    return ""


class VllmServer:
    """One `vllm serve`, with the watched connector, or without any."""

    def __init__(self, folder: Path, name: str, model: Path) -> None:
        self.folder = folder
        self.name = name
        self.model = model
        self.url = ""
        self.watch = folder / f"{name}-watch.jsonl"
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: Path | None = None
        self._shared: set[Path] = set()

    def launch(self, link: Path | None, *options: str, **extra: object) -> None:
        """Start it; it is not there yet.

        Args:
            link: the daemon's socket; None: without a connector.
            options: of `vllm serve`.
            extra: keys of kv_connector_extra_config.
        """
        port = free_port()
        arguments = server_arguments(
            self.model, port, "--dtype", "float32", "--max-model-len", "4096", *options
        )
        if link is not None:
            arguments += [
                "--kv-transfer-config",
                transfer_config("tests.vllm.watched:WatchedConnector", link, extra),
            ]
        self.url = f"http://127.0.0.1:{port}"
        self._temporary = Path(tempfile.mkdtemp(prefix="kvlog-vllm-"))  # short: vLLM's sockets are in it
        environment = {
            **os.environ,
            **server_environment(path=ROOT, witness=self.watch),
            "TMPDIR": str(self._temporary),
        }
        with (self.folder / f"{self.name}.log").open("ab") as log:
            self._process = subprocess.Popen(
                [vllm_python(), "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                cwd=self.folder,
                env=environment,
            )

    @property
    def output(self) -> str:
        """What it has written."""
        return (self.folder / f"{self.name}.log").read_text(errors="replace")

    @property
    def is_running(self) -> bool:
        """It was started, and nobody has killed it."""
        return self._process is not None

    def wait_ready(self) -> None:
        """Wait until it takes requests."""
        until(self._is_serving, seconds=_START_SECONDS, what=f"{self.name} serving")
        if not self._shared:  # when it is killed there is no time to ask
            assert self._process is not None
            self._shared = shared_files(self._process.pid)

    def _is_serving(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended:\n{self.output[-4000:]}"
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.url}/health", timeout=2).status_code == httpx.codes.OK
        return False

    def kill(self) -> None:
        """SIGKILL to the whole process group, and remove what vLLM leaves behind then."""
        process = self._process
        if process is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        until(lambda: not living_members(process.pid), what=f"the end of {self.name}")
        process.wait()
        self._process = None
        for path in self._shared:
            path.unlink(missing_ok=True)
        self._shared = set()
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def newest_turn(self) -> dict[str, Any] | None:
        """The turn of any session that ended last; None: none has."""
        lines = self.watch.read_text().splitlines() if self.watch.exists() else []
        newest: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
        return newest

    def turns(self, session: str) -> list[dict[str, Any]]:
        """What the watched connector said of a session's ended turns."""
        lines = self.watch.read_text().splitlines() if self.watch.exists() else []
        return [line for line in map(json.loads, lines) if line["session"] == session]

    def last_turn(self, session: str, count: int = 1) -> dict[str, Any]:
        """The newest ended turn of a session, once there are so many."""
        until(
            lambda: len(self.turns(session)) >= count, what=f"turn {count} of {session} ended at {self.name}"
        )
        return self.turns(session)[-1]


@dataclass(frozen=True)
class LoggedSession:
    """A session as the log has it."""

    tokens: list[int]
    rows: int
    layers: list[np.ndarray]

    def digests(self, positions: int) -> list[str]:
        """As kvlog.engines.kv_digests has them."""
        return [
            hashlib.blake2b(layer[:positions].tobytes(), digest_size=DIGEST_BYTES).hexdigest()
            for layer in self.layers
        ]


def logged_session(log_url: str, session: str, folder: Path) -> LoggedSession:
    """Rebuild a session from the log by `kvlog replay`."""
    out = folder / f"replayed-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "consumers", "replay", session, "--log", log_url, "--out", str(out)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, preexec_fn=die_with_parent
    )
    assert done.returncode == 0, done.stdout + done.stderr
    whole = np.fromfile(out, np.uint8)
    size = int.from_bytes(bytes(whole[:PREFIX_BYTES]), "little")
    replayed = read_head(bytes(whole[: PREFIX_BYTES + size]))
    data = whole[PREFIX_BYTES + size :]
    layers = []
    for layer in range(replayed.identity.layout.layers):
        at = replayed.layer_at(Shard(0), layer)
        layers.append(data[at : at + replayed.layer_bytes].reshape(replayed.positions, -1))
    tokens = data[: replayed.tokens_bytes].view(np.int64).tolist()
    return LoggedSession(tokens, replayed.positions, layers)
