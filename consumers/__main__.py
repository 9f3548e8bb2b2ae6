"""kvlog: tools that look at the replicated log. `kvlog VERB --help` says more.

Exit codes of all verbs: 0 done and whole, 1 broken or corrupt, 2 wrong arguments or settings, 3 the log cannot be
reached or is not there, 4 the session is unknown or truncated, 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import os
import sys
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from consumers import lag, replay, show, verify
from consumers.access import add_log_arguments
from consumers.exits import exit_code_of
from consumers.render import console, error_text
from consumers.render import show as show_parts
from kvlog.errors import KvlogError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from consumers.answers import Answer

__all__ = ["main"]

_INTERRUPTED = 130


class _Verb(Protocol):
    HELP: str

    @staticmethod
    def add_arguments(parser: argparse.ArgumentParser) -> None: ...

    @staticmethod
    async def run(arguments: argparse.Namespace) -> Answer: ...


_VERBS: Mapping[str, _Verb] = MappingProxyType(
    {"lag": lag, "show": show, "replay": replay, "verify": verify}  # type: ignore[dict-item]
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["demo"]:
        # Its arguments are its own, and what it needs is loaded only when it is wanted.
        return int(importlib.import_module("consumers.demo").main(given[1:]))
    options = _parser().parse_args(given)
    try:
        return _run(options)
    except KeyboardInterrupt:
        return _INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlog", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, verb in _VERBS.items():
        sub = verbs.add_parser(name, help=verb.HELP, description=f"{verb.HELP[0].upper()}{verb.HELP[1:]}.")
        verb.add_arguments(sub)
        sub.add_argument("--json", action="store_true", help="one JSON object on standard output")
        add_log_arguments(sub)
    verbs.add_parser("demo", help="an answer that survives kill -9 of its node")
    return parser


def _run(options: argparse.Namespace) -> int:
    try:
        answer = asyncio.run(_VERBS[options.verb].run(options))
    except KvlogError as error:
        return _fail(error, as_json=options.json)
    try:
        if options.json:
            print(json.dumps({**answer.figures, "exit_code": int(answer.code)}))
        else:
            show_parts(console(), answer.shown)
        sys.stdout.flush()
    except BrokenPipeError:
        # `kvlog show s | head`: nobody reads on, and the interpreter must not try to flush at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(answer.code)


def _fail(error: KvlogError, *, as_json: bool) -> int:
    code = int(exit_code_of(error))
    if as_json:
        said = {name: str(value) for name, value in error.fields.items()}
        print(
            json.dumps(
                {"error": type(error).__name__, "fields": said, "hint": error.hint, "exit_code": code}
            ),
            flush=True,
        )
    else:
        console(stderr=True).print(error_text(error))
    return code


if __name__ == "__main__":
    sys.exit(main())
