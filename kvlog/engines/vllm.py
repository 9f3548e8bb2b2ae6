"""The vLLM connector: the only module that imports vLLM. Switched on with --kv-transfer-config (docs/vllm.md).

vLLM makes it twice, in different processes: in the scheduler, where it plans (vllm_scheduler), and in the worker, where
it has the cache and the daemon (vllm_worker). Between them travel a plan with each step and a report with each result.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.platforms import current_platform
from vllm.transformers_utils.repo_utils import try_get_local_file

from kvlog.engines.vllm_adapters import AdapterDigests, local_folder
from kvlog.engines.vllm_kernels import writer_of
from kvlog.engines.vllm_scheduler import EngineShape, SchedulerHalf
from kvlog.engines.vllm_settings import ConnectorSettings
from kvlog.engines.vllm_stats import KvlogPromMetrics, KvlogStats
from kvlog.engines.vllm_support import CacheGroup, EngineFacts, check_api, check_version, refuse_unsupported
from kvlog.engines.vllm_worker import CacheFacts, WorkerHalf, engine_identity, layers_in_order, open_store
from kvlog.link.messages import EngineRank

if TYPE_CHECKING:
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

    from kvlog.engines.step_plan import StepPlan, StepReport

__all__ = ["KvlogConnector"]


@dataclass
class _Plan(KVConnectorMetadata):
    """A StepPlan as vLLM carries it."""

    plan: StepPlan


@dataclass
class _Report(KVConnectorWorkerMetadata):
    """A StepReport as vLLM carries it."""

    report: StepReport

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """Two workers' reports as one."""
        return _Report(self.report.aggregate(other.report))


class KvlogConnector(KVConnectorBase_V1, SupportsHMA):
    """Replicates vLLM's KV cache through kvlogd; see the base class for when each method is called.

    Raises (constructor):
        ConfigError: a key, an option or a model that is not served; named.
    """

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)
        settings = ConnectorSettings.parse(vllm_config.kv_transfer_config.kv_connector_extra_config)
        check_version(vllm.__version__, any_version=settings.any_version)
        check_api(dir(KVConnectorBase_V1))
        refuse_unsupported(_facts(vllm_config, kv_cache_config, settings))
        self._settings = settings
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            shape = EngineShape(
                engine=str(vllm_config.kv_transfer_config.engine_id),
                blocks=kv_cache_config.num_blocks,
                row_bytes=_row_bytes(kv_cache_config),
                block_size=kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size,
                ranks=vllm_config.parallel_config.tensor_parallel_size,
            )
            self._scheduler = SchedulerHalf(settings, shape, AdapterDigests(_adapter_folder))

    @property
    def requires_kv_delivery(self) -> bool:
        """No: what is not logged is computed again."""
        return False

    # In both, and for the metrics

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """What has been done since this was asked for."""
        half = self._scheduler or self._worker
        increments = {} if half is None else half.take_increments()
        return KvlogStats(data=increments) if increments else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        """Increments as they travelled."""
        return KvlogStats(data=data or {})

    @classmethod
    def build_prom_metrics(cls, *args: Any) -> KVConnectorPromMetrics | None:  # noqa: ANN401
        """The counters of the Prometheus endpoint."""
        return KvlogPromMetrics(*args)

    # In the scheduler

    def on_new_request(self, request: Any) -> None:  # noqa: ANN401
        """Take a request."""
        self._planning.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        """Verified rows beyond the local ones."""
        return self._planning.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        """The request got blocks."""
        self._planning.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        """The step's plan."""
        return _Plan(self._planning.plan(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:  # noqa: ANN401
        """What the workers said."""
        said = connector_output.kv_connector_worker_meta
        self._planning.take(None if said is None else said.report, connector_output.finished_sending)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:  # noqa: ANN401
        """A request is over."""
        return self._planning.finished(request, len(block_ids))

    def request_finished_all_groups(
        self,
        request: Any,  # noqa: ANN401
        block_ids: tuple[list[int], ...],
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request is over."""
        return self._planning.finished(request, sum(map(len, block_ids)))

    def reset_cache(self) -> bool | None:
        """The caches are void, since the weights may be others: sessions are claimed anew."""
        if self._scheduler is not None:
            self._scheduler.renew()
        return True

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """The cache is there: find its layout, and start to look for the daemon."""
        config = self._vllm_config
        modules = config.compilation_config.static_forward_context
        group = self._kv_cache_config.kv_cache_groups[0]
        names = layers_in_order(group.layer_names)
        facts = CacheFacts(
            planes=_group(group).planes,
            block_size=group.kv_cache_spec.block_size,
            backend=modules[names[0]].attn_backend.get_name(),
            step_bytes=self._settings.step_bytes,
        )
        layers = [(kv_caches[name], writer_of(modules[name], facts.planes)) for name in names]
        store, layout = open_store(layers, facts)
        model = config.model_config
        identity = engine_identity(
            _folder(model),
            layout,
            architecture=",".join(model.architectures),
            rope=getattr(model.hf_text_config, "rope_parameters", None),
            settings={
                "dtype": model.dtype,
                "quantization": model.quantization,
                "overrides": model.hf_overrides,
            },
        )
        self._worker = WorkerHalf.start(
            self._settings,
            store,
            identity,
            engine=f"vllm {vllm.__version__}",
            rank=EngineRank(get_tensor_model_parallel_rank(), config.parallel_config.tensor_parallel_size),
        )

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:  # noqa: ANN401
        """Before blocks are overwritten."""
        self._working.before_step(kv_connector_metadata.plan)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ANN401, ARG002
        """Before the computation, if the step has loads."""
        self._working.load(self._plan)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are done when start_load_kv returns."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ANN401
        """Nothing: rows are taken when the whole step is computed."""

    def wait_for_save(self) -> None:
        """After the computation."""
        self._working.after_step(self._plan)

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:  # noqa: ARG002
        """Finished requests whose blocks are not needed any more, and those whose load beside the steps is over."""
        return self._working.take_released() or None, self._working.take_received() or None

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that were to be loaded and were not."""
        return self._working.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """What the scheduler's half has to know."""
        report = self._working.report()
        return None if report.is_empty else _Report(report)

    def shutdown(self) -> None:
        """The process ends."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.close()

    @property
    def _planning(self) -> SchedulerHalf:
        assert self._scheduler is not None, "the scheduler's methods are called in the scheduler"
        return self._scheduler

    @property
    def _working(self) -> WorkerHalf:
        assert self._worker is not None, "register_kv_caches comes first"
        return self._worker

    @property
    def _plan(self) -> StepPlan:
        plan: StepPlan = self._get_connector_metadata().plan
        return plan


def _folder(model: Any) -> Path:  # noqa: ANN401 - theirs
    """Where the model's files are: the folder that was given, or the hub's cache, which vLLM has filled by now."""
    return _found(model.model, "config.json", model.revision)


def _adapter_folder(place: str) -> Path:
    """Where an adapter's files are, likewise."""
    return _found(str(local_folder(place)), "adapter_config.json", None)


def _found(place: str, name: str, revision: str | None) -> Path:
    """A folder, or the snapshot of a repository's revision in the hub's cache, by a file that it must have."""
    found = try_get_local_file(place, name, revision or "main")
    return found.parent if isinstance(found, Path) else Path(place)


def _row_bytes(cache: Any) -> int:  # noqa: ANN401 - theirs
    group = cache.kv_cache_groups[0]
    page: int = group.kv_cache_spec.page_size_bytes
    return page * len(group.layer_names) // int(group.kv_cache_spec.block_size)


def _facts(config: Any, cache: Any, settings: ConnectorSettings) -> EngineFacts:  # noqa: ANN401 - theirs
    parallel, transfer = config.parallel_config, config.kv_transfer_config
    speculative = config.speculative_config
    return EngineFacts(
        groups=tuple(_group(group) for group in cache.kv_cache_groups),
        tensor_parallel=parallel.tensor_parallel_size,
        kv_heads=config.model_config.get_total_num_kv_heads(),
        nodes=parallel.nnodes,
        executor=str(parallel.distributed_executor_backend),
        pipeline_parallel=parallel.pipeline_parallel_size,
        data_parallel=parallel.data_parallel_size,
        context_parallel=parallel.decode_context_parallel_size,
        cache_dtype=str(config.cache_config.cache_dtype),
        load_failure_policy=transfer.kv_load_failure_policy,
        role=transfer.kv_role,
        speculative=None if speculative is None else str(speculative.method),
        encoder_decoder=bool(config.model_config.is_encoder_decoder),
        platform=current_platform.device_type,
        cuda=settings.cuda,
        plans_ahead=bool(config.scheduler_config.async_scheduling),
        loads_in_a_step=settings.load_step_bytes > 0,
    )


def _group(group: Any) -> CacheGroup:  # noqa: ANN401 - theirs
    spec = group.kv_cache_spec
    head_size = getattr(spec, "head_size", 0)
    return CacheGroup(
        kind=type(spec).__name__,
        layers=tuple(group.layer_names),
        dtype=str(getattr(spec, "dtype", "")).removeprefix("torch."),
        head_size=head_size,
        head_size_v=getattr(spec, "head_size_v", head_size),
        sliding_window=getattr(spec, "sliding_window", None),
        chunk=getattr(spec, "attention_chunk_size", None),
        packed=_packed(spec),
    )


def _packed(spec: Any) -> str:  # noqa: ANN401 - theirs
    """Why a position is not one plain row of elements; empty: it is."""
    quantised = getattr(getattr(spec, "kv_quant_mode", None), "name", "NONE")
    if quantised != "NONE":
        return f"elements packed as {quantised}"
    if getattr(spec, "tokens_per_state", 1) != 1:
        return f"{spec.tokens_per_state} tokens in one state"
    if (
        getattr(spec, "state_content_bytes", None) is not None
        or getattr(spec, "model_version", None) is not None
    ):
        return "a state of the model's own form"
    return ""
