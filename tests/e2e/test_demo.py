"""The whole demo as a user starts it: exit code, JSON, what it shows, and that nothing is left of it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.demo_runs import Demo, check
from tests.e2e.vllm_stand_in import install
from tests.nodes import until
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

QUESTION = "What is a lighthouse for? Explain it to a child, in several sentences."


@pytest.fixture
def demo() -> Iterator[Demo]:
    """A folder for a demo; its path is short enough for a unix socket, and for those of vLLM."""
    with tempfile.TemporaryDirectory(prefix="kd-") as name:
        demo = Demo(Path(name))
        yield demo
        demo.close()


def test_demo_on_a_log_of_its_own_proves_every_claim_and_leaves_nothing(demo: Demo) -> None:
    """Without --log there is a log for as long as the demo lasts; the JSON has what was measured, and nothing else."""
    figures = demo.figures("--engine", "synthetic", "--tokens", "40", "--prompt", QUESTION)
    check(figures, tokens=40)
    assert ("synthetic", "bfloat16") == (figures["model"], figures["dtype"])


def test_demo_shows_the_same_sentence_going_on_within_80_columns(demo: Demo, tmp_path: Path) -> None:
    """Without a terminal it is plain text: both nodes' parts, the kill between them, the table, the verdict."""
    log = tmp_path / "log"
    arguments = ("--engine", "synthetic", "--tokens", "40", "--kill-at", "15", "--log", str(log))
    code, out, err = demo.run(*arguments, "--prompt", QUESTION)
    assert (0, "") == (code, err), out
    assert "\x1b" not in out
    lines = out.splitlines()
    assert [] == [line for line in lines if len(line) > 80 and str(log) not in line]
    killed = next(number for number, line in enumerate(lines) if "node A: kill -9" in line)
    said = re.search(r"kill -9, kvlogd \d+ and engine \d+, (\d+) tokens", lines[killed])
    assert said is not None
    assert int(said[1]) >= 15
    assert any(line.startswith("A │ ") for line in lines[:killed])
    assert lines[killed + 1].startswith("B │ ")
    assert re.search(r"^kill to next token +[\d,]+ ms *$", out, re.MULTILINE)
    assert 4 == out.count("✔ yes ")
    assert "Every claim held." in out
    demo.assert_nothing_left()
    command = next(line for line in lines if line.startswith("kvlog show demo-"))
    shown = subprocess.run(
        [sys.executable, "-m", "consumers", *command.split()[1:], "--json"],
        capture_output=True,
        check=False,
        preexec_fn=die_with_parent,
    )
    timeline = json.loads(shown.stdout)
    assert 0 == timeline["exit_code"], timeline


@pytest.mark.model
def test_demo_on_the_trained_model_proves_every_claim(demo: Demo) -> None:
    """What `make demo` shows, in float32, with a shorter answer."""
    figures = demo.figures("--tokens", "40")
    check(figures, tokens=40)
    assert "float32" == figures["dtype"]
    assert figures["tokens_in_log"] > 500
    assert figures["ratio"] > 1  # rows of 600 tokens are copied sooner than computed


@pytest.mark.kafka
def test_demo_on_kafka_proves_every_claim(demo: Demo, kafka_broker: str) -> None:
    """The same on a real broker; twice, since its topics are there the second time, with the first demo in them."""
    for _ in range(2):
        figures = demo.figures(
            *(
                "--engine",
                "synthetic",
                "--tokens",
                "40",
                "--prompt",
                QUESTION,
                "--log",
                f"kafka://{kafka_broker}",
            )
        )
        check(figures, tokens=40)
        assert f"kafka://{kafka_broker}" == figures["log"]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_demo_that_is_interrupted_leaves_no_process(demo: Demo, number: int, code: int) -> None:
    """Ctrl-C, SIGTERM and even SIGKILL end every daemon and engine; what can clean up does."""
    process = demo.start("--engine", "synthetic", "--tokens", "400", "--kill-at", "200")
    assert process.stdout is not None
    while "── answer ──" not in process.stdout.readline():  # node A begins to speak
        pass
    assert len(demo.left()) >= 4  # two daemons, two engines
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert code == process.returncode, err
    assert "Traceback" not in err
    until(lambda: not demo.left(), what=f"the end of {demo.left()}")
    if number != signal.SIGKILL:
        demo.assert_nothing_left()


@pytest.fixture
def short_demo() -> Iterator[Demo]:
    """A folder with a name so short that there is room for those of vLLM's sockets."""
    demo = Demo(Path(tempfile.mkdtemp(prefix="kvlog-")))
    yield demo
    demo.close()
    shutil.rmtree(demo.folder)


def test_demo_on_servers_of_another_environment_proves_every_claim(short_demo: Demo, tmp_path: Path) -> None:
    """What --engine vllm does, with a stand-in for vLLM: one server after the other, and nothing left in /dev/shm."""
    python, model = install(tmp_path), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"max_position_embeddings": 4096}')
    engine = ("--engine", "vllm", "--vllm-python", str(python), "--model", str(model), "--prompt", QUESTION)
    code, out, err = short_demo.run(*engine, "--tokens", "40")
    assert (0, "") == (code, err), out
    lines = out.splitlines()
    assert [] == [
        line
        for line in lines
        if len(line) > 80 and str(short_demo.folder) not in line and str(python) not in line
    ]
    starts = [number for number, line in enumerate(lines) if line.startswith("starting node")]
    assert [line[:15] for line in lines if line.startswith("starting node")] == [
        "starting node A",
        "starting node B",
        "starting node A",
    ]
    assert re.match(
        r"node A   kvlogd \(pid \d+\) and vLLM \(pid \d+\), ready after \d+ s$", lines[starts[0] + 1]
    )
    assert 4 == out.count("✔ yes ")
    assert "Every claim held." in out
    short_demo.assert_nothing_left()
    assert [] == list(Path("/dev/shm").glob("psm_stand-in-*"))


def test_demo_that_cannot_be_had_says_so_in_a_sentence(demo: Demo, tmp_path: Path) -> None:
    """A model that is not there, a log that cannot be reached: no traceback, nothing left."""
    code, out, err = demo.run("--model", str(tmp_path / "nothing"))
    assert 2 == code
    assert "cannot be had: there is no such folder." in " ".join(err.split())
    code, out, err = demo.run("--engine", "synthetic", "--log", "kafka://127.0.0.1:1", "--json")
    assert (3, "") == (code, err)
    assert "cannot be used" in json.loads(out)["error"]
    demo.assert_nothing_left()
