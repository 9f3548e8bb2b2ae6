"""What an engine is told while the last turn of a session still lies in its ring."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from daemon.control import ControlOptions, EngineControl
from daemon.turns import OpenTurnEntry, Rank, TurnRegistry
from kvlog.buffers.ring import session_hash
from kvlog.checksums import digest
from kvlog.core import effects as fx
from kvlog.ids import Epoch, NodeId, SessionId, Turn
from kvlog.layout import DType, Identity, Layout
from kvlog.limits import DEFAULT
from kvlog.link import messages as link
from kvlog.modes import FULL

S = SessionId("s")
LAYOUT = Layout(1, 2, 1, 4, DType.FLOAT32)


def control(turns: TurnRegistry, stepped: list[Any], *, overloaded: int = 0) -> EngineControl:
    """A control whose core only notes its inputs, and refuses turns: as often as is said for its load, then as busy."""
    handlers: dict[Any, Any] = {}

    def step(what: Any) -> None:
        stepped.append(what)
        reason = fx.UnloggedReason.OVERLOADED if len(stepped) <= overloaded else fx.UnloggedReason.BUSY
        handlers[fx.TurnUnlogged](fx.TurnUnlogged(what.request, S, reason, None))

    shell = SimpleNamespace(
        handle=handlers.__setitem__, step=step, core=SimpleNamespace(state=lambda _: None)
    )
    counted = SimpleNamespace(labels=lambda _: SimpleNamespace(inc=lambda: None))
    telemetry = SimpleNamespace(say=lambda *_, **__: None, metrics=SimpleNamespace(turns_unlogged=counted))
    parts: Any = SimpleNamespace(turns=turns, shell=shell, telemetry=telemetry, limits=DEFAULT)
    pool: Any = SimpleNamespace(memory=SimpleNamespace(reader_fd=lambda: -1))
    neighbours: Any = None
    options = ControlOptions(
        node=NodeId("n"), incarnation=bytes(16), ring_bytes=0, claim_wait_ms_max=1000, mode=FULL
    )
    return EngineControl(parts, pool, neighbours, options)


def closing_entry(peer: Any) -> OpenTurnEntry:
    """A turn that its engine has closed; 100 bytes of its ring are still to be read."""
    entry = OpenTurnEntry((Rank(peer),), S, Turn(1), Epoch(1), FULL, LAYOUT, session_hash(S))
    entry.ranks[0].closing_at = 100
    return entry


def one_process() -> Any:  # as little of a Peer as is asked for
    """An engine of one process."""
    identity = Identity(digest(b"m"), digest(b"w"), LAYOUT, 1)
    return SimpleNamespace(hello=link.Hello(link.PROTOCOL, "test", 1, identity, link.EngineRank()))


def ask(wait_ms: int) -> link.OpenTurn:
    """A next turn."""
    return link.OpenTurn(
        link.RequestNumber(7), S, b"", link.DIGEST_NONE, Epoch(0), None, wait_ms, take_over=False
    )


async def test_open_turn_behind_a_closing_one_is_asked_again_not_refused_for_good() -> None:
    """Rows that need longer than the request may wait are no other request: the answer passes."""
    stepped: list[Any] = []
    turns, peer = TurnRegistry(), one_process()
    turns.add(closing_entry(peer))
    answer = await control(turns, stepped).open_turn(peer, ask(20))
    assert isinstance(answer, link.TurnUnlogged)
    assert (link.UnloggedReason.CLAIM_TIMEOUT, True, []) == (answer.reason, answer.reason.passes, stepped)


async def test_open_turn_behind_a_closing_one_goes_on_when_it_is_closed() -> None:
    """It waits for the rows, and then the core decides."""
    stepped: list[Any] = []
    turns, peer = TurnRegistry(), one_process()
    turns.add(closing_entry(peer))
    asyncio.get_running_loop().call_later(0.01, turns.pop, Turn(1))
    await control(turns, stepped).open_turn(peer, ask(1000))
    assert 1 == len(stepped)


async def test_open_turn_among_too_many_claims_waits_for_a_place_within_its_time() -> None:
    """A node that takes over another one's sessions is asked for all of them at once."""
    stepped: list[Any] = []
    answer = await control(TurnRegistry(), stepped, overloaded=2).open_turn(one_process(), ask(1000))
    assert isinstance(answer, link.TurnUnlogged)
    assert (link.UnloggedReason.BUSY, 3) == (answer.reason, len(stepped))
    assert 3 == len({question.request for question in stepped}), "each is a question of its own"


async def test_open_turn_that_finds_no_place_in_its_time_is_asked_again_later() -> None:
    """Its request is computed meanwhile; the answer passes."""
    stepped: list[Any] = []
    answer = await control(TurnRegistry(), stepped, overloaded=1000).open_turn(one_process(), ask(120))
    assert isinstance(answer, link.TurnUnlogged)
    assert (link.UnloggedReason.CLAIM_TIMEOUT, True) == (answer.reason, answer.reason.passes)
    assert 1 < len(stepped) < 10


async def test_open_turn_that_is_given_up_asks_for_no_place_any_more() -> None:
    """Its engine is gone."""
    stepped: list[Any] = []
    opening = asyncio.create_task(
        control(TurnRegistry(), stepped, overloaded=1000).open_turn(one_process(), ask(1000))
    )
    await asyncio.sleep(0.01)
    opening.cancel()
    await asyncio.wait([opening])
    asked = len(stepped)
    await asyncio.sleep(0.12)
    assert asked == len(stepped)
