"""`kvlog demo --engine vllm` as a user starts it: real vLLM servers, the trained model, and what it leaves behind."""

from __future__ import annotations

import json
import shutil
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.demo_runs import Demo, check
from tests.nodes import until
from tests.vllm.servers import vllm_python, why_not

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

ENGINE = ("--engine", "vllm", "--vllm-python", str(vllm_python()))
VLLMS_OWN = ("psm_", "sem.mp-", "vllm_dist_")


def shared() -> set[str]:
    """Names in /dev/shm of vLLM's making."""
    return {path.name for path in Path("/dev/shm").iterdir() if path.name.startswith(VLLMS_OWN)}


@pytest.fixture
def demo() -> Iterator[Demo]:
    """A folder for a demo, with a short name: vLLM's sockets have long ones. Nothing new is in /dev/shm afterwards."""
    if reason := why_not():
        pytest.skip(f"NOT TESTED: {reason}")
    before = shared()
    demo = Demo(Path(tempfile.mkdtemp(prefix="kvlog-")), seconds=800.0)
    yield demo
    demo.close()
    shutil.rmtree(demo.folder, ignore_errors=True)
    assert shared() <= before


@pytest.mark.model
def test_vllm_demo_on_the_trained_model_proves_every_claim(demo: Demo) -> None:
    """The same claims and figures as with our own engine, in the same JSON; nothing is left of four servers."""
    figures = demo.figures(*ENGINE, "--tokens", "60")
    check(figures, tokens=60)
    assert ("smollm2-135m-instruct-v1", "float32") == (figures["model"], figures["dtype"])
    assert figures["tokens_in_log"] > 500
    assert figures["tokens_recomputed"] < 100
    assert figures["ratio"] > 1  # rows of 600 tokens are copied sooner than computed


def test_vllm_demo_that_is_interrupted_leaves_no_process_and_no_file(demo: Demo) -> None:
    """While vLLM starts, and once it has its engine's process, which is no child of ours: SIGTERM, then SIGKILL."""
    for number, code in ((signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)):
        process = demo.start(*ENGINE, "--model", "random", "--tokens", "16")
        assert process.stdout is not None
        while "starting node A" not in process.stdout.readline():
            pass
        if number == signal.SIGKILL:
            while "node A " not in process.stdout.readline():
                pass
        until(lambda: len(demo.left()) >= 3, seconds=60, what="a daemon and a vLLM")
        time.sleep(1)
        process.send_signal(number)
        _, err = process.communicate(timeout=60)
        assert code == process.returncode, err
        assert "Traceback" not in err
        until(lambda: not demo.left(), seconds=20, what=f"the end of {demo.left()}")
    assert 1 == len(list(demo.folder.glob("kvlog-demo-*")))  # only what had no time to clean up


def test_vllm_demo_whose_server_does_not_start_says_why(demo: Demo, tmp_path: Path) -> None:
    """One sentence with the cause out of vLLM's many lines; nothing left."""
    (tmp_path / "config.json").write_text('{"model_type": "none", "max_position_embeddings": 64}')
    code, out, err = demo.run(*ENGINE, "--model", str(tmp_path), "--json")
    said = json.loads(out)
    assert (1, "") == (code, err)
    assert "vLLM a did not start" in said["error"]
    assert len(said["error"]) < 600
    demo.assert_nothing_left()
