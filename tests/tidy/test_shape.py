"""Sizes, names of files, purity, banned names, dead code."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING

import pytest

from tests.tidy.shape import banned_names, dead_modules, file_names, impure, misplaced_files, sizes
from tests.tidy.source import PACKAGES, ROOT, example, real_tree

if TYPE_CHECKING:
    from pathlib import Path


def entry_points() -> list[str]:
    """Reads the modules that pyproject.toml names as programs."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [target.split(":")[0] for target in project["scripts"].values()]


def test_files_functions_and_classes_of_the_tree_are_small() -> None:
    """A file has at most 500 lines, a function 70 and five parameters, a class twelve public methods."""
    assert sizes(real_tree()) == []


def test_files_of_the_tree_are_named_by_nouns() -> None:
    """No file is called utils, common, helpers, misc or manager."""
    assert file_names(real_tree()) == []


def test_pure_layers_of_the_tree_are_pure() -> None:
    """First row, wire and core know no clock, randomness, I/O or asyncio; buffers are synchronous."""
    assert impure(real_tree()) == []


def test_tree_uses_no_banned_name() -> None:
    """The library never logs; tasks live in groups; shared memory is memfd."""
    assert banned_names(real_tree()) == []


def test_tree_has_no_dead_module() -> None:
    """Every module is imported by another, or is an entry point."""
    assert dead_modules(real_tree(), entry_points()) == []


def test_python_files_of_the_tree_are_in_the_packages() -> None:
    """Code lives in kvlog, daemon, consumers and tests."""
    assert misplaced_files(ROOT, PACKAGES) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x = 1\n" * 501, "kvlog/a.py has 501 lines, more than 500"),
        ("def f():\n" + "    x = 1\n" * 70, "kvlog/a.py:1 f has 71 lines, more than 70"),
        (
            "class C:\n  async def f(self, a, b, /, c, *, d, e, f): ...",
            "kvlog/a.py:2 f takes 6 parameters, more than 5",
        ),
        (
            "class C:\n" + "".join(f"    def m{n}(self): ...\n" for n in range(13)),
            "kvlog/a.py:1 C has 13 public methods, more than 12",
        ),
        (
            "from kvlog.base import B\nclass C(B):\n"
            + "".join(f"    def m{n}(self): ...\n" for n in range(13)),
            "kvlog/a.py:2 C has 13 public methods, more than 12",
        ),
    ],
)
def test_large_thing_is_found(text: str, complaint: str) -> None:
    """One over each limit is refused."""
    assert sizes(example(kvlog__a=text)) == [complaint]


@pytest.mark.parametrize(
    "text",
    [
        "x = 1\n" * 500,
        "def f():\n" + "    x = 1\n" * 69,
        "class C:\n  def f(self, a, b, /, c, *, d, e): ...",
        "class C:\n"
        + "".join(f"    def m{n}(self): ...\n    def _p{n}(self): ...\n" for n in range(12))
        + "    @property\n    def p(self): ...\n",
        "from vllm.base import Connector\nclass C(Connector):\n"
        + "".join(f"    def m{n}(self): ...\n" for n in range(20)),
    ],
)
def test_thing_at_the_limit_is_not_found(text: str) -> None:
    """Each limit itself is allowed."""
    assert sizes(example(kvlog__a=text)) == []


@pytest.mark.parametrize(
    "path", ["kvlog/utils", "daemon/kafka_helpers", "tests/common/x", "consumers/lag_manager"]
)
def test_vague_file_name_is_found(path: str) -> None:
    """A vague word anywhere in a file's or folder's name is refused."""
    assert file_names(example(**{path.replace("/", "__"): ""})) == [f"{path}.py: name it by the noun in it"]


def test_clear_file_name_is_not_found() -> None:
    """Only whole words count."""
    assert file_names(example(kvlog__utilisation="", kvlog__miscount="")) == []


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("import time", "core may not import time"),
        ("from time import monotonic_ns", "core may not import time"),
        ("import random", "core may not import random"),
        ("import asyncio", "core may not import asyncio"),
        ("import secrets", "core may not import secrets"),
        ("from datetime import datetime", "core may not import datetime"),
        ("from os import environ", "core may not import os"),
        ("def f():\n    import os.path", "core may not import os.path"),
        ("def f():\n    print(1)", "core may not call print"),
        ("open('x')", "core may not call open"),
        ("async def f(): ...", "core may not be asynchronous"),
    ],
)
def test_impurity_in_core_is_found(text: str, complaint: str) -> None:
    """A core takes time and randomness as inputs and leaves I/O to the shell."""
    found = impure(example(kvlog__core__fold=text))
    assert [line.split(" ", 1)[1] for line in found] == [complaint]


def test_impurity_in_other_pure_layers_is_found() -> None:
    """First row and wire are as pure as the cores; buffers are synchronous only."""
    tree = example(
        kvlog__ids="import uuid", kvlog__wire__cut="import os", kvlog__buffers__ring="async def f(): ..."
    )
    assert impure(tree) == [
        "kvlog/ids.py:1 first row may not import uuid",
        "kvlog/wire/cut.py:1 wire may not import os",
        "kvlog/buffers/ring.py:1 buffers may not be asynchronous",
    ]


def test_clock_in_a_shell_is_not_found() -> None:
    """The shells do the I/O."""
    assert impure(example(daemon__service="import time, asyncio\nasync def f(): print(time.time())")) == []


@pytest.mark.parametrize(
    ("path", "text", "name"),
    [
        ("kvlog__log__kafka", "import logging", "logging"),
        ("kvlog__engines__base", "from structlog import get_logger", "structlog"),
        ("daemon__service", "import asyncio\nasyncio.create_task(x)", "asyncio.create_task"),
        ("daemon__service", "from asyncio import gather", "asyncio.gather"),
        ("daemon__service", "from multiprocessing import shared_memory", "multiprocessing.shared_memory"),
        (
            "daemon__service",
            "from multiprocessing.shared_memory import SharedMemory",
            "multiprocessing.shared_memory",
        ),
    ],
)
def test_banned_name_is_found(path: str, text: str, name: str) -> None:
    """A banned name is found as an import and as an attribute."""
    found = banned_names(example(**{path: text}))
    assert [line.split(" ")[1] for line in found] == [name]


def test_logger_of_the_daemon_is_not_found() -> None:
    """The daemon logs, and starts tasks in groups."""
    assert banned_names(example(daemon__service="import structlog\ngroup.create_task(f())")) == []


def test_dead_module_is_found() -> None:
    """A module that only itself and tests import is dead."""
    tree = example(
        kvlog__init="",
        kvlog__dead="import kvlog.dead",
        kvlog__used="",
        kvlog__started="",
        daemon__main="import kvlog.used",
        daemon__service="ARGUMENTS = ['-m', 'kvlog.started']",
        kvlog__engines__vllm="",
        consumers__cli="",
        tests__unit__test_dead="import kvlog.dead",
    )
    assert dead_modules(tree, ["consumers.cli"]) == [
        "kvlog/dead.py is imported by nobody",
        "daemon/service.py is imported by nobody",
    ]


def test_misplaced_file_is_found(tmp_path: Path) -> None:
    """A Python file beside the packages, however deep, is found; hidden folders are not ours."""
    for name in ("kvlog/a.py", "tool.py", "deploy/x/b.py", ".venv/c.py", "README.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert misplaced_files(tmp_path, ["kvlog"]) == ["deploy/x/b.py", "tool.py"]
