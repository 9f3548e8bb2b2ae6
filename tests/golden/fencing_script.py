"""The language of the scenario files in tests/golden/fencing: one command, below it what it made the nodes want.

    # a comment
    open A s 1 2 3
    ----
    ask for the watermark of s

    answer A
    ----
    append claim s epoch 1

Commands (A: a node, s: a session, numbers are token ids unless said otherwise):

    node A [from OFFSET | from nothing]       a node that reads the log from there; nothing: no partition yet
    open A s TOKENS… [continues EPOCH] [deadline NS] [weights]    a request; weights: of an engine with newer ones
    rewrite A s                               the node wants a session of its own logged again; numbered as requests are
    withdraw A s REQUEST · close A TURN · end A s · stop A · tick A NS
    rows A s TOKENS… [shard N]                new rows of the turn in progress, of each shard or of one
    answer A | no-answer A                    the oldest question for a watermark is answered, or fails
    land A [COUNT] | lose A                   its appends reach the log, in order; or all that wait failed
    read A [until OFFSET]                     it reads on, over again where it asks for that
    hole A OFFSET | replaced A OFFSET | forget A s
    unreadable OFFSET [s] | readable OFFSET   damage at rest, with or without a key that names the session
    misread A OFFSET [s]                      damage on the way: this once, the node cannot read the record
    corrupt OFFSET | repair OFFSET            the record's chain is damaged at rest, its header is not
    cut-log OFFSET                            the log loses its records from there on
    copy OFFSET                               a late copy of that record lands
    log | state A s | owners s                look

A scenario has two shards a session and the tiny limits. Every node is the real NodeCore.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from kvlog.core.inputs import CloseTurn, HoleRead, LogReplacedRead, Stop, UnreadableRead, WithdrawRequest
from kvlog.ids import Offset, Partition, SessionId, Turn
from tests.golden.fencing_words import effect_line, record_words, state_line
from tests.unit.core.cluster import FAR_AWAY, Cluster, Machine
from tests.unit.core.logbook import IDENTITY, OTHER_WEIGHTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from kvlog.core.effects import Effect

__all__ = ["Step", "parse", "play", "render"]

DIVIDER = "----"


@dataclass(frozen=True, slots=True)
class Step:
    """One command with the comment above it, and the output that is expected."""

    comment: tuple[str, ...]
    command: str
    expected: tuple[str, ...]


def parse(text: str) -> list[Step]:
    """Reads a scenario; a last comment without a command is an error, as is a command without a divider."""
    steps = []
    for paragraph in text.strip().split("\n\n"):
        lines = paragraph.splitlines()
        comment = tuple(line for line in lines if line.startswith("#"))
        command, divider, *expected = lines[len(comment) :]
        if divider != DIVIDER:
            message = f"no {DIVIDER} below {command!r}"
            raise ValueError(message)
        steps.append(Step(comment, command, tuple(expected)))
    return steps


def render(steps: Iterable[Step]) -> str:
    """Writes a scenario."""
    paragraphs = ("\n".join([*step.comment, step.command, DIVIDER, *step.expected]) for step in steps)
    return "\n\n".join(paragraphs) + "\n"


def play(steps: Iterable[Step]) -> list[Step]:
    """Carries the commands out; the same steps with the output that there was."""
    stage = _Stage()
    return [replace(step, expected=tuple(stage.run(step.command)) or ("nothing",)) for step in steps]


@dataclass(slots=True)
class _Stage:
    cluster: Cluster = field(default_factory=Cluster)
    machines: dict[str, Machine] = field(default_factory=dict)

    def run(self, command: str) -> list[str]:
        verb, *words = command.split()
        if verb in _OF_LOG:
            return _OF_LOG[verb](self, words)
        name, *rest = words
        if verb == "node":
            return self._node(name, rest)
        machine = self.machines[name]
        if verb == "state":
            return [state_line(machine.state(rest[0]))]
        return [effect_line(effect) for effect in _OF_NODE[verb](machine, rest)]

    def _node(self, name: str, rest: list[str]) -> list[str]:
        where = rest[-1] if rest else "0"
        first = None if where == "nothing" else int(where)
        self.machines[name] = self.cluster.machine(name, first=first)
        return [f"{name} reads from {'nothing' if first is None else first}"]

    def log(self, _: list[str]) -> list[str]:
        return [f"{at}: {record_words(entry.record)}" for at, entry in enumerate(self.cluster.book.entries)]

    def owners(self, words: list[str]) -> list[str]:
        session = SessionId(words[0])
        found = [(m.name, m.core.primary(session)) for m in self.machines.values()]
        return [f"{name} by epoch {primary.claim.epoch}" for name, primary in found if primary is not None]

    def unreadable(self, words: list[str]) -> list[str]:
        self.cluster.unreadable[Offset(int(words[0]))] = SessionId(words[1]) if words[1:] else None
        return [f"{words[0]} cannot be read"]

    def readable(self, words: list[str]) -> list[str]:
        del self.cluster.unreadable[Offset(int(words[0]))]
        return [f"{words[0]} can be read"]

    def corrupt(self, words: list[str]) -> list[str]:
        entries, at = self.cluster.book.entries, int(words[0])
        entries[at] = entries[at]._replace(chain=entries[at].chain ^ 1)
        return [f"{at} is damaged: {record_words(entries[at].record)}"]

    def repair(self, words: list[str]) -> list[str]:
        self.corrupt(words)
        return [f"{words[0]} is as it was written"]

    def cut_log(self, words: list[str]) -> list[str]:
        del self.cluster.book.entries[int(words[0]) :]
        return [f"the log ends at {self.cluster.book.high_watermark}"]

    def copy(self, words: list[str]) -> list[str]:
        entry = self.cluster.book.entries[int(words[0])]
        return [f"{self.cluster.book.append(entry)}: {record_words(entry.record)}"]


_OF_LOG: dict[str, Callable[[_Stage, list[str]], list[str]]] = {
    "log": _Stage.log,
    "owners": _Stage.owners,
    "unreadable": _Stage.unreadable,
    "readable": _Stage.readable,
    "corrupt": _Stage.corrupt,
    "repair": _Stage.repair,
    "cut-log": _Stage.cut_log,
    "copy": _Stage.copy,
}


def _open(machine: Machine, words: list[str]) -> list[Effect]:
    session, *rest = words
    tokens: list[int] = []
    options = {"continues": 0, "deadline": FAR_AWAY}
    while rest and rest[0].isdigit():
        tokens.append(int(rest.pop(0)))
    identity = OTHER_WEIGHTS if "weights" in rest else IDENTITY
    named = [word for word in rest if word != "weights"]
    options |= {key: int(value) for key, value in zip(named[::2], named[1::2], strict=True)}
    return machine.open(
        *tokens,
        session=session,
        identity=identity,
        continues=options["continues"],
        deadline_ns=options["deadline"],
    )


def _rows(machine: Machine, words: list[str]) -> list[Effect]:
    session, *rest = words
    shard = int(rest[-1]) if "shard" in rest else None
    tokens = [int(word) for word in (rest if shard is None else rest[:-2])]
    return machine.rows(*tokens, session=session, shard=shard)


def _land(machine: Machine, words: list[str]) -> list[Effect]:
    machine.land(int(words[0]) if words else None)
    return []


def _read(machine: Machine, words: list[str]) -> list[Effect]:
    return machine.read(until=int(words[1]) if words else None)


def _forget(machine: Machine, words: list[str]) -> list[Effect]:
    return list(machine.core.partitions[Partition(0)].forget(SessionId(words[0])))


def _misread(machine: Machine, words: list[str]) -> list[Effect]:
    key = SessionId(words[1]) if words[1:] else None
    return machine.step(UnreadableRead(Partition(0), Offset(int(words[0])), key))


_OF_NODE: dict[str, Callable[[Machine, list[str]], list[Effect]]] = {
    "open": _open,
    "rows": _rows,
    "land": _land,
    "read": _read,
    "forget": _forget,
    "answer": lambda m, _: m.answer(),
    "no-answer": lambda m, _: m.no_answer(),
    "lose": lambda m, _: m.lose(),
    "end": lambda m, w: m.end(session=w[0]),
    "rewrite": lambda m, w: m.rewrite(session=w[0]),
    "close": lambda m, w: m.step(CloseTurn(Turn(int(w[0])))),
    "withdraw": lambda m, w: m.step(WithdrawRequest(SessionId(w[0]), int(w[1]))),
    "stop": lambda m, _: m.step(Stop()),
    "tick": lambda m, w: list(m.core.tick(int(w[0]))),
    "hole": lambda m, w: m.step(HoleRead(Partition(0), Offset(int(w[0])))),
    "replaced": lambda m, w: m.step(LogReplacedRead(Partition(0), Offset(int(w[0])))),
    "misread": _misread,
}
