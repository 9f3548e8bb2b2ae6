"""One contract for every pool: host memory, and a device's (here torch's `cpu` device; tests/gpu has the real one)."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.blocks import Key, PinnedBlocks
from kvlog.buffers.memory import attach
from kvlog.buffers.pool import BlockPool, PoolOptions, open_pool
from kvlog.buffers.pool_cuda import DeviceStore, open_device_store
from kvlog.buffers.pool_tensor import view_blocks
from kvlog.checksums import row_checksums
from kvlog.errors import ConfigError, LayoutMismatch, PoolFull, RowTooLarge
from kvlog.ids import Position, SessionId, Shard
from tests.processes import die_with_parent

ROW = 100
KEY = Key(SessionId("a"), Shard(0))
OTHER = Key(SessionId("b"), Shard(0))
OPTIONS = PoolOptions(bytes_total=8 * 450 + 7, block_bytes=450, staging_bytes=5 * 450)


@pytest.fixture(params=["host", "device"])
def pool(request):
    """A pool of 8 blocks of 4 rows."""
    if request.param == "host":
        made = open_pool(OPTIONS)
    else:
        made = BlockPool(DeviceStore.open(OPTIONS, torch.device("cpu")), pinned_share=100)
    yield made
    made.close()


def rows(first: int, n: int, *, size: int = ROW) -> bytes:
    """Rows that differ in every position."""
    return b"".join(random.Random(first + i).randbytes(size) for i in range(n))


def put(pool: BlockPool, key: Key, start: int, data: bytes) -> bool:
    """Apply rows of the usual size."""
    return pool.apply(key, Position(start), memoryview(data), ROW)


def attached(pool: BlockPool, pinned: PinnedBlocks) -> bytes:
    """What an engine gets, through a read-only descriptor of its own."""
    fd = pool.memory.reader_fd()
    got: list[bytes] = []
    with attach(fd, writable=False, bytes_min=pool.geometry.size_bytes) as memory:
        os.close(fd)
        found = Attachment(pinned.row_bytes, pinned.blocks, pinned.row_checksums)
        count = copy_attached(memory.view, pool.geometry, found, lambda part: got.append(bytes(part)))
    assert count == len(pinned.row_checksums)
    return b"".join(got)


def fail(*_):
    """What a store does whose device is gone."""
    raise ConnectionError


def put_in_vain(pool: BlockPool, start: int, data: bytes, monkeypatch, **broken) -> None:
    """Apply rows while methods of the store fail."""
    with monkeypatch.context() as patched:
        for name, method in broken.items():
            patched.setattr(pool.store, name, method)
        with pytest.raises(ConnectionError):
            put(pool, KEY, start, data)


def test_pool_rows_applied_are_read_back_and_attached(pool):
    """The same bytes for tools and for an engine in another mapping."""
    data = rows(0, 7)
    assert put(pool, KEY, 0, data)
    assert put(pool, KEY, 7, rows(7, 4))
    assert pool.present_prefix(KEY) == 11
    assert pool.read(KEY, Position(0), 11) == data + rows(7, 4)
    assert pool.read(KEY, Position(3), 2) == data[300:500]
    pinned = pool.pin(KEY, Position(9))
    assert attached(pool, pinned) == (data + rows(7, 4))[:900]
    pool.release(pinned.lease)


def test_pool_rows_pinned_do_not_change_by_what_is_applied_later(pool):
    """Append, replace, drop and refill: an attach in flight reads what it was given."""
    data = rows(0, 6)
    put(pool, KEY, 0, data)
    pinned = pool.pin(KEY, Position(6))
    put(pool, KEY, 6, rows(6, 1))
    assert pool.read(KEY, Position(0), 7) == data + rows(6, 1)
    put(pool, KEY, 2, rows(50, 3))
    assert pool.read(KEY, Position(0), 5) == data[:200] + rows(50, 3)
    pool.drop(KEY.session)
    for n in range(6):
        put(pool, Key(SessionId(f"x{n}"), Shard(0)), 0, rows(n, 4))
    assert attached(pool, pinned) == data
    pool.release(pinned.lease)
    pool.blocks.check()


def test_pool_rows_applied_with_checksums_are_held_under_these(pool):
    """Who has verified rows says what of; an engine finds whatever became of them in the pool's own copy."""
    data = rows(0, 2)
    sums = row_checksums(memoryview(data), ROW)
    assert pool.apply(KEY, Position(0), memoryview(data), ROW, sums)
    assert pool.apply(KEY, Position(2), memoryview(rows(2, 1)), ROW, [7])
    assert [*sums, 7] == pool.pin(KEY, Position(3)).row_checksums.tolist()


def test_pool_rows_that_could_not_be_copied_are_absent_and_take_no_block(pool, monkeypatch):
    """What was there before them stays, and the next rows find their place."""
    put(pool, KEY, 0, rows(0, 3))
    free = pool.blocks.ledger.counts.free
    put_in_vain(pool, 3, rows(3, 4), monkeypatch, store_views=fail)
    pool.blocks.check()
    assert (pool.present_prefix(KEY), pool.blocks.ledger.counts.free) == (3, free)
    assert put(pool, KEY, 3, rows(3, 4))
    assert pool.read(KEY, Position(0), 7) == rows(0, 7)


def test_pool_rows_that_could_not_be_copied_change_no_pinned_block(pool, monkeypatch):
    """They were on their way to a block of their own, which is where the rows before them are from then on."""
    put(pool, KEY, 0, rows(0, 6))
    pinned = pool.pin(KEY, Position(6))

    def spoil(_, views):
        for view in views:
            view[:] = bytes(len(view))
        raise ConnectionError

    put_in_vain(pool, 5, rows(50, 4), monkeypatch, store_views=spoil)
    assert pool.read(KEY, Position(0), 5) == rows(0, 5)
    assert pool.present_prefix(KEY) == 5
    assert attached(pool, pinned) == rows(0, 6)
    pool.release(pinned.lease)
    pool.blocks.check()
    assert pool.blocks.ledger.counts.free == 6


def test_pool_block_whose_first_rows_could_not_be_copied_holds_none_of_them(pool, monkeypatch):
    """They are in the pinned block only, which is not the session's any more."""
    put(pool, KEY, 0, rows(0, 6))
    pinned = pool.pin(KEY, Position(6))
    first = 6 - 6 % (pool.geometry.block_bytes // ROW)
    assert first < 5, "row 5 has others before it in its block"
    put_in_vain(pool, 5, rows(50, 4), monkeypatch, copy_head=fail)
    assert pool.present_prefix(KEY) == first
    assert pool.read(KEY, Position(0), first) == rows(0, first)
    assert attached(pool, pinned) == rows(0, 6)
    pool.release(pinned.lease)
    pool.blocks.check()
    assert put(pool, KEY, first, rows(first, 3))


def test_pool_rows_behind_a_hole_are_not_held(pool):
    """Nobody could use them; the next turn that begins at or below the prefix can."""
    assert not put(pool, KEY, 1, rows(1, 1))
    put(pool, KEY, 0, rows(0, 2))
    assert not put(pool, KEY, 3, rows(3, 1))
    assert pool.present_prefix(KEY) == 2
    assert put(pool, KEY, 2, rows(2, 1))


def test_pool_that_is_full_keeps_what_it_has(pool):
    """The rows that found no block are absent, all others are there; after a drop there is room."""
    put(pool, OTHER, 0, rows(9, 24))
    put(pool, KEY, 0, rows(0, 8))
    with pytest.raises(PoolFull):
        put(pool, KEY, 6, rows(6, 3))
    assert pool.read(KEY, Position(0), 6) == rows(0, 6)
    assert pool.present_prefix(KEY) == 6
    pool.drop(OTHER.session)
    assert put(pool, KEY, 6, rows(6, 3))


def test_pool_rows_of_another_size_or_too_large_are_refused(pool):
    """A mismatch names both sizes; a row larger than a block fits nowhere."""
    put(pool, KEY, 0, rows(0, 1))
    with pytest.raises(LayoutMismatch):
        pool.apply(KEY, Position(1), memoryview(bytes(50)), 50)
    with pytest.raises(RowTooLarge):
        pool.apply(OTHER, Position(0), memoryview(bytes(451)), 451)


def test_pool_cut_shortens_and_frees(pool):
    """A Truncate."""
    put(pool, KEY, 0, rows(0, 9))
    pool.cut(KEY.session, Position(4))
    assert pool.read(KEY, Position(0), 4) == rows(0, 4)
    assert pool.blocks.ledger.counts.free == 7


def test_pool_attaches_beyond_the_room_for_them_are_refused(pool):
    """Half the pool on the host, the staging area on a device; a release makes room again."""
    put(pool, KEY, 0, rows(0, 16))
    put(pool, OTHER, 0, rows(9, 8))
    first = pool.pin(KEY, Position(16))
    with pytest.raises(PoolFull):
        pool.pin(OTHER, Position(8))
    pool.blocks.check()
    pool.release(first.lease)
    second = pool.pin(OTHER, Position(8))
    assert attached(pool, second) == rows(9, 8)


def test_pool_options_out_of_range_are_config_errors():
    """The setting is named."""
    for options, setting in (
        ({"bytes_total": 5}, "pool.bytes"),
        ({"bytes_total": 4 << 20, "block_bytes": 0}, "pool.bytes"),
        ({"bytes_total": 4 << 20, "staging_bytes": 5}, "pool.staging_bytes"),
        ({"bytes_total": 4 << 20, "device": "gpu"}, "pool.device"),
    ):
        with pytest.raises(ConfigError) as caught:
            PoolOptions(**options)
        assert caught.value.fields["setting"] == setting


def test_pool_larger_than_memory_is_refused_with_both_numbers():
    """At start, not in the night."""
    with pytest.raises(ConfigError, match=r"pool\.bytes.* are wanted, \d+ bytes are available"):
        open_pool(PoolOptions(bytes_total=1 << 50))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU: tests/gpu covers it")
def test_pool_on_a_gpu_that_is_not_there_is_a_config_error():
    """It says what torch sees and what to do."""
    with pytest.raises(ConfigError, match="sees 0 CUDA devices"):
        open_pool(PoolOptions(bytes_total=4 << 20, device="cuda:0"))


def test_device_store_on_too_small_a_gpu_is_a_config_error(monkeypatch):
    """Both numbers, before anything is allocated."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 2000))
    with pytest.raises(ConfigError, match="4194304 bytes are wanted, 1000 bytes are free"):
        open_device_store(PoolOptions(bytes_total=4 << 20, device="cuda:0"))


def test_view_blocks_is_the_pool_without_a_copy():
    """Shape [blocks, block_bytes], and what is written in one is seen in the other."""
    pool = open_pool(OPTIONS)
    blocks = view_blocks(pool.memory, pool.geometry)
    assert blocks.shape == (8, 450)
    put(pool, KEY, 0, rows(0, 1))
    assert bytes(blocks[0, :ROW].numpy()) == rows(0, 1)
    pool.close()
    assert bytes(blocks[0, :ROW].numpy()) == rows(0, 1)


def test_pool_on_the_host_does_not_import_torch():
    """A daemon without a GPU stays small."""
    code = "import sys, kvlog.buffers.pool, kvlog.buffers.attach; sys.exit('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], check=False, preexec_fn=die_with_parent).returncode == 0
    )
