"""What a run of real processes may leave behind on a machine that others use too: only what is its own is looked at.

A process is of the run if it works in one of the run's folders, or has a file there open, as each server and each of
its children has its output there; a socket if it is bound in one. Memory without a name (memfd) lives as long as a
process that holds it: of the run, or we ourselves.
"""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

__all__ = ["Leftovers"]

_MEMFD = "/memfd:"
_STATE = 0
"""The first field after the name in /proc/PID/stat. Source: proc_pid_stat(5)."""

_SOCKET_PATH = 7
"""Field of a line of /proc/net/unix. Source: unix(7)."""


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What the run in some folders has left; empty: nothing.

    Args:
        processes: id and name of those that live.
        sockets: paths that somebody is bound to.
        memfds: names of nameless memory that this process holds.
    """

    processes: tuple[str, ...]
    sockets: tuple[str, ...]
    memfds: tuple[str, ...]

    @classmethod
    def of(cls, folders: Collection[Path]) -> Leftovers:
        """Look now. The folders may be gone: the kernel still says where a file was."""
        roots = tuple(f"{folder}/" for folder in folders)
        return cls(
            tuple(f"{pid} {_name(pid)}" for pid in _others() if _is_of(pid, roots)),
            tuple(path for path in _bound() if path.startswith(roots)),
            tuple(sorted(target for target in _open_of(os.getpid()) if target.startswith(_MEMFD))),
        )

    def __bool__(self) -> bool:
        """Something is left."""
        return bool(self.processes or self.sockets or self.memfds)


def _others() -> Iterator[int]:
    for path in Path("/proc").glob("[0-9]*"):
        pid = int(path.name)
        with suppress(OSError):  # it has just ended
            fields = (path / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if pid != os.getpid() and fields[_STATE] != "Z":
                yield pid


def _is_of(pid: int, roots: tuple[str, ...]) -> bool:
    with suppress(OSError):
        if f"{os.readlink(f'/proc/{pid}/cwd')}/".startswith(roots):  # noqa: PTH115 - Path would resolve it
            return True
    return any(target.startswith(roots) for target in _open_of(pid))


def _open_of(pid: int) -> Iterator[str]:
    with suppress(OSError):  # it has just ended, or is another user's
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with suppress(OSError):  # it was closed
                yield os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115


def _bound() -> Iterator[str]:
    for line in Path("/proc/net/unix").read_text(errors="replace").splitlines()[1:]:
        fields = line.split(maxsplit=_SOCKET_PATH)
        if len(fields) > _SOCKET_PATH:
            yield fields[_SOCKET_PATH]


def _name(pid: int) -> str:
    with suppress(OSError):
        said = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        return said.strip()[:200]
    return ""
