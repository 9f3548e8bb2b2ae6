"""What an installed kvlog imports, seen from a fresh process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import daemon
from tests.processes import die_with_parent
from tests.tidy.source import ROOT, real_tree

# Imports each module named on the command line; prints which forbidden modules each one brought in, and which package
# that is not installed stopped it (an engine's own: then the layer table, which reads the rest of the file, has to do).
PROBE = """
import importlib, json, sys

forbidden = json.loads(sys.argv[1])
found = {}
for name in sys.argv[2:]:
    try:
        importlib.import_module(name)
        missing = ""
    except ModuleNotFoundError as error:
        missing = error.name.split(".")[0]
    loaded = [other for other in forbidden if other in sys.modules]
    found[name] = {"loaded": loaded, "missing": missing}
print(json.dumps(found))
"""
FORBIDDEN = ["aiokafka", "kvlog.log", "kvlog.core", "daemon", "consumers"]
ENGINES = {"vllm", "transformers", "torch"}


def probe(names: list[str], folder: Path) -> dict[str, dict[str, object]]:
    """Imports modules in a new process that runs in a folder, and gives what each brought in."""
    command = [sys.executable, "-c", PROBE, json.dumps(FORBIDDEN), *names]
    output = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, check=True, preexec_fn=die_with_parent
    ).stdout
    found: dict[str, dict[str, object]] = json.loads(output.splitlines()[-1])
    return found


def test_daemon_that_tests_import_is_ours() -> None:
    """PyPI's python-daemon also installs a package called daemon."""
    assert Path(daemon.__file__).parent == ROOT / "daemon"


def test_daemon_that_programs_import_is_ours(tmp_path: Path) -> None:
    """The installed kvlogd finds our package from any folder."""
    command = [sys.executable, "-c", "import daemon; print(daemon.__file__)"]
    output = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=True, preexec_fn=die_with_parent
    ).stdout
    assert Path(output.strip()).parent == ROOT / "daemon"


def test_engine_side_brings_in_no_kafka(tmp_path: Path) -> None:
    """An inference server that imports any module of kvlog/engines gets no Kafka client and no daemon."""
    names = sorted(name for name in real_tree() if name.startswith("kvlog.engines"))
    found = probe(names, tmp_path)
    assert {name: seen for name, seen in found.items() if seen["loaded"]} == {}
    assert {seen["missing"] for seen in found.values()} - ENGINES - {""} == set()


def test_probe_finds_kafka(tmp_path: Path) -> None:
    """The probe itself sees a forbidden import, and one that is not installed."""
    (tmp_path / "clean.py").write_text("import json\n")
    (tmp_path / "lost.py").write_text("import vllm_is_not_here.thing\n")
    (tmp_path / "dirty.py").write_text("def f():\n    import aiokafka\nf()\n")
    assert probe(["clean", "lost", "dirty"], tmp_path) == {
        "clean": {"loaded": [], "missing": ""},
        "lost": {"loaded": [], "missing": "vllm_is_not_here"},
        "dirty": {"loaded": ["aiokafka"], "missing": ""},
    }
