"""What the connector refuses, asked with vLLM's own specs and configurations: their names and ours have to fit."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from tests.model.llama import random_folder
from tests.processes import die_with_parent
from tests.vllm.servers import ROOT, vllm_python, why_not

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SERVED = {"plain", "tensor parallel", "worker", "version", "base class"}
SAID = {
    "window": "SlidingWindowSpec",
    "window as full": "sliding window of 64",
    "chunked": "ChunkedLocalAttentionSpec",
    "mla": "MLAAttentionSpec",
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
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    command = [str(vllm_python()), "-m", "tests.vllm.refusals", str(random_folder())]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, preexec_fn=die_with_parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert {*SERVED, *SAID} == answers.keys()
    assert dict.fromkeys(SERVED, "") == {name: answers[name] for name in SERVED}
    for name, part in SAID.items():
        assert part in answers[name], name
