"""Runs where vLLM is: its own scheduler and output aggregator with the connectors of two ranks, and no model.

The rows of a rank are a function of the tokens up to their position and of the rank; latent ones are the same on all.
Prints one JSON object.

python -m tests.vllm.two_ranks FOLDER SOCKET heads|latent
"""

from __future__ import annotations

import itertools
import json
import pickle
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
from vllm import SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.engine.arg_utils import EngineArgs
from vllm.v1 import kv_cache_interface as kv
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvlog.checksums import checksum
from kvlog.engines import vllm as connector_module
from kvlog.engines.vllm import KvlogConnector

RANKS, LAYERS, SIZE, BLOCKS, DIM = 2, 3, 16, 64, 32
LATENT, ROTARY = 24, 2 * DIM - 24
SPEC = {"block_size": SIZE, "num_kv_heads": 1, "dtype": torch.float32}
NAMES = [f"model.layers.{layer}.attn" for layer in range(LAYERS)]


def row_of(tokens: list[int], position: int, rank: int) -> torch.Tensor:
    """A position's elements. Shape: [layers, K and V, dim], float32."""
    seed = checksum(repr((tokens[: position + 1], rank)).encode()) % (1 << 31)
    return torch.rand((LAYERS, 2, DIM), generator=torch.Generator().manual_seed(seed))


def _write(module: Any, keys: Any, values: Any, cache: Any, slots: Any) -> None:
    """As an attention kernel writes rows into slots."""
    for key, value, slot in zip(keys, values, slots.tolist(), strict=True):
        cache[slot // SIZE, :, slot % SIZE, :DIM] = key
        cache[slot // SIZE, :, slot % SIZE, DIM:] = value


def _write_latents(latents: Any, rotary: Any, cache: Any, slots: Any, *_: Any) -> None:
    """As a kernel of latent attention does: both parts side by side, in a cache without heads."""
    for latent, turned, slot in zip(latents, rotary, slots.tolist(), strict=True):
        cache[slot // SIZE, slot % SIZE, :LATENT] = latent
        cache[slot // SIZE, slot % SIZE, LATENT:] = turned[0]


def _module(*, latent: bool) -> Any:
    """As much of an attention layer as is asked for."""
    kernel = SimpleNamespace(get_name=lambda: "CPU_MLA" if latent else "CPU_ATTN")
    impl = SimpleNamespace(do_kv_cache_update=_write_latents if latent else _write)
    return SimpleNamespace(
        impl=impl, attn_backend=kernel, kv_lora_rank=LATENT, kv_cache_dtype="auto", _k_scale=None
    )


class Engine:
    """Steps as vLLM makes them."""

    def __init__(self, folder: str, socket: str, *, ranks: int = RANKS, latent: bool = False) -> None:
        self.latent = latent
        transfer = {
            "kv_connector": "KvlogConnector",
            "kv_connector_module_path": "kvlog.engines.vllm",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"link": socket, "wait_seconds": 10},
        }
        config = EngineArgs(
            model=folder,
            max_model_len=512,
            dtype="float32",
            block_size=SIZE,
            tensor_parallel_size=ranks,
            max_num_batched_tokens=64,
            enable_prefix_caching=False,
            async_scheduling=False,
            kv_transfer_config=KVTransferConfig(**transfer),
        ).create_engine_config()
        config.cache_config.num_gpu_blocks = BLOCKS
        for name in NAMES:
            config.compilation_config.static_forward_context[name] = _module(latent=latent)
        spec = kv.MLAAttentionSpec if latent else kv.FullAttentionSpec
        group = kv.KVCacheGroupSpec(NAMES, spec(**SPEC, head_size=2 * DIM if latent else DIM))
        cache = kv.KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group])
        self.scheduler = Scheduler(config, cache, StructuredOutputManager(config), SIZE)
        self.aggregator = KVOutputAggregator(ranks)
        self.caches = [{name: torch.zeros(BLOCKS, 1, SIZE, 2 * DIM) for name in NAMES} for _ in range(ranks)]
        self.workers: list[Any] = []
        for rank, caches in enumerate(self.caches):
            worker = KvlogConnector(config, KVConnectorRole.WORKER, cache)
            vars(connector_module)["get_tensor_model_parallel_rank"] = lambda rank=rank: rank
            worker.register_kv_caches(caches)
            assert worker._working.worker.replicator.wait_connected(20)
            self.workers.append(worker)

    def answer(self, name: str, session: str, tokens: list[int], count: int) -> list[int]:
        """A whole answer's tokens."""
        params = SamplingParams(max_tokens=count, temperature=0, ignore_eos=True)
        params.update_from_generation_config({}, eos_token_id=None)
        request = Request(name, list(tokens), params, None, session_id=session)
        self.scheduler.add_request(request)
        until = time.monotonic() + 60
        while not request.is_finished():
            assert time.monotonic() < until, f"{name} stands at {request.num_tokens} of {len(tokens) + count}"
            if not self.step():
                time.sleep(0.002)
        for _ in range(200):
            self.step()
            if all(not worker._working.worker._entries for worker in self.workers):
                break
            time.sleep(0.005)
        return list(request.all_token_ids)

    def step(self) -> int:
        """One step. Returns: tokens that it computed."""
        output = self.scheduler.schedule()
        plan = pickle.loads(pickle.dumps(output.kv_connector_metadata))
        for worker in self.workers:
            worker.bind_connector_metadata(plan)
            worker.handle_preemptions(plan)
            worker.start_load_kv(None)
        for name, count in output.num_scheduled_tokens.items():
            self._compute(name, count)
        said = [self._work(worker, output) for worker in self.workers]
        names = list(output.num_scheduled_tokens)
        results = [
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: index for index, name in enumerate(names)},
                sampled_token_ids=[self._drawn(name) for name in names],
                kv_connector_output=each,
            )
            for each in said
        ]
        self.scheduler.update_from_output(output, self.aggregator.aggregate(results))
        return int(output.total_num_scheduled_tokens)

    def _work(self, worker: Any, output: Any) -> KVConnectorOutput:
        worker.wait_for_save()
        sending, recving = worker.get_finished(output.finished_req_ids)
        said = KVConnectorOutput(
            finished_sending=sending,
            finished_recving=recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
            kv_connector_stats=worker.get_kv_connector_stats(),
        )
        worker.clear_connector_metadata()
        return said

    def _compute(self, name: str, count: int) -> None:
        """What any rank has not filled spoils the rows of all: each layer's sum is over all of them."""
        request = self.scheduler.requests[name]
        blocks = self.scheduler.kv_cache_manager.get_block_ids(name)[0]
        unfilled = {block for worker in self.workers for block in worker._working.worker._failed_blocks}
        spoilt = not unfilled.isdisjoint(blocks)
        tokens, end = list(request.all_token_ids), request.num_computed_tokens
        for rank, position in itertools.product(range(len(self.caches)), range(end - count, end)):
            row = row_of(tokens, position, 0 if self.latent else rank) + spoilt
            block, at = blocks[position // SIZE], position % SIZE
            for layer, cache in enumerate(self.caches[rank].values()):
                cache[block, :, at] = row[layer].flatten()

    def _drawn(self, name: str) -> list[int]:
        request = self.scheduler.requests[name]
        if request.num_computed_tokens < request.num_tokens:
            return []
        return [checksum(repr(list(request.all_token_ids)).encode()) % 250]


def main(folder: str, socket: str, kind: str) -> None:
    """Two turns, and a third whose load fails on the second rank; of latent rows also a fourth, on one rank."""
    latent = kind == "latent"
    engine = Engine(folder, socket, latent=latent)
    halves = [worker._working.worker for worker in engine.workers]
    told: dict[str, Any] = {}
    first = engine.answer("r1", "s", list(range(100, 200)), 30)
    time.sleep(1)
    second = engine.answer("r2", "s", [*first, 7, 8], 20)
    told["loaded"] = [half.counts.rows_loaded for half in halves]
    time.sleep(1)
    real = halves[1]._store.scatter
    failed: list[int] = []

    def failing(*arguments: Any) -> None:
        if not failed:
            failed.append(1)
            raise OSError
        real(*arguments)

    halves[1]._store.scatter = failing
    third = engine.answer("r3", "s", [*second, *range(90)], 20)
    told["failures"] = [half.counts.load_failures for half in halves]
    told["loaded_third"] = [half.counts.rows_loaded for half in halves]
    told["tokens"] = third
    told["written"] = [half.replicator.counts.rows for half in halves]
    told["unlogged"] = engine.scheduler.connector._planning._planner.unlogged
    time.sleep(1)
    for worker in engine.workers:
        worker.shutdown()
    if latent:
        alone = Engine(folder, socket, ranks=1, latent=True)
        told["tokens"] = third = alone.answer("r4", "s", [*third, 7], 5)
        told["loaded_alone"] = alone.workers[0]._working.worker.counts.rows_loaded
        time.sleep(1)
        alone.workers[0].shutdown()
    told["rows"] = [
        [checksum(row_of(third, position, rank).numpy().tobytes()) for position in range(len(third) - 1)]
        for rank in range(RANKS)
    ]
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
