"""The layer table of DESIGN.md, as data, and the rules that read it.

A layer may import the layers in `may` and the packages in `packages`, beside itself and the standard library. A package
in OWNED may be imported by the modules named there and by no other, whatever their layer: one border file each.
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib.metadata import packages_distributions
from typing import TYPE_CHECKING

from tests.tidy.source import PRODUCTION, Import, Module, Tree, imports

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

__all__ = ["LAYERS", "OWNED", "direct_imports", "layer_of", "transitive_imports", "undeclared_packages"]


@dataclass(frozen=True, slots=True)
class Layer:
    """What the modules of one layer may import."""

    may: tuple[str, ...] = ()
    packages: frozenset[str] = field(default_factory=frozenset)
    any_package: bool = False


WEB = frozenset({"starlette", "uvicorn", "httptools", "h11"})
LAYERS: dict[str, Layer] = {
    "first row": Layer(packages=frozenset({"xxhash"})),
    "wire": Layer(("first row",), frozenset({"xxhash", "msgpack", "lz4", "zstandard", "numpy"})),
    "core": Layer(("first row",)),
    "log": Layer(("first row", "wire"), frozenset({"aiokafka", "pydantic"})),
    "buffers": Layer(("first row",), frozenset({"numpy", "torch"})),
    "link": Layer(("first row", "buffers"), frozenset({"msgpack"})),
    "engines": Layer(
        ("first row", "wire", "buffers", "link"),
        WEB | {"numpy", "torch", "transformers", "gguf", "accelerate", "jinja2", "safetensors", "vllm"},
    ),
    "daemon": Layer(("first row", "wire", "core", "log", "buffers", "link"), any_package=True),
    "consumers": Layer(("first row", "wire", "core", "log", "buffers", "link"), any_package=True),
}

TRANSFORMERS = ("kvlog.engines.transformers*",)
OWNED: dict[str, tuple[str, ...]] = {
    "aiokafka": ("kvlog.log.kafka*",),
    "pydantic": ("kvlog.log.settings", "daemon.*", "consumers.*"),
    "torch": ("kvlog.buffers.pool*", "kvlog.engines.*"),
    "transformers": TRANSFORMERS,
    "gguf": TRANSFORMERS,
    "accelerate": TRANSFORMERS,
    "jinja2": TRANSFORMERS,
    "safetensors": TRANSFORMERS,
    "vllm": ("kvlog.engines.vllm*",),
}


def layer_of(name: str) -> str | None:
    """Gives a module's layer; None is no layer: another's code, or a folder of kvlog that the table does not know."""
    parts = name.split(".")
    if parts[0] in {"daemon", "consumers"}:
        return parts[0]
    if parts[0] != "kvlog":
        return None
    if len(parts) >= 2 and parts[1] in LAYERS:
        return parts[1]
    return "first row" if len(parts) <= 2 else None


def direct_imports(tree: Tree) -> list[str]:
    """Finds imports that the importing module's own layer forbids."""
    return [
        f"{module.path}:{found.line} {complaint}"
        for module in tree.values()
        if module.is_production
        for found in imports(module, tree)
        for complaint in _forbidden(module, found)
    ]


def _forbidden(module: Module, found: Import) -> Iterator[str]:
    name = layer_of(module.name)
    if name is None:
        yield "is in no layer of tests/tidy/layers.py"
        return
    if _is_ours(found):
        other = layer_of(found.target)
        if other != name and other not in LAYERS[name].may:
            yield f"{name} may not import {found.target} ({other or 'no layer'})"
    elif _is_package(found):
        if found.top not in LAYERS[name].packages and not LAYERS[name].any_package:
            yield f"{name} may not import the package {found.top}"
        elif not _may_own(module.name, found.top):
            yield f"only {' and '.join(OWNED[found.top])} may import {found.top}"


def _is_ours(found: Import) -> bool:
    return found.top in {*PRODUCTION, "tests"}


def _is_package(found: Import) -> bool:
    backport = (
        found.top == "typing_extensions" and found.for_types_only
    )  # of a later standard library; never loaded
    return found.top not in sys.stdlib_module_names and not _is_ours(found) and not backport


def _may_own(module: str, package: str) -> bool:
    return package not in OWNED or any(fnmatchcase(module, pattern) for pattern in OWNED[package])


def transitive_imports(tree: Tree) -> list[str]:
    """Finds modules that reach a forbidden layer or package through others, the __init__ of packages included."""
    return [
        f"{module.path} reaches {reached}"
        for module in tree.values()
        if module.is_production
        for reached in _reaches_forbidden(module, tree)
    ]


def _reaches_forbidden(module: Module, tree: Tree) -> Iterator[str]:
    name = layer_of(module.name)
    if name is None:
        return
    layers = _layers_below(name)
    packages = frozenset[str]().union(*(LAYERS[layer].packages for layer in layers))
    for other in _closure(module.name, tree):
        layer = layer_of(other)
        if layer not in layers:
            yield f"{other} ({layer or 'no layer'}), which {name} may not"
        if LAYERS[name].any_package:
            continue
        for found in imports(tree[other], tree):
            if _is_package(found) and found.top not in packages:
                yield f"the package {found.top} through {other}, which {name} may not"


def _layers_below(name: str) -> set[str]:
    below = {name}
    for other in LAYERS[name].may:
        below |= _layers_below(other)
    return below


def _closure(start: str, tree: Tree) -> set[str]:
    seen: set[str] = set()
    todo = [start]
    while todo:
        name = todo.pop()
        if name in seen or name not in tree:
            continue
        seen.add(name)
        todo += _parents(name)
        todo += [found.target for found in imports(tree[name], tree)]
    return seen


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:n]) for n in range(1, len(parts))]


def undeclared_packages(tree: Tree, declared: Mapping[str, Iterable[str]]) -> list[str]:
    """Finds packages that a top folder imports without pyproject.toml declaring them for it.

    Args:
        tree: The modules.
        declared: Names of distributions, per top folder.
    """
    known = packages_distributions()
    wanted = {top: {_normal(name) for name in names} for top, names in declared.items()}
    return [
        f"{module.path}:{found.line} {found.top} is not declared for {module.name.split('.')[0]}"
        for module in tree.values()
        if module.is_production
        for found in imports(module, tree)
        if _is_package(found)
        and not wanted[module.name.split(".")[0]]
        & {_normal(name) for name in known.get(found.top, [found.top])}
    ]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
