"""Rows of a cache on a GPU, on host tensors of the same shapes and strides, and a stream that lands when it is told."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kvlog.engines.device_layout import SERVED_BACKENDS, refuse_other_order, slots_of, stack_layers
from kvlog.engines.device_rows import DeviceOptions, DeviceRows, DeviceStore
from kvlog.engines.paged_rows import PageMap
from kvlog.engines.vllm_probe import probe_page_map
from kvlog.errors import ConfigError
from kvlog.layout import DType, Layout
from tests.unit.engines.fake_queue import FakeQueue

LAYERS, BLOCKS, HEADS, SIZE, DIM = 3, 7, 2, 8, 4
ORDERS = {"LBHNC": (0, 1, 2, 3, 4), "LBNHC": (0, 1, 3, 2, 4), "LHBNC": (0, 2, 1, 3, 4),
          "BLHNC": (1, 0, 2, 3, 4), "BLNHC": (1, 0, 3, 2, 4), "BHLNC": (1, 2, 0, 3, 4)}  # fmt: skip
"""vLLM's names of the orders in memory of [layers, blocks, heads, positions, content] (vllm/v1/kv_cache_layout.py)."""


def cache(order: str = "LBNHC", planes: int = 2, heads: int = HEADS) -> list[torch.Tensor]:
    """Layers as vLLM's create_kv_cache_views makes them: views of one allocation, of random bytes."""
    sizes = (LAYERS, BLOCKS, heads, SIZE, planes * DIM)
    axes = ORDERS[order]
    strides = [0] * len(sizes)
    for place, axis in enumerate(axes):
        strides[axis] = math.prod(sizes[other] for other in axes[place + 1 :])
    raw = torch.randint(-30000, 30000, (math.prod(sizes),), dtype=torch.int16).view(torch.bfloat16)
    return list(raw.as_strided(sizes, strides))


def layout(planes: int = 2, heads: int = HEADS) -> Layout:
    """Of a row."""
    return Layout(LAYERS, planes, heads, DIM, DType.BFLOAT16)


def store_of(layers: list[torch.Tensor], planes: int = 2, **options: int) -> tuple[DeviceStore, FakeQueue]:
    """A store over them, with blocks of the tensors' size."""
    queue = FakeQueue()
    heads = layers[0].shape[1]
    given = DeviceOptions(**{"slot_bytes": 1 << 16, **options})
    return DeviceStore(stack_layers(layers, planes), SIZE, layout(planes, heads), queue, given), queue


def plain(layers: list[torch.Tensor], blocks: list[int], position: int, planes: int = 2) -> bytes:
    """One row, element by element, by the documented shape."""
    block, at = blocks[position // SIZE], position % SIZE
    row = [layer[block, head, at, plane * DIM + d] for layer in layers
           for plane in range(planes) for head in range(layer.shape[1]) for d in range(DIM)]  # fmt: skip
    return torch.stack(row).view(torch.uint8).numpy().tobytes()


def opened(store: DeviceStore, blocks: list[int], length: int) -> DeviceRows:
    """A request that is computed so far."""
    rows = store.open_rows()
    rows.take_blocks(blocks, anew=True)
    rows.settle(length)
    return rows


def read(rows: DeviceRows, start: int, row_bytes: int) -> bytes:
    """Everything that can be read from a position on."""
    out = bytearray((rows.length - start) * row_bytes)
    rows.copy_rows(start, memoryview(out))
    return bytes(out)


def test_rows_whose_blocks_were_given_up_are_not_read_for_a_log_that_begins_further_down() -> None:
    """The daemon died and lost what was under way: those blocks are somebody else's, so the log stays shorter."""
    store, queue = store_of(cache())
    rows = opened(store, [5, 2], 10)
    store.gather_step([(rows, 6)])
    rows.give_up_blocks()
    store.gather_step([(rows, 2)])
    queue.arrive()
    assert (2, False) == (rows.length, rows.is_pending)


@pytest.mark.parametrize(("planes", "heads"), [(2, HEADS), (1, 1)])
@pytest.mark.parametrize("order", ORDERS)
def test_store_reads_each_order_in_memory_and_writes_it_back(order: str, planes: int, heads: int) -> None:
    """NHD and HND, layers apart or together in a block, K and V or one latent row: what the documented shape says."""
    layers = cache(order, planes, heads)
    store, queue = store_of(layers, planes)
    rows = opened(store, [5, 2, 6], 20)
    store.gather_step([(rows, 3)])
    queue.arrive()
    got = read(rows, 3, store.row_bytes)
    assert b"".join(plain(layers, [5, 2, 6], position, planes) for position in range(3, 20)) == got
    before = [layer.view(torch.int16).clone() for layer in layers]
    store.scatter([0, 3, 1], 3, memoryview(got))
    assert got == b"".join(plain(layers, [0, 3, 1], position, planes) for position in range(3, 20))
    after = [layer.view(torch.int16) for layer in layers]
    changed = sum(int((old != new).sum()) for old, new in zip(before, after, strict=True))
    assert changed <= 17 * LAYERS * planes * heads * DIM


def test_blocks_of_several_kernel_blocks_are_numbered_through() -> None:
    """The scheduler's block of 16 is two of a kernel's 8: block 2 is 4 and 5."""
    layers = cache()
    queue = FakeQueue()
    store = DeviceStore(stack_layers(layers, 2), 2 * SIZE, layout(), queue, DeviceOptions(slot_bytes=1 << 16))
    rows = opened(store, [2, 0], 32)
    store.gather_step([(rows, 0)])
    queue.arrive()
    expected = b"".join(plain(layers, [4, 5, 0, 1], position) for position in range(32))
    assert (expected, 3) == (read(rows, 0, store.row_bytes), store.blocks)
    assert [46, 47, 0, 1] == slots_of(np.array([2, 0]), 16, 14, 4).tolist()


def test_rows_can_be_read_once_their_mark_has_passed() -> None:
    """Not before: the copy is under way. One step's rows land without the next one's."""
    layers = cache()
    store, queue = store_of(layers)
    rows = opened(store, [1, 4], 9)
    store.gather_step([(rows, 0)])
    assert (0, True) == (rows.length, rows.is_pending)
    rows.settle(10)
    store.gather_step([(rows, 0)])
    queue.arrive(but=1)
    assert (9, True) == (rows.length, rows.is_pending)
    queue.arrive()
    assert (10, False) == (rows.length, rows.is_pending)
    assert plain(layers, [1, 4], 9) == read(rows, 9, store.row_bytes)
    assert ["mark 0", "mark 1"] == queue.said


def test_rows_are_those_of_the_step_whatever_becomes_of_the_blocks() -> None:
    """What is queued afterwards, another request's step, does not change what was read; nothing more is."""
    layers = cache()
    store, queue = store_of(layers)
    rows = opened(store, [1, 4], 12)
    expected = b"".join(plain(layers, [1, 4], position) for position in range(12))
    store.gather_step([(rows, 0)])
    rows.give_up_blocks()
    for layer in layers:
        layer.zero_()
    store.gather_step([(rows, 0)])
    queue.arrive()
    assert (expected, False, 1) == (read(rows, 0, store.row_bytes), rows.is_pending, len(queue.marks))


def test_step_without_a_free_slot_gathers_nothing_and_a_later_one_does() -> None:
    """Rows stay in their blocks; slots are free when the log's cursor has passed their rows and the copy is over."""
    store, queue = store_of(cache(), slots=2)
    rows = opened(store, [1, 4], 1)
    for length in (1, 2, 3, 4):
        rows.settle(length)
        store.gather_step([(rows, 0)])
    assert 2 == len(queue.marks)
    queue.arrive()
    assert (2, True) == (rows.length, rows.is_pending)
    store.gather_step([(rows, 2)])  # the cursor has passed both
    queue.arrive()
    assert (4, 3) == (rows.length, len(queue.marks))


def test_slot_of_a_request_that_has_left_is_not_used_before_its_copy_is_over() -> None:
    """Else two steps' rows would lie in one place."""
    store, queue = store_of(cache(), slots=2)
    for _ in range(2):
        rows = opened(store, [1], 3)
        store.gather_step([(rows, 0)])
        rows.close()
    other = opened(store, [2], 2)
    store.gather_step([(other, 0)])
    assert 2 == len(queue.marks)
    queue.arrive()
    store.gather_step([(other, 0)])
    queue.arrive()
    assert 2 == other.length


def test_budget_gives_each_request_a_row_and_the_rest_in_turn() -> None:
    """A prefill does not keep the others from being logged; who is served first changes."""
    store, queue = store_of(cache(), step_bytes=6 * layout().row_bytes)
    requests = [opened(store, [block], 8) for block in range(3)]
    found = []
    for _ in range(3):
        store.gather_step([(rows, 0 if rows.length == 0 else rows.length) for rows in requests])
        queue.arrive()
        found.append([rows.length for rows in requests])
    assert [[4, 1, 1], [5, 5, 2]] == found[:2]
    assert sum(found[2]) == 18


def test_more_requests_than_a_slot_holds_take_turns() -> None:
    """A slot of two rows, three requests: nobody is left out for good."""
    store, queue = store_of(cache(), slot_bytes=2 * layout().row_bytes, step_bytes=1)
    requests = [opened(store, [block], 2) for block in range(3)]
    for _ in range(4):
        store.gather_step([(rows, rows.length) for rows in requests])
        queue.arrive()
    assert all(rows.length >= 1 for rows in requests)


def test_cursor_that_goes_back_is_followed() -> None:
    """A turn that is opened anew wants rows that have left pinned memory: they are read again."""
    layers = cache()
    store, queue = store_of(layers)
    rows = opened(store, [1, 4], 12)
    store.gather_step([(rows, 5)])
    queue.arrive()
    assert 12 == rows.length
    store.gather_step([(rows, 2)])
    assert (2, True) == (rows.length, rows.is_pending)
    queue.arrive()
    assert b"".join(plain(layers, [1, 4], n) for n in range(2, 12)) == read(rows, 2, store.row_bytes)


def test_watermark_that_falls_takes_rows_back() -> None:
    """Blocks given anew, a load that failed: what was gathered of the old ones is void."""
    layers = cache()
    store, queue = store_of(layers)
    rows = opened(store, [1, 4], 12)
    store.gather_step([(rows, 0)])
    queue.arrive()
    rows.settle(4)
    assert rows.length <= 4
    rows.take_blocks([6], anew=True)
    rows.settle(3)
    store.gather_step([(rows, 0)])
    queue.arrive()
    assert b"".join(plain(layers, [6], n) for n in range(3)) == read(rows, 0, store.row_bytes)
    rows.cut(1)
    assert 1 >= rows.length


def test_settle_is_bounded_by_the_blocks() -> None:
    """As on the host."""
    store, queue = store_of(cache())
    rows = opened(store, [3], 100)
    store.gather_step([(rows, 0)])
    queue.arrive()
    assert (8, [3]) == (rows.length, list(rows.blocks))


def test_drain_waits_for_what_somebody_will_read_and_for_nothing_else() -> None:
    """When no step follows, rows would stay under way until the next request."""
    store, queue = store_of(cache())
    left, rows = opened(store, [1], 3), opened(store, [2], 3)
    store.gather_step([(left, 0)])
    store.gather_step([(rows, 0)])
    left.close()
    store.drain()
    assert (3, [False, True]) == (rows.length, [mark.waited for mark in queue.marks])


def test_load_beside_the_steps_begins_after_the_fence_and_is_waited_for() -> None:
    """A step that is still under way may write to blocks that were given away since."""
    layers = cache()
    store, queue = store_of(layers)
    data = np.random.default_rng(5).bytes(9 * store.row_bytes)
    fence = store.fence()
    store.scatter([4, 0], 2, memoryview(data), fence)
    assert ["mark 0", "beside, after 0", "waited"] == queue.said
    assert data == b"".join(plain(layers, [4, 0], position) for position in range(2, 11))


def test_load_of_a_step_is_queued_before_it_and_nobody_waits() -> None:
    """In pieces, if it is long."""
    store, queue = store_of(cache())
    store.scatter([4], 0, memoryview(bytes(3 * store.row_bytes)))
    assert [] == queue.said


def test_layers_that_lie_anywhere_are_refused() -> None:
    """One strided view has to reach them all: one allocation, equal distances."""
    apart = [torch.zeros(2, 2, 4, 8) for _ in range(2)]
    raw = torch.zeros(5, 2, 2, 4, 8)
    for layers in (apart, [raw[0], raw[1], raw[4]], [raw[0], raw[1].transpose(1, 2)]):
        with pytest.raises(ConfigError, match="equally far apart"):
            stack_layers(layers, 2)
    assert (1, 2, 2, 2, 4, 4) == tuple(stack_layers([raw[3]], 2).shape)


@pytest.mark.parametrize("planes", [1, 2])
def test_kernel_that_writes_as_documented_is_served_and_another_is_not(planes: int) -> None:
    """The probe asks the kernel on the device, of a page whose strides are the cache's."""

    def documented(*rows_page_slots: torch.Tensor) -> None:
        *rows, page, slots = rows_page_slots
        page[slots // SIZE, :, slots % SIZE] = torch.cat(rows, -1)

    def reversed_dims(*rows_page_slots: torch.Tensor) -> None:
        *rows, page, slots = rows_page_slots
        documented(*(part.flip(-1) for part in rows), page, slots)

    first = cache("LBNHC", planes)[0]
    page = torch.empty_strided((1, *first.shape[1:]), first.stride(), dtype=first.dtype).zero_()
    refuse_other_order(probe_page_map(documented, page, planes), "FLASH_ATTN")
    with pytest.raises(ConfigError, match="FLASH_ATTN does not write"):
        refuse_other_order(probe_page_map(reversed_dims, page, planes), "FLASH_ATTN")


def test_rows_are_loaded_by_the_store_only() -> None:
    """The scheduler's blocks are not the rows' to extend."""
    store, _ = store_of(cache())
    with pytest.raises(AssertionError):
        store.open_rows().load_rows(memoryview(b""))


def test_served_backends_are_those_whose_layout_was_read() -> None:
    """A new one is added by whoever has read it."""
    assert {"FLASH_ATTN", "FLASHINFER"} == SERVED_BACKENDS
    assert PageMap(np.arange(16).reshape(4, 2, 2)).block_size == 4
