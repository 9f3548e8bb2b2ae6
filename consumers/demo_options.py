"""The demo's arguments, checked."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from consumers.demo_error import DemoError
from consumers.exits import ExitCode

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["LEFT_MIN", "DemoOptions", "parse_options"]

TOKENS_DEFAULT = 80
TOKENS_MIN = 16
TOKENS_MAX = 4096
LEFT_MIN = 8
"""Tokens that node B must have left to say."""

_EPILOG = """\
What it starts dies with it. Nothing is left behind but the log, where --log names one: look at it with kvlog show,
kvlog verify and kvlog replay. On Kafka it uses topics of its own (kvlog-demo.*).

Figures of --json: tokens_before_kill are tokens of the answer; tokens_in_log counts the prompt too; tokens_recomputed
are tokens that were known and whose rows node B had to compute. The five parts add up to kill_to_next_token_ms.
reprefill_ms is the same take-over with nothing to attach, and ratio is reprefill_ms / kill_to_next_token_ms.

--engine vllm starts real vLLM servers on the CPU, one after the other (20 to 60 s each), with kvlog's connector and
fence. Their prefix cache is off, so that no row can come from anywhere but the log; what lies in their blocks is
digested, layer by layer, when a turn ends, and compared with a third server that has no daemon.

Exit code: 0 every claim held, 1 one did not, 2 wrong arguments, 3 the log cannot be reached, 130 interrupted.
In bfloat16, equal tokens are reported and not asked for: rows that are computed again may differ by rounding.
"""


EngineName = Literal["transformers", "synthetic", "vllm"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What is to be shown.

    Args:
        log: a URL or a directory; None: a directory that is gone afterwards.
        engine: what computes.
        vllm_python: the interpreter that has vLLM; None: found by itself.
        model: small, random, or a folder; the synthetic engine has none.
        dtype: of weights and cache.
        question: the user's own; None: about the demo's text.
        tokens: of the answer.
        kill_at: the answer's token after which node A is killed; None: in the middle of a sentence.
        as_json: print one object instead of the view.
    """

    log: str | None
    engine: EngineName
    vllm_python: Path | None
    model: str
    dtype: Literal["float32", "bfloat16"]
    question: str | None
    tokens: int
    kill_at: int | None
    as_json: bool

    @property
    def is_exact(self) -> bool:
        """Whether computing again gives the same tokens, so that this may be asked for."""
        return self.engine == "synthetic" or self.dtype == "float32"


def parse_options(arguments: Sequence[str]) -> DemoOptions:
    """Read the command line; argparse ends the process over what it cannot read.

    DemoError: values that do not fit together.
    """
    given = _parser().parse_args(arguments)
    if not TOKENS_MIN <= given.tokens <= TOKENS_MAX:
        raise _wrong(f"--tokens {given.tokens} is not {TOKENS_MIN} to {TOKENS_MAX}.", "Choose one of those.")
    kill_at_max = given.tokens - LEFT_MIN
    if given.kill_at is not None and not 1 <= given.kill_at <= kill_at_max:
        raise _wrong(
            f"--kill-at {given.kill_at}: the answer has {given.tokens} tokens (--tokens), and node B must have"
            f" at least {LEFT_MIN} of them left to say.",
            f"Choose 1 to {kill_at_max}, or raise --tokens.",
        )
    if given.prompt is not None and not given.prompt.strip():
        raise _wrong("--prompt is empty.", "Ask something, or leave it out.")
    if given.engine == "synthetic" and (given.model is not None or given.dtype is not None):
        raise _wrong("The synthetic engine has no model and no dtype.", "Leave --model and --dtype out.")
    if given.vllm_python is not None and given.engine != "vllm":
        raise _wrong(f"--vllm-python is of no use to the {given.engine} engine.", "Say --engine vllm too.")
    return DemoOptions(
        log=given.log,
        engine=cast("EngineName", given.engine),
        vllm_python=given.vllm_python,
        model=given.model or "small",
        dtype=cast("Literal['float32', 'bfloat16']", given.dtype or "float32"),
        question=given.prompt,
        tokens=given.tokens,
        kill_at=given.kill_at,
        as_json=given.json,
    )


def _wrong(sentence: str, fix: str) -> DemoError:
    return DemoError(sentence, fix=fix, code=ExitCode.USAGE)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvlog demo",
        description="An answer that survives kill -9 of its node, on real processes, with every figure measured.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--log", metavar="URL", help="a directory, or kafka://host:port (a directory that is gone afterwards)"
    )
    parser.add_argument("--prompt", metavar="TEXT", help="ask this instead of a question about a short text")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS_DEFAULT, metavar="N", help=f"of the answer ({TOKENS_DEFAULT})"
    )
    parser.add_argument(
        "--kill-at", type=int, metavar="N", help="kill node A after so many tokens (in mid-sentence)"
    )
    parser.add_argument(
        "--engine",
        choices=["transformers", "synthetic", "vllm"],
        default="transformers",
        help="(transformers)",
    )
    parser.add_argument(
        "--vllm-python",
        type=Path,
        metavar="PATH",
        help="Python that has vLLM ($KVLOG_VLLM_PYTHON, else this one if it has)",
    )
    parser.add_argument("--model", metavar="NAME", help="a model's folder, or small, or random (small)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], help="of weights and cache (float32)")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    return parser
