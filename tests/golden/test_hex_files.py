"""The keeper of goldens: it compares, it writes what is missing when asked, and it never overwrites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.golden.hex_files import GoldenMismatchError, check_golden, may_write, read_golden

if TYPE_CHECKING:
    from pathlib import Path


def test_golden_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    """A missing file is not written unless that was asked for."""
    with pytest.raises(GoldenMismatchError, match="is missing"):
        check_golden(tmp_path / "new.hex", b"bytes", write=False)
    assert list(tmp_path.iterdir()) == []


def test_golden_that_is_missing_is_written_when_asked(tmp_path: Path) -> None:
    """What was written is what the next run compares with."""
    path = tmp_path / "v9" / "new.hex"
    check_golden(path, bytes(range(70)), write=True)
    check_golden(path, bytes(range(70)), write=False)
    assert bytes(range(70)) == read_golden(path)
    assert [len(line) for line in path.read_text(encoding="ascii").splitlines()] == [64, 64, 12]


@pytest.mark.parametrize("write", [False, True])
def test_golden_that_differs_is_never_overwritten(tmp_path: Path, write: bool) -> None:
    """Asked or not: a file that exists stays, and the difference is a failure that shows both."""
    path = tmp_path / "old.hex"
    path.write_text("00ff\n", encoding="ascii")
    with pytest.raises(GoldenMismatchError, match=r"00ff\nnow:\n00fe"):
        check_golden(path, b"\x00\xfe", write=write)
    assert path.read_text(encoding="ascii") == "00ff\n"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"KVLOG_REWRITE": "1"}, True),
        ({"KVLOG_REWRITE": "0"}, False),
        ({"KVLOG_REWRITE": "1", "CI": "true"}, False),
    ],
)
def test_golden_writing_is_asked_for_and_never_in_ci(environment: dict[str, str], expected: bool) -> None:
    """CI compares; it never makes the file that it should have compared with."""
    assert expected is may_write(environment)
