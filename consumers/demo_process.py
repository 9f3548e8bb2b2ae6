"""The demo's processes: programs in process groups of their own, which can be killed, stopped and continued as a whole.

Nothing outlives the demo: its end kills every group, and the kernel kills every program whose parent has died
(consumers.demo_child).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from consumers.demo_error import DemoError
from consumers.process_group import living_members, shared_files

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

__all__ = ["Processes", "Program", "ProgramGroup", "Runtime", "until"]

_CHILD = "consumers.demo_child"
_POLL_SECONDS = 0.01
_REAP_SECONDS = 10.0
"""After SIGKILL; a process with gigabytes takes a moment to give them back."""

_LAST_WORDS = 400
_ROOT = Path(__file__).resolve().parents[1]
_PACKAGES = ("kvlog", "consumers")
"""Ours that another interpreter needs."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """What a program runs on.

    Args:
        python: the interpreter.
        environment: what its environment has beside, or instead of, the group's.
    """

    python: Path = Path(sys.executable)
    environment: Mapping[str, str] = field(default_factory=dict)


_OURS = Runtime()


async def until(condition: Callable[[], bool], *, seconds: float, what: str) -> None:
    """Wait until it holds. DemoError: it did not, for so long."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise DemoError(
                f"{what} did not happen within {seconds:.0f} s.", fix="Is this machine very busy?"
            )
        await asyncio.sleep(_POLL_SECONDS)


class Program:
    """One started program; what it writes goes into two files.

    Args:
        name: for people.
        process: started.
        out: file with its standard output.
        err: file with its standard error.
    """

    def __init__(self, name: str, process: subprocess.Popen[bytes], *, out: Path, err: Path) -> None:
        self.name = name
        self._process = process
        self._out = out
        self._err = err

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it runs, or is stopped."""
        return self._process.poll() is None

    def output(self) -> list[str]:
        """The lines of its standard output so far."""
        return self._out.read_text(errors="replace").splitlines()

    def complaints(self) -> list[str]:
        """The lines of its standard error so far."""
        return self._err.read_text(errors="replace").splitlines()

    def events(self, name: str, session: str | None = None) -> list[dict[str, Any]]:
        """The diagnostics events of this name, of one session if one is given, oldest first."""
        found = []
        for line in self.complaints():
            if f'"{name}"' not in line:
                continue
            with contextlib.suppress(ValueError):  # the last line may be half written
                event = json.loads(line)
                if event.get("event") == name and session in {None, event.get("session")}:
                    found.append(event)
        return found

    async def wait_for(self, condition: Callable[[], bool], *, seconds: float, what: str) -> None:
        """Wait until it holds. DemoError: the program died first, with its last words, or it took too long."""
        await until(lambda: not self.is_alive or condition(), seconds=seconds, what=what)
        if not self.is_alive and not condition():
            raise DemoError(f"{self.name} ended ({self._ending()}): {self.last_words()}")

    def last_words(self) -> str:
        """The end of its standard error, in one line."""
        return " ".join(self.complaints())[-_LAST_WORDS:] or "it said nothing"

    def send(self, number: int) -> None:
        """Signal it, if it is there."""
        if self.is_alive:
            self._process.send_signal(number)

    def reap(self) -> None:
        """Wait for its end, which must have been asked for."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_REAP_SECONDS)

    def _ending(self) -> str:
        code = self._process.returncode
        return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


class ProgramGroup:
    """Programs of one process group: what dies together when a node dies. The first program leads it."""

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self.folder = folder
        self._environment = environment
        self._programs: list[Program] = []
        self._shared: set[Path] = set()

    def start(self, name: str, arguments: Sequence[str], runtime: Runtime = _OURS) -> Program:
        """Start `python -m ARGUMENTS` in this group.

        DemoError: the group's first program has died already.
        """
        leader = self._programs[0] if self._programs else None
        file = self.folder / name.replace(" ", "-")
        out, err = file.with_suffix(".out"), file.with_suffix(".err")
        try:
            with out.open("wb") as stdout, err.open("wb") as stderr:
                process = subprocess.Popen(
                    [runtime.python, "-m", _CHILD, str(os.getpid()), *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=stderr,
                    env={**self._environment, **runtime.environment},
                    process_group=leader.pid if leader else 0,
                )
        except (ProcessLookupError, PermissionError) as error:  # setpgid: no such group
            assert leader is not None, "a group of its own always can be made"
            raise DemoError(f"{leader.name} ended: {leader.last_words()}") from error
        program = Program(name, process, out=out, err=err)
        self._programs.append(program)
        return program

    def note_shared_files(self) -> None:
        """Note which files of /dev/shm its processes use, those that programs of it have started too: for `reap`."""
        if self._is_ours:
            self._shared |= shared_files(self._programs[0].pid)

    def kill(self) -> None:
        """SIGKILL to all of it at once."""
        self._signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGSTOP to all of it at once."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """SIGCONT to all of it at once."""
        self._signal(signal.SIGCONT)

    def reap(self) -> None:
        """Wait for the end of all of it, after `kill`, and remove what it has left in /dev/shm."""
        deadline = time.monotonic() + _REAP_SECONDS
        while (
            self._is_ours and len(living_members(self._programs[0].pid)) > 0 and time.monotonic() < deadline
        ):
            time.sleep(_POLL_SECONDS)  # also for those that are not our children
        for program in self._programs:
            program.reap()
        for file in self._shared:
            with contextlib.suppress(OSError):  # most remove their own, and others' are not ours to remove
                file.unlink()

    @property
    def _is_ours(self) -> bool:
        """One of our own, not reaped children is in it: the number of a group that is gone may be another's."""
        return any(program.is_alive for program in self._programs)

    def _signal(self, number: int) -> None:
        if self._is_ours:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._programs[0].pid, number)


class Processes:
    """Every group of one demo, and the folder that they live in.

    Args:
        folder: empty; each group gets a folder of its own in it.
        kept: names of environment variables of kvlog that programs may see; the user's others are not for them.
    """

    def __init__(self, folder: Path, kept: Callable[[str], bool]) -> None:
        self.folder = folder
        self._kept = kept
        self._groups: list[ProgramGroup] = []

    def group(self, name: str) -> ProgramGroup:
        """A new group, without programs yet."""
        folder = self.folder / name
        folder.mkdir()
        group = ProgramGroup(folder, self._environment())
        self._groups.append(group)
        return group

    def packages(self) -> Path:
        """A folder for the path of another interpreter: it has our packages and nothing else of our environment."""
        folder = self.folder / "path"
        folder.mkdir(exist_ok=True)
        for name in _PACKAGES:
            with contextlib.suppress(FileExistsError):
                (folder / name).symlink_to(_ROOT / name, target_is_directory=True)
        return folder

    def close(self) -> None:
        """Kill everything, whatever state it is in, and wait until it is gone."""
        for group in self._groups:
            try:
                group.note_shared_files()
            finally:
                group.kill()
        for group in self._groups:
            group.reap()

    def _environment(self) -> dict[str, str]:
        """Ours, without settings of other daemons, with this kvlog first on the path."""
        seen = {
            name: value
            for name, value in os.environ.items()
            if not (name.startswith("KVLOG_") and "__" in name) or self._kept(name)
        }
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return seen | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONUNBUFFERED": "1"}
