"""The rewriter over a real core and pool: what it logs again, when it does not, and what it leaves behind."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from kvlog.core import effects as fx
from kvlog.core.inputs import CloseTurn, LogReplacedRead
from kvlog.ids import Offset, Position
from kvlog.records import Claim, Codec, Delta, Truncate
from tests.unit.daemon.rewriting_bench import ROW, SHARDS, Bench, P, S, encoded, rows

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

TOKENS = tuple(range(100, 230))
"""130 positions of 64 bytes: three blocks of a shard, the last one not full."""
ROWS = len(TOKENS) * ROW * SHARDS


def run(body: Callable[[Bench], Coroutine[None, None, None]], **options: float) -> None:
    """Runs a test on a bench of its own, and looks afterwards that nothing is left pinned."""

    async def on_a_bench() -> None:
        bench = Bench(**options)  # type: ignore[arg-type]
        try:
            async with asyncio.timeout(20):
                await body(bench)
            assert 0 == bench.pool.blocks.ledger.counts.pinned
            bench.pool.blocks.check()
        finally:
            bench.pool.close()

    asyncio.run(on_a_bench())


def skipped(bench: Bench, reason: str) -> float:
    """How often it was skipped for this reason."""
    return bench.figure("kvlog_rewrites_skipped_total", reason=reason)


def test_session_near_its_end_is_logged_again_and_known_from_there_on() -> None:
    """Everything from a new claim on: a reader that begins there has the tokens, the pool has the same rows again."""

    async def body(bench: Bench) -> None:
        first = await bench.turn(TOKENS)
        bench.age(800)
        before = len(bench.log)
        await bench.rewriter.look()
        claim = bench.log[before].record
        assert isinstance(claim, Claim)
        assert (claim.epoch - 1, claim.epoch > first.epoch) == (bench.state.first_needed_offset, True)
        late = bench.read_from(claim.epoch - 1)
        assert late is not None
        assert list(TOKENS) == list(late.tokens) == list(bench.state.tokens)
        for shard in range(SHARDS):
            assert rows(shard, 0, len(TOKENS)) == bench.held(shard)
        assert [claim] == bench.noted, "the session's row moves with its root"
        assert ROWS == bench.figure("kvlog_rewrite_bytes_total")
        await bench.rewriter.look()
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="done"), "its life has begun anew"
        again = await bench.open((*TOKENS, 7))
        assert (len(TOKENS), len(TOKENS)) == (again.usable, again.log_from)

    run(body)


def test_session_with_enough_time_left_is_left_alone() -> None:
    """A quarter of its life is the default."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(740)
        before = len(bench.log)
        await bench.rewriter.look()
        assert before == len(bench.log)

    run(body)


def test_rewriting_that_is_switched_off_rewrites_nothing() -> None:
    """rewrite_when_left = 0."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(5000)
        before = len(bench.log)
        await bench.rewriter.look()
        assert before == len(bench.log)

    run(body, when_left=0)


def test_session_that_was_just_used_waits_until_it_is_urgent() -> None:
    """Its next request is near, and would find a shorter prefix; past half of the time it is rewritten all the same."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        for seconds, expected in ((800, 0), (900, 1)):
            bench.age(seconds)
            bench.turns._use(S)
            bench.rewriter._not_before.clear()
            await bench.rewriter.look()
            assert expected == bench.figure("kvlog_rewrites_total", outcome="done")

    run(body)


def test_session_by_token_ids_alone_is_logged_again_by_them() -> None:
    """There are no rows in the log, so none are needed."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS, rows_to=0)
        bench.age(800)
        await bench.rewriter.look()
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="done")
        late = bench.read_from(bench.state.epoch - 1)
        assert late is not None
        assert list(TOKENS) == list(late.tokens)

    run(body)


def test_session_whose_end_has_no_rows_is_logged_again_as_it_was() -> None:
    """Rows as far as the log has them, token ids for the rest."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS, rows_to=70)
        bench.age(800)
        before = len(bench.log)
        await bench.rewriter.look()
        deltas = [entry.record for entry in bench.log[before:] if isinstance(entry.record, Delta)]
        kinds = {(delta.codec, delta.start < 70) for delta in deltas}
        assert {(Codec.RAW, True), (Codec.IDS, False)} == kinds
        assert rows(1, 0, 70) == bench.held(1)
        late = bench.read_from(bench.state.epoch - 1)
        assert late is not None
        assert list(TOKENS) == list(late.tokens)

    run(body)


def test_session_that_is_cut_below_its_ids_has_rows_again() -> None:
    """What was logged by token ids alone, and was cut, is not remembered as that."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS, rows_to=70)
        other = (*TOKENS[:50], *range(900, 980))
        await bench.turn(other, start=50)
        bench.age(800)
        await bench.rewriter.look()
        assert rows(0, 0, len(other)) == bench.held(0)
        assert ROWS == bench.figure("kvlog_rewrite_bytes_total")

    run(body)


def test_evicted_session_is_skipped_and_said_once() -> None:
    """Nothing is claimed for it: standbys may hold what we do not."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.pool.drop(S)
        before = len(bench.log)
        for _ in range(3):
            bench.rewriter._not_before.clear()
            await bench.rewriter.look()
        assert (before, 1) == (len(bench.log), skipped(bench, "absent"))

    run(body)


@pytest.mark.parametrize(("blocks", "reason"), [(8, "no_room"), (14, "no_room"), (15, "")])
def test_pool_without_room_for_both_copies_skips(blocks: int, reason: str) -> None:
    """Six blocks are held; six more must be free below the mark for evictions, and attaches may pin half of all."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        before = len(bench.log)
        await bench.rewriter.look()
        assert (not reason) == (len(bench.log) > before)
        assert bool(reason) == skipped(bench, "no_room")

    run(body, blocks=blocks)


def test_rotten_row_is_noticed_before_anything_is_cut() -> None:
    """What the pool holds is verified as an attach is: the log keeps what it has."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        view = bench.pool.memory.view
        at = bytes(view).index(rows(1, 120, 121))
        view[at] ^= 1
        before = len(bench.log)
        await bench.rewriter.look()
        assert [Claim] == [type(entry.record) for entry in bench.log[before:]]
        assert (1, len(TOKENS)) == (skipped(bench, "rotten"), bench.state.length)
        assert None is bench.shell.core.primary(S).turn  # type: ignore[union-attr]

    run(body)


def test_rotten_session_is_claimed_again_only_when_it_was_written_since() -> None:
    """Each try is a claim in the log and a pass over all of its rows, and would find the same row."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        view = bench.pool.memory.view
        view[bytes(view).index(rows(1, 120, 121))] ^= 1
        claims = []
        for tokens in (None, None, (*TOKENS, 7)):
            if tokens is not None:
                await bench.turn(tokens, start=len(TOKENS))
            bench.age(800)
            bench.rewriter._not_before.clear()
            await bench.rewriter.look()
            claims.append(sum(isinstance(entry.record, Claim) for entry in bench.log))
        assert [2, 2, 3] == claims

    run(body)


def test_log_whose_clock_is_far_behind_ours_is_not_filled_by_rewriting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was logged a moment ago looks old: it is not logged again, and again, without a pause."""
    monkeypatch.setattr("daemon.rewrite._AGAIN_SECONDS", 0.0)

    async def body(bench: Bench) -> None:
        bench.now_ms -= 900_000
        await bench.turn(TOKENS)
        for _ in range(3):
            await bench.rewriter.look()
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="done")

    run(body)


def test_session_that_nobody_has_used_for_long_may_go() -> None:
    """Else no session would ever leave the log."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.turns._used.clear()
        before = len(bench.log)
        await bench.rewriter.look()
        assert (before, 1) == (len(bench.log), skipped(bench, "unused"))

    run(body)


def test_log_of_few_bytes_is_not_filled_by_rewriting() -> None:
    """A rewrite ends others' lives where bytes are what ends them: half of the log at most is spent on it."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        for expected in (1, 2, 2):
            bench.age(800)
            bench.rewriter._not_before.clear()
            await bench.rewriter.look()
            assert expected == bench.figure("kvlog_rewrites_total", outcome="done")
        assert 1 == skipped(bench, "log_too_small")

    run(body, size_bytes=int(2.5 * ROWS * 2 / 0.75))


def test_log_that_was_replaced_owes_nothing_for_the_one_before() -> None:
    """What was spent of the old log's bytes does not keep sessions from being logged again in the new one."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        for _ in range(2):
            bench.age(800)
            bench.rewriter._not_before.clear()
            await bench.rewriter.look()
        bench.log.clear()
        bench.arrivals.forget(P)
        bench.shell.step(LogReplacedRead(P, Offset(0)))
        await bench.turn(TOKENS)
        bench.age(800)
        bench.rewriter._not_before.clear()
        await bench.rewriter.look()
        assert 3 == bench.figure("kvlog_rewrites_total", outcome="done")

    run(body, size_bytes=int(2.5 * ROWS * 2 / 0.75))


def test_request_in_mid_rewrite_ends_it() -> None:
    """INV-REWRITE: the request is answered at once, with what is there, and the pins are given back."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.publisher.is_calm.clear()
        looking = asyncio.create_task(bench.rewriter.look())
        await bench.publisher.waiting.wait()
        assert bench.pool.blocks.ledger.counts.pinned > 0
        opened = await bench.open((*TOKENS, 7))
        assert (len(TOKENS), len(TOKENS)) == (opened.usable, opened.log_from), "nothing was cut yet"
        bench.publisher.is_calm.set()
        await looking
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="gave_way")
        assert [] == [a for a in bench.answers if isinstance(a, fx.TurnEnded)], "no engine hears of it"
        for shard in range(SHARDS):
            bench.shell.step(encoded(opened, shard, len(TOKENS), (7,)))
        await bench.settled()
        assert [*TOKENS, 7] == list(bench.state.tokens)

    run(body)


def test_request_while_the_log_is_away_gets_the_pins_back() -> None:
    """A rewrite that is over waits for nothing more, though the log takes nothing for as long as it likes."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.publisher.is_calm.clear()
        looking = asyncio.create_task(bench.rewriter.look())
        await bench.publisher.waiting.wait()
        await bench.open((*TOKENS, 7))
        await looking
        assert 0 == bench.pool.blocks.ledger.counts.pinned

    run(body)


def test_newer_claim_in_mid_rewrite_ends_it() -> None:
    """Another node takes the session over."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.publisher.is_calm.clear()
        looking = asyncio.create_task(bench.rewriter.look())
        await bench.publisher.waiting.wait()
        assert bench.pool.blocks.ledger.counts.pinned > 0
        rival = bench.rival_claim()
        await bench.settled()
        bench.publisher.is_calm.set()
        await looking
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="fenced")
        assert (rival, len(TOKENS)) == (bench.state.claim, bench.state.length)

    run(body)


def test_session_in_use_is_not_asked_for() -> None:
    """A turn is in progress."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        opened = await bench.open(TOKENS)
        bench.age(800)
        before = len(bench.log)
        await bench.rewriter.look()
        assert before == len(bench.log)
        bench.shell.step(CloseTurn(opened.turn))

    run(body)


def test_rewrite_that_gets_no_turn_is_counted_by_its_reason() -> None:
    """Another claim stands below the watermark: the session is not ours any more, and is not taken back."""

    async def body(bench: Bench) -> None:
        await bench.turn(TOKENS)
        bench.age(800)
        bench.rival_claim()
        await bench.rewriter.look()
        assert 1 == bench.figure("kvlog_rewrites_total", outcome="fenced")
        assert [Truncate] == [type(e.record) for e in bench.log if isinstance(e.record, Truncate)]
        assert Position(len(TOKENS)) == bench.state.length

    run(body)
