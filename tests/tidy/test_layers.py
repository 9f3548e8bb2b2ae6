"""Imports obey the layer table of DESIGN.md, directly and transitively."""

from __future__ import annotations

import re
import tomllib

import pytest

from tests.tidy.layers import LAYERS, direct_imports, layer_of, transitive_imports, undeclared_packages
from tests.tidy.source import ROOT, example, real_tree


def declared() -> dict[str, set[str]]:
    """Reads the distributions that pyproject.toml declares for each top folder."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in requirements}
        for name, requirements in project["optional-dependencies"].items()
    }
    core = {re.split(r"[\[<>=~! ]", requirement)[0] for requirement in project["dependencies"]}
    return {
        "kvlog": core | extras["daemon"] | extras["transformers"] | {"vllm"},
        "daemon": core | extras["daemon"],
        "consumers": core | extras["tools"],
    }


def test_imports_of_the_tree_obey_the_layers() -> None:
    """No module imports a layer or a package that its own layer forbids."""
    assert direct_imports(real_tree()) == []


def test_imports_of_the_tree_obey_the_layers_transitively() -> None:
    """No module reaches a forbidden layer or package through another one."""
    assert transitive_imports(real_tree()) == []


def test_imports_of_the_tree_are_declared() -> None:
    """Each top folder's packages are in its own extra, so an install with that extra alone works."""
    assert undeclared_packages(real_tree(), declared()) == []


@pytest.mark.parametrize(
    ("path", "text", "complaint"),
    [
        ("kvlog__core__fold", "import numpy", "core may not import the package numpy"),
        ("kvlog__core__fold", "import xxhash", "core may not import the package xxhash"),
        ("kvlog__core__fold", "from kvlog.wire import frame", "core may not import kvlog.wire.frame (wire)"),
        ("kvlog__core__fold", "from ..log import base", "core may not import kvlog.log (log)"),
        ("kvlog__errors", "import kvlog.core.fold", "first row may not import kvlog.core.fold (core)"),
        ("kvlog__wire__frame", "import torch", "wire may not import the package torch"),
        ("kvlog__log__topics", "import aiokafka", "only kvlog.log.kafka* may import aiokafka"),
        (
            "kvlog__buffers__ring",
            "import torch",
            "only kvlog.buffers.pool* and kvlog.engines.* may import torch",
        ),
        ("kvlog__link__server", "from kvlog.log import base", "link may not import kvlog.log (log)"),
        (
            "kvlog__engines__vllm",
            "import transformers",
            "only kvlog.engines.transformers* may import transformers",
        ),
        ("kvlog__engines__base", "import aiokafka", "engines may not import the package aiokafka"),
        ("kvlog__engines__base", "from kvlog.core import fold", "engines may not import kvlog.core (core)"),
        ("daemon__wiring", "import kvlog.engines.base", "daemon may not import kvlog.engines.base (engines)"),
        ("daemon__wiring", "import aiokafka", "only kvlog.log.kafka* may import aiokafka"),
        ("consumers__lag", "from daemon import settings", "consumers may not import daemon (daemon)"),
        ("consumers__lag", "import tests.sim", "consumers may not import tests.sim (no layer)"),
        ("kvlog__extras__thing", "import json", "is in no layer of tests/tidy/layers.py"),
        (
            "kvlog__errors",
            "import typing_extensions",
            "first row may not import the package typing_extensions",
        ),
    ],
)
def test_forbidden_import_is_found(path: str, text: str, complaint: str) -> None:
    """Each row of the table refuses what it does not name."""
    found = direct_imports(example(kvlog__wire__frame="") | example(**{path: text}))
    assert [line.split(" ", 1)[1] for line in found] == [complaint]


@pytest.mark.parametrize(
    "text",
    [
        "def f():\n    import numpy",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import numpy",
        "import importlib\nimportlib.import_module('numpy')",
        "import importlib\nimportlib.import_module(name)",
        "__import__('numpy')",
    ],
)
def test_hidden_import_is_found(text: str) -> None:
    """An import inside a function, for types only, or by a call is an import."""
    assert len(direct_imports(example(kvlog__core__fold=text))) == 1


def test_allowed_imports_are_not_found() -> None:
    """What the table names is allowed."""
    tree = example(
        kvlog__checksums="import xxhash\nif TYPE_CHECKING:\n    from typing_extensions import Buffer",
        kvlog__wire__header="import msgpack, lz4.frame\nfrom kvlog.errors import DecodeError",
        kvlog__log__kafka_log="import aiokafka\nfrom kvlog.wire.header import x",
        kvlog__buffers__pool="import torch",
        kvlog__engines__transformers="import transformers, torch\nimport kvlog.link.client",
        daemon__service="import structlog\nimport kvlog.core.fold, kvlog.log.kafka_log",
    )
    assert direct_imports(tree) == []


def test_forbidden_package_is_found_through_an_init() -> None:
    """A package's __init__ runs whenever a module of it is imported, so it counts."""
    tree = example(
        kvlog__init="import kvlog.wire.header",
        kvlog__wire__header="import msgpack",
        kvlog__core__fold="import kvlog.ids",
        kvlog__ids="",
    )
    found = transitive_imports(tree)
    assert "kvlog/core/fold.py reaches kvlog.wire.header (wire), which core may not" in found
    assert (
        "kvlog/core/fold.py reaches the package msgpack through kvlog.wire.header, which core may not"
        in found
    )


def test_forbidden_layer_is_found_two_steps_away() -> None:
    """Reaching a log through another module is as forbidden as importing it."""
    tree = example(
        kvlog__engines__base="import kvlog.link.client",
        kvlog__link__client="import kvlog.log.kafka",
        kvlog__log__kafka="import aiokafka",
    )
    found = transitive_imports(tree)
    assert "kvlog/engines/base.py reaches kvlog.log.kafka (log), which engines may not" in found
    assert (
        "kvlog/engines/base.py reaches the package aiokafka through kvlog.log.kafka, which engines may not"
        in found
    )


def test_undeclared_package_is_found() -> None:
    """A package that came along with another one is not ours to import."""
    tree = example(consumers__lag="import yaml, rich.table, json", daemon__service="import rich")
    allowed = {"kvlog": set(), "daemon": {"structlog"}, "consumers": {"rich"}}
    assert undeclared_packages(tree, allowed) == [
        "consumers/lag.py:1 yaml is not declared for consumers",
        "daemon/service.py:1 rich is not declared for daemon",
    ]


def test_every_folder_of_the_table_is_known_to_layer_of() -> None:
    """A module's place decides its layer; a new folder needs a row first."""
    assert {layer_of(f"kvlog.{name}.x") for name in LAYERS if " " not in name} >= {"core", "wire", "log"}
    assert layer_of("kvlog") == layer_of("kvlog.errors") == "first row"
    assert layer_of("kvlog.extras.thing") is None
