"""Two nodes with a vLLM each over one local log, and requests to them; whoever was killed is started anew on demand.

A: blocks of 128, prefill in chunks of 64, loads within a step. B: blocks of 32, and so few that several long requests
do not fit; loads beside the steps. C, when it is asked for: drafts from the prompt, and the prefills of two requests in
one step. D and E, when they are asked for: a model with latent attention (MLA); vLLM's CPU kernel for it has blocks of
16 and neither chunks nor a prefix cache. P and Q: two ranks, a core each. M and N: both.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import httpx

from consumers.plain_http import NO_AUTHORITIES
from tests.model.deepseek import random_latent_folder
from tests.model.llama import random_folder
from tests.nodes import Answer, Node, ask, daemon_config, logged_length, until
from tests.processes import die_with_parent
from tests.vllm.forked import ForkedServers
from tests.vllm.servers import ROOT, LoggedSession, VllmServer, logged_session, vllm_python

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

__all__ = ["DRAFTS", "LOST_SECONDS", "TAKE_OVER", "Fleet", "Row", "VllmNode", "prompt_of", "stock_client"]

LOST_SECONDS: Final = 1.0
"""What a whole node's death may lose, beside nothing that was acknowledged: what was in the ring, or on its way to the
log. That is a time, not a number of rows: how long the daemon takes. It shares two cores with two engines."""

TAKE_OVER: Final = {"kvlog": {"take_over": True}}

DRAFTS: Final = 4
"""A step at node C."""

_NGRAM: Final = {
    "method": "ngram",
    "num_speculative_tokens": DRAFTS,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
_LATENT: Final = ("--attention-backend", "CPU_MLA")
"""By name: on a processor with AMX vLLM takes another one, which starts in 16 bits only."""
_FENCE: Final = "kvlog.engines.vllm_fence.FenceMiddleware"
_OPTIONS: Final = {
    "a": ("--max-num-batched-tokens", "64", "--middleware", _FENCE),
    "b": ("--block-size", "32", "--num-gpu-blocks-override", "48", "--max-model-len", "1024"),
    "c": (
        *("--speculative-config", json.dumps(_NGRAM), "--middleware", _FENCE),
        *("--max-num-batched-tokens", "64", "--long-prefill-token-threshold", "32"),
    ),
    "d": _LATENT,
    "e": _LATENT,
    "p": ("--tensor-parallel-size", "2", "--max-num-batched-tokens", "64"),
    "q": ("--tensor-parallel-size", "2", "--block-size", "32"),
    "m": ("--tensor-parallel-size", "2", *_LATENT),
    "n": ("--tensor-parallel-size", "2", *_LATENT),
}
_EXTRA: Final[dict[str, dict[str, object]]] = {
    "a": {"load_step_bytes": 8 << 20},
    "d": {"load_step_bytes": 8 << 20, "wait_seconds": 10},
    "e": {"wait_seconds": 10},
    "p": {"load_step_bytes": 8 << 20, "wait_seconds": 10},
    "q": {"wait_seconds": 10},
    "m": {"wait_seconds": 10},
    "n": {"load_step_bytes": 8 << 20, "wait_seconds": 10},
}
_CORES: Final = dict.fromkeys("pqmn", "0|1")

_TOKENS_MAX: Final = {"b": 1024}

_WARMING_MAX: Final = 10
"""Requests to a server that was started, until one is logged."""

_TOGETHER: Final = {"a": "ab", "b": "ab", "d": "de", "e": "de"}
"""Which nodes are started side by side; the others alone."""

_MODELS: Final = dict.fromkeys("demn", random_latent_folder)


def prompt_of(test: str) -> tuple[int, ...]:
    """Gives 200 tokens of a test's own: what another test left in a prefix cache is of no use to it."""
    return tuple((ord(test[position % len(test)]) + position * 37) % 250 for position in range(200))


class Pace:
    """How fast an answer comes."""

    def __init__(self) -> None:
        self._began = self._ended = 0.0
        self._tokens = 0

    def shown(self, tokens: int) -> None:
        """So many have come by now."""
        self._ended = time.monotonic()
        self._began = self._began or self._ended
        self._tokens = tokens

    def seconds(self, tokens: int) -> float:
        """How long so many take."""
        return tokens * (self._ended - self._began) / max(1, self._tokens - 1)


class VllmNode:
    """A daemon and a vLLM server."""

    def __init__(self, folder: Path, name: str, log_url: str) -> None:
        self.daemon = Node(folder, name, daemon_config(folder, name, log_url, pool={"bytes": 256 << 20}))
        self.server = VllmServer(
            folder, name, _MODELS.get(name, random_folder)(), cores=_CORES.get(name, "0")
        )
        self.name = name
        self.acked_at_kill: dict[str, int] = {}
        self.pace = Pace()
        self._socket = folder / f"{name}.sock"

    def launch(self) -> None:
        """Start what does not run; the server is not there yet."""
        daemon = self.daemon.daemon
        if daemon is None or daemon.code is not None:
            self.daemon.start_daemon()
            self.daemon.wait_log()
        if not self.server.is_running:
            self.server.launch(self._socket, *_OPTIONS[self.name], **_EXTRA.get(self.name, {}))

    def kill(self) -> None:
        """The whole node dies at once: the daemon has no time to save what the server left in the ring."""
        self.daemon.signal(signal.SIGKILL)
        self.server.kill()
        self.daemon.kill()
        self.acked_at_kill = self.server.all_acked()  # by steps that the client has not seen, too

    def load_failures(self) -> float:
        """Loads whose blocks were given back to be computed, as the server's metrics say."""
        return self.metric("vllm:kvlog_load_failures_blocks_total")

    def metric(self, name: str) -> float:
        """A metric of the server, over all its labels."""
        text = httpx.get(f"{self.server.url}/metrics", verify=NO_AUTHORITIES, timeout=10).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"{name}{{"))

    def stream(self, session: str, tokens: Sequence[int], count: int, **body: object) -> Any:
        """Stream a greedy answer."""
        return ask(
            self.server.url,
            model="m",
            prompt=list(tokens),
            max_tokens=count,
            temperature=0,
            ignore_eos=True,
            session_id=session,
            **body,  # type: ignore[arg-type]
        )

    def answer(self, session: str, tokens: Sequence[int], count: int, **body: object) -> list[int]:
        """A whole answer's tokens."""
        answers: list[Answer] = list(self.stream(session, tokens, count, **body))
        assert answers[-1].error is None, answers[-1].error
        assert len(answers[-1].tokens) == count
        return answers[-1].tokens

    def answer_until(
        self, session: str, tokens: Sequence[int], many: int, do: Callable[[], None], **body: object
    ) -> list[int]:
        """Stream until so many tokens have come, do something, and give what had come by then."""
        most = _TOKENS_MAX.get(self.name, 4096) - len(tokens)
        pace = Pace()
        for answer in self.stream(session, tokens, most, **body):
            pace.shown(len(answer.tokens))
            if len(answer.tokens) >= many:
                shown = list(answer.tokens)
                do()
                self.pace = pace
                return shown
        raise AssertionError(f"the answer ended before {many} tokens: {answer.error}")


@dataclass(frozen=True)
class Row:
    """A line of the scenario table. `seconds`: how long the killed node took for what is computed again."""

    scenario: str
    known: int
    acked: int
    loaded: int
    seconds: float
    kv_equal: bool
    tokens_equal: bool

    def __str__(self) -> str:
        """As it is printed."""
        counts = f"{self.known:6} {self.acked:13} {self.loaded:7} {self.known - self.loaded:9}"
        return (
            f"{self.scenario:24} {counts} {self.seconds:8.3f} {self.kv_equal!s:>9} {self.tokens_equal!s:>13}"
        )

    @property
    def is_right(self) -> bool:
        """What had been acknowledged is loaded, the rest is not far, and all of it is what it must be."""
        kept = min(self.acked, self.known - 1) <= self.loaded < self.known
        return kept and self.seconds <= LOST_SECONDS and self.kv_equal and self.tokens_equal


def stock_client(
    node: VllmNode, session: str, tokens: Sequence[int], count: int, *, take_over: bool = False
) -> Iterator[int]:
    """Stream an answer with the `openai` package, which is where vLLM is; ends when the stream does, or breaks."""
    given = [node.server.url, session, "yes" if take_over else "no", json.dumps(list(tokens)), str(count)]
    with subprocess.Popen(
        [str(vllm_python()), "-m", "tests.vllm.openai_client", *given],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        preexec_fn=die_with_parent,
    ) as client:
        assert client.stdout is not None
        yield from map(int, client.stdout)


class Fleet:
    """Nodes A and B, and others when asked for. `table`: what each kill cost, and `notes`: printed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log_url = f"file://{folder}/log"
        self._nodes = {name: VllmNode(folder, name, self.log_url) for name in _OPTIONS}
        self.table: list[Row] = []
        self.notes: list[str] = []
        self._answers: dict[str, list[int]] = {}
        self._reset: set[str] = set()
        self._warm: dict[str, int] = {}
        self._forks: ForkedServers | None = None
        if os.environ.get("KVLOG_VLLM_FORKS"):
            self.fork_servers()

    @property
    def a(self) -> VllmNode:
        """Node A, serving."""
        return self.serving("a")

    @property
    def b(self) -> VllmNode:
        """Node B, serving."""
        return self.serving("b")

    def node(self, name: str) -> VllmNode:
        """A node as it is, dead or alive."""
        return self._nodes[name]

    def undisturbed(
        self, prompt: Sequence[int], count: int, on: str = "a"
    ) -> tuple[list[int], LoggedSession]:
        """What an undisturbed run answers, alone on A, and what the log holds of it: what its blocks held."""
        session = f"undisturbed-{on}-{hash(tuple(prompt))}-{count}"
        if session not in self._answers:
            self._answers[session] = self.serving(on).answer(session, prompt, count)
            turn = self.node(on).server.last_turn(session)
            assert turn["logged"], f"{on} served {session} unlogged: see its daemon's turn_unlogged"
            self.wait_rows(session, turn["length"])
            assert turn["digests"] == self.logged(session).digests(turn["length"])
        return self._answers[session], self.logged(session)

    def fork_servers(self) -> None:
        """From now on servers are forks of one process that has imported vLLM: for tests that start many.

        KVLOG_VLLM_FORKS does so for all, for whoever works on a test.
        """
        self._forks = self._forks or ForkedServers(vllm_python(), ROOT, self.folder)
        for node in self._nodes.values():
            node.server.forks = self._forks

    def wait_rows(self, session: str, rows: int) -> None:
        """Wait until the daemon has brought so many rows of a session from the ring to the log."""
        log = self.folder / "log"
        until(
            lambda: logged_length(log, session) >= rows,
            seconds=20,
            what=f"{rows} rows of {session} in the log",
        )

    def logged(self, session: str) -> LoggedSession:
        """A session as the log has it."""
        return logged_session(self.log_url, session, self.folder)

    def at_once(self, *calls: Callable[[], object]) -> None:
        """Run all of them together, each on a thread."""
        failures: list[BaseException] = []

        def run(call: Callable[[], object]) -> None:
            try:
                call()
            except BaseException as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=run, args=(call,)) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]

    def close(self) -> None:
        """End everything, and note what the connector's calls have cost."""
        for name, node in self._nodes.items():
            self._note_calls(name, node)
            node.server.kill()
            node.daemon.close()
        if self._forks is not None:
            self._forks.close()

    def _note_calls(self, name: str, node: VllmNode) -> None:
        turn = node.server.newest_turn()
        if turn is None:
            return
        counts = turn["replicator"]
        mean = 1e6 * counts["hook_seconds"] / max(1, counts["steps"])
        longest = ", ".join(f"{call} {ms:.2f}" for call, ms in turn["longest_ms"].items() if ms)
        self.notes.append(
            f"node {name}: hook {mean:.0f} us a step (mean of {counts['steps']}); longest, ms: {longest}"
        )

    def serving(self, name: str, *, to_reset: bool = False) -> VllmNode:
        """A node by its name, serving; whose cache was reset fits no other one, and is started anew for other tests."""
        if name in self._reset and not to_reset:
            self._nodes[name].server.kill()
        (self._reset.add if to_reset else self._reset.discard)(name)
        for each in _TOGETHER.get(name, name):  # both at once: they start side by side
            self._nodes[each].launch()
        node = self._nodes[name]
        node.server.wait_ready()
        if self._warm.get(name) != node.server.launches:
            self._warm_up(node)
            self._warm[name] = node.server.launches
        return node

    def _warm_up(self, node: VllmNode) -> None:
        """Ask until an answer is logged: a server takes requests before its link is up, and serves them unlogged."""
        for number in range(_WARMING_MAX):
            session = f"warm-{node.name}-{node.server.launches}-{number}"
            node.answer(session, prompt_of(session)[:20], 2)
            with suppress(AssertionError):  # without a link nobody may ever tell of the turn
                until(lambda: node.server.turns(session) != [], seconds=2)  # noqa: B023
            if any(turn["logged"] for turn in node.server.turns(session)):
                return
        raise AssertionError(f"{node.name} answered {_WARMING_MAX} requests, and logged none of them")
