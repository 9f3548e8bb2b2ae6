"""A process group as the kernel knows it: who is in it, and which files of /dev/shm they use.

What is killed cannot clean up, and its names in /dev/shm are random: only while its processes live can be known which
files are theirs. Nobody else's are touched that way.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["living_members", "shared_files"]

_SHARED = re.compile(r"/dev/shm/[^/\s]+$")  # noqa: S108 - not a temporary file of ours: what others have there
_STATE, _GROUP = 0, 2
"""Fields after the name in /proc/PID/stat: state, parent, group. Source: proc_pid_stat(5)."""


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
    """Files of /dev/shm that processes of a group have mapped or open now, and that still have a name."""
    return {file for member in living_members(group) for file in _files_of(member)}


def _files_of(pid: int) -> set[Path]:
    process, names = Path("/proc") / str(pid), []
    with suppress(OSError):  # it has just ended, or is another user's
        names += [line.split(maxsplit=5)[-1] for line in (process / "maps").read_text().splitlines()]
        names += [str(link.readlink()) for link in (process / "fd").iterdir()]
    return {Path(name) for name in names if _SHARED.match(name)}
