"""Processes that are forked for tests are what a new interpreter would have made of the same words."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.forks import NODES, Forks
from tests.nodes import Node, Process, daemon_config, nodes_started_by, until

JOBS = (
    (["daemon", "check-config"], {"KVLOG_NODE__ID": "n", "KVLOG_LOG__URL": "file:///nowhere"}),
    (["daemon", "run", "--config", "absent.toml"], None),
    (["kvlog.engines", "synthetic", "--row-bytes", "-1"], None),
    (["kvlog.engines", "nothing"], None),
)


@pytest.mark.parametrize(("arguments", "environment"), JOBS)
def test_forked_process_ends_and_says_as_a_new_one_does(
    arguments: list[str], environment: dict[str, str] | None, tmp_path: Path
) -> None:
    """Exit code, standard output and error, environment and arguments are a program's own."""
    with Forks(NODES) as forks:
        forked = forks.start(arguments, tmp_path / "forked", environment)
        code = forked.wait()
    plain = Process(arguments, tmp_path / "plain", environment)
    expected = (plain.wait(), plain.output)
    assert expected == (code, forked.output)


def test_forked_process_that_is_killed_says_by_what_and_others_end_with_who_forks(tmp_path: Path) -> None:
    """An exit code is negative for a signal; whoever kills the tests leaves no forked process behind."""
    with Forks(NODES) as forks:
        first, second = (
            Node(tmp_path, name, daemon_config(tmp_path, name, f"file://{tmp_path}/log")) for name in "ab"
        )
        with nodes_started_by(forks.start):
            daemons = [node.start_daemon() for node in (first, second)]
        assert [d.pid for d in daemons] == [os.getpgid(d.pid) for d in daemons]
        assert -signal.SIGKILL == daemons[0].stop(signal.SIGKILL)
        assert daemons[1].code is None
    until(lambda: not Path(f"/proc/{daemons[1].pid}").exists(), what="the end of the second")
