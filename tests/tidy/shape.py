"""The rules about size, names of files, purity and dead code."""

from __future__ import annotations

import ast
import re
import sys
from typing import TYPE_CHECKING

from tests.tidy.layers import layer_of
from tests.tidy.source import PACKAGES, Module, Tree, imports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

__all__ = [
    "banned_names",
    "dead_modules",
    "file_names",
    "impure",
    "misplaced_files",
    "sizes",
]

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 70
PARAMETERS_MAX = 5
PUBLIC_METHODS_MAX = 12

VAGUE = {"util", "utils", "common", "helper", "helpers", "misc", "manager", "managers"}

PURE_LAYERS = {"first row", "wire", "core"}
IMPURE_MODULES = {
    *(
        "asyncio",
        "concurrent",
        "datetime",
        "importlib",
        "logging",
        "multiprocessing",
        "os",
        "pathlib",
        "random",
    ),
    *(
        "secrets",
        "select",
        "selectors",
        "shutil",
        "signal",
        "socket",
        "sqlite3",
        "subprocess",
        "sys",
        "tempfile",
    ),
    *("threading", "time", "uuid"),
}
# A compressor's context belongs to one thread; which one changes no byte.
ALLOWED = {"first row": set[str](), "core": set[str](), "wire": {"threading"}}
IMPURE_CALLS = {"print", "open", "input", "eval", "exec", "breakpoint", "hash", "id"}
SYNCHRONOUS_LAYERS = {*PURE_LAYERS, "buffers"}

# What no production code uses, and what to do instead.
BANNED_EVERYWHERE = {
    "asyncio.create_task": "a TaskGroup's create_task",
    "asyncio.ensure_future": "a TaskGroup's create_task",
    "asyncio.gather": "a TaskGroup",
    "multiprocessing.shared_memory": "memfd: its resource tracker unlinks other processes' segments",
}
BANNED_IN_LIBRARY = {
    "logging": "nothing: the library never logs",
    "structlog": "nothing: the library never logs",
    "warnings": "a typed error",
}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(module: Module) -> Iterator[Function]:
    """Yields every function and method of a module, nested ones too."""
    for node in module.nodes:
        if isinstance(node, Function):
            yield node


def sizes(tree: Tree) -> list[str]:
    """Finds files, functions, parameter lists and classes that are too large."""
    return [f"{module.path}{complaint}" for module in tree.values() for complaint in _too_large(module)]


def _too_large(module: Module) -> Iterator[str]:
    lines = len(module.text.splitlines())
    if lines > FILE_LINES_MAX:
        yield f" has {lines} lines, more than {FILE_LINES_MAX}"
    for function in functions(module):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        if length > FUNCTION_LINES_MAX:
            yield f":{function.lineno} {function.name} has {length} lines, more than {FUNCTION_LINES_MAX}"
        count = len(_parameters(function))
        if count > PARAMETERS_MAX:
            yield f":{function.lineno} {function.name} takes {count} parameters, more than {PARAMETERS_MAX}"
    for node in module.nodes:
        if isinstance(node, ast.ClassDef) and module.is_production:
            methods = [
                inner for inner in node.body if isinstance(inner, Function) and _is_public_method(inner)
            ]
            if len(methods) > PUBLIC_METHODS_MAX and not _is_of_a_foreign_base(node, module):
                yield f":{node.lineno} {node.name} has {len(methods)} public methods, more than {PUBLIC_METHODS_MAX}"


def _is_of_a_foreign_base(node: ast.ClassDef, module: Module) -> bool:
    """Says whether a class implements another package's interface: how many methods that has is not ours to choose."""
    foreign = {
        alias.asname or alias.name
        for found in module.nodes
        if isinstance(found, ast.ImportFrom) and found.module and found.level == 0
        if found.module.split(".")[0] not in {*PACKAGES, *sys.stdlib_module_names}
        for alias in found.names
    }
    return any(isinstance(base, ast.Name) and base.id in foreign for base in node.bases)


def _is_public_method(function: Function) -> bool:
    """Says whether this is a verb of its class; a property is a noun, and is read like an attribute."""
    return function.name[0] != "_" and not any(
        "property" in ast.unparse(name) for name in function.decorator_list
    )


def _parameters(function: Function) -> list[str]:
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    return [name for name in names if name not in {"self", "cls"}]


def file_names(tree: Tree) -> list[str]:
    """Finds files and folders that are named for nothing in particular."""
    return [
        f"{module.path}: name it by the noun in it"
        for module in tree.values()
        if VAGUE & set(re.split(r"[/_.]", module.path))
    ]


def impure(tree: Tree) -> list[str]:
    """Finds clocks, randomness, I/O and asynchronous code in the layers that must have none."""
    return [
        f"{module.path}:{line} {complaint}"
        for module in tree.values()
        for line, complaint in sorted(_impurities(module, tree))
    ]


def _impurities(module: Module, tree: Tree) -> Iterator[tuple[int, str]]:
    layer = layer_of(module.name)
    if layer in PURE_LAYERS:
        for found in imports(module, tree):
            if found.top in IMPURE_MODULES - ALLOWED[layer] and not found.for_types_only:
                yield found.line, f"{layer} may not import {found.target}"
        for line, name in _names_called(module):
            if name in IMPURE_CALLS:
                yield line, f"{layer} may not call {name}"
    if layer in SYNCHRONOUS_LAYERS:
        for node in module.nodes:
            if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
                yield node.lineno, f"{layer} may not be asynchronous"


def _names_called(module: Module) -> Iterator[tuple[int, str]]:
    for node in module.nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id


def banned_names(tree: Tree) -> list[str]:
    """Finds the names that no production code uses, and those that the library may not use."""
    return [
        f"{module.path}:{line} {name} is banned; use {instead}"
        for module in tree.values()
        if module.is_production
        for line, name, instead in sorted(_banned(module, tree))
    ]


def _banned(module: Module, tree: Tree) -> Iterator[tuple[int, str, str]]:
    banned = BANNED_EVERYWHERE | (BANNED_IN_LIBRARY if module.name.split(".")[0] == "kvlog" else {})
    for found in imports(module, tree):
        if found.target in banned:
            yield found.line, found.target, banned[found.target]
    for node in module.nodes:
        if isinstance(node, ast.Attribute) and ast.unparse(node) in banned:
            yield node.lineno, ast.unparse(node), banned[ast.unparse(node)]
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                if whole in banned:
                    yield node.lineno, whole, banned[whole]


def dead_modules(tree: Tree, entry_points: Iterable[str]) -> list[str]:
    """Finds production modules that no production module imports or names.

    A module is alive as an entry point, as a __main__, as a package's __init__, and as an engine adapter: those are
    imported by the engine's process. A string that is a module's name counts: that is how `python -m` and servers
    start one.
    """
    alive = set(entry_points)
    for module in tree.values():
        if module.is_production:
            alive |= {found.target for found in imports(module, tree) if found.target != module.name}
            alive |= {text.split(":")[0] for text in _strings(module)} - {module.name}
    return [
        f"{module.path} is imported by nobody"
        for module in tree.values()
        if module.is_production and module.name not in alive and not _is_started_from_outside(module)
    ]


def _is_started_from_outside(module: Module) -> bool:
    is_adapter = (
        re.fullmatch(r"kvlog\.engines\.(transformers|vllm|vllm_fence)(\.\w+)?", module.name) is not None
    )
    return module.is_package or module.name.endswith("__main__") or is_adapter


def _strings(module: Module) -> Iterator[str]:
    for node in module.nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def misplaced_files(root: Path, packages: Iterable[str]) -> list[str]:
    """Finds Python files outside the packages; folders that begin with a dot are not looked into."""
    homes = set(packages)
    return sorted(
        path.relative_to(root).as_posix()
        for entry in root.iterdir()
        if entry.name[0] != "." and entry.name not in homes | {"build", "dist"}
        for path in (entry.rglob("*.py") if entry.is_dir() else [entry])
        if path.suffix == ".py"
    )
