"""vLLM's own scheduler with our connector, and no engine: two requests with one prefix whose loads fail at once.

python -m tests.vllm.failed_load MODEL LOAD_STEP_BYTES prints how many positions were read before they were computed.
The blocks are a set of (block, offset) that somebody has computed; each step computes what it was given, then reads.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from kvlog.engines.step_plan import Ready, StepReport
from kvlog.engines.vllm import _Report
from kvlog.ids import Shard

BLOCK = 128
KNOWN = 260
STEPS = 40


def scheduler(model: str, load_step_bytes: int) -> Scheduler:
    """With prefills of two requests in one step."""
    transfer = KVTransferConfig(
        kv_connector="KvlogConnector",
        kv_connector_module_path="kvlog.engines.vllm",
        kv_role="kv_both",
        kv_load_failure_policy="recompute",
        kv_connector_extra_config={"link": "/nowhere", "load_step_bytes": load_step_bytes},
    )
    config = EngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        max_model_len=4096,
        max_num_batched_tokens=64,
        long_prefill_token_threshold=32,
        block_size=BLOCK,
        kv_transfer_config=transfer,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = 100
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=2, head_size=32, dtype=torch.float32)
    cache = KVCacheConfig(100, [], [KVCacheGroupSpec(["model.layers.0.self_attn.attn"], spec)])
    return Scheduler(config, cache, StructuredOutputManager(config), block_size=BLOCK)


class Worker:
    """What the worker's side would do: every turn is answered with all rows but the last, and every load fails."""

    def __init__(self) -> None:
        self.computed: set[tuple[int, int]] = set()
        self.read_too_early = 0

    def step(self, scheduler: Scheduler, output: Any) -> ModelRunnerOutput:
        """Compute and read."""
        parts = list(self._parts(scheduler, output))
        for blocks, start, count in parts:
            self.computed |= {place(blocks, at) for at in range(start, start + count)}
        for blocks, start, _ in parts:
            self.read_too_early += sum(place(blocks, at) not in self.computed for at in range(start))
        names = list(output.num_scheduled_tokens)
        ends = [start + count for _, start, count in parts]
        drawn = [
            [7] if end >= scheduler.requests[name].num_tokens else []
            for name, end in zip(names, ends, strict=True)
        ]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=drawn,
            kv_connector_output=self._answers(output.kv_connector_metadata.plan),
        )

    def _parts(self, scheduler: Scheduler, output: Any) -> Any:
        """Gives (block table, first position, positions) of each request; nothing of one whose load fails now."""
        starts = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        cached = output.scheduled_cached_reqs
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        loads = output.kv_connector_metadata.plan.loads
        loading = {block for ask in loads if not ask.beside for block in ask.blocks}
        for name, count in output.num_scheduled_tokens.items():
            blocks = scheduler.kv_cache_manager.get_block_ids(name)[0]
            yield (blocks, 0, 0) if loading & set(blocks) else (blocks, starts[name], count)

    def _answers(self, plan: Any) -> KVConnectorOutput:
        ready = tuple(Ready(ask.key, Shard(0), ask.local, KNOWN - 1, logged=True) for ask in plan.opens)
        report = StepReport(ready=ready, failed=tuple(ask.key for ask in plan.loads))
        return KVConnectorOutput(
            finished_recving={ask.beside for ask in plan.loads if ask.beside} or None,
            finished_sending={close.held for close in plan.closes if close.held} or None,
            kv_connector_worker_meta=_Report(report),
            invalid_block_ids={
                block
                for ask in plan.loads
                for block in ask.blocks[ask.start // BLOCK : -(-ask.length // BLOCK)]
            },
        )


def place(blocks: list[int], position: int) -> tuple[int, int]:
    """Where a position lies."""
    return blocks[position // BLOCK], position % BLOCK


def main(model: str, load_step_bytes: str) -> None:
    """Run both requests to their ends."""
    init_none_hash(sha256)
    one, worker = scheduler(model, int(load_step_bytes)), Worker()
    hasher = get_request_block_hasher(BLOCK, sha256)
    prompt = [position % 250 for position in range(KNOWN)]
    sampling = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    for name in ("first", "second"):
        tokens = [*prompt, 1] if name == "second" else prompt
        one.add_request(Request(name, tokens, sampling, None, block_hasher=hasher, session_id=name))
    for _ in range(STEPS):
        output = one.schedule()
        one.update_from_output(output, worker.step(one, output))
    assert not one.requests, "both have their answers"
    print(worker.read_too_early)


if __name__ == "__main__":
    main(*sys.argv[1:])
