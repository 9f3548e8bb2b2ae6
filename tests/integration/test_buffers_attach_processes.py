"""Attaching across real processes: a daemon or an engine that dies in mid-attach, a wild writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.blocks import Key
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.buffers.memory import SealedMemory, attach
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.errors import DecodeError
from kvlog.ids import Position, SessionId, Shard
from tests.processes import die_with_parent

ROW_BYTES = 1000
ROWS = 64

DAEMON = """
import json, os, sys, time
from kvlog.buffers.blocks import Key
from kvlog.buffers.pool import PoolOptions, open_pool
row_bytes, rows = map(int, sys.argv[1:])
pool = open_pool(PoolOptions(bytes_total=1 << 20, block_bytes=1 << 13))
data = b"".join(bytes([n]) * row_bytes for n in range(rows))
pool.apply(Key("a", 0), 0, memoryview(data), row_bytes)
pinned = pool.pin(Key("a", 0), rows)
print(json.dumps({
    "fd": pool.memory.reader_fd(), "size": pool.geometry.size_bytes,
    "blocks": [[block.index, block.rows] for block in pinned.blocks], "checksums": pinned.row_checksums.tolist(),
}), flush=True)
if sys.stdin.readline() == "scribble\\n":
    pool.memory.view[:] = bytes(len(pool.memory.view))
    print("done", flush=True)
time.sleep(60)
"""


@pytest.fixture
def daemon():
    """A process with a pool that holds one session."""
    child = subprocess.Popen(
        [sys.executable, "-c", DAEMON, str(ROW_BYTES), str(ROWS)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    yield child
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        assert pipe is not None
        pipe.close()


def hello(daemon: subprocess.Popen[bytes]) -> tuple[SealedMemory, PoolGeometry, Attachment]:
    """What a welcome and an opened turn would bring."""
    assert daemon.stdout is not None
    said = json.loads(daemon.stdout.readline())
    fd = os.open(f"/proc/{daemon.pid}/fd/{said['fd']}", os.O_RDONLY)
    memory = attach(fd, writable=False, bytes_min=said["size"])
    os.close(fd)
    blocks = tuple(PinnedBlock(index, rows) for index, rows in said["blocks"])
    return (
        memory,
        PoolGeometry(1 << 13, said["size"] >> 13, "cpu"),
        Attachment(ROW_BYTES, blocks, said["checksums"]),
    )


def test_attach_whose_daemon_is_killed_in_the_middle_still_ends_whole(daemon):
    """The mapping outlives the daemon: no SIGBUS, and every row verifies."""
    memory, geometry, attachment = hello(daemon)
    got: list[bytes] = []

    def kill_then_take(rows: memoryview) -> None:
        if not got:
            daemon.kill()
            daemon.wait()
        got.append(bytes(rows))

    assert copy_attached(memory.view, geometry, attachment, kill_then_take) == ROWS
    assert b"".join(got) == b"".join(bytes([n]) * ROW_BYTES for n in range(ROWS))
    memory.close()


def test_attach_from_a_daemon_that_overwrites_pinned_blocks_takes_no_wrong_row(daemon):
    """The engine's side relies on the daemon's promise for nothing."""
    memory, geometry, attachment = hello(daemon)
    got: list[bytes] = []

    def scribble_then_take(rows: memoryview) -> None:
        if not got:
            assert daemon.stdin is not None
            assert daemon.stdout is not None
            daemon.stdin.write(b"scribble\n")
            daemon.stdin.flush()
            assert daemon.stdout.readline() == b"done\n"
        got.append(bytes(rows))

    per_block = (1 << 13) // ROW_BYTES
    assert copy_attached(memory.view, geometry, attachment, scribble_then_take) == per_block
    assert b"".join(got) == b"".join(bytes([n]) * ROW_BYTES for n in range(per_block))
    memory.close()


def test_pool_memory_cannot_be_written_by_an_engine(daemon):
    """Neither through what it was given, nor by going around it."""
    memory, _, _ = hello(daemon)
    with pytest.raises(TypeError, match="read-only"):
        memory.view[0] = 1
    with pytest.raises(DecodeError):
        attach(memory.fd, writable=True)
    fd = os.open(f"/proc/self/fd/{memory.fd}", os.O_RDWR)
    with pytest.raises(DecodeError):
        attach(fd, writable=True)
    os.close(fd)
    memory.close()


ENGINE = """
import sys, time
from kvlog.buffers.memory import attach
memory = attach(int(sys.argv[1]), writable=False)
private = bytes(memory.view[:4096])
print("copying", flush=True)
time.sleep(60)
"""


def test_engine_killed_in_mid_attach_leaves_the_pool_usable():
    """Its link closes, its lease is released, and its blocks go to others."""
    key = Key(SessionId("a"), Shard(0))
    pool = open_pool(PoolOptions(bytes_total=4 << 12, block_bytes=1 << 12))
    pool.apply(key, Position(0), memoryview(bytes(8 << 10)), 1 << 10)
    pinned = pool.pin(key, Position(8))
    fd = pool.memory.reader_fd()
    engine = subprocess.Popen(
        [sys.executable, "-c", ENGINE, str(fd)],
        pass_fds=(fd,),
        stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    os.close(fd)
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"copying\n"
    engine.kill()
    engine.wait()
    engine.stdout.close()
    pool.drop(key.session)
    assert pool.blocks.ledger.counts.free == 2
    pool.release(pinned.lease)
    assert pool.blocks.ledger.counts.free == 4
    pool.blocks.check()
    pool.close()
