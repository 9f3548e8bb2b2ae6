"""What kvlogd takes as settings, and how it says no."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from daemon.__main__ import EX_CONFIG, main
from daemon.settings import load_settings
from kvlog.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def written(folder: Path, text: str) -> Path:
    """A settings file."""
    path = folder / "kvlogd.toml"
    path.write_text(text)
    return path


def test_settings_without_a_file_are_the_defaults() -> None:
    """Every setting has a default that works on one machine."""
    settings = load_settings(None)
    assert settings.log.url == "file:///var/lib/kvlog/log"
    assert settings.follow.partitions == "all"
    assert settings.metrics.port is None


def test_environment_wins_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment variable overrides the same setting of the file, and leaves its neighbours alone."""
    monkeypatch.setenv("KVLOG_POOL__BYTES", "2097152")
    settings = load_settings(written(tmp_path, "[pool]\nbytes = 8388608\nblock_bytes = 65536\n"))
    assert (settings.pool.bytes, settings.pool.block_bytes) == (2097152, 65536)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[pool]\nbites = 3\n", "pool.bites: no such setting; did you mean bytes?"),
        ("[pol]\nbytes = 3\n", "pol: no such setting; did you mean pool?"),
        ("[log]\nurl = 'ftp://x'\n", "names no log; write file:///"),
        ("[log]\nurl = 'kafka://broker'\n", "is not host:port"),
        ("[log]\npartitions = 0\n", "greater than or equal to 1"),
        ("[log]\nformat_version = 2\n", "log.format_version"),
        ("[log.kafka]\nreplicas = 3\n", "log.kafka.replicas: no such setting; did you mean replication?"),
        ("[sync]\nmode = 'sometimes'\n", "write full, ids, or every:TOKENS,TIMEms"),
        ("[pool]\nlow_percent = 90\n", "low_percent 90 must be below high_percent 85"),
        ("[pool]\nbytes = 1048576\nblock_bytes = 2097152\n", "does not fit pool.bytes"),
        ("[pool]\ndevice = 'gpu'\n", "pool.device"),
        ("[log]\npartitions = 4\n[follow]\npartitions = [1, 4]\n", "names [4], the log has 0 to 3"),
        ("[node]\nid = ''\n", "node.id"),
        ("[primary]\nrewrite_when_left = 0.95\n", "primary.rewrite_when_left"),
        ("[primary]\nrewrite_when_left = nan\n", "primary.rewrite_when_left"),
        ("[primary]\nrewrite_when_lef = 0.5\n", "did you mean rewrite_when_left?"),
        ("pool = \n", "is not TOML"),
    ],
)
def test_wrong_setting_is_refused_with_what_to_do(tmp_path: Path, text: str, said: str) -> None:
    """A misspelt, unknown or impossible setting is an error that names it."""
    with pytest.raises(ConfigError) as caught:
        load_settings(written(tmp_path, text))
    assert said in str(caught.value)


def test_misspelt_environment_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of ours that names no section is not ignored."""
    monkeypatch.setenv("KVLOG_POL__BYTES", "1")
    with pytest.raises(ConfigError, match="did you mean KVLOG_POOL__"):
        load_settings(None)


def test_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    """A file that cannot be read is named."""
    with pytest.raises(ConfigError, match=r"nowhere\.toml"):
        load_settings(tmp_path / "nowhere.toml")


def test_check_config_of_a_good_file_prints_all_but_secrets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """check-config shows what is in force, and no password."""
    path = written(
        tmp_path, "[log]\nurl = 'kafka://h:1'\n[log.kafka]\nusername = 'u'\npassword = 'hush-hush'\n"
    )
    assert main(["check-config", "--config", str(path)]) == 0
    out = capsys.readouterr().out
    assert "kafka.username = 'u'" in out
    assert "hush-hush" not in out
    assert "# memory: pool 1024 MiB" in out
    assert "rewrite_when_left = 0.25" in out


def test_wrong_config_ends_with_the_exit_code_that_systemd_does_not_restart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """EX_CONFIG (78) says that a restart does not help."""
    assert main(["run", "--config", str(written(tmp_path, "[pool]\nbites = 3\n"))]) == EX_CONFIG
    assert "did you mean bytes?" in capsys.readouterr().err
