"""Which interpreter starts a vLLM server, what is said of one that cannot, and how it is started."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from consumers.demo_error import DemoError
from consumers.demo_model import Model
from consumers.demo_process import Processes
from consumers.demo_vllm import VllmServing, installed_vllm
from consumers.exits import ExitCode
from consumers.vllm_server import (
    VERSION,
    VllmInstall,
    check_vllm,
    find_vllm,
    free_port,
    server_environment,
    transfer_config,
    why_ended,
)
from kvlog.engines.vllm_support import VERSIONS
from kvlog.errors import ConfigError
from tests.tidy.source import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

GOOD = {"python": [3, 11], "vllm": "0.32.0+cpu", "missing": [], "window": [[0, 32], [0, 33]]}


def interpreter(folder: Path, said: str) -> Path:
    """Makes a program that answers as an interpreter would, whatever it is asked."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\ncat <<'END'\n{said}\nEND\n")
    program.chmod(0o755)
    return program


def test_interpreter_that_is_named_is_taken_before_the_variable_and_this_one(monkeypatch, tmp_path):
    """The option, then KVLOG_VLLM_PYTHON, then whoever runs this."""
    environment = {"KVLOG_VLLM_PYTHON": "/there/python"}
    assert Path("/here/python") == find_vllm(Path("/here/python"), environment)
    assert Path("/there/python") == find_vllm(None, environment)
    monkeypatch.chdir(tmp_path)
    assert tmp_path / "bin" / "python" == find_vllm(Path("bin/python"), {})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    assert Path(sys.executable) == find_vllm(None, {"KVLOG_VLLM_PYTHON": ""})


def test_interpreter_that_nobody_names_is_asked_for(monkeypatch):
    """The error says what to install and how to name it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(ConfigError) as caught:
        find_vllm(None, {})
    said = str(DemoError.of(caught.value, "vLLM:"))
    assert "vLLM is not installed here" in said
    assert f"Install vLLM {VERSION} for the CPU" in said
    assert VERSIONS[0] == tuple(map(int, VERSION.split(".")))
    assert "make venv-vllm" in said
    assert "--vllm-python or KVLOG_VLLM_PYTHON" in said


def test_interpreter_with_a_served_vllm_is_taken(tmp_path):
    """Its version is told."""
    python = interpreter(tmp_path, json.dumps(GOOD))
    assert VllmInstall(python, "0.32.0+cpu") == check_vllm(python, ROOT)


@pytest.mark.parametrize(
    ("differs", "said"),
    [
        ({"python": [3, 10], "window": None}, "is Python 3.10, and kvlog needs 3.11"),
        ({"vllm": None}, "has no vLLM"),
        ({"missing": ["lz4", "xxhash"]}, "lacks what kvlog needs beside it: lz4 xxhash"),
        ({"vllm": "0.31.4"}, "has vLLM 0.31.4, and the connector is tested with 0.32"),
        ({"vllm": "0.33.0"}, "has vLLM 0.33.0"),
    ],
)
def test_interpreter_that_cannot_serve_is_refused_with_the_reason(tmp_path, differs, said):
    """One sentence names the interpreter and what is wrong with it; another says what to do."""
    python = interpreter(tmp_path, json.dumps({**GOOD, **differs}))
    with pytest.raises(ConfigError) as caught:
        check_vllm(python, ROOT)
    assert said in str(caught.value.fields["problem"])
    assert str(python) in str(caught.value.fields["problem"])
    assert caught.value.fields["fix"]


def test_program_that_is_no_interpreter_is_refused(tmp_path):
    """Not there, not to be run, or something else."""
    (tmp_path / "text").write_text("hello")
    for path, said in (
        (tmp_path / "nothing", "cannot be run: No such file or directory"),
        (tmp_path / "text", "cannot be run: Permission denied"),
        (tmp_path, "cannot be run: Permission denied"),
        (interpreter(tmp_path, "hello"), "is no Python that can be used: it said nothing"),
    ):
        with pytest.raises(ConfigError) as caught:
            check_vllm(path, ROOT)
        assert said in str(caught.value.fields["problem"])


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A folder with a short name: vLLM's sockets would be in it."""
    with tempfile.TemporaryDirectory(prefix="kv-") as name:
        yield Path(name)


def test_real_interpreter_without_vllm_says_so(short_folder):
    """The question itself is one that a Python can answer, with our packages and nothing else on its path."""
    processes = Processes(short_folder, lambda _: False)
    if "vllm" in sys.modules:
        pytest.skip("this interpreter has vLLM")
    with pytest.raises(DemoError, match=r"vLLM cannot be started: .* has no vLLM") as caught:
        installed_vllm(Path(sys.executable), processes)
    assert ExitCode.USAGE == caught.value.code
    assert {"kvlog", "consumers"} == {path.name for path in processes.packages().iterdir()}


def test_transfer_config_is_what_the_flag_takes(tmp_path):
    """Module and class apart, the link and other keys in the connector's own part."""
    config = json.loads(transfer_config("a.b:C", tmp_path / "s", {"wait_seconds": 5}))
    assert ("a.b", "C") == (config["kv_connector_module_path"], config["kv_connector"])
    assert {"link": str(tmp_path / "s"), "wait_seconds": 5} == config["kv_connector_extra_config"]


def test_server_computes_on_one_thread(tmp_path):
    """Another number of threads is another rounding; where it may run is up to whoever started us."""
    environment = server_environment(path=tmp_path, witness=tmp_path / "w", cache_gib=3)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    assert ("3", str(tmp_path)) == (environment["VLLM_CPU_KVCACHE_SPACE"], environment["PYTHONPATH"])
    assert free_port() > 1023


def test_serving_has_room_for_two_conversations_and_no_more_positions_than_the_model(tmp_path):
    """A cache of whole GiB; a prompt with more characters than the model has positions is vLLM's to refuse."""
    model = Model("m", (), 1 << 20, "", folder=tmp_path, positions_max=1000)
    assert (900, 2) == (
        VllmServing.of(model, "float32", 900).positions,
        VllmServing.of(model, "float32", 900).cache_gib,
    )
    assert 1000 == VllmServing.of(model, "float32", 5000).positions
    options = VllmServing.of(model, "bfloat16", 500).options(tmp_path / "s")
    assert "--no-enable-prefix-caching" in options
    assert ["--dtype", "bfloat16", "--max-model-len", "500"] == options[:4]


def test_folder_whose_sockets_would_have_too_long_names_is_refused(tmp_path):
    """The system allows 107 bytes; the sentence says which variable to set."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    with pytest.raises(DemoError, match="Set TMPDIR to a folder with a shorter name") as caught:
        installed_vllm(Path(sys.executable), Processes(long, lambda _: False))
    assert ExitCode.USAGE == caught.value.code


@pytest.mark.parametrize(
    ("output", "said"),
    [
        (
            """\
(EngineCore pid=7) ERROR 11-30 kvlog.errors.ConfigError: ConfigError (setting: model)
Traceback (most recent call last):
RuntimeError: Engine core initialization failed. See root cause above.
""",
            "ConfigError: ConfigError (setting: model)",
        ),
        (
            """\
(APIServer pid=7) pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig
  Value error, no such model.
    For more visit nobody
more
""",
            "ValidationError: 1 validation error for VllmConfig Value error, no such model. For more visit nobody",
        ),
        ("OSError: [Errno 98] Address already in use\n", "OSError: [Errno 98] Address already in use"),
        ("api_server.py: error: unrecognized arguments\n", "api_server.py: error: unrecognized arguments"),
        ("", "it said nothing"),
    ],
)
def test_cause_of_a_servers_end_is_its_first_error_that_is_no_consequence(output, said):
    """Of a hundred lines a person reads one."""
    assert said == why_ended(output)
