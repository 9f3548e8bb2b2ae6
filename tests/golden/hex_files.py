"""Golden files of bytes: hex, 32 bytes a line, so that a difference is readable.

A file of a released format is never changed: it stands for messages that lie in somebody's log. So nothing here
overwrites one. `KVLOG_REWRITE=1 pytest tests/golden` writes the files that are missing; to replace one that has not
been released, delete it first, and review the diff. In CI (the variable CI is set) nothing is ever written.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["GoldenMismatchError", "check_golden", "may_write", "read_golden"]

LINE_BYTES = 32


class GoldenMismatchError(AssertionError):
    """The bytes are not the golden file's, or there is no such file."""


def read_golden(path: Path) -> bytes:
    """Reads a golden file's bytes."""
    return bytes.fromhex(path.read_text(encoding="ascii"))


def may_write(environment: Mapping[str, str] = os.environ) -> bool:
    """Says whether missing files are to be written: asked for, and not in CI."""
    return environment.get("KVLOG_REWRITE") == "1" and not environment.get("CI")


def check_golden(path: Path, actual: bytes, *, write: bool) -> None:
    """Compares bytes with their golden file, and writes the file if it is missing and `write` is set."""
    if path.exists():
        expected = read_golden(path)
        if expected != actual:
            said = f"{path.name} holds other bytes, and a golden is never overwritten"
            message = f"{said}:\n{_lines(expected)}\nnow:\n{_lines(actual)}"
            raise GoldenMismatchError(message)
        return
    if not write:
        message = f"{path.name} is missing; KVLOG_REWRITE=1 writes it (not in CI)"
        raise GoldenMismatchError(message)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_lines(actual) + "\n", encoding="ascii")


def _lines(data: bytes) -> str:
    return "\n".join(data[at : at + LINE_BYTES].hex() for at in range(0, len(data), LINE_BYTES))
