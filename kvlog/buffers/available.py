"""How much memory this process can still get: the machine's, or less where a cgroup says so.

An estimate for a refusal at start, not a reservation: other processes may take it a moment later.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["available_bytes"]

_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_DEPTH_MAX = 64
"""A cgroup path deeper than this is not read on; systemd's are about 5 deep."""


def available_bytes(*, proc: Path = _PROC, cgroups: Path = _CGROUPS) -> int | None:
    """The least of MemAvailable and what each cgroup above this process still allows; None where neither can be read.

    Args:
        proc: where procfs is mounted.
        cgroups: where the cgroup file systems are mounted, version 2 or 1.
    """
    room = [*_machine_room(proc), *_cgroup_room(proc, cgroups)]
    return max(0, min(room)) if room else None


def _machine_room(proc: Path) -> Iterator[int]:
    for line in _lines(proc / "meminfo"):
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            yield int(value.split()[0]) << 10


def _cgroup_room(proc: Path, cgroups: Path) -> Iterator[int]:
    for line in _lines(proc / "self" / "cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            for folder in _upwards(cgroups, path):
                yield from _room(folder, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            for folder in _upwards(cgroups / "memory", path):
                yield from _room(
                    folder, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
                )


def _upwards(root: Path, path: str) -> Iterator[Path]:
    parts = [part for part in path.split("/") if part][:_CGROUP_DEPTH_MAX]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _room(folder: Path, limit_name: str, used_name: str, reclaimable_name: str) -> Iterator[int]:
    limit, used = _number(folder / limit_name), _number(folder / used_name)
    if limit is None or used is None:
        return
    # Page cache that nobody uses counts as used, but the kernel gives it up before it refuses us.
    stat = dict(line.split(None, 1) for line in _lines(folder / "memory.stat") if " " in line)
    yield limit - used + int(stat.get(reclaimable_name, "0"))


def _number(file: Path) -> int | None:
    text = "".join(_lines(file)).strip()
    return int(text) if text.isdigit() else None


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
