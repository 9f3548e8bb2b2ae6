"""The source tree as the tidy rules see it: parsed modules, and who imports whom.

A rule is a function from a Tree to a list of complaints, so each rule is run over the real tree and over a small bad
example alike: a checker that cannot fail is worth nothing.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from textwrap import dedent

__all__ = ["PACKAGES", "PRODUCTION", "ROOT", "Import", "Module", "Tree", "example", "imports", "real_tree"]

ROOT = Path(__file__).resolve().parents[2]
PRODUCTION = ("kvlog", "daemon", "consumers")
PACKAGES = (*PRODUCTION, "tests")


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file, read and parsed; `nodes`: all of its tree, for the many rules that walk it."""

    name: str
    path: str
    text: str
    tree: ast.Module = field(repr=False, compare=False)
    nodes: tuple[ast.AST, ...] = field(repr=False, compare=False)

    @property
    def is_package(self) -> bool:
        """Says whether this is an __init__.py."""
        return self.path.endswith("__init__.py")

    @property
    def is_production(self) -> bool:
        """Says whether this is code of ours that users run, not a test."""
        return self.name.split(".")[0] in PRODUCTION


Tree = dict[str, Module]


@dataclass(frozen=True, slots=True, order=True)
class Import:
    """One name that a module imports: a dotted module name, resolved as far as the tree knows."""

    target: str
    line: int
    for_types_only: bool = False

    @property
    def top(self) -> str:
        """The first part of the name: the package."""
        return self.target.split(".")[0]


def module_name(path: str) -> str:
    """Gives the dotted name of a file's module."""
    parts = path.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def parse(path: str, text: str) -> Module:
    """Parses one file."""
    tree = ast.parse(text, filename=path)
    return Module(module_name(path), path, text, tree, nodes=tuple(ast.walk(tree)))


def example(**files: str) -> Tree:
    """Makes a small tree for a test; `a__b` stands for the file a/b.py, `a__init` for a/__init__.py."""
    tree: Tree = {}
    for key, text in files.items():
        path = key.replace("__", "/").replace("/init", "/__init__").replace("/main", "/__main__") + ".py"
        module = parse(path, dedent(text))
        tree[module.name] = module
    return tree


@cache
def real_tree() -> Tree:
    """Reads and parses this project's packages."""
    modules = [
        parse(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    ]
    return {module.name: module for module in modules}


def imports(module: Module, tree: Tree) -> list[Import]:
    """Lists what a module imports, wherever in the file and for whatever reason (type checking included)."""
    return sorted(
        {
            Import(whole if whole in tree else base, line, for_types_only)
            for base, whole, line, for_types_only in _imports(module)
        }
    )


@cache
def _imports(module: Module) -> tuple[tuple[str, str, int, bool], ...]:
    """Lists a file's imports once, however many rules ask: what a name comes from, its whole name, line, for types."""
    typing_nodes = _nodes_for_types_only(module)
    found: list[tuple[str, str, int, bool]] = []
    for node in module.nodes:
        if isinstance(node, ast.Import):
            found += [(alias.name, alias.name, node.lineno, node in typing_nodes) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module)
            names = [f"{base}.{alias.name}" for alias in node.names]
            found += [(base, name, node.lineno, node in typing_nodes) for name in names]
        elif isinstance(node, ast.Call) and _is_import_call(node):
            name = _constant(node.args[0])
            found.append((name, name, node.lineno, False))
    return tuple(found)


def _nodes_for_types_only(module: Module) -> set[ast.AST]:
    blocks = [
        node
        for node in module.nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    ]
    return {inner for block in blocks for statement in block.body for inner in ast.walk(statement)}


def _base(node: ast.ImportFrom, module: Module) -> str:
    if node.level == 0:
        return node.module or ""
    package = module.name.split(".") if module.is_package else module.name.split(".")[:-1]
    package = package[: len(package) - node.level + 1]
    return ".".join([*package, node.module] if node.module else package)


def _is_import_call(node: ast.Call) -> bool:
    if not node.args or not isinstance(node.func, (ast.Name, ast.Attribute)):
        return False
    called = ast.unparse(node.func)
    return called in {"importlib.import_module", "import_module", "__import__"}


def _constant(node: ast.expr) -> str:
    """Gives a string constant, or a name that no layer may import: what is not constant cannot be checked."""
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else "a_computed_name"
