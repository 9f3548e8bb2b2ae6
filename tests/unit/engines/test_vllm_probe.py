"""The probe against kernels written here: it finds their order, or refuses them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kvlog.engines.paged_rows import PagedStore
from kvlog.engines.vllm_kernels import writer_of
from kvlog.engines.vllm_probe import probe_page_map
from kvlog.engines.vllm_worker import CacheFacts, layers_in_order, open_store
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


def on_host(layers, planes=2):
    """A store of tensors on the host, and the layout."""
    store, layout = open_store(layers, CacheFacts(planes=planes))
    assert isinstance(store, PagedStore)
    return store, layout


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_store_of_tensors_reads_what_the_kernel_wrote(dtype):
    """From torch tensors to token-major bytes, over two layers and two blocks."""
    caches = [torch.zeros(3, HEADS, SIZE, 2 * DIM, dtype=dtype) for _ in range(2)]
    store, layout = on_host([(cache, vec) for cache in caches])
    rows = torch.randn(40, 2, 2, HEADS, DIM).to(dtype)
    blocks = [2, 0]
    slots = torch.tensor([blocks[n // SIZE] * SIZE + n % SIZE for n in range(40)])
    for layer, cache in enumerate(caches):
        vec(rows[:, layer, 0], rows[:, layer, 1], cache, slots)
    out = bytearray(40 * layout.row_bytes)
    store.gather(blocks, 0, memoryview(out))
    assert rows.view(torch.uint8).numpy().tobytes() == bytes(out)
    assert 3 == store.blocks


class Latent:
    """An attention layer of vLLM whose cache has one latent row a position: [blocks, block_size, rank + rotary]."""

    kv_lora_rank, kv_cache_dtype, _k_scale = 12, "auto", None

    def __init__(self) -> None:
        self.impl = SimpleNamespace(do_kv_cache_update=self.update)

    @staticmethod
    def update(normed, rotary, cache, slots, *dtype_and_scale):
        """As the CPU's reference kernel does it; shapes are those that the kernels are given."""
        assert ("auto", None) == dtype_and_scale
        assert (2, 3, 3) == (normed.dim(), rotary.dim(), cache.dim())
        flat = cache.view(-1, cache.shape[2])
        flat[slots, : normed.shape[1]] = normed
        flat[slots, normed.shape[1] :] = rotary.squeeze(1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_latent_cache_is_read_as_one_row_of_one_plane(dtype):
    """MLA: no K, no V, one head; rows are what was written, whatever the block table."""
    caches = [torch.zeros(3, 1, SIZE, DIM, dtype=dtype) for _ in range(2)]
    store, layout = on_host([(cache, writer_of(Latent(), 1)) for cache in caches], planes=1)
    assert (2, 1, 1, DIM) == (layout.layers, layout.planes, layout.kv_heads, layout.head_dim)
    assert store.is_replicated
    rows = torch.randn(40, 2, 1, DIM).to(dtype)
    blocks = [2, 0]
    slots = torch.tensor([blocks[n // SIZE] * SIZE + n % SIZE for n in range(40)])
    for layer, cache in enumerate(caches):
        writer_of(Latent(), 1)(rows[:, layer], cache, slots)
    out = bytearray(40 * layout.row_bytes)
    store.gather(blocks, 0, memoryview(out))
    assert rows.view(torch.uint8).numpy().tobytes() == bytes(out)
    store.scatter([1, 0], 0, memoryview(out))
    assert torch.equal(caches[1][1, 0], rows[:SIZE, 1, 0])


def test_keys_and_values_are_every_ranks_own():
    """Each rank has other heads."""
    store, _ = on_host([(torch.zeros(1, HEADS, SIZE, 2 * DIM), vec)])
    assert not store.is_replicated


def test_writer_of_keys_and_values_passes_the_layer_on():
    """The kernel reads its scales from it."""
    got: list[object] = []
    module = SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=lambda *given: got.append(given)))
    writer_of(module, 2)("k", "v", "cache", "slots")
    assert [(module, "k", "v", "cache", "slots")] == got


def test_blocks_of_several_pages_are_refused_on_the_host():
    """A kernel with smaller blocks than the scheduler's: the map of a page would be read past its end."""
    layers = [(torch.zeros(2, HEADS, SIZE, 2 * DIM), vec)]
    with pytest.raises(ConfigError, match="blocks of 64 positions in pages of 32"):
        open_store(layers, CacheFacts(block_size=2 * SIZE))


def test_backend_that_nobody_has_read_is_refused_on_a_device():
    """By its name, before anything of the cache is touched."""
    layers = [(torch.zeros(2, HEADS, SIZE, 2 * DIM, device="meta"), documented)]
    with pytest.raises(ConfigError, match="TRITON_ATTN on meta"):
        open_store(layers, CacheFacts(backend="TRITON_ATTN"))
