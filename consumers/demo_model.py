"""Gets the demo's model by the engine's own program, in a process: nothing here imports an engine."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from consumers.demo_error import DemoError
from consumers.demo_process import until
from consumers.exits import ExitCode
from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

    from consumers.demo_process import Processes

__all__ = ["Model", "find_model", "synthetic_model"]

_SECONDS = 1800.0
"""A download of 270 MB over a slow line, and a conversion on a busy machine; the program has deadlines of its own."""

_ROW_BYTES_UNKNOWN = 128 << 10
_SYNTHETIC_ROW_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Model:
    """What the engines are to load.

    Args:
        name: for people.
        arguments: of `python -m kvlog.engines`, engine first.
        row_bytes: of one position, as far as it can be told before it is loaded; for the size of the pools.
        warning: what the reader of its answers must know; empty: nothing.
        folder: where its files are; None: it has none.
        positions_max: of its context; None: it says none.
    """

    name: str
    arguments: tuple[str, ...]
    row_bytes: int
    warning: str
    folder: Path | None = None
    positions_max: int | None = None


def synthetic_model() -> Model:
    """No model: see kvlog.engines.synthetic."""
    return Model("synthetic", ("synthetic",), _SYNTHETIC_ROW_BYTES, "")


async def find_model(processes: Processes, choice: str, dtype: str, tell: Callable[[str], None]) -> Model:
    """Find the model, or fetch it the first time.

    Args:
        processes: where its program runs.
        choice: small, random, or a folder.
        dtype: of weights and cache.
        tell: told what takes time.

    DemoError: it cannot be had.
    """
    program = processes.group("model").start("model", ["kvlog.engines.models", choice])
    told = 0

    def ended() -> bool:
        nonlocal told
        said = program.complaints()
        for line in said[told:]:
            if not line.startswith(("error: ", "warning: ")):
                tell(line)
        told = len(said)
        return not program.is_alive

    await until(ended, seconds=_SECONDS, what="finding the model")
    found = program.output()
    if not found:
        raise _not_had(choice, program.last_words())
    folder = Path(found[-1])
    warnings = [
        line.removeprefix("warning: ") for line in program.complaints() if line.startswith("warning: ")
    ]
    arguments = ("transformers", "--model", str(folder), "--dtype", dtype, "--threads", "1")
    return Model(
        name=folder.name,
        arguments=arguments,
        row_bytes=_row_bytes(folder, dtype),
        warning=" ".join(warnings),
        folder=folder,
        positions_max=_positions_max(folder),
    )


def _not_had(choice: str, words: str) -> DemoError:
    """From the program's last words: a ConfigError as text, or whatever else went wrong."""
    found = re.search(r"problem: (.*), fix: (.*?)\)\. ", words)
    if found is None:
        return DemoError(f"The model {choice!r} cannot be had: {words}", code=ExitCode.USAGE)
    error = ConfigError(problem=found[1], fix=found[2])
    return DemoError.of(error, f"The model {choice!r} cannot be had:")


def _positions_max(folder: Path) -> int | None:
    try:
        return int(json.loads((folder / "config.json").read_bytes())["max_position_embeddings"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _row_bytes(folder: Path, dtype: str) -> int:
    """From the configuration of a Llama-like model; a guess for another one."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // heads
        elements = 2 * config["num_hidden_layers"] * config.get("num_key_value_heads", heads) * head_dim
        return int(elements) * (2 if dtype == "bfloat16" else 4)
    except (OSError, ValueError, KeyError, TypeError):
        return _ROW_BYTES_UNKNOWN
