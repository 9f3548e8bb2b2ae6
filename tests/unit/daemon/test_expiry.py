"""The expirer over a real core: which sessions it ends, and which it lets be."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from daemon.expiry import Expirer
from kvlog.core.session import Standing
from kvlog.records import Claim, End, EndReason
from tests.unit.daemon.rewriting_bench import Bench, P, S

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

TOKENS = (1, 2, 3)
TTL_SECONDS = 100


def run(body: Callable[[Bench, Expirer], Coroutine[None, None, None]], *, ttl: int = TTL_SECONDS) -> None:
    """Runs a test on a bench of its own."""

    async def on_a_bench() -> None:
        bench = Bench()
        try:
            async with asyncio.timeout(20):
                await body(bench, Expirer(bench.parts, ttl))
        finally:
            bench.pool.close()

    asyncio.run(on_a_bench())


def ends(bench: Bench) -> list[EndReason]:
    """Why the log's sessions were ended."""
    return [entry.record.reason for entry in bench.log if isinstance(entry.record, End)]


def test_session_that_nobody_used_for_its_time_is_ended_and_its_bytes_are_free() -> None:
    """Once, for every reader, with the reason."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        await bench.turn(TOKENS)
        assert bench.pool.blocks.ledger.counts.used > 0
        for _ in range(2):
            expirer.look(time.monotonic() + TTL_SECONDS)
            await bench.settled()
        assert [EndReason.TTL] == ends(bench)
        assert Standing.ENDED is bench.state.standing
        assert bench.pool.blocks.ledger.counts.used == 0

    run(body)


def test_session_that_was_used_since_is_let_be() -> None:
    """Its time begins at the end of its last turn, rows or none."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        await bench.turn(TOKENS)
        expirer.look(time.monotonic() + TTL_SECONDS - 1)
        assert [] == ends(bench)

    run(body)


def test_session_with_a_turn_in_progress_is_let_be() -> None:
    """However long the turn lasts."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        await bench.turn(TOKENS)
        await bench.open(TOKENS)
        expirer.look(time.monotonic() + 10 * TTL_SECONDS)
        assert [] == ends(bench)

    run(body)


def test_session_of_another_owner_is_let_be() -> None:
    """A claim only to end what another node may still use would be worse than a session too many."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        await bench.turn(TOKENS)
        bench.rival_claim()
        await bench.settled()
        expirer.look(time.monotonic() + TTL_SECONDS)
        assert [] == ends(bench)

    run(body)


def test_session_ended_by_its_time_begins_anew() -> None:
    """The next request claims it, from position 0."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        first = await bench.turn(TOKENS)
        expirer.look(time.monotonic() + TTL_SECONDS)
        await bench.settled()
        again = await bench.turn(TOKENS)
        assert (0, True) == (again.log_from, again.epoch > first.epoch)
        assert 2 == sum(isinstance(entry.record, Claim) for entry in bench.log)
        assert S in {state.session for state in bench.shell.core.partitions[P].sessions()}

    run(body)


def test_no_time_to_live_means_never() -> None:
    """0 is the default: a session ends by request, or when retention takes it."""

    async def body(bench: Bench, expirer: Expirer) -> None:
        await bench.turn(TOKENS)
        expirer.look(time.monotonic() + 1e9)
        assert [] == ends(bench)

    run(body, ttl=0)
