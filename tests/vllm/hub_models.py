"""Runs where vLLM is: which files the connector takes for a model or an adapter that is named as on the hub; JSON.

python -m tests.vllm.hub_models FOLDER MODEL [REVISION] ...; HF_HOME is a cache that the test has made.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

from vllm.engine.arg_utils import EngineArgs

from kvlog.engines.vllm import _adapter_folder, _folder
from kvlog.engines.vllm_worker import engine_identity
from kvlog.layout import DType, Layout


def identity(model: Any) -> list[str]:
    """What it would introduce itself to the daemon as: digests of the model and of its weights."""
    found = engine_identity(
        _folder(model), Layout(1, 2, 1, 8, DType.FLOAT32), architecture="x", rope=None, settings={}
    )
    return [found.model.hex(), found.weights.hex()]


def main(folder: str, name: str, revision: str) -> None:
    """A folder, its name on the hub, an older revision of it, and how vLLM itself hands such a name on."""
    by_name = SimpleNamespace(model=name, revision=None)
    older = SimpleNamespace(model=name, revision=revision)
    configured = EngineArgs(model=name, max_model_len=512, dtype="float32").create_engine_config()
    answers = {
        "folder": identity(SimpleNamespace(model=folder, revision=None)),
        "name": identity(by_name),
        "older": identity(older),
        "configured": identity(configured.model_config),
        "adapter": str(_adapter_folder(name)),
        "absent": str(_adapter_folder("nobody/nothing")),
    }
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
