"""Where the tests get Kafka from, and that a wrong setting does not pass for none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.kafka import choice
from tests.kafka.broker import BrokerFailed, jars_in
from tests.kafka.choice import CLUSTER_VARIABLE, HOME_VARIABLE, WrongSetting, choose

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder that looks like a Kafka distribution."""
    (tmp_path / "libs").mkdir()
    for name in ("kafka-clients-4.3.1.jar", "kafka_2.13-4.3.1.jar"):
        (tmp_path / "libs" / name).touch()
    return tmp_path


@pytest.fixture(autouse=True)
def bare_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Java, and nothing else, unless the test says so."""
    monkeypatch.setattr(choice, "java_version", lambda: 17)
    monkeypatch.setattr(choice, "why_no_engine", lambda: "no container engine")
    monkeypatch.setattr("shutil.which", lambda _: None)


def test_cluster_that_is_there_is_chosen_first(home: Path) -> None:
    """It comes before the jars, which then serve the tests that kill brokers."""
    chosen = choose({CLUSTER_VARIABLE: "h:1", HOME_VARIABLE: str(home)})
    assert ("h:1", True, True) == (chosen.cluster, chosen.make is not None, chosen.is_asked_for)
    assert "h:1" in chosen.said
    assert HOME_VARIABLE in chosen.said


def test_jars_are_found_in_libs_or_in_the_folder_itself(home: Path) -> None:
    """A distribution and a plain folder of jars do both."""
    assert home / "libs" == jars_in(home) == jars_in(home / "libs")
    assert choose({HOME_VARIABLE: str(home / "libs")}).make is not None


def test_wrong_setting_is_refused(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home without jars, or with too old a Java, stops the run instead of skipping its tests."""
    with pytest.raises(WrongSetting):
        choose({HOME_VARIABLE: str(tmp_path / "nothing")})
    monkeypatch.setattr(choice, "java_version", lambda: 11)
    with pytest.raises(WrongSetting):
        choose({HOME_VARIABLE: str(home)})


def test_container_comes_before_maven(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing was asked for, so skipping is allowed."""
    monkeypatch.setattr(choice, "why_no_engine", lambda: None)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/mvn")
    chosen = choose({})
    assert "container" in chosen.said
    assert not chosen.is_asked_for


def test_maven_fetches_when_a_broker_is_first_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choosing is quick; a fetch that fails says so then."""
    mvn = tmp_path / "mvn"
    mvn.write_text("#!/bin/sh\necho no network; exit 1\n", encoding="utf-8")
    mvn.chmod(0o755)
    monkeypatch.setattr("shutil.which", lambda _: str(mvn))
    chosen = choose({"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert "Maven" in chosen.said
    assert chosen.make is not None
    with pytest.raises(BrokerFailed) as failed:
        chosen.make(tmp_path / "cluster", 1, {})
    assert "no network" in str(failed.value)


def test_nothing_says_what_was_looked_for() -> None:
    """The header tells how to get a broker."""
    chosen = choose({})
    assert (False, False) == (chosen.has_broker, chosen.is_asked_for)
    assert all(word in chosen.said for word in (HOME_VARIABLE, "container engine", "Maven"))


@pytest.mark.parametrize(("variable", "code"), [({}, 0), ({HOME_VARIABLE: "yes"}, 1)])
def test_run_that_skips_kafka_tests_fails_when_a_broker_was_asked_for(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, variable: dict[str, str], code: int
) -> None:
    """Without a wish, a skip is loud; with one, it fails the run."""
    pytester.makeconftest(
        f"""
        from tests.kafka import plugin
        from tests.kafka.choice import Choice
        plugin.choose = lambda: Choice("none", None, None, is_asked_for={bool(variable)})
        pytest_plugins = ["tests.kafka.plugin"]
        """
    )
    pytester.makepyfile(
        """
        import pytest
        pytestmark = pytest.mark.kafka
        def test_needs_a_broker(kafka_broker): ...
        @pytest.mark.parametrize("log", ["x"])
        def test_cannot(log): pytest.skip("this implementation cannot")
        """
    )
    pytester.makeini("[pytest]\nmarkers = kafka: x\npythonpath = " + str(choice.POM.parents[2]))
    result = pytester.runpytest_subprocess()
    assert code == result.ret
    result.stdout.fnmatch_lines(["*kafka: none*", "*1 Kafka tests were skipped*"])
