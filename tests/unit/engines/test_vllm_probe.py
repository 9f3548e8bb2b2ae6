"""The probe against kernels written here: it finds their order, or refuses them."""

from __future__ import annotations

import pytest
import torch

from kvlog.engines.vllm_probe import probe_page_map
from kvlog.engines.vllm_worker import layers_in_order, open_store
from kvlog.errors import ConfigError

HEADS, SIZE, DIM = 2, 32, 16


def vec(keys, values, cache, slots):
    """K column-major, V row-major, in the two halves of each head's page."""
    blocks, heads, size, _ = cache.shape
    pages = cache.view(blocks, heads, -1)
    for n, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, size)
        half = size * keys.shape[2]
        pages[block, :, at:half:size] = keys[n]
        begin = half + at * keys.shape[2]
        pages[block, :, begin : begin + keys.shape[2]] = values[n]


def documented(keys, values, cache, slots):
    """[..., :dim] is K, [..., dim:] is V."""
    for n, slot in enumerate(slots.tolist()):
        block, at = divmod(slot, cache.shape[2])
        cache[block, :, at] = torch.cat((keys[n], values[n]), -1)


def tiles(keys, values, cache, slots):
    """Any other fixed order."""
    scratch = torch.zeros_like(cache)
    documented(keys, values, scratch, slots)
    order = torch.randperm(cache.shape[2] * cache.shape[3], generator=torch.Generator().manual_seed(1))
    cache.view(*cache.shape[:2], -1)[...] = scratch.view(*cache.shape[:2], -1)[..., order]


def lossy(keys, values, cache, slots):
    """A cache of half the digits."""
    documented(keys // 2, values // 2, cache, slots)


def mixing(keys, values, cache, slots):
    """Heads in another order than they came."""
    documented(keys.flip(1), values.flip(1), cache, slots)


def keys_only(keys, values, cache, slots):
    """V is kept elsewhere."""
    documented(keys, torch.zeros_like(values), cache, slots)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kernel", [vec, documented, tiles])
def test_probe_finds_each_element(kernel, dtype):
    """What the kernel wrote of random rows is found where the map says."""
    table = probe_page_map(kernel, torch.zeros(1, HEADS, SIZE, 2 * DIM, dtype=dtype)).table
    keys, values = (torch.randn(SIZE, HEADS, DIM).to(dtype) for _ in range(2))
    cache = torch.zeros(1, HEADS, SIZE, 2 * DIM, dtype=dtype)
    kernel(keys, values, cache, torch.arange(SIZE))
    page = cache.view(HEADS, -1)
    assert torch.equal(keys, page[:, table[:, 0]].transpose(0, 1))
    assert torch.equal(values, page[:, table[:, 1]].transpose(0, 1))


@pytest.mark.parametrize("kernel", [lossy, mixing, keys_only])
def test_probe_refuses_what_is_no_plain_row(kernel):
    """A packed, mixed or split cache is no K and V row as computed."""
    with pytest.raises(ConfigError, match="serve without kvlog"):
        probe_page_map(kernel, torch.zeros(1, HEADS, SIZE, 2 * DIM))


def test_layers_are_ordered_by_number():
    """Layer 10 is not the second one."""
    names = [f"model.layers.{n}.self_attn.attn" for n in (10, 2, 0)]
    assert names[::-1] == layers_in_order(names)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_store_of_tensors_reads_what_the_kernel_wrote(dtype):
    """From torch tensors to token-major bytes, over two layers and two blocks."""
    caches = [torch.zeros(3, HEADS, SIZE, 2 * DIM, dtype=dtype) for _ in range(2)]
    store, layout = open_store([(cache, vec) for cache in caches])
    rows = torch.randn(40, 2, 2, HEADS, DIM).to(dtype)
    blocks = [2, 0]
    slots = torch.tensor([blocks[n // SIZE] * SIZE + n % SIZE for n in range(40)])
    for layer, cache in enumerate(caches):
        vec(rows[:, layer, 0], rows[:, layer, 1], cache, slots)
    out = bytearray(40 * layout.row_bytes)
    store.gather(blocks, 0, memoryview(out))
    assert rows.view(torch.uint8).numpy().tobytes() == bytes(out)
    assert 3 == store.blocks
