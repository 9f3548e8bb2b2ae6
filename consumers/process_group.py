"""A process group as the kernel knows it: who is in it, and which files of /dev/shm they use.

What is killed cannot clean up, and its names in /dev/shm are random: only while its processes live can be known which
files are theirs. Nobody else's are touched that way.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["living_members", "shared_files", "shared_files_of"]

_SHARED = Path("/dev/shm")  # noqa: S108 - not a temporary file of ours: what others have there
_STATE, _GROUP = 0, 2
"""Fields after the name in /proc/PID/stat: state, parent, group. Source: proc_pid_stat(5)."""

_DEVICE, _INODE, _PATH = 3, 4, 5
"""Fields of a line of /proc/PID/maps. Source: proc_pid_maps(5)."""

File = tuple[int, int]
"""Device and inode."""


def living_members(group: int) -> list[int]:
    """Process ids of a group; whoever has ended and was not reaped is not in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = path.read_text(errors="replace").rpartition(")")[2].split()
            if int(fields[_GROUP]) == group and fields[_STATE] != "Z":
                found.append(int(path.parent.name))
    return found


def shared_files(group: int) -> set[Path]:
    """Files of /dev/shm that processes of a group use; see `shared_files_of`."""
    return shared_files_of(living_members(group))


def shared_files_of(processes: Iterable[int]) -> set[Path]:
    """Files of /dev/shm that processes have mapped or open now, and that still have a name.

    Told by inode: a semaphore is made under one name, and linked to the one that it keeps.
    """
    used = {file for process in processes for file in (*_mapped(process), *_open(process))}
    found = set()
    with suppress(OSError):  # there is no such folder here, or it is not ours to read
        for path in _SHARED.iterdir():
            with suppress(OSError):  # it is gone
                stat = path.lstat()
                if (stat.st_dev, stat.st_ino) in used:
                    found.add(path)
    return found


def _mapped(pid: int) -> set[File]:
    found = set()
    with suppress(OSError):  # it has just ended, or is another user's
        for line in (Path("/proc") / str(pid) / "maps").read_text().splitlines():
            fields = line.split(maxsplit=_PATH)
            if len(fields) > _PATH and fields[_PATH].startswith(f"{_SHARED}/"):
                major, minor = fields[_DEVICE].split(":")
                found.add((os.makedev(int(major, 16), int(minor, 16)), int(fields[_INODE])))
    return found


def _open(pid: int) -> set[File]:
    found = set()
    with suppress(OSError):
        for link in (Path("/proc") / str(pid) / "fd").iterdir():
            with suppress(OSError):  # it was closed, or is no file
                stat = link.stat()
                found.add((stat.st_dev, stat.st_ino))
    return found
