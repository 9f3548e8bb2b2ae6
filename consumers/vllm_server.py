"""How a vLLM server is started from here: which interpreter, and the command line and environment of the proofs.

vLLM lives in an environment of its own, with kvlog's few dependencies and nothing else of ours; the kvlog that it
imports is the one that runs here. Proofs need rows that are the same whoever computes them: float32, and one thread
that stays where it is, since another number of threads is another rounding.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "MODULE",
    "SERVED_NAME",
    "VERSION",
    "VllmInstall",
    "check_vllm",
    "find_vllm",
    "free_port",
    "server_arguments",
    "server_environment",
    "transfer_config",
    "why_ended",
]

MODULE = "vllm.entrypoints.openai.api_server"
SERVED_NAME = "m"
_VARIABLE = "KVLOG_VLLM_PYTHON"
_SETTING = f"--vllm-python or {_VARIABLE}"
_CHECK_SECONDS = 60.0

VERSION = "0.32"
"""What to install; the connector itself says which versions it serves."""

_HOW = (
    f"Install vLLM {VERSION} for the CPU into an environment of its own, with kvlog beside it (docs/vllm.md; in a"
    f" checkout, make venv-vllm does both), and name its Python by {_SETTING}"
)
_NAME_IT = f"Name the Python of the environment that has vLLM, by {_SETTING}"

_CHECK = """
import importlib.metadata as metadata, importlib.util as util, json, sys
found = {"python": sys.version_info[:2], "vllm": None, "missing": [], "window": None}
if util.find_spec("vllm") is not None:
    names = metadata.packages_distributions().get("vllm") or ["vllm"]
    found["vllm"] = metadata.version(names[0])
wanted = ("msgpack", "lz4", "xxhash", "zstandard", "numpy")
found["missing"] = [name for name in wanted if util.find_spec(name) is None]
if sys.version_info >= (3, 11):
    from kvlog.engines.vllm_support import VERSIONS
    found["window"] = VERSIONS
print(json.dumps(found))
"""
"""Run by the other interpreter, which may be any; vLLM itself is not imported, that takes seconds."""

_PYTHON_MIN = (3, 11)

_ERROR = re.compile(r"(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt)): (\S.*)$")
_LAST_WORDS = 400
_NOT_THE_CAUSE = ("Engine core initialization failed", "Failed core proc")


@dataclass(frozen=True, slots=True)
class VllmInstall:
    """An interpreter that has vLLM, and which."""

    python: Path
    version: str


def find_vllm(given: Path | None, environment: Mapping[str, str]) -> Path:
    """The interpreter that is meant: the one that is given, else KVLOG_VLLM_PYTHON, else this one if it has vLLM.

    Raises:
        ConfigError: none of them.
    """
    named = given or (Path(environment[_VARIABLE]) if environment.get(_VARIABLE) else None)
    if named is not None:
        return named.expanduser().absolute()  # not resolved: a virtual environment is found by its link
    if importlib.util.find_spec("vllm") is not None:
        return Path(sys.executable)
    problem = f"vLLM is not installed here ({sys.executable}), and no other Python is named"
    raise ConfigError(setting=_SETTING, problem=problem, fix=_HOW)


def check_vllm(python: Path, path: Path) -> VllmInstall:
    """Ask an interpreter what it has.

    Args:
        python: the interpreter.
        path: folder with our packages, for its PYTHONPATH.

    Raises:
        ConfigError: it is none, or has no vLLM, or one that is not served, or lacks what kvlog needs.
    """
    found = _asked(python, path)
    if found.python < _PYTHON_MIN:
        problem = f"{python} is Python {_dotted(found.python)}, and kvlog needs {_dotted(_PYTHON_MIN)}"
        raise ConfigError(setting=_SETTING, problem=problem, fix=_HOW)
    if not found.vllm:
        raise ConfigError(setting=_SETTING, problem=f"{python} has no vLLM", fix=_HOW)
    if found.missing:
        missing = " ".join(found.missing)
        raise ConfigError(
            setting=_SETTING,
            problem=f"{python} has vLLM, and lacks what kvlog needs beside it: {missing}",
            fix=f"{python} -m pip install {missing}",
        )
    least, below = found.window
    version = tuple(int(number) for number in re.findall(r"\d+", found.vllm)[:2])
    if not least <= version < below:
        problem = f"{python} has vLLM {found.vllm}, and the connector is tested with {_dotted(least)}"
        raise ConfigError(
            setting=_SETTING,
            problem=problem,
            fix=f"Install vLLM {_dotted(least)} there, or name another Python",
        )
    return VllmInstall(python, found.vllm)


@dataclass(frozen=True, slots=True)
class _Found:
    """What an interpreter says of itself. `vllm`: its version; empty: none. `window`: the versions that are served."""

    python: tuple[int, ...]
    vllm: str
    missing: tuple[str, ...]
    window: tuple[tuple[int, ...], ...]

    @classmethod
    def read(cls, text: str) -> _Found:
        said = json.loads(text)
        window = tuple(tuple(version) for version in said["window"] or ())
        return cls(tuple(said["python"]), said["vllm"] or "", tuple(said["missing"]), window)


def _asked(python: Path, path: Path) -> _Found:
    environment = {**os.environ, "PYTHONPATH": str(path)}
    try:
        done = subprocess.run(
            [python, "-c", _CHECK],
            capture_output=True,
            text=True,
            check=False,
            env=environment,
            timeout=_CHECK_SECONDS,
        )
        return _Found.read(done.stdout)
    except OSError as error:
        problem = f"{python} cannot be run: {error.strerror}"
    except subprocess.TimeoutExpired:
        problem = f"{python} did not answer within {_CHECK_SECONDS:.0f} s"
    except (ValueError, KeyError, TypeError):
        words = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        problem = f"{python} is no Python that can be used: {words}"
    raise ConfigError(setting=_SETTING, problem=problem, fix=_NAME_IT)


def free_port() -> int:
    """A port of this machine that nobody listened on a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def server_arguments(model: Path, port: int, *options: str) -> list[str]:
    """Arguments of MODULE. `options`: more of them."""
    return [
        *("--model", str(model), "--served-model-name", SERVED_NAME),
        *("--host", "127.0.0.1", "--port", str(port), "--enforce-eager"),
        *options,
    ]


def transfer_config(connector: str, link: Path, extra: Mapping[str, object]) -> str:
    """The value of --kv-transfer-config.

    Args:
        connector: module:class.
        link: kvlogd's socket.
        extra: other keys of kv_connector_extra_config.
    """
    module, _, name = connector.partition(":")
    return json.dumps(
        {
            "kv_connector": name,
            "kv_connector_module_path": module,
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"link": str(link), **extra},
        }
    )


def server_environment(*, path: Path, witness: Path, cache_gib: int = 1) -> dict[str, str]:
    """What a server's environment has beside the user's.

    Args:
        path: folder with our packages.
        witness: file of kvlog.engines.vllm_witness.
        cache_gib: of the KV cache, GiB.
    """
    return {
        "PYTHONPATH": str(path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
        "VLLM_CPU_OMP_THREADS_BIND": str(min(os.sched_getaffinity(0))),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "KVLOG_VLLM_WITNESS": str(witness),
    }


def why_ended(output: str) -> str:
    """The cause in what a server wrote before it ended: its first error that is no consequence; or its last words."""
    lines = output.splitlines()
    for number, line in enumerate(lines):
        match = _ERROR.search(line)
        if match and not match[2].startswith(_NOT_THE_CAUSE):
            more = takewhile(
                lambda line: line.startswith(" "), lines[number + 1 :]
            )  # pydantic says what below
            said = " ".join([match[2], *(part.strip() for part in more)])
            return f"{match[1].rpartition('.')[2]}: {said}"[:_LAST_WORDS]
    return " ".join(lines)[-_LAST_WORDS:] or "it said nothing"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
