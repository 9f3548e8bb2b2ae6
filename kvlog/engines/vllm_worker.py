"""The connector's half in a vLLM worker: finds the cache's layout, and carries out plans. Imports nothing of vLLM.

What nobody foresaw ends replication on this worker, not the engine: from then on plans are only read for what must be
answered, so that no block stays held and no load is believed in.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from kvlog.checksums import digest
from kvlog.engines.device_layout import SERVED_BACKENDS, refuse_other_order, stack_layers
from kvlog.engines.device_queue import CudaQueue
from kvlog.engines.device_rows import DeviceOptions, DeviceStore
from kvlog.engines.paged_rows import PagedStore
from kvlog.engines.replicator import Replicator, ReplicatorOptions
from kvlog.engines.step_plan import Dropped, StepReport, UnloggedCause
from kvlog.engines.step_worker import StepWorker, WorkerOptions
from kvlog.engines.transformers_identity import model_digest, weights_digest
from kvlog.engines.vllm_probe import probe_page_map
from kvlog.errors import ConfigError
from kvlog.layout import DType, Identity, Layout
from kvlog.link.messages import ONLY_RANK

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from kvlog.engines.row_store import RowStore
    from kvlog.engines.step_plan import StepPlan, TurnKey
    from kvlog.engines.vllm_settings import ConnectorSettings
    from kvlog.link.messages import EngineRank

__all__ = ["CacheFacts", "CacheLayer", "WorkerHalf", "engine_identity", "layers_in_order", "open_store"]

_DTYPES: Final = {
    torch.bfloat16: DType.BFLOAT16,
    torch.float16: DType.FLOAT16,
    torch.float32: DType.FLOAT32,
}
_WORDS: Final = {2: (torch.int16, np.uint16), 4: (torch.int32, np.uint32)}

CacheLayer = tuple[torch.Tensor, "Callable[..., None]"]
"""One layer's cache, [blocks, heads, block_size, planes · head_dim], and its kernel's writer of rows into slots."""


_ALIKE: Final = frozenset({"saved_tokens", "loaded_tokens", "turns_cut", "turns_fenced"})
"""What every rank counts of the same tokens and turns: vLLM adds ranks up, so one of them says it."""


class WorkerHalf:
    """One per worker process.

    Args:
        worker: what it drives.
        counts_for_all: it says what all ranks count alike.
    """

    def __init__(self, worker: StepWorker, *, counts_for_all: bool = True) -> None:
        self._worker = worker
        self._left_out = frozenset() if counts_for_all else _ALIKE
        self._held: set[str] = set()
        self._awaited: set[str] = set()
        self._broken = False
        self._refused: list[Dropped] = []
        self._failed_blocks: set[int] = set()
        self._failed: list[TurnKey] = []
        self._counted_here: dict[str, float] = {}
        self._counted_there: dict[str, float] = {}
        self._counted_of = worker.replicator

    @classmethod
    def start(
        cls,
        settings: ConnectorSettings,
        store: RowStore,
        identity: Identity,
        *,
        engine: str,
        rank: EngineRank = ONLY_RANK,
    ) -> WorkerHalf:
        """Start to look for the daemon; returns at once.

        Args:
            settings: of the connector.
            store: the cache.
            identity: of the engine, as one of one rank.
            engine: kind and version, for people.
            rank: which of the server's workers this is. Their rows are parts, a shard each, or all the same: then
                there is one shard, whatever the number of ranks, and an engine of another number can go on with it.
        """
        shards = 1 if store.is_replicated else rank.ranks
        options = ReplicatorOptions(socket=settings.link, engine=engine, step_bytes=settings.step_bytes)

        def start_replicator(renewal: bytes) -> Replicator:
            """Weights that came later are known to nobody else: their digest is this engine's alone."""
            weights = digest(identity.weights, renewal) if renewal else identity.weights
            replicator = Replicator(options, replace(identity, weights=weights, shards=shards), rank)
            replicator.start()
            return replicator

        worker_options = WorkerOptions(
            hold_seconds=settings.hold_seconds,
            staging_bytes_max=settings.staging_bytes,
            ranks=rank.ranks,
        )
        worker = StepWorker(start_replicator, store, rank.rank, worker_options)
        return cls(worker, counts_for_all=rank.rank == 0)

    @property
    def worker(self) -> StepWorker:
        """What it drives."""
        return self._worker

    def before_step(self, plan: StepPlan) -> None:
        """Before anything is written to blocks."""
        self._held |= {close.held for close in plan.closes if close.held}
        self._awaited |= {ask.beside for ask in plan.loads if ask.beside}
        self._guarded(self._worker.before_step, plan)
        if self._broken:  # else each of them would wait for an answer that never comes, on every rank
            self._refused += [Dropped(ask.key, UnloggedCause.FAULT) for ask in plan.opens]

    def load(self, plan: StepPlan) -> None:
        """Before the computation."""
        self._guarded(self._worker.load, plan)
        if self._broken:
            self._failed_blocks |= {block for ask in plan.loads for block in ask.blocks}
            self._failed += [ask.key for ask in plan.loads]

    def after_step(self, plan: StepPlan) -> None:
        """After the computation."""
        self._guarded(self._worker.after_step, plan)

    def take_released(self) -> set[str]:
        """Finished requests whose blocks are not needed any more."""
        released = set(self._held) if self._broken else self._worker.take_released()
        self._held -= released
        return released

    def take_received(self) -> set[str]:
        """Requests whose load beside the steps is over."""
        received = (
            self._worker.take_received()
        )  # also if broken: what is being filled may not be given back yet
        self._awaited -= received
        if self._broken and not self._worker.is_loading:
            received, self._awaited = received | self._awaited, set()
        return received

    def take_failed_blocks(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        failed, self._failed_blocks = self._failed_blocks | self._worker.take_failed_blocks(), set()
        return failed

    def report(self) -> StepReport:
        """What the scheduler's half has to know."""
        if not self._broken:
            try:
                return self._worker.report()
            except Exception:  # noqa: BLE001  # the adapter's top: generation never fails by it
                self._break()
        refused, self._refused = tuple(self._refused), []
        failed, self._failed = tuple(self._failed), []
        return StepReport(dropped=refused, failed=failed)

    def take_increments(self) -> dict[str, float]:
        """What has been done since this was asked for, by the names of vllm_stats."""
        replicator = self._worker.replicator
        if self._counted_of is not replicator:  # new weights, another link, new counts
            self._counted_there, self._counted_of = {}, replicator
        there, here = _counts_of_replicator(replicator), _counts_of_worker(self._worker)
        increments = _increments(there, self._counted_there) | _increments(here, self._counted_here)
        self._counted_there, self._counted_here = there, here
        return {name: count for name, count in increments.items() if name not in self._left_out}

    def close(self) -> None:
        """Leave the daemon."""
        self._worker.close()

    def _guarded(self, do: Callable[[StepPlan], None], plan: StepPlan) -> None:
        if self._broken:
            return
        try:
            do(plan)
        except Exception:  # noqa: BLE001  # the adapter's top: generation never fails by it
            self._break()

    def _break(self) -> None:
        self._broken = True
        self._worker.counts.faults += 1
        # Not here: leaving a daemon that does not read takes seconds.
        threading.Thread(target=self._worker.close, name="kvlog-close", daemon=True).start()


def _counts_of_worker(worker: StepWorker) -> dict[str, float]:
    counts = worker.counts
    return {
        "loaded_tokens": counts.rows_loaded,
        "stage_seconds": counts.stage_seconds,
        "load_seconds": counts.load_seconds,
        "load_failures_staging": counts.staging_refused,
        "load_failures_blocks": counts.load_failures,
        "faults": counts.faults,
    }


def _counts_of_replicator(replicator: Replicator) -> dict[str, float]:
    counts = replicator.counts
    return {
        "saved_tokens": counts.rows,
        "skipped_steps": counts.ring_full,
        "load_failures_unverified": replicator.loads.failed,
        "turns_cut": counts.turns_cut,
        "turns_fenced": counts.turns_fenced,
        "link_faults": counts.failures,
        "steps": counts.steps,
        "hook_seconds": counts.hook_seconds,
    }


def _increments(total: dict[str, float], before: dict[str, float]) -> dict[str, float]:
    found = {name: value - before.get(name, 0) for name, value in total.items()}
    return {name: value for name, value in found.items() if value}


def layers_in_order(names: Sequence[str]) -> list[str]:
    """Layer names by the numbers in them: 2 comes before 10."""
    return sorted(names, key=lambda name: [int(number) for number in re.findall(r"\d+", name)])


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFacts:
    """What the tensors of a cache do not say themselves.

    Args:
        planes: of a row; 2: K and V, 1: one latent vector (MLA).
        block_size: positions of one of the scheduler's blocks; 0: as the tensors have it.
        backend: vLLM's name of the attention backend.
        step_bytes: rows that one step gathers at most from a device, beside one row of each request.
    """

    planes: int = 2
    block_size: int = 0
    backend: str = ""
    step_bytes: int = 2 << 20


def open_store(layers: Sequence[CacheLayer], facts: CacheFacts) -> tuple[RowStore, Layout]:
    """Find out how the cache lies, and give access to its rows.

    Args:
        layers: in the order of the model.
        facts: see there.

    Raises:
        ConfigError: its layout is not understood, or it is on a device that is not served.
    """
    first, write = layers[0]
    _, heads, positions, width = first.shape
    layout = Layout(len(layers), facts.planes, heads, width // facts.planes, _DTYPES[first.dtype])
    block_size = facts.block_size or positions
    on_device = first.device.type != "cpu"
    if on_device and facts.backend not in SERVED_BACKENDS:
        raise _bad(f"{facts.backend} on {first.device}", f"one of {', '.join(sorted(SERVED_BACKENDS))}")
    if block_size % positions or (block_size != positions and not on_device):
        raise _bad(f"blocks of {block_size} positions in pages of {positions}", "another --block-size")
    page_map = probe_page_map(write, _scratch_page(first), facts.planes)
    if not on_device:
        return PagedStore([_pages(cache) for cache, _ in layers], page_map, layout), layout
    refuse_other_order(page_map, facts.backend)
    view = stack_layers([cache for cache, _ in layers], facts.planes)
    options = DeviceOptions(step_bytes=facts.step_bytes)
    return DeviceStore(view, block_size, layout, CudaQueue(first.device), options), layout


def _scratch_page(cache: torch.Tensor) -> torch.Tensor:
    """One block of zeros that lies as the cache's blocks do."""
    shape = (1, *cache.shape[1:])
    return torch.empty_strided(shape, cache.stride(), dtype=cache.dtype, device=cache.device).zero_()


def engine_identity(
    folder: Path, layout: Layout, *, architecture: str, rope: object, settings: Mapping[str, object]
) -> Identity:
    """Which cache bytes this engine makes, as one of one rank.

    Args:
        folder: the model's.
        layout: of a row, on one rank.
        architecture: the model's class name.
        rope: rotary parameters as loaded.
        settings: of the engine that change the bytes of rows: dtype, quantization, overrides.

    Raises:
        ConfigError: the folder is no folder, or has no safetensors.
    """
    if not folder.is_dir():
        raise _bad(f"{folder} is neither a folder nor in the hub's cache", "give a folder", "model")
    said = [f"{name}={settings[name]}".encode() for name in sorted(settings)]
    model = model_digest(folder, architecture=f"vllm:{architecture}", rope=rope, layout=layout)
    return Identity(digest(model, *said), weights_digest(folder), layout, shards=1)


def _pages(cache: torch.Tensor) -> np.ndarray[Any, np.dtype[np.generic]]:
    """View a layer as [blocks, heads, page size] words."""
    word, numbers = _WORDS[cache.element_size()]
    pages = cache.view(word).flatten(2)
    if pages.data_ptr() != cache.data_ptr():
        raise _bad("the interior of its blocks is not contiguous", "serve without kvlog")
    viewed: np.ndarray[Any, np.dtype[np.generic]] = pages.numpy().view(numbers)
    return viewed


def _bad(problem: str, fix: str, setting: str = "attention backend") -> ConfigError:
    return ConfigError(setting=setting, problem=problem, fix=fix)
