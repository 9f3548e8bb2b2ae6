"""Sealed memory: what a peer can and cannot do with it, and what is refused."""

from __future__ import annotations

import fcntl
import mmap
import os
import resource
from pathlib import Path

import pytest

from kvlog.buffers import memory as memory_module
from kvlog.buffers.available import available_bytes
from kvlog.buffers.memory import attach, create
from kvlog.errors import ConfigError, DecodeError
from tests.python_lock import counted_turns


def test_memory_written_by_its_creator_is_read_through_a_reader_descriptor():
    """Both mappings are the same bytes."""
    with create("kvlog-test", 8192, setting="pool.bytes") as ours:
        fd = ours.reader_fd()
        with attach(fd, writable=False, bytes_min=8192) as theirs:
            os.close(fd)
            ours.view[4096:4101] = b"hello"
            assert bytes(theirs.view[4096:4101]) == b"hello"
            assert theirs.view.readonly
            assert theirs.size_bytes == 8192


def test_memory_attached_writable_is_shared_both_ways():
    """A ring's two sides both write."""
    with (
        create("kvlog-test", 4096, setting="link.ring_bytes") as ours,
        attach(ours.fd, writable=True) as theirs,
    ):
        theirs.view[0] = 7
        assert ours.view[0] == 7


def test_memory_attached_writable_takes_no_fault_when_it_is_written():
    """A step that writes rows pays for their bytes, not for mapping pages."""
    size = 4 << 20
    with (
        create("kvlog-test", size, setting="link.ring_bytes") as ours,
        attach(ours.fd, writable=True) as theirs,
    ):
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
        for at in range(0, size, mmap.PAGESIZE):
            theirs.view[at] = 1
        assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < 10


def test_steps_go_on_while_memory_is_attached():
    """Mapping all pages takes tens of milliseconds, in which Python's lock is free."""
    with create("kvlog-test", 64 << 20, setting="link.ring_bytes") as ours:
        with counted_turns() as turns:
            theirs = attach(ours.fd, writable=True)
            meanwhile = turns.count
        theirs.close()
    assert meanwhile >= 5


def test_reader_descriptor_mapped_writable_is_refused():
    """A read-only descriptor gives no write access."""
    with create("kvlog-test", 4096, setting="pool.bytes") as ours:
        fd = ours.reader_fd()
        with pytest.raises(DecodeError, match="cannot be mapped"):
            attach(fd, writable=True)
        os.close(fd)


def test_memory_that_only_its_creator_writes_cannot_be_written_by_a_reopened_descriptor():
    """Even the same user, going through /proc, can neither map nor write nor punch holes."""
    with create("kvlog-test", 4096, setting="pool.bytes", creator_writes_only=True) as ours:
        reader = ours.reader_fd()
        fd = os.open(f"/proc/self/fd/{reader}", os.O_RDWR)
        with pytest.raises(PermissionError):
            mmap.mmap(fd, 4096, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
        with pytest.raises(PermissionError):
            os.write(fd, b"x")
        ours.view[0] = 9
        with attach(reader, writable=False) as theirs:
            assert theirs.view[0] == 9
        os.close(fd)
        os.close(reader)


@pytest.mark.parametrize("size_bytes", [0, 4095, 8192])
def test_memory_resized_by_a_peer_is_refused_by_the_kernel(size_bytes: int):
    """A peer that could shrink it could kill us with SIGBUS."""
    with create("kvlog-test", 4096, setting="pool.bytes") as ours, pytest.raises(PermissionError):
        os.ftruncate(ours.fd, size_bytes)


def test_attach_of_an_unsealed_memfd_is_refused():
    """Its owner could shrink it under our feet."""
    fd = os.memfd_create("kvlog-test", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    with pytest.raises(DecodeError, match="not sealed"):
        attach(fd, writable=False)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(DecodeError, match="not sealed"):
        attach(fd, writable=False)
    os.close(fd)


def test_attach_of_memory_that_is_too_short_is_refused_with_both_numbers():
    """What a message promised must be there."""
    with create("kvlog-test", 4096, setting="pool.bytes") as ours, pytest.raises(DecodeError) as caught:
        attach(ours.fd, writable=False, bytes_min=4097)
    assert caught.value.fields["bytes_expected"] == 4097
    assert caught.value.fields["bytes_actual"] == 4096


def test_attach_of_something_else_is_refused(tmp_path):
    """A file, a pipe, an empty memfd and a closed descriptor are no shared memory."""
    read, write = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(file, 4096)
    empty = os.memfd_create("kvlog-test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(empty, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    for fd in (read, file, empty, 1 << 20):
        with pytest.raises(DecodeError):
            attach(fd, writable=False)
    for fd in (read, write, file, empty):
        os.close(fd)


def test_create_beyond_the_available_memory_is_refused_before_it_takes_any(monkeypatch):
    """The error names the setting and both numbers, and nothing was allocated."""
    monkeypatch.setattr(memory_module, "available_bytes", lambda: 1_000_000)
    monkeypatch.setattr(os, "memfd_create", lambda *_: pytest.fail("it went on"))
    with pytest.raises(ConfigError) as caught:
        create("kvlog-test", 950_001, setting="pool.bytes")
    assert caught.value.fields["setting"] == "pool.bytes"
    assert "950001" in str(caught.value)
    assert "1000000" in str(caught.value)


def test_create_of_more_than_this_machine_has_is_refused():
    """The same, with the machine's real figures."""
    available = available_bytes()
    assert available is not None
    with pytest.raises(ConfigError, match=r"pool\.bytes"):
        create("kvlog-test", available * 2, setting="pool.bytes")


def test_create_that_the_kernel_refuses_gives_its_descriptor_back(monkeypatch):
    """A failed allocation is a ConfigError and leaks nothing."""

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with pytest.raises(ConfigError, match="No space left"):
        create("kvlog-test", 4096, setting="pool.bytes")
    assert before >= len(list(Path("/proc/self/fd").iterdir()))


def test_create_allocates_every_page():
    """Memory that is only promised would be missed later."""
    with create("kvlog-test", 1 << 20, setting="pool.bytes") as ours:
        assert os.fstat(ours.fd).st_blocks * 512 == 1 << 20


def test_close_with_a_view_in_use_leaves_the_view_valid():
    """A mapping goes with its last view, never under somebody's feet."""
    ours = create("kvlog-test", 4096, setting="pool.bytes")
    part = ours.view[:4]
    ours.close()
    ours.close()
    part[0] = 1
    assert part[0] == 1


def _write(folder, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_available_bytes_is_the_least_of_machine_and_cgroups(tmp_path):
    """A limit of any cgroup above this process counts; idle page cache does not."""
    _write(
        tmp_path,
        {
            "proc/meminfo": "MemTotal: 1000 kB\nMemAvailable:    900 kB\n",
            "proc/self/cgroup": "0::/a/b\n",
            "cg/a/memory.max": "500000\n",
            "cg/a/memory.current": "300000\n",
            "cg/a/memory.stat": "anon 1\ninactive_file 1000\n",
            "cg/a/b/memory.max": "max\n",
            "cg/a/b/memory.current": "1\n",
        },
    )
    assert available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == 201_000


def test_available_bytes_reads_version_1_cgroups(tmp_path):
    """Older machines have the memory controller in a folder of its own."""
    _write(
        tmp_path,
        {
            "proc/meminfo": "MemAvailable: 900 kB\n",
            "proc/self/cgroup": "5:cpu:/x\n4:memory:/x\n",
            "cg/memory/x/memory.limit_in_bytes": "4096",
            "cg/memory/x/memory.usage_in_bytes": "8192",
        },
    )
    assert available_bytes(proc=tmp_path / "proc", cgroups=tmp_path / "cg") == 0


def test_available_bytes_without_procfs_is_unknown(tmp_path):
    """Unknown is not 0."""
    assert available_bytes(proc=tmp_path, cgroups=tmp_path) is None
