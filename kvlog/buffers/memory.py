"""Memory that processes share without a name: a sealed memfd, mapped by both sides.

No file exists, so none is left behind: the kernel frees the memory when the last process that has it ends, however it
ends. Seals keep a peer from shrinking it, which would turn our next read into SIGBUS. Where only the creator writes
(the pool), F_SEAL_FUTURE_WRITE is set after the creator has mapped it: from then on nobody, not even the same user with
a descriptor that was reopened through /proc, can map or write it.

All pages are allocated at `create`: too little memory is an error at start, not a SIGBUS in the night.
Source: memfd_create(2), fcntl(2) "File Sealing"
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import stat
from typing import TYPE_CHECKING, Self

import numpy as np

from kvlog.buffers.available import available_bytes
from kvlog.errors import ConfigError, DecodeError

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["SealedMemory", "attach", "create"]

_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_F_SEAL_FUTURE_WRITE = 0x0010
"""Linux 5.1 and later; Python's fcntl does not name it. Source: linux/fcntl.h"""

_AVAILABLE_PERCENT_MAX = 95
"""The most of the available memory that one `create` takes; the rest is for page tables and everybody else."""

_ALLOCATE_STEP_BYTES = 1 << 30
"""A signal makes the kernel undo one call of fallocate; in steps, a start makes progress whatever signals come."""


class SealedMemory:
    """One mapping of a sealed memfd. Not for use by several threads while it is being closed."""

    def __init__(self, fd: int, mapping: mmap.mmap, *, writable: bool) -> None:
        self._fd = fd
        self._mapping = mapping
        self._view = memoryview(mapping) if writable else memoryview(mapping).toreadonly()

    @property
    def fd(self) -> int:
        """The memfd, owned by this object; whoever gets it over a socket can map it as this object's rights allow."""
        return self._fd

    @property
    def size_bytes(self) -> int:
        """Size in bytes, which never changes."""
        return len(self._mapping)

    @property
    def view(self) -> memoryview:
        """All of it, format B; read-only if it was attached so."""
        return self._view

    def reader_fd(self) -> int:
        """A new descriptor of the same memory that allows reading only; the caller closes it."""
        return os.open(f"/proc/self/fd/{self._fd}", os.O_RDONLY | os.O_CLOEXEC)

    def close(self) -> None:
        """Give the descriptor back, and the mapping as soon as no view of it is left; may be called twice."""
        if self._fd < 0:
            return
        os.close(self._fd)
        self._fd = -1
        with contextlib.suppress(
            BufferError
        ):  # somebody still holds a view: the mapping goes with the last of them
            self._view.release()
            self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.close()


def create(name: str, size_bytes: int, *, setting: str, creator_writes_only: bool = False) -> SealedMemory:
    """Allocate, map and seal new zeroed memory.

    Args:
        name: for people; shown in /proc/PID/maps, at most 249 bytes, need not be unique.
        size_bytes: ≥ 1.
        setting: the setting that asked for this size, for the error.
        creator_writes_only: nobody else will ever be able to write; else whoever gets the descriptor can.

    Raises:
        ConfigError: the memory is not there, or this kernel cannot seal; make `setting` smaller.
    """
    assert size_bytes >= 1, "memory of no size cannot be mapped"
    _check_room(size_bytes, setting)
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        for at in range(0, size_bytes, _ALLOCATE_STEP_BYTES):
            os.posix_fallocate(fd, at, min(_ALLOCATE_STEP_BYTES, size_bytes - at))
        mapping = mmap.mmap(fd, size_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS | (_F_SEAL_FUTURE_WRITE if creator_writes_only else 0))
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            setting=setting,
            problem=f"{size_bytes} bytes of shared memory could not be allocated: {error.strerror}",
            fix="make it smaller, or give this process more memory (Linux 5.1 or later is needed)",
        ) from error
    return SealedMemory(fd, mapping, writable=True)


def attach(fd: int, *, writable: bool, bytes_min: int = 1) -> SealedMemory:
    """Map memory that another process created and handed over.

    Args:
        fd: stays the caller's, who may close it at once.
        writable: ask for write access too; all pages are then mapped before this returns, so that no later write takes
            a fault. It may take a millisecond a MiB, and other threads run meanwhile.
        bytes_min: what must be there.

    Raises:
        DecodeError: not a sealed memfd, too short, or not writable as asked; close the link that it came from.
    """
    size_bytes = _check_sealed(fd)
    if size_bytes < bytes_min:
        raise DecodeError(
            problem="shared memory is too short", bytes_expected=bytes_min, bytes_actual=size_bytes
        )
    prot = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    own = os.dup(fd)
    try:
        mapping = mmap.mmap(own, size_bytes, mmap.MAP_SHARED, prot)
    except OSError as error:
        os.close(own)
        raise DecodeError(problem=f"shared memory cannot be mapped: {error.strerror}") from error
    if writable:
        _touch(mapping)
    return SealedMemory(own, mapping, writable=writable)


def _touch(mapping: mmap.mmap) -> None:
    """Read a byte of each page, which maps it; of shared memory for writing too.

    Not MAP_POPULATE: Python holds its lock for as long as mmap takes, and an engine's steps stand still for the 67 ms
    that 64 MiB took. numpy copies without it.
    """
    np.frombuffer(mapping, np.uint8)[:: mmap.PAGESIZE].copy()


def _check_room(size_bytes: int, setting: str) -> None:
    available = available_bytes()
    if available is not None and size_bytes > available * _AVAILABLE_PERCENT_MAX // 100:
        raise ConfigError(
            setting=setting,
            problem=f"{size_bytes} bytes are wanted, {available} bytes are available to this process",
            fix=f"at most {_AVAILABLE_PERCENT_MAX} % of the available memory, and leave room for the engine",
        )


def _check_sealed(fd: int) -> int:
    """The size of a memfd that can no longer change its size; a peer could otherwise make our reads fault.

    Raises:
        DecodeError: it is something else.
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
        status = os.fstat(fd)
    except OSError as error:
        raise DecodeError(problem=f"not a memfd: {error.strerror}") from error
    if seals & _SEALS != _SEALS:
        raise DecodeError(problem="shared memory is not sealed", seals_expected=_SEALS, seals_actual=seals)
    if not stat.S_ISREG(status.st_mode) or status.st_size < 1:
        raise DecodeError(problem="shared memory is empty")
    return status.st_size
