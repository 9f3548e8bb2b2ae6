"""Fencing scenarios: what real node cores do, command by command, as reviewed.

`KVLOG_REWRITE=1 pytest tests/golden/test_fencing.py` writes what they do now into the files (not in CI); then read the
diff: each changed line is a changed promise.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.golden.fencing_script import Step, parse, play, render
from tests.golden.hex_files import may_write

FOLDER = Path(__file__).parent / "fencing"
SCENARIOS = sorted(path.stem for path in FOLDER.glob("*.txt"))


@pytest.mark.parametrize("name", SCENARIOS)
def test_fencing_scenario_goes_as_reviewed(name: str) -> None:
    """Every command makes the nodes want what the file says, no more and no less."""
    path = FOLDER / f"{name}.txt"
    text = path.read_text(encoding="utf-8")
    actual = render(play(parse(text)))
    if may_write() and actual != text:
        path.write_text(actual, encoding="utf-8")
        return
    assert text == actual


def test_fencing_scenarios_exist() -> None:
    """A folder that was moved would pass for a folder without a failure."""
    assert len(SCENARIOS) >= 12


def test_scenario_is_rendered_as_it_was_parsed() -> None:
    """A rewrite changes expected output and nothing else."""
    steps = [Step(("# why",), "node A", ("A reads from 0",)), Step((), "log", ("nothing",))]
    assert steps == parse(render(steps))


def test_scenario_without_divider_is_refused() -> None:
    """A command whose expected output is missing would test nothing."""
    with pytest.raises(ValueError, match="no ----"):
        parse("node A\nA reads from 0\n")


def test_scenario_that_goes_otherwise_is_noticed() -> None:
    """A checker that cannot fail is worth nothing."""
    steps = parse("node A\n----\nA reads from 7\n")
    assert [("A reads from 0",)] == [step.expected for step in play(steps)]
