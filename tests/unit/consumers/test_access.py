"""Where the tools look for the log, and what they say when it is not what was meant."""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING

import pytest

from consumers.__main__ import main
from consumers.access import add_log_arguments, log_settings
from consumers.exits import ExitCode, exit_code_of
from kvlog.errors import (
    ConfigError,
    DecodeError,
    LogReplaced,
    LogTruncated,
    LogUnavailable,
    SessionUnknown,
)
from tests.unit.consumers.written_log import PARTITIONS, WrittenLog, kvlog

if TYPE_CHECKING:
    from pathlib import Path

    from kvlog.errors import KvlogError
    from kvlog.log.settings import LogSettings

CONFIG = """
[node]
id = "of the daemon, not of the tools"
[log]
url = "file:///from/file"
topic_prefix = "of-file"
[log.kafka]
username = "of-file"
client_id = "kept"
"""


def settings_of(*arguments: object, **environment: str) -> LogSettings:
    """What the settings come to."""
    parser = argparse.ArgumentParser()
    add_log_arguments(parser)
    return log_settings(parser.parse_args([*map(str, arguments)]), environment)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """A daemon's configuration."""
    path = tmp_path / "kvlogd.toml"
    path.write_text(CONFIG)
    return path


def test_log_of_the_daemons_file_is_taken(config: Path) -> None:
    """Kvlogd's own file is enough; its other sections are not ours to judge."""
    settings = settings_of("--config", config)
    assert ("file:///from/file", "of-file") == (settings.url, settings.topic_prefix)


def test_environment_wins_over_the_file_and_the_command_line_over_both(config: Path) -> None:
    """The nearer to the person, the stronger."""
    environment = {
        "KVLOG_LOG__URL": "file:///from/environment",
        "KVLOG_LOG__KAFKA__USERNAME": "of-environment",
    }
    settings = settings_of("--config", config, **environment)
    assert "file:///from/environment" == settings.url
    assert ("of-environment", "kept") == (settings.kafka.username, settings.kafka.client_id)
    settings = settings_of("--config", config, "--log", "/given", "--prefix", "given", **environment)
    assert ("/given", "given") == (settings.url, settings.topic_prefix)


def test_environment_alone_is_enough() -> None:
    """Numbers come as text."""
    settings = settings_of(KVLOG_LOG__URL="kafka://h:1", KVLOG_LOG__PARTITIONS="7", OTHER="x")
    assert ("kafka://h:1", 7) == (settings.url, settings.partitions)


@pytest.mark.parametrize(
    ("arguments", "environment", "named"),
    [
        (["--log", "ftp://x"], {}, "log.url"),
        (["--log", "kafka://nowhere"], {}, "log.url"),
        (["--prefix", "a b"], {}, "log.topic_prefix"),
        ([], {"KVLOG_LOG__URLL": "x"}, "log.urll"),
        ([], {"KVLOG_LOG__KAFKA__PASWORD": "x"}, "log.kafka.pasword"),
        (["--config", "/no/such/file"], {}, "/no/such/file"),
    ],
)
def test_wrong_setting_is_named(arguments: list[str], environment: dict[str, str], named: str) -> None:
    """Nothing is ignored."""
    with pytest.raises(ConfigError, match=named):
        settings_of(*arguments, **environment)


@pytest.mark.parametrize("text", ["[log", "log = 3", "\xff"])
def test_config_that_cannot_be_read_is_refused(tmp_path: Path, text: str) -> None:
    """The file is named."""
    path = tmp_path / "k.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"k\.toml"):
        settings_of("--config", path)


def test_password_is_not_shown_by_an_error() -> None:
    """A value that is refused is not repeated."""
    with pytest.raises(ConfigError) as caught:
        settings_of(KVLOG_LOG__KAFKA__PASSWORD="secret", KVLOG_LOG__PARTITIONS="secret")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (LogUnavailable(where="x", problem="y"), ExitCode.UNREACHABLE),
        (ConfigError(setting="x"), ExitCode.USAGE),
        (SessionUnknown(session="s"), ExitCode.UNKNOWN),
        (LogTruncated(partition=0, wanted=0, log_start=1), ExitCode.UNKNOWN),
        (DecodeError(problem="x"), ExitCode.BROKEN),
        (LogReplaced(partition=0, problem="x"), ExitCode.BROKEN),
    ],
)
def test_exit_code_follows_from_the_error(error: KvlogError, code: ExitCode) -> None:
    """One code for one consequence, whatever the verb."""
    assert code == exit_code_of(error)


@pytest.mark.parametrize("verb", [["lag"], ["verify"], ["show", "s"]])
def test_log_that_is_not_there_is_unreachable_and_not_made(tmp_path: Path, verb: list[str]) -> None:
    """3: a misspelt directory stays a directory that is not there."""
    code, said = kvlog(*verb, "--log", tmp_path / "none")
    assert (3, "LogUnavailable") == (code, said["error"])
    assert not (tmp_path / "none").exists()


def test_cluster_that_does_not_answer_is_unreachable() -> None:
    """3: port 1 of this machine refuses."""
    code, said = kvlog("verify", "--log", "kafka://127.0.0.1:1")
    assert (3, "LogUnavailable") == (code, said["error"])


def test_other_number_of_partitions_is_refused(tmp_path: Path) -> None:
    """2, naming both: sessions would be looked for in the wrong ones. Without the setting, P is taken as it is."""

    async def write() -> None:
        await (await WrittenLog.make(tmp_path / "log")).close()

    asyncio.run(write())
    config = tmp_path / "k.toml"
    config.write_text(f'[log]\nurl = "{tmp_path}/log"\npartitions = {PARTITIONS + 1}\n')
    code, said = kvlog("verify", "--config", config)
    assert (2, "ConfigError") == (code, said["error"])
    assert f"has {PARTITIONS} partitions, the setting says {PARTITIONS + 1}" in str(said["fields"])
    assert 0 == kvlog("verify", "--log", tmp_path / "log")[0]


def test_error_for_a_person_goes_to_standard_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With what is known and what to do; standard output stays empty."""
    assert 3 == main(["verify", "--log", str(tmp_path / "none")])
    caught = capsys.readouterr()
    assert "" == caught.out
    assert "no log here" in caught.err


@pytest.mark.parametrize("arguments", [[], ["nonsense"], ["show"], ["lag", "--nonsense"]])
def test_wrong_command_line_exits_with_two(arguments: list[str]) -> None:
    """As argparse has it."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    assert 2 == caught.value.code
