"""Runs `kvlog demo` as a user does, and checks what holds of every run, whatever engine and log."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.nodes import until
from tests.processes import die_with_parent

__all__ = ["Demo", "check"]

NAMES = {
    *("tokens_equal", "kv_equal", "tamper_detected", "zombie_fenced"),
    *("tokens_before_kill", "tokens_in_log", "tokens_recomputed"),
    *("kill_to_next_token_ms", "detect_ms", "claim_ms", "catch_up_ms", "attach_ms", "first_token_ms"),
    *("reprefill_ms", "ratio", "log", "model", "dtype"),
}
PARTS = ("detect_ms", "claim_ms", "catch_up_ms", "attach_ms", "first_token_ms")


@dataclass
class Demo:
    """Runs demos whose temporary files are in a folder of the test's own.

    `seconds`: for one of them, on a machine that does much else.
    """

    folder: Path
    columns: int = 80
    seconds: float = 500.0
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """A running demo."""
        environment = {**os.environ, "TMPDIR": str(self.folder), "COLUMNS": str(self.columns)}
        process = subprocess.Popen(
            [sys.executable, "-m", "consumers", "demo", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            preexec_fn=die_with_parent,
        )
        self.started.append(process)
        return process

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=self.seconds)
        return process.returncode, out, err

    def figures(self, *arguments: str) -> dict[str, Any]:
        """The JSON of a demo whose every claim held; nothing is left of it."""
        code, out, err = self.run("--json", *arguments)
        figures: dict[str, Any] = json.loads(out)
        assert (0, "") == (code, err), figures
        self.assert_nothing_left()
        return figures

    def left(self) -> list[str]:
        """Processes whose command line names our folder, or that have a file open there."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has just ended
                line = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                said = [line, *(str(link.readlink()) for link in (process / "fd").iterdir())]
                if any(str(self.folder) in text for text in said):
                    found.append(line)
        return found

    def close(self) -> None:
        """End what a test that failed has left; its nodes die with it."""
        for process in self.started:
            process.kill()
            process.communicate(timeout=60)

    def assert_nothing_left(self) -> None:
        """No process, no file."""
        until(lambda: not self.left(), what=f"the end of {self.left()}")
        assert [] == list(self.folder.glob("kvlog-demo-*"))


def check(figures: dict[str, Any], *, tokens: int) -> None:
    """What holds of every demo, whatever engine and log."""
    assert NAMES == set(figures)
    claims = ("tokens_equal", "kv_equal", "tamper_detected", "zombie_fenced")
    assert [True] * 4 == [figures[name] for name in claims]
    assert 0 < figures["tokens_before_kill"] < tokens
    assert figures["tokens_in_log"] > 0
    assert figures["tokens_recomputed"] >= 1  # the last token's row is never attached
    assert figures["kill_to_next_token_ms"] == pytest.approx(sum(figures[part] for part in PARTS), abs=0.01)
    assert all(figures[part] > 0 for part in PARTS)
    assert figures["ratio"] == pytest.approx(
        figures["reprefill_ms"] / figures["kill_to_next_token_ms"], abs=0.01
    )
