"""A pool in a GPU's memory (`cuda:N`). EXPERIMENTAL: no run of tests/gpu on a device is recorded yet.

Chosen: engines never map the daemon's device memory. Blocks that an attach pins are gathered into a staging area on
the host, a sealed memfd like that of a `cpu` pool, and engines read that. So the engine's side is the same for both
kinds of pool, and whatever happens to the daemon in the middle of an attach, the engine's CUDA context knows nothing of
it: with CUDA IPC or an exported VMM allocation, a fault of the exporter could end the importer's context, and with it
the server. The price is one pass over PCIe more, and `staging_bytes` of host memory. The staging area is registered
with the driver (cudaHostRegister), so that the copies are DMA at full speed.

A CUDA error in the daemon is final for its context: torch's exception goes up, the daemon ends and is started again,
and engines go on unreplicated meanwhile.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

import torch

from kvlog.buffers.geometry import PoolGeometry
from kvlog.buffers.memory import create
from kvlog.buffers.pool_tensor import view_blocks
from kvlog.errors import ConfigError, PoolFull

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvlog.buffers.memory import SealedMemory
    from kvlog.buffers.pool import Extent, PoolOptions

__all__ = ["DeviceStore", "HostRegistration", "open_device_store"]

_REGISTER_PORTABLE = 1
"""cudaHostRegisterPortable: pinned for every context of this process. Source: cuda_runtime_api.h"""


class HostRegistration:
    """Host memory that the driver knows, so that copies from and to a device are DMA; ended by `close`.

    For the staging area here, and for a ring into which an engine gathers from its device.
    """

    def __init__(self, address: int) -> None:
        self._address = address

    @classmethod
    def of(cls, memory: torch.Tensor) -> Self:
        """Register the bytes of a host tensor, which has to stay alive.

        Raises:
            ConfigError: the driver refuses; raise the limit of locked memory.
        """
        size_bytes = memory.numel() * memory.element_size()
        status = int(_cudart().cudaHostRegister(memory.data_ptr(), size_bytes, _REGISTER_PORTABLE))
        if status:
            raise ConfigError(
                setting="pool.staging_bytes",
                problem=f"{size_bytes} bytes of host memory cannot be registered with CUDA: error {status}",
                fix="raise the limit of locked memory (LimitMEMLOCK=infinity), or make it smaller",
            )
        return cls(memory.data_ptr())

    def close(self) -> None:
        """The driver forgets the memory; once, before it is unmapped."""
        _cudart().cudaHostUnregister(self._address)


def _cudart() -> Any:  # noqa: ANN401 - torch's binding of the CUDA runtime has no types
    cudart: Any = torch.cuda.cudart
    return cudart()


class DeviceStore:
    """Blocks in device memory, shared through a staging area on the host.

    Shape: `blocks` is [blocks, block_bytes], uint8, on the device; the staging area the same on the host.
    """

    def __init__(self, geometry: PoolGeometry, blocks: torch.Tensor, staging: SealedMemory) -> None:
        staged = staging.size_bytes // geometry.block_bytes
        self.geometry = geometry
        self.shared_geometry = PoolGeometry(geometry.block_bytes, staged, geometry.device)
        self.memory = staging
        self._blocks = blocks
        self._staging = view_blocks(staging, self.shared_geometry)
        self._free = list(range(staged - 1, -1, -1))
        self._registrations: list[HostRegistration] = []

    @classmethod
    def open(cls, options: PoolOptions, device: torch.device) -> Self:
        """Allocate blocks on any torch device, and the staging area on the host.

        Raises:
            ConfigError: the memory is not there.
        """
        geometry = options.geometry
        staged_bytes = options.staging_bytes // options.block_bytes * options.block_bytes
        staging = create(
            "kvlog-staging", staged_bytes, setting="pool.staging_bytes", creator_writes_only=True
        )
        try:
            blocks = torch.zeros((geometry.blocks, geometry.block_bytes), dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            staging.close()
            raise ConfigError(
                setting="pool.bytes",
                problem=f"{geometry.size_bytes} bytes could not be allocated on {device}",
                fix="make it smaller, or leave more device memory to the daemon",
            ) from error
        store = cls(geometry, blocks, staging)
        try:
            store.register()
        except ConfigError:
            store.close()
            raise
        return store

    def register(self) -> None:
        """Tell the driver of the staging area; nothing to do for blocks that are not on a GPU.

        Raises:
            ConfigError: the driver refuses; raise the limit of locked memory.
        """
        if self._blocks.is_cuda:
            self._registrations.append(HostRegistration.of(self._staging))

    def open_views(self, extents: Sequence[Extent]) -> tuple[memoryview, ...]:
        """Host memory of its own for each extent; pinned, where there is CUDA."""
        pin = self._blocks.is_cuda
        tensors = (torch.empty(extent.size, dtype=torch.uint8, pin_memory=pin) for extent in extents)
        return tuple(tensor.numpy().data for tensor in tensors)

    def store_views(self, extents: Sequence[Extent], views: Sequence[memoryview]) -> None:
        """Copy to the device; complete when it returns."""
        for extent, view in zip(extents, views, strict=True):
            self._part(extent).copy_(torch.frombuffer(view, dtype=torch.uint8), non_blocking=True)
        self._wait()

    def copy_head(self, source: int, target: int, size: int) -> None:
        """Copy within the device; later copies of this store come after it."""
        self._blocks[target, :size].copy_(self._blocks[source, :size])

    def read(self, extent: Extent) -> bytes:
        """A copy on the host."""
        return self._part(extent).cpu().numpy().tobytes()

    def share(self, blocks: Sequence[Extent]) -> tuple[int, ...]:
        """Gather the blocks into the staging area; complete when it returns.

        Raises:
            PoolFull: the staging area is in use.
        """
        if len(blocks) > len(self._free):
            raise PoolFull(blocks_wanted=len(blocks), blocks_free=len(self._free))
        indexes = tuple(self._free.pop() for _ in blocks)
        for index, extent in zip(indexes, blocks, strict=True):
            self._staging[index, : extent.size].copy_(self._part(extent), non_blocking=True)
        self._wait()
        return indexes

    def unshare(self, indexes: Sequence[int]) -> None:
        """Their staging blocks are free again."""
        self._free.extend(indexes)

    def close(self) -> None:
        """Give device and host memory back."""
        while self._registrations:
            self._registrations.pop().close()
        del self._blocks, self._staging
        self.memory.close()

    def _part(self, extent: Extent) -> torch.Tensor:
        return self._blocks[extent.block, extent.at : extent.at + extent.size]

    def _wait(self) -> None:
        if self._blocks.is_cuda:
            torch.cuda.current_stream(self._blocks.device).synchronize()


def open_device_store(options: PoolOptions) -> DeviceStore:
    """Blocks on the GPU that options.device names.

    Raises:
        ConfigError: there is no such GPU, or it has too little free memory; nothing was started.
    """
    index = int(options.device.removeprefix("cuda:"))
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ConfigError(
            setting="pool.device",
            problem=f"{options.device} is wanted, torch {torch.__version__} sees {count} CUDA devices here",
            fix="set it to cpu, or install a CUDA build of torch and give the daemon access to the GPU",
        )
    device = torch.device("cuda", index)
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if options.geometry.size_bytes > free_bytes:
        raise ConfigError(
            setting="pool.bytes",
            problem=f"{options.geometry.size_bytes} bytes are wanted, {free_bytes} bytes are free on {options.device}",
            fix="make it smaller, or lower the engine's share of the GPU (vLLM: --gpu-memory-utilization)",
        )
    return DeviceStore.open(options, device)
