"""The ring between two real processes: whole entries only, whatever happens to the writer, and nothing left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvlog.buffers.doorbell import create_doorbell
from kvlog.buffers.ring import RingReader, create_ring
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from kvlog.buffers.memory import SealedMemory

ROW_BYTES = 4096
DEADLINE_SECONDS = 20.0

WRITER = """
import sys
from itertools import count
from kvlog.buffers.doorbell import Doorbell
from kvlog.buffers.memory import attach
from kvlog.buffers.ring import RingWriter, TableRow
from kvlog.errors import RingFull

ring_fd, bell_fd, entries, row_bytes = map(int, sys.argv[1:])
writer = RingWriter(attach(ring_fd, writable=True), Doorbell(bell_fd))
for number in count() if entries < 0 else range(entries):
    n = number % 7 + 1
    while True:
        try:
            reservation = writer.reserve([TableRow(1, number, 5, 0, 0, n)], [number] * n, row_bytes)
            break
        except RingFull:
            pass
    pattern = bytes((number + at) & 255 for at in range(256))
    for at in range(0, len(reservation.rows), 256):  # slowly, so that a kill lands in the middle
        reservation.rows[at : at + 256] = pattern
    writer.commit(reservation)
    if number == 0:
        print("started", flush=True)
"""


def start_writer(memory: SealedMemory, bell_fd: int, *, entries: int) -> subprocess.Popen[bytes]:
    """A writer process that has committed its first entry."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(memory.fd), str(bell_fd), str(entries), str(ROW_BYTES)],
        pass_fds=(memory.fd, bell_fd),
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"started\n"
    return child


def end(child: subprocess.Popen[bytes]) -> None:
    """Kill it and take what is left of it."""
    child.kill()
    child.wait()
    assert child.stdout is not None
    child.stdout.close()


def check_next(reader: RingReader, number: int) -> bool:
    """Read one entry and check every byte of it; whether there was one."""
    entry = reader.peek()
    if entry is None:
        return False
    n = number % 7 + 1
    assert [row.epoch for row in entry.table] == [number]
    assert entry.tokens.tolist() == [number] * n
    pattern = bytes((number + at) & 255 for at in range(256))
    assert bytes(entry.rows) == pattern * (n * ROW_BYTES // 256)
    reader.release()
    return True


def test_ring_between_processes_hands_over_every_entry_in_order():
    """Many laps around a small ring, woken by the doorbell, each byte checked."""
    entries = 2000
    bell = create_doorbell()
    with create_ring(1 << 17) as memory:
        reader = RingReader(memory)
        child = start_writer(memory, bell.fileno(), entries=entries)
        seen, deadline = 0, time.monotonic() + DEADLINE_SECONDS
        while seen < entries:
            assert select.select([bell.fileno()], [], [], deadline - time.monotonic())[0], "nobody rang"
            bell.clear()
            while check_next(reader, seen):
                seen += 1
        assert child.wait(DEADLINE_SECONDS) == 0
        assert reader.peek() is None
        assert (reader.counts.corrupt, seen) == (0, entries)
        end(child)
        reader.close()
    bell.close()


@pytest.mark.parametrize("attempt", range(8))
def test_ring_whose_writer_is_killed_in_mid_write_holds_whole_entries_only(attempt: int):
    """After SIGKILL at any moment the reader sees complete entries, then nothing, and never an error."""
    bell = create_doorbell()
    with create_ring(1 << 17) as memory:
        reader = RingReader(memory)
        child = start_writer(memory, bell.fileno(), entries=-1)
        seen, stop_at = 0, time.monotonic() + random.Random(attempt).uniform(0.005, 0.1)
        while time.monotonic() < stop_at:
            seen += check_next(reader, seen)
        end(child)
        while check_next(reader, seen):
            seen += 1
        assert reader.peek() is None
        assert reader.counts.corrupt == 0
        assert seen > 0
        reader.close()
    bell.close()


STORER = """
import sys
from kvlog.buffers.memory import attach
from kvlog.buffers.ring_layout import RingArea
area = RingArea(attach(int(sys.argv[1]), writable=True))
print("started", flush=True)
while True:
    area.store_head(0)
    area.store_head((1 << 64) - 1)
"""


def test_ring_head_stored_by_another_process_is_never_seen_half():
    """One store of 8 bytes: all of the old value or all of the new one."""
    with create_ring(4096) as memory:
        child = subprocess.Popen(
            [sys.executable, "-c", STORER, str(memory.fd)],
            pass_fds=(memory.fd,),
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"started\n"
        word = memory.view[128:136].cast("Q")
        seen, started = {word[0]}, time.monotonic()
        while time.monotonic() < started + (0.5 if len(seen) > 1 else DEADLINE_SECONDS):
            seen.update(word[0] for _ in range(1000))
        end(child)
        word.release()
    assert seen == {0, (1 << 64) - 1}


OWNER = """
import sys, time
from kvlog.buffers.doorbell import create_doorbell
from kvlog.buffers.memory import create
from kvlog.buffers.ring import create_ring
ring, pool, bell = create_ring(1 << 20), create("kvlog-pool", 1 << 20, setting="pool.bytes"), create_doorbell()
print(ring.fd, pool.fd, flush=True)
time.sleep(60)
"""


def _kvlog_files() -> set[str]:
    return {file.name for file in Path("/dev/shm").iterdir() if "kvlog" in file.name}


@pytest.mark.parametrize("first", ["owner", "peer"])
def test_buffers_after_both_sides_were_killed_leave_nothing_in_dev_shm(first: str):
    """A memfd has no name: whichever side dies first, the memory goes with the last of them, and no file is left."""
    before = _kvlog_files()
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, preexec_fn=die_with_parent
    )
    assert owner.stdout is not None
    ring_fd, pool_fd = map(int, owner.stdout.readline().split())
    # Opening another process's descriptor stands for receiving it over a socket.
    ours = [os.open(f"/proc/{owner.pid}/fd/{fd}", os.O_RDWR) for fd in (ring_fd, pool_fd)]
    peer = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        pass_fds=ours,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    inode = os.fstat(ours[0]).st_ino
    for fd in ours:
        os.close(fd)
    for child in (owner, peer) if first == "owner" else (peer, owner):
        child.send_signal(signal.SIGKILL)
        end(child)
    assert before == _kvlog_files()
    assert inode not in {status.st_ino for status in _open_memfds()}


def _open_memfds() -> list[os.stat_result]:
    """Every ring that some process still has open, as far as we may look."""
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if str(link.readlink()).startswith("/memfd:kvlog-ring"):
                found.append(link.stat())
        except OSError:
            continue
    return found
