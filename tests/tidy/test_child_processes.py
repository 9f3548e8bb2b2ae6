"""Every process that a test starts dies with the tests, even when these are killed."""

from __future__ import annotations

import ast
from typing import TYPE_CHECKING

import pytest

from tests.tidy.source import example, real_tree

if TYPE_CHECKING:
    from tests.tidy.source import Tree

_STARTS = {"Popen", "call", "check_call", "check_output", "run"}


def orphans(tree: Tree) -> list[str]:
    """Finds children of tests that would outlive them."""
    return [
        f"{module.path}:{node.lineno} a child outlives the tests, pass preexec_fn=die_with_parent"
        for module in tree.values()
        if not module.is_production
        for node in module.nodes
        if isinstance(node, ast.Call) and _starts(node.func) and not _dies(node)
    ]


def _starts(called: ast.expr) -> bool:
    match called:
        case ast.Attribute(value=ast.Name(id="subprocess"), attr=name):
            return name in _STARTS
        case ast.Attribute(value=ast.Name(id="asyncio"), attr=name):
            return name.startswith("create_subprocess_")
        case _:
            return False


def _dies(call: ast.Call) -> bool:
    return any(
        given.arg == "preexec_fn"
        and isinstance(given.value, ast.Name)
        and given.value.id == "die_with_parent"
        for given in call.keywords
    )


def test_children_of_the_tests_die_with_them() -> None:
    """Whoever kills the tests finds no daemon, engine or broker of theirs afterwards."""
    assert orphans(real_tree()) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("subprocess.Popen(['x'])", 1),
        ("subprocess.run(['x'], preexec_fn=print)", 1),
        ("asyncio.create_subprocess_exec('x')", 1),
        ("subprocess.run(['x'], preexec_fn=die_with_parent)", 0),
        ("asyncio.run(main())", 0),
    ],
)
def test_rule_against_orphans_finds_each_of_them(text: str, count: int) -> None:
    """A call that starts a process without the wish is found."""
    assert len(orphans(example(tests__a=text))) == count
