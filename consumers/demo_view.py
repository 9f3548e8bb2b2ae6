"""How the demo looks while it runs: what is started, what is asked, the answer as it comes.

Colours say nothing that words do not say too: it can be read without them, and without a terminal.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.text import Text

from consumers.demo_answer_box import AnswerBox

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from consumers.demo_nodes import Node
    from consumers.demo_prompt import Prompt

__all__ = ["DemoView"]

_STYLES = {"A": "cyan", "B": "green"}


class DemoView:
    """Shows a demo.

    Args:
        console: where.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._ascii = console.options.ascii_only
        self._box: AnswerBox | None = None

    def opening(self) -> None:
        """What is going to be shown."""
        self._line()
        self._line("kvlog demo: a node is killed in the middle of an answer; the answer goes on", "bold")
        self._line()

    def made_of(self, *, model: str, dtype: str, log: str, warning: str) -> None:
        """On what. `warning`: what the reader must know of the model; empty: nothing."""
        self._facts([("model", f"{model}, {dtype}"), ("log", log)])
        if warning:
            self._line(f"Mind: {warning}", "yellow")

    def progress(self, text: str) -> None:
        """What takes time within `working`."""
        self._line(text, "dim")

    def engines(self, text: str) -> None:
        """What the engines are, if they are not ours."""
        self._facts([("engines", text)])

    def node(self, node: Node, *, word: str = "engine", seconds: float | None = None) -> None:
        """Which processes there are. `seconds`: what their start took, if it is worth telling."""
        after = "" if seconds is None else f", ready after {seconds:.0f} s"
        pids = f"kvlogd (pid {node.daemon.pid}) and {word} (pid {node.engine.program.pid})"
        self._facts([(f"node {node.name.upper()}", pids + after)])

    def question(self, prompt: Prompt) -> None:
        """What is asked, now that all nodes are ready."""
        self._facts([("nonce", f"{prompt.nonce}, made now: no row can have been prepared")])
        self._line()
        self._console.print(Text(f"{self._sign('▸', '>')} {prompt.question}", style="bold"))
        self._line()

    def begin_answer(self) -> None:
        """Node A begins to speak."""
        self._box = AnswerBox(self._console, "answer")

    def piece(self, speaker: str, text: str) -> None:
        """A node says something."""
        if self._box is not None:
            self._box.speak(speaker, _STYLES[speaker])
            self._box.push(text)

    def killed(self, tokens: int, pids: tuple[int, int]) -> None:
        """Node A is no more."""
        if self._box is not None:
            sign = self._sign("✗", "x")
            pieces = f"kvlogd {pids[0]} and engine {pids[1]}"
            self._box.cut(f"{sign} node A: kill -9, {pieces}, {tokens} tokens", "bold red")

    def cancel_answer(self) -> None:
        """The answer was over too soon."""
        self.end_answer()
        self._line("That answer was over before node A could be killed.", "yellow")

    def end_answer(self) -> None:
        """The answer is complete."""
        if self._box is not None:
            self._box.close()
            self._box = None

    @contextmanager
    def working(self, text: str, *, is_long: bool = False) -> Iterator[None]:
        """Say what takes time: as a spinner on a terminal, else as a line. `is_long`: with the seconds so far."""
        if not self._console.is_terminal:
            self._line(f"{text} ...")
            yield
            return
        spinner = "line" if self._ascii else "dots"
        if not is_long:
            with self._console.status(f"{text} ...", spinner=spinner):
                yield
            return
        columns = (SpinnerColumn(spinner), TextColumn("{task.description} ..."), TimeElapsedColumn())
        with Progress(*columns, console=self._console, transient=True) as progress:
            progress.add_task(text)
            yield

    def _facts(self, pairs: Sequence[tuple[str, str]]) -> None:
        for name, value in pairs:
            self._console.print(Text(f"{name:<8}", style="dim"), Text(value), soft_wrap=True)

    def _line(self, text: str = "", style: str = "") -> None:
        self._console.print(Text(text, style=style))

    def _sign(self, sign: str, plain: str) -> str:
        return plain if self._ascii else sign
