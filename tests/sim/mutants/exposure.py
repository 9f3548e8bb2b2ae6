"""Mutants of what an engine is given: the exposure checks one by one, the buffer's blocks, and the shell's reading."""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlog.core import session
from kvlog.core.inputs import RecordRead
from kvlog.core.session import SessionState, ShardState
from kvlog.ids import Offset, Position
from kvlog.records import Delta
from tests.sim.buffer import Buffer
from tests.sim.faults import Fault
from tests.sim.mutants.mutant import Mutant, together
from tests.sim.mutants.writing import RING_EPOCH
from tests.sim.shell import Shell

if TYPE_CHECKING:
    from kvlog.core.inputs import Input
    from kvlog.ids import Digest
    from kvlog.layout import Identity
    from tests.sim.buffer import Block
    from tests.sim.modellog import Message

_shard_usable = ShardState.usable
_feed = Shell.feed


def _same_lengths(left: array[int], right: array[int], at_most: int) -> int:
    return min(at_most, len(left), len(right))


def _any_context(self: ShardState, tokens: array[int], context: Digest, identity: Identity) -> Position:
    seen = ShardState(self.tokens, [replace(run, context=context) for run in self.runs])
    return _shard_usable(seen, tokens, context, identity)


def _any(field: str) -> Any:
    """Compares identities in all fields but one."""

    def usable(self: ShardState, tokens: array[int], context: Digest, identity: Identity) -> Position:
        value: Any = getattr(identity, field)
        runs = [replace(run, identity=replace(run.identity, **{field: value})) for run in self.runs]
        return _shard_usable(ShardState(self.tokens, runs), tokens, context, identity)

    return usable


def _longest_shard(self: SessionState, tokens: Any, context: Digest, identity: Identity) -> Position:
    if len(self.shards) != identity.shards:
        return Position(0)
    wanted = array("I", tokens)
    return Position(max(shard.usable(wanted, context, identity) for shard in self.shards))


def _any_count(self: SessionState, tokens: Any, context: Digest, identity: Identity) -> Position:
    wanted = array("I", tokens)
    lengths = (shard.usable(wanted, context, identity) for shard in self.shards)
    return Position(min(lengths, default=0))


WRONG = (Fault.MOVED, Fault.CONCURRENT)
ANY_TOKENS = Mutant("tokens not compared", ((session, "_common_prefix", _same_lengths),), WRONG)
ANY_CONTEXT = Mutant("context not compared", ((ShardState, "usable", _any_context),), (*WRONG, Fault.CONTEXT))
ANY_MODEL = Mutant("model not compared", ((ShardState, "usable", _any("model")),), (*WRONG, Fault.WEIGHTS))
ANY_WEIGHTS = Mutant(
    "weights not compared", ((ShardState, "usable", _any("weights")),), (*WRONG, Fault.WEIGHTS)
)
ANY_LAYOUT = Mutant("layout not compared", ((ShardState, "usable", _any("layout")),), (*WRONG, Fault.WEIGHTS))
ANY_SHARDS = Mutant("shards not compared", ((ShardState, "usable", _any("shards")),), (*WRONG, Fault.WEIGHTS))
ANY_COUNT = Mutant(
    "count of shards not compared", ((SessionState, "usable", _any_count),), (*WRONG, Fault.WEIGHTS)
)
ANY_SHARDS_ANY_COUNT = together("shards and their count not compared", ANY_SHARDS, ANY_COUNT)
LONGEST_SHARD = Mutant(
    "longest shard instead of the shortest",
    ((SessionState, "usable", _longest_shard),),
    (*WRONG, Fault.PREEMPTED),
)

# Blocks


def _reused_at_once(self: Buffer, block: Block) -> None:
    self._put_back(block)


BUSY_BLOCKS = (Fault.PREEMPTED, Fault.CONCURRENT, Fault.EVICTED, Fault.MOVED)
FREED_REUSED = Mutant(
    "freed blocks reused while pinned", ((Buffer, "_give_up", _reused_at_once),), BUSY_BLOCKS
)
PINNED_WRITTEN = Mutant(
    "pinned blocks written", ((Buffer, "_is_frozen", lambda *_: False),), (*BUSY_BLOCKS, Fault.CONTEXT)
)

# The shell's reading


def _not_when_full(self: Shell, happened: Input, cause: Message | None = None) -> None:
    """A full buffer stops the fold."""
    full = (
        isinstance(happened, RecordRead) and isinstance(happened.entry.record, Delta) and not self.buffer.free
    )
    if full and self.core is not None and isinstance(happened, RecordRead):
        core = self.core.partitions[happened.partition]
        if core.position == happened.offset == core.applied:
            core._position = core._frontier = Offset(happened.offset + 1)
            return
    _feed(self, happened, cause)


RING_SESSION = Mutant(
    "rows of any session taken from the ring",
    ((Shell, "is_of_session", lambda *_: True),),
    (Fault.DAEMON_CRASH, Fault.CRASH_BETWEEN_EFFECTS),
)
RING_ANYTHING = together("rows of any session and epoch taken from the ring", RING_SESSION, RING_EPOCH)
FULL_NOT_FOLDED = Mutant("a full buffer stops the fold", ((Shell, "feed", _not_when_full),), WRONG)
SAME_LOG = Mutant(
    "the log's identity is not compared",
    ((Shell, "is_another_log", lambda *_: False),),
    (Fault.TAIL_LOST, Fault.MOVED),
)
