"""What the connector refuses, asked with vLLM's own specs and configurations: their names and ours have to fit."""

from __future__ import annotations

import json

import pytest

from tests.model.llama import random_folder
from tests.vllm.servers import run_vllm_python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SERVED = {
    *("plain", "tensor parallel", "mla", "mla, tensor parallel", "latent kernel"),
    *("worker", "version", "base class"),
}
SAID = {
    "window": "SlidingWindowSpec",
    "window as full": "sliding window of 64",
    "chunked": "ChunkedLocalAttentionSpec",
    "packed mla": "a state of the model's own form",
    "compressed mla": "4 tokens in one state",
    "mamba": "MambaSpec",
    "hybrid": "2 groups",
    "other V": "K has 32 dimensions and V has 64",
    "packed": "INT4_PER_TOKEN_HEAD",
    "bytes": "uint8",
    "tensor parallel that does not divide": "3 ranks do not divide",
    "pipeline parallel": "--pipeline-parallel-size",
    "data parallel": "--data-parallel-size",
    "fp8": "--kv-cache-dtype",
    "policy": "kv_load_failure_policy",
    "role": "kv_role",
    "key": "lnik",
}


def test_configurations_of_vllm_are_served_or_refused_by_name() -> None:
    """Each refusal says which option, layer or group is in the way; nothing else is refused."""
    done = run_vllm_python(["-m", "tests.vllm.refusals", str(random_folder())])
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert {*SERVED, *SAID} == answers.keys()
    assert dict.fromkeys(SERVED, "") == {name: answers[name] for name in SERVED}
    for name, part in SAID.items():
        assert part in answers[name], name
