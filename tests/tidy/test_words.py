"""Docstrings, names, and the documents that code cites."""

from __future__ import annotations

import importlib
import logging

import pytest

from tests.tidy.source import ROOT, Tree, example, real_tree
from tests.tidy.words import (
    foreign_words,
    missing_all,
    missing_docstrings,
    missing_headings,
    unknown_errors,
    unknown_invariants,
    unnumbered_todos,
)

INV = "INV" + "-"  # in two parts, so that the examples below are not citations
TODO = "TO" + "DO"
FIXME = "FIX" + "ME"


def document(name: str) -> str:
    """Reads one of the project's documents; one that is missing says nothing."""
    path = ROOT / name
    return path.read_text(encoding="utf-8") if path.exists() else ""


def test_public_names_of_the_tree_have_docstrings() -> None:
    """Every public module, class, function and method says what it does."""
    assert missing_docstrings(real_tree()) == []


def test_raises_sections_of_the_tree_name_our_errors() -> None:
    """Callers handle errors by consequence, so a documented one is a class of kvlog/errors.py."""
    assert unknown_errors(real_tree()) == []


def test_library_modules_of_the_tree_have_all() -> None:
    """A module of the library says what is public."""
    assert missing_all(real_tree()) == []


def test_invariants_cited_in_the_tree_exist() -> None:
    """An invariant has a home in ARCHITECTURE.md."""
    assert unknown_invariants(real_tree(), document("ARCHITECTURE.md")) == []


def test_todos_of_the_tree_have_numbers() -> None:
    """What is left undone is an issue."""
    assert unnumbered_todos(real_tree()) == []


def test_names_of_the_tree_are_words_of_the_design() -> None:
    """One thing has one name."""
    assert foreign_words(real_tree()) == []


@pytest.mark.skipif(
    not (ROOT / "daemon/telemetry.py").exists(), reason="daemon/telemetry.py is not written yet"
)
def test_alarming_events_have_headings_in_the_runbook() -> None:
    """Every event has a level; an operator who is woken by one finds a heading with its name."""
    telemetry = importlib.import_module("daemon.telemetry")
    levels = {str(event): telemetry.EVENT_LEVELS.get(event) for event in telemetry.Event}
    assert [event for event, level in levels.items() if level is None] == []
    assert missing_headings(levels, document("docs/runbook.md")) == []


def test_missing_docstrings_are_found() -> None:
    """What is public needs a sentence; what is private, an overload or a setter does not."""
    text = """
        def f(): ...
        def _f(): ...
        class C:
            def m(self): ...
            def _m(self): ...
            @overload
            def n(self): ...
            @m.setter
            def m(self): ...
        class _C:
            def m(self): ...
    """
    assert missing_docstrings(example(kvlog__a=text, tests__b="def g(): ...")) == [
        "kvlog/a.py:1 the module has no docstring",
        "kvlog/a.py:2 f has no docstring",
        "kvlog/a.py:4 C has no docstring",
        "kvlog/a.py:5 C.m has no docstring",
    ]


def errors_beside(docstring: str) -> Tree:
    """Makes a tree with two errors and one function with the given docstring."""
    return example(
        kvlog__errors="class Fenced(Exception): ...\nclass RingFull(Exception): ...",
        kvlog__a=f'def f():\n    """Does it.\n\n{docstring}\n    """\n',
    )


@pytest.mark.parametrize(
    ("docstring", "error"),
    [
        ("    Raises:\n        Fenced: stop.\n        ValueError: fix it.", "ValueError"),
        ("    Raises:\n        Fenced, OSError: stop.", "OSError"),
        ("    Raises: KeyError: fix it.", "KeyError"),
        (
            "    Raises:\n        Fenced: stop\n            at once: now.\n        Gone: x.\n\n    Order: y.",
            "Gone",
        ),
    ],
)
def test_unknown_error_is_found(docstring: str, error: str) -> None:
    """Each name of a Raises section is looked up, in each form that it may take."""
    expected = [f"kvlog/a.py f raises {error}, which is not in kvlog/errors.py"]
    assert unknown_errors(errors_beside(docstring)) == expected


def test_known_errors_are_not_found() -> None:
    """Explanations below a name, and other sections, are not names."""
    docstring = "    Raises:\n        Fenced or RingFull: stop: at\n            once: now.\n\n    Order:\n        A: x."
    assert unknown_errors(errors_beside(docstring)) == []


def test_missing_all_is_found() -> None:
    """Only the library's modules that hold something need one."""
    tree = example(
        kvlog__a="x = 1", kvlog__b="__all__: list[str] = []", kvlog__init='"""D."""', daemon__c="x = 1"
    )
    assert missing_all(tree) == ["kvlog/a.py has no __all__"]


def test_unknown_invariant_is_found() -> None:
    """A longer name is another name."""
    tree = example(kvlog__a=f"# {INV}ONE-WRITER, {INV}PREFIX and {INV}ONE")
    assert unknown_invariants(tree, f"## {INV}ONE-WRITER\n{INV}PREFIX.") == [
        f"kvlog/a.py:1 {INV}ONE is not in ARCHITECTURE.md"
    ]


def test_unnumbered_todo_is_found() -> None:
    """A mark in a comment or docstring needs a number; a string is data."""
    text = f'"""{TODO} all."""\nx = "{TODO}"  # {TODO}: later\n# {FIXME}(#12): known\n# {TODO} 7: known'
    found = unnumbered_todos(example(kvlog__a=text))
    assert found == [
        f"kvlog/a.py:2 # {TODO}: later",
        f"kvlog/a.py the module: {TODO}",
    ]


def test_foreign_word_is_found() -> None:
    """A synonym in a public name is refused, except where Kafka speaks."""
    tree = example(
        daemon__a="class FollowerState: ...\ndef read_hwm(): ...\ndef remaster(): ...\ndef _leader(): ...",
        kvlog__log__topics="def leader_epoch(): ...",
    )
    assert foreign_words(tree) == [
        "daemon/a.py:1 FollowerState: the word is standby",
        "daemon/a.py:2 read_hwm: the word is high_watermark",
    ]


@pytest.mark.parametrize("level", ["WARN", "warning", "error", logging.WARNING, logging.CRITICAL])
def test_alarming_event_without_heading_is_found(level: object) -> None:
    """Text about an event is not a heading, and neither is a longer name."""
    runbook = "# Alerts\n## record_refused: what to do\n## node_fenced_twice\nnode_fenced\n"
    assert missing_headings({"record_refused": level}, runbook) == []
    assert missing_headings({"node_fenced": level}, runbook) == [
        "node_fenced has no heading in docs/runbook.md"
    ]


@pytest.mark.parametrize("level", ["INFO", "debug", logging.INFO])
def test_quiet_event_needs_no_heading(level: object) -> None:
    """Nobody is woken by a change of state."""
    assert missing_headings({"claim_won": level}, "") == []
