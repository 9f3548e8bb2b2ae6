"""A model or an adapter by its name on the hub: the snapshot of its revision in the hub's cache is what counts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from tests.model.llama import random_folder
from tests.processes import die_with_parent
from tests.vllm.servers import ROOT, vllm_python, why_not

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

NAME, NEWER, OLDER = "kvlog-tests/tiny", "a" * 40, "b" * 40


def fill_hub_cache(home: Path) -> Path:
    """Lay two revisions of a model into a cache as the hub's client does. Returns: the newer one, which is `main`."""
    repository = home / "hub" / f"models--{NAME.replace('/', '--')}"
    for revision, seed in ((NEWER, 7), (OLDER, 8)):
        shutil.copytree(random_folder(seed=seed), repository / "snapshots" / revision)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEWER)
    newer = repository / "snapshots" / NEWER
    (newer / "adapter_config.json").write_text("{}")
    return newer


def test_model_by_its_name_on_the_hub_is_its_revisions_snapshot(tmp_path: Path) -> None:
    """The same digests as of the same files in a folder; another revision has others; an absent name has none."""
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    newer = fill_hub_cache(tmp_path)
    command = [str(vllm_python()), "-m", "tests.vllm.hub_models", str(random_folder(seed=7)), NAME, OLDER]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    }
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, preexec_fn=die_with_parent
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads(done.stdout.strip().splitlines()[-1])
    assert said["folder"] == said["name"] == said["configured"]
    assert said["folder"][1] != said["older"][1]
    assert (str(newer), "nobody/nothing") == (said["adapter"], said["absent"])
