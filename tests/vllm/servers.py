"""Real vLLM servers for tests: one process group each, from a virtual environment of their own, and what they leave."""

from __future__ import annotations

import functools
import hashlib
import http.client
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import httpx
import numpy as np
import pytest

from consumers.demo_vllm_client import Witness
from consumers.plain_http import NO_AUTHORITIES
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

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.vllm.forked import ForkedProcess, ForkedServers

__all__ = [
    "ROOT",
    "LoggedSession",
    "VllmServer",
    "logged_session",
    "run_vllm_python",
    "vllm_python",
    "why_not",
]

ROOT = Path(__file__).parents[2]
_START_SECONDS = 400.0
_GONE_SECONDS = 10.0


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


def run_vllm_python(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Run vLLM's interpreter, without an engine; skips where there is none."""
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return subprocess.run(
        [vllm_python(), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", **quiet},
        preexec_fn=die_with_parent,
    )


class VllmServer:
    """One `vllm serve`, with the watched connector, or without any.

    `folders`: for temporary files, of all servers that this process has launched; gone when their servers are.
    `launches`: how often this one was started.
    `forks`: whose fork it is; None: it is started from nothing.
    """

    folders: ClassVar[list[Path]] = []

    def __init__(self, folder: Path, name: str, model: Path, *, cores: str = "0") -> None:
        """`cores`: those of each rank, as VLLM_CPU_OMP_THREADS_BIND has them."""
        self.folder = folder
        self._cores = cores
        self.name = name
        self.model = model
        self.url = ""
        self.watch = folder / f"{name}-watch.jsonl"
        self._acked = folder / f"{name}-acked.json"
        self._fail_loads = folder / f"{name}-fail-loads"
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self.forks: ForkedServers | None = None
        self.launches = 0

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
        self.folders.append(self._temporary)
        environment = {
            **os.environ,
            **server_environment(path=ROOT, witness=self.watch),
            "VLLM_CPU_OMP_THREADS_BIND": self._cores,
            "VLLM_SERVER_DEV_MODE": "1",  # /reset_prefix_cache, /pause, /sleep
            "TMPDIR": str(self._temporary),
            "KVLOG_TEST_ACKED": str(self._acked),
            "KVLOG_TEST_FAIL_LOADS": str(self._fail_loads),
        }
        self._process = self._start([str(one) for one in arguments], environment)
        self.launches += 1

    def _start(
        self, arguments: list[str], environment: dict[str, str]
    ) -> subprocess.Popen[bytes] | ForkedProcess:
        path = self.folder / f"{self.name}.log"
        if self.forks is not None:
            return self.forks.launch(arguments, environment, folder=self.folder, log=path)
        with path.open("ab") as log:
            return subprocess.Popen(
                [vllm_python(), "-m", MODULE, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                process_group=0,  # not a session: see tests.processes
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
        until(self.is_serving, seconds=_START_SECONDS, what=f"{self.name} serving")

    def is_serving(self) -> bool:
        """It takes requests. Cheap, because it is asked all the time while servers start on the same cores."""
        assert self._process is not None
        assert self._process.poll() is None, f"{self.name} ended:\n{self.output[-4000:]}"
        asked = http.client.HTTPConnection(self.url.removeprefix("http://"), timeout=2)
        try:
            asked.request("GET", "/health")
            return asked.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False
        finally:
            asked.close()

    def kill(self) -> None:
        """SIGKILL to the whole process group, and remove what vLLM leaves behind then."""
        process = self._process
        if process is None:
            return
        left = shared_files(process.pid)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        self._process = None
        until(lambda: not living_members(process.pid), seconds=_GONE_SECONDS, what=f"the end of {self.name}")
        for path in left:
            path.unlink(missing_ok=True)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)

    def post(self, path: str, **query: str) -> dict[str, Any]:
        """POST without a body, as the endpoints of the development mode want it; the answer."""
        answer = httpx.post(f"{self.url}/{path}", verify=NO_AUTHORITIES, params=query, timeout=60)
        assert answer.status_code == httpx.codes.OK, answer.text
        said: dict[str, Any] = answer.json()
        return said

    @contextmanager
    def failing_loads(self) -> Iterator[None]:
        """Within this, rows cannot be put into blocks."""
        self._fail_loads.touch()
        try:
            yield
        finally:
            self._fail_loads.unlink()

    def acked(self, session: str) -> int:
        """Positions of a session's turn in progress that were acknowledged when its last step was over."""
        return self.all_acked().get(session, 0)

    def all_acked(self) -> dict[str, int]:
        """The same of all sessions."""
        known: dict[str, int] = json.loads(self._acked.read_bytes().rstrip(b"\0") or b"{}")
        return known

    def newest_turn(self) -> dict[str, Any] | None:
        """The turn of any session that ended last; None: none has."""
        told = Witness(self.watch).told()
        return told[-1] if told else None

    def turns(self, session: str, rank: int = 0) -> list[dict[str, Any]]:
        """What the watched connector of one rank said of a session's ended turns."""
        watch = self.watch if rank == 0 else Path(f"{self.watch}.{rank}")
        return Witness(watch).turns(session)

    def last_turn(self, session: str, count: int = 1, rank: int = 0) -> dict[str, Any]:
        """The newest ended turn of a session, once there are so many."""
        until(
            lambda: len(self.turns(session, rank)) >= count,
            what=f"turn {count} of {session} ended at {self.name}",
        )
        return self.turns(session, rank)[-1]


@dataclass(frozen=True)
class LoggedSession:
    """A session as the log has it."""

    tokens: list[int]
    rows: int
    layers: list[np.ndarray]

    def differs_from(self, other: LoggedSession, positions: int) -> float:
        """How far the rows of the first positions lie apart, as float32: the largest difference of two elements.

        Rows that are computed in another batch, or piece of a prefill, differ by rounding; those of another token, or
        another position, by far more.
        """
        parts = zip(self.layers, other.layers, strict=True)
        return max(
            float(np.abs(one[:positions].view(np.float32) - two[:positions].view(np.float32)).max())
            for one, two in parts
        )

    def digests(self, positions: int, first: int = 0) -> list[str]:
        """As kvlog.engines.kv_digests has them."""
        return [
            hashlib.blake2b(layer[first:positions].tobytes(), digest_size=DIGEST_BYTES).hexdigest()
            for layer in self.layers
        ]


def logged_session(log_url: str, session: str, folder: Path, shard: int = 0) -> LoggedSession:
    """Rebuild a session's shard from the log by `kvlog replay`."""
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
        at = replayed.layer_at(Shard(shard), layer)
        layers.append(data[at : at + replayed.layer_bytes].reshape(replayed.positions, -1))
    tokens = data[: replayed.tokens_bytes].view(np.int64).tolist()
    return LoggedSession(tokens, replayed.positions, layers)
