"""The rules about docstrings, names and the documents that code cites."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from typing import TYPE_CHECKING

from tests.tidy.shape import Function

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tests.tidy.source import Module, Tree

__all__ = [
    "foreign_words",
    "missing_all",
    "missing_docstrings",
    "missing_headings",
    "unknown_errors",
    "unknown_invariants",
    "unnumbered_todos",
]

# Words that mean what another word of DESIGN.md means already. Kafka's own words are Kafka's, in kvlog/log.
FOREIGN = {
    "backup": "standby",
    "failover": "takeover",
    "follower": "standby",
    "hwm": "high_watermark",
    "leader": "primary",
    "master": "primary",
    "replica": "standby",
    "slave": "standby",
    "wal": "log",
}
ALARMING = {"WARN", "WARNING", "ERROR", "CRITICAL"}
ALARMING_LEVEL = 30  # logging.WARNING


def missing_docstrings(tree: Tree) -> list[str]:
    """Finds public modules, classes, functions and methods of production code without a docstring."""
    return [
        f"{module.path}:{line} {name} has no docstring"
        for module in tree.values()
        if module.is_production
        for line, name, node in _public(module.tree, "")
        if ast.get_docstring(node) is None
    ]


def _public(
    scope: ast.Module | ast.ClassDef, prefix: str
) -> Iterator[tuple[int, str, ast.Module | ast.ClassDef | Function]]:
    if isinstance(scope, ast.Module):
        yield 1, "the module", scope
    for node in scope.body:
        if isinstance(node, ast.ClassDef) and node.name[0] != "_":
            yield node.lineno, prefix + node.name, node
            yield from _public(node, f"{prefix}{node.name}.")
        elif isinstance(node, Function) and node.name[0] != "_" and not _is_variant(node):
            yield node.lineno, prefix + node.name, node


def _is_variant(function: Function) -> bool:
    """Says whether this is another form of a documented thing: an overload, a setter."""
    names = [ast.unparse(name) for name in function.decorator_list]
    return any(name.split(".")[-1] in {"overload", "setter", "deleter"} for name in names)


def unknown_errors(tree: Tree) -> list[str]:
    """Finds names in a docstring's Raises section that are no class of kvlog/errors.py."""
    known = {node.name for node in ast.walk(tree["kvlog.errors"].tree) if isinstance(node, ast.ClassDef)}
    return [
        f"{module.path} {name} raises {error}, which is not in kvlog/errors.py"
        for module in tree.values()
        if module.is_production
        for name, text in _docstrings(module)
        for error in _raises(text)
        if error not in known
    ]


def _docstrings(module: Module) -> Iterator[tuple[str, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text is not None:
                yield getattr(node, "name", "the module"), text


def _raises(docstring: str) -> Iterator[str]:
    """Yields the names of a Raises section: its lines of least indentation, up to their colon."""
    section = re.search(r"^Raises:(.*)\n((?:[ \t]+.*\n|\n)*)", docstring + "\n", re.MULTILINE)
    if section is None:
        return
    lines = [line for line in (section[1], *section[2].splitlines()) if line.strip()]
    indent = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    for line in lines:
        if len(line) - len(line.lstrip()) == indent:
            yield from re.split(r"\s*(?:,|\bor\b)\s*", line.split(":")[0].strip())


def missing_all(tree: Tree) -> list[str]:
    """Finds modules of the library without an `__all__`; an empty __init__ needs none."""
    return [
        f"{module.path} has no __all__"
        for module in tree.values()
        if module.name.split(".")[0] == "kvlog" and _has_code(module) and "__all__" not in _assigned(module)
    ]


def _has_code(module: Module) -> bool:
    return any(
        not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in module.tree.body
    )


def _assigned(module: Module) -> set[str]:
    targets: list[ast.expr] = []
    for node in module.tree.body:
        targets += node.targets if isinstance(node, ast.Assign) else []
        targets += [node.target] if isinstance(node, ast.AnnAssign) else []
    return {ast.unparse(target) for target in targets}


def unknown_invariants(tree: Tree, architecture: str) -> list[str]:
    """Finds cited invariants that ARCHITECTURE.md does not have."""
    pattern = re.compile(r"\bINV-[A-Za-z0-9]+(?:[-_][A-Za-z0-9]+)*")
    known = set(pattern.findall(architecture))
    return [
        f"{module.path}:{number} {cited} is not in ARCHITECTURE.md"
        for module in tree.values()
        for number, line in enumerate(module.text.splitlines(), 1)
        for cited in pattern.findall(line)
        if cited not in known
    ]


def unnumbered_todos(tree: Tree) -> list[str]:
    """Finds to-do marks without the number of an issue, in comments and docstrings."""
    pattern = re.compile(r"\b(?:TODO|FIXME|XXX)\b(?!\W{0,2}\d)")
    found = [
        f"{module.path}:{token.start[0]} {token.string.strip()}"
        for module in tree.values()
        if pattern.search(module.text)  # reading tokens takes long
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type == tokenize.COMMENT and pattern.search(token.string)
    ]
    return found + [
        f"{module.path} {name}: {pattern.findall(text)[0]}"
        for module in tree.values()
        for name, text in _docstrings(module)
        if pattern.search(text)
    ]


def foreign_words(tree: Tree) -> list[str]:
    """Finds public names of production code that use another word where DESIGN.md has one."""
    return [
        f"{module.path}:{line} {name}: the word is {FOREIGN[word]}"
        for module in tree.values()
        if module.is_production and not module.name.startswith("kvlog.log.")
        for line, name, _ in _public(module.tree, "")
        for word in _word_parts(name)
        if word in FOREIGN
    ]


def _word_parts(name: str) -> list[str]:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().replace(".", "_").split("_")


def missing_headings(levels: Mapping[str, object], runbook: str) -> list[str]:
    """Finds events at WARN or above that are in no heading of the runbook.

    Args:
        levels: The level of each event's name: a word, or a number of the logging module.
        runbook: The Markdown text.
    """
    headings = [line for line in runbook.splitlines() if line.startswith("#")]
    words = {word for line in headings for word in re.findall(r"\w+", line)}
    return [
        f"{event} has no heading in docs/runbook.md"
        for event, level in levels.items()
        if _is_alarm(level) and event not in words
    ]


def _is_alarm(level: object) -> bool:
    if isinstance(level, int):
        return level >= ALARMING_LEVEL
    return str(getattr(level, "value", level)).upper() in ALARMING
