"""The `cuda:N` pool on a real device: apply, attach, a daemon killed in mid-attach, and what an engine's gather costs.

All of it is to take less than six minutes; figures are printed (-s).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import time

import pytest
import torch

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.blocks import Key
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.buffers.memory import attach
from kvlog.buffers.pool import BlockPool, PoolOptions, open_pool
from kvlog.buffers.pool_cuda import HostRegistration
from kvlog.buffers.ring import RingReader, RingWriter, TableRow, create_ring
from kvlog.errors import ConfigError
from kvlog.ids import Epoch, Position, SessionId, Shard, Turn
from tests.processes import die_with_parent

pytestmark = pytest.mark.gpu

ROW = 128 << 10
KEY = Key(SessionId("a"), Shard(0))
OPTIONS = PoolOptions(bytes_total=1 << 30, device="cuda:0", staging_bytes=256 << 20)


@pytest.fixture
def pool(device):
    """A pool of 512 blocks of 16 rows on the device."""
    made = open_pool(OPTIONS)
    yield made
    made.close()


def rows(first: int, n: int) -> bytes:
    """Rows that differ in every position."""
    return b"".join(random.Random(first + i).randbytes(ROW) for i in range(n))


def attached(pool: BlockPool, length: int) -> bytes:
    """What an engine gets through a read-only descriptor."""
    pinned = pool.pin(KEY, Position(length))
    fd = pool.memory.reader_fd()
    got: list[bytes] = []
    with attach(fd, writable=False) as memory:
        os.close(fd)
        found = Attachment(pinned.row_bytes, pinned.blocks, pinned.row_checksums)
        assert (
            copy_attached(memory.view, pool.geometry, found, lambda part: got.append(bytes(part))) == length
        )
    pool.release(pinned.lease)
    return b"".join(got)


def test_gpu_pool_rows_applied_are_read_back_and_attached(pool):
    """Over several blocks, appended, replaced and copied on write."""
    data = rows(0, 40)
    assert pool.apply(KEY, Position(0), memoryview(data[: 23 * ROW]), ROW)
    assert pool.apply(KEY, Position(23), memoryview(data[23 * ROW :]), ROW)
    assert pool.read(KEY, Position(0), 40) == data
    pinned = pool.pin(KEY, Position(40))
    assert pool.apply(KEY, Position(20), memoryview(rows(90, 5)), ROW)
    pool.release(pinned.lease)
    assert attached(pool, 25) == data[: 20 * ROW] + rows(90, 5)
    pool.blocks.check()


def test_gpu_pool_larger_than_the_device_is_refused_with_both_numbers(device):
    """Before anything is allocated."""
    free, total = torch.cuda.mem_get_info(device)
    with pytest.raises(ConfigError, match=f"{total * 2 // (2 << 20) * (2 << 20)} bytes are wanted"):
        open_pool(PoolOptions(bytes_total=total * 2, device="cuda:0"))
    assert free > 0


def test_gpu_pool_on_a_device_that_is_not_there_is_refused(device):
    """The number of devices is named."""
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"sees {count} CUDA devices"):
        open_pool(PoolOptions(bytes_total=1 << 30, device=f"cuda:{count}"))


def test_gpu_pool_apply_and_attach_figures(pool):
    """Prints GB/s of apply (host to device) and of pin plus copy (device to host to private memory)."""
    data = memoryview(rows(0, 7))
    started = time.perf_counter()
    for n in range(200):
        pool.apply(KEY, Position(n * 7), data, ROW)
    applied = time.perf_counter() - started
    started = time.perf_counter()
    assert len(attached(pool, 1400)) == 1400 * ROW
    took = time.perf_counter() - started
    size = 1400 * ROW / 1e9
    print(
        f"\ngpu pool, 7 rows of 128 KiB a call: apply {size / applied:.2f} GB/s, attach {size / took:.2f} GB/s"
    )


DAEMON = """
import json, sys, time
from kvlog.buffers.blocks import Key
from kvlog.buffers.pool import PoolOptions, open_pool
row, rows = map(int, sys.argv[1:])
pool = open_pool(PoolOptions(bytes_total=256 << 20, device="cuda:0", staging_bytes=128 << 20))
for n in range(rows):
    pool.apply(Key("a", 0), n, memoryview(bytes([n % 251]) * row), row)
pinned = pool.pin(Key("a", 0), rows)
print(json.dumps({
    "fd": pool.memory.reader_fd(), "blocks": [[b.index, b.rows] for b in pinned.blocks],
    "checksums": pinned.row_checksums.tolist(), "staged": pool.geometry.blocks,
}), flush=True)
while True:  # the daemon goes on using its device until it is killed
    pool.apply(Key("b", 0), 0, memoryview(bytes(row)), row)
"""


def test_gpu_daemon_killed_in_mid_attach_does_not_poison_the_engines_context(device):
    """The engine copies to its own GPU cache; the daemon dies by SIGKILL; every later CUDA call of the engine works."""
    count = 400
    ours = torch.empty(count * ROW, dtype=torch.uint8, device=device)  # the engine's context exists before
    daemon = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(ROW), str(count)],
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    try:
        assert daemon.stdout is not None
        said = json.loads(daemon.stdout.readline())
        fd = os.open(f"/proc/{daemon.pid}/fd/{said['fd']}", os.O_RDONLY)
        memory = attach(fd, writable=False)
        os.close(fd)
        blocks = tuple(PinnedBlock(index, held) for index, held in said["blocks"])
        done = 0

        def kill_then_load(part: memoryview) -> None:
            nonlocal done
            if done > count * ROW // 3 and daemon.poll() is None:
                daemon.kill()
                daemon.wait()
            ours[done : done + len(part)].copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
            done += len(part)

        geometry = PoolGeometry(2 << 20, said["staged"], "cuda:0")
        found = Attachment(ROW, blocks, said["checksums"])
        assert copy_attached(memory.view, geometry, found, kill_then_load) == count
        assert daemon.poll() is not None
        torch.cuda.synchronize()
        expected = torch.arange(count, device=device).remainder(251).to(torch.uint8)
        assert bool((ours.view(count, ROW) == expected[:, None]).all())
        assert float(torch.ones(1000, device=device).sum()) == 1000.0
        memory.close()
    finally:
        daemon.kill()
        daemon.wait()
        if daemon.stdout is not None:
            daemon.stdout.close()


@pytest.mark.parametrize("batch", [1, 16])
def test_gpu_gather_into_the_ring_is_right_and_its_cost_is_printed(device, batch: int):
    """New rows of 32 layers (2 planes, 8 heads, 128 dims, bfloat16: 128 KiB) go from a paged cache into the ring."""
    layers, blocks, slots = 32, 64, 16
    cache = torch.randn((layers, blocks * slots, 2, 8, 128), device=device).to(torch.bfloat16)
    memory = create_ring(64 << 20)
    ring = torch.frombuffer(memory.view, dtype=torch.uint8)
    registration = HostRegistration.of(ring)
    writer, reader = RingWriter(memory), RingReader(memory)
    took = []
    for step in range(220):
        places = torch.tensor([(step * 31 + n * 7) % (blocks * slots) for n in range(batch)], device=device)
        torch.cuda.synchronize()
        started = time.perf_counter()
        table = [TableRow(Turn(n), Epoch(1), n, Shard(0), Position(step), 1) for n in range(batch)]
        reservation = writer.reserve(table, [step] * batch, ROW)
        target = torch.frombuffer(reservation.rows, dtype=torch.bfloat16)
        gathered = cache.index_select(1, places).transpose(0, 1).contiguous().view(-1)
        target.copy_(gathered, non_blocking=True)
        torch.cuda.current_stream(device).synchronize()
        writer.commit(reservation)
        took.append((time.perf_counter() - started) * 1e6)
        entry = reader.peek()
        assert entry is not None
        if step % 50 == 0:
            expected = cache[:, places].transpose(0, 1).contiguous().cpu().view(torch.uint8).numpy().tobytes()
            assert bytes(entry.rows) == expected
        reader.release()
    figures = sorted(took[20:])
    print(
        f"\ngpu gather + commit, batch {batch}: median {statistics.median(figures):.0f} µs, p90 {figures[180]:.0f} µs"
    )
    registration.close()
    writer.close()
    reader.close()
