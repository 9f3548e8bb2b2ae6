"""What the rewriter needs of the parts around it: who sees effects first, last uses, what is not evicted."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, cast

from daemon import turns
from daemon.eviction import Evictor
from daemon.node import NodeShell
from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
from kvlog.buffers.blocks import Key
from kvlog.buffers.eviction import EvictionMarks
from kvlog.buffers.pool import PoolOptions, open_pool
from kvlog.core.effects import TurnUnlogged
from kvlog.core.inputs import OpenTurn, Stop
from kvlog.core.node import Myself, NodeCore
from kvlog.ids import NO_EPOCH, Epoch, NodeId, Partition, Position, SessionId, Shard, Turn, Writer
from kvlog.limits import DEFAULT
from kvlog.modes import FULL
from kvlog.wire.header import header_bytes
from tests.unit.daemon.rewriting_bench import CONTEXT, IDENTITY, LAYOUT

if TYPE_CHECKING:
    import pytest

    from kvlog.link.server import Peer

S = SessionId("s")


def shell() -> NodeShell:
    """A node that follows nothing and stops, so that it refuses every request."""
    made = NodeShell(
        NodeCore(Myself(NodeId("a"), Writer(b"a" * 16), lambda _: Partition(0), header_bytes), DEFAULT)
    )
    made.step(Stop())
    return made


def ask(to: NodeShell, request: int) -> None:
    """A request that is refused."""
    to.step(OpenTurn(request, S, (1,), CONTEXT, IDENTITY, NO_EPOCH, 1 << 62))


def test_diverted_effect_goes_to_its_handler_only_if_it_is_not_taken() -> None:
    """Who sees an effect first says whether it was his."""
    node, handled, seen = shell(), list[int](), list[int]()
    node.handle(TurnUnlogged, lambda effect: handled.append(effect.request))

    def take_negative(effect: TurnUnlogged) -> bool:
        seen.append(effect.request)
        return effect.request < 0

    node.divert(TurnUnlogged, take_negative)
    ask(node, 5)
    ask(node, -1)
    assert ([5, -1], [5]) == (seen, handled)


def entry(number: int, session: str) -> OpenTurnEntry:
    """A turn in progress."""
    peer = cast("Peer", object())
    return OpenTurnEntry((Rank(peer),), SessionId(session), Turn(number), Epoch(1), FULL, LAYOUT, number)


def test_turns_say_when_a_session_was_last_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The beginning and the end of a turn are uses; of only so many sessions it is known."""
    monkeypatch.setattr(turns, "_USED_MAX", 2)

    async def body() -> None:
        registry = TurnRegistry()
        assert float("-inf") == registry.used_at(S)
        for number, session in enumerate(("s", "t", "u"), 1):
            registry.add(entry(number, session))
        assert float("-inf") == registry.used_at(S)
        begun = registry.used_at(SessionId("t"))
        registry.pop(Turn(2))
        assert registry.used_at(SessionId("t")) >= begun > 0

    asyncio.run(body())


def test_session_that_is_being_rewritten_is_not_evicted() -> None:
    """Its new rows belong to no turn of an engine, and are in use all the same."""
    pool = open_pool(PoolOptions(bytes_total=4 * 4096, block_bytes=4096))
    try:
        evictor = Evictor(shell(), pool, TurnRegistry(), EvictionMarks(high_percent=50, low_percent=0))
        pool.apply(Key(S, Shard(0)), Position(0), memoryview(bytes(3 * 4096)), 4096)
        evictor.rewritten = S
        assert (0, -1) == (evictor.evict(), evictor.room)
        evictor.rewritten = None
        assert (1, 2) == (evictor.evict(), evictor.room)
    finally:
        pool.close()
