"""The connector's way to a cache on a real device: layouts, a gather that nobody waits for, loads, a captured graph.

Written to be run first where there is a GPU, before a vLLM is started with `"cuda": "experimental"`; less than a
minute. The shapes are vLLM's; its own kernels are asked too where vLLM can be imported. Figures are printed (-s).
"""

from __future__ import annotations

import statistics
import threading
import time

import numpy as np
import pytest
import torch

from kvlog.engines.device_layout import refuse_other_order, slots_of, stack_layers
from kvlog.engines.device_queue import CudaQueue
from kvlog.engines.device_rows import DeviceOptions, DeviceRows, DeviceStore
from kvlog.engines.vllm_probe import probe_page_map
from kvlog.layout import DType, Layout

pytestmark = pytest.mark.gpu

LAYERS, HEADS, SIZE, DIM = 32, 8, 16, 128
LAYOUT = Layout(LAYERS, 2, HEADS, DIM, DType.BFLOAT16)
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "BLHNC": (1, 0, 2, 3, 4),
          "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}  # fmt: skip


def cache(device: torch.device, order: str = "LBNHC", blocks: int = 64) -> list[torch.Tensor]:
    """Layers as vLLM makes them: views of one allocation; random."""
    sizes = (LAYERS, blocks, HEADS, SIZE, 2 * DIM)
    strides, step = [0] * len(sizes), 1
    for axis in reversed(ORDERS[order]):
        strides[axis], step = step, step * sizes[axis]
    raw = torch.randn(step, device=device).to(torch.bfloat16)
    return list(raw.as_strided(sizes, strides))


def store_of(layers: list[torch.Tensor], **options: int) -> DeviceStore:
    """A store over them."""
    queue = CudaQueue(layers[0].device)
    return DeviceStore(stack_layers(layers, 2), SIZE, LAYOUT, queue, DeviceOptions(**options))


def opened(store: DeviceStore, blocks: list[int], length: int) -> DeviceRows:
    """A request that is computed so far."""
    rows = store.open_rows()
    rows.take_blocks(blocks, anew=True)
    rows.settle(length)
    return rows


def plain(layers: list[torch.Tensor], blocks: list[int], start: int, end: int) -> bytes:
    """Rows by the documented shape, layer by layer, in the order of the log."""
    slots = torch.from_numpy(slots_of(np.array(blocks), SIZE, start, end - start))
    found = [layer.cpu()[slots // SIZE, :, slots % SIZE].unflatten(-1, (2, DIM)) for layer in layers]
    rows = torch.stack([layer.transpose(1, 2) for layer in found], 1)  # [n, layers, planes, heads, dim]
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


def read(rows: DeviceRows, start: int) -> bytes:
    """What has landed."""
    out = bytearray((rows.length - start) * LAYOUT.row_bytes)
    rows.copy_rows(start, memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("order", ORDERS)
def test_gpu_rows_are_gathered_and_loaded_in_each_order_of_memory(device, order):
    """NHD, HND, and their forms with all layers of a block together."""
    layers = cache(device, order)
    store = store_of(layers)
    rows = opened(store, [9, 3, 60], 40)
    store.gather_step([(rows, 7)])
    store.drain()
    got = read(rows, 7)
    assert plain(layers, [9, 3, 60], 7, 7 + len(got) // LAYOUT.row_bytes) == got
    store.scatter([1, 2, 4], 7, memoryview(got))
    assert got == plain(layers, [1, 2, 4], 7, 7 + len(got) // LAYOUT.row_bytes)


def test_gpu_gather_sees_the_step_before_it_and_not_the_one_after(device):
    """Behind a long computation that writes the rows, before one that overwrites the blocks; the host never waits."""
    layers = cache(device)
    store = store_of(layers)
    rows = opened(store, [5], 16)
    busy = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    for layer in layers:
        layer[5].fill_(1)
    started = time.perf_counter()
    store.gather_step([(rows, 0)])
    waited = time.perf_counter() - started
    under_way = rows.is_pending
    for layer in layers:
        layer[5].fill_(2)
    store.drain()
    expected = (
        torch.ones(16 * LAYOUT.row_bytes // 2, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes()
    )
    assert (expected, True) == (read(rows, 0), under_way)
    print(f"\nhook's part of a gather of 2 MiB: {1e6 * waited:.0f} µs while the device is busy")


def test_gpu_load_beside_the_steps_waits_for_the_step_in_flight(device):
    """A step that is still under way may write to blocks that were given away; the load comes after it."""
    layers = cache(device)
    store = store_of(layers)
    data = np.random.default_rng(1).bytes(30 * LAYOUT.row_bytes)
    busy = torch.randn(8192, 8192, device=device)
    torch.cuda.synchronize()
    for _ in range(20):
        busy = busy @ busy / busy.norm()
    for layer in layers:
        layer[:8].fill_(3)
    fence = store.fence()
    thread = threading.Thread(target=store.scatter, args=([0, 7], 1, memoryview(data), fence))
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert data == plain(layers, [0, 7], 1, 31)


def test_gpu_step_in_a_captured_graph_is_followed(device):
    """The graph is replayed; the gather is queued behind it, outside: no Python of ours is in it."""
    layers = cache(device)
    store = store_of(layers, slots=8)
    value = torch.zeros((), device=device, dtype=torch.bfloat16)

    def step() -> None:
        value.add_(1)
        for layer in layers:
            layer[11] = value

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    rows = opened(store, [11], 0)
    for position in range(1, 9):
        graph.replay()
        rows.settle(position)
        store.gather_step([(rows, position - 1)])
    store.drain()
    got = np.frombuffer(read(rows, 7), np.uint16)
    expected = torch.tensor([9.0], dtype=torch.bfloat16).view(torch.int16).item()
    assert {expected} == set(got.tolist())


def test_gpu_probe_asks_vllms_own_kernel(device):
    """FlashAttention's writer on a page of a cache's strides; skips where vLLM cannot be imported."""
    ops = pytest.importorskip("vllm._custom_ops", reason="NO VLLM beside this torch: its kernel is NOT asked")
    first = cache(device)[0]
    page = torch.empty_strided(
        (1, *first.shape[1:]), first.stride(), dtype=first.dtype, device=device
    ).zero_()
    one = torch.ones((), device=device)

    def write(keys, values, page, slots):
        parts = page.transpose(1, 2).split(DIM, dim=-1)
        ops.reshape_and_cache_flash(keys, values, *parts, slots, "auto", one, one)

    refuse_other_order(probe_page_map(write, page), "FLASH_ATTN")


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_gpu_figures_of_the_hook_and_of_a_load(device, batch):
    """Prints the host's time in a gather, the time until it has landed, and a load's rate."""
    layers = cache(device, blocks=256)
    store = store_of(layers)
    requests = [opened(store, [4 * n % 256, (4 * n + 1) % 256], 0) for n in range(batch)]
    hook, landed = [], []
    for position in range(1, 33):
        for rows in requests:
            rows.settle(position)
        torch.cuda.synchronize()
        started = time.perf_counter()
        store.gather_step([(rows, position - 1) for rows in requests])
        hook.append(time.perf_counter() - started)
        store.drain()
        landed.append(time.perf_counter() - started)
    data = memoryview(bytes(64 * LAYOUT.row_bytes))
    started = time.perf_counter()
    store.scatter(list(range(4)), 0, data)
    torch.cuda.synchronize()
    rate = len(data) / (time.perf_counter() - started) / 1e9
    medians = [1e6 * statistics.median(each[4:]) for each in (hook, landed)]
    print(
        f"\nbatch {batch}: hook {medians[0]:.0f} µs, landed after {medians[1]:.0f} µs; load {rate:.1f} GB/s"
    )
