"""Turns of ranks that all have the same rows: one shard, which the first one writes and every one reads.

INV-JOINT; the ranks' links, rings and blocks are real, the log is a list.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from daemon import control
from kvlog.layout import Identity
from kvlog.link import messages as link
from kvlog.records import Delta, Truncate
from tests.unit.daemon.ranks_bench import (
    REPLICATED,
    TOKENS,
    RankLink,
    logged_turn,
    running,
    until,
)
from tests.unit.daemon.rewriting_bench import rows


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
async def test_ranks_that_are_alike_are_one_turn_of_one_shard_and_each_has_its_lease(
    order: tuple[int, int],
) -> None:
    """One claim of one shard; the same blocks for both, which stay until both have copied them."""
    async with running(REPLICATED) as (bench, ranks):
        await logged_turn(bench, ranks, (10, 0), b"1")
        assert (1, 10, rows(0, 0, 10)) == (len(bench.state.shards), bench.length, bench.held(0))
        answers = await bench.opened([ranks[number] for number in order], TOKENS, b"2", apart=0.01)
        opened = dict(zip(order, answers, strict=True))
        assert replace(opened[0], request=opened[1].request) == opened[1]
        assert (10, 10) == (opened[0].log_from, opened[0].attach_length)
        assert [rows(0, 0, 10)] * 2 == [ranks[number].attached(opened[number]) for number in (0, 1)]
        pinned = [bench.pinned]
        bench.control.release(ranks[0].peer, link.Release(opened[0].turn))
        pinned.append(bench.pinned)
        bench.control.release(ranks[1].peer, link.Release(opened[1].turn))
        pinned.append(bench.pinned)
        assert [1, 1, 0] == pinned


async def test_rows_out_of_the_ring_of_a_rank_that_only_reads_are_dropped() -> None:
    """The log is written by one of them, whatever another one does; what it acknowledges is that one's."""
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"1")
        ranks[1].write(opened[1], 0, TOKENS[:9])
        ranks[0].write(opened[0], 0, TOKENS[:4])
        await until(lambda: bool(ranks[0].said(link.Acked)))
        await until(lambda: 9 == bench.figure("kvlog_ring_rows_dropped_total"))
        await bench.settled()
        assert [Truncate, Delta] == [type(entry.record) for entry in bench.log[1:]]
        assert [[4], [4]] == [[one.length for one in rank.said(link.Acked)] for rank in ranks]


@pytest.mark.parametrize("number", [0, 1])
async def test_missing_rank_that_is_alike_leaves_the_other_unlogged_and_claims_nothing(number: int) -> None:
    """Also the one that only reads: it has to load what the other does not compute."""
    async with running(REPLICATED) as (bench, ranks):
        ranks[number].ask(TOKENS, wait_ms=30)
        refused = await ranks[number].answer()
        assert link.UnloggedReason.RANK_MISSING is refused.reason
        assert (f"rank {1 - number}", []) == (refused.detail[: len("rank 0")], bench.log)


@pytest.mark.parametrize("number", [0, 1])
async def test_rank_that_leaves_before_the_answer_leaves_for_all_that_are_alike(number: int) -> None:
    """Nobody knows by then what the others can load."""
    async with running(REPLICATED) as (bench, ranks):
        bench.holds_back = True
        for rank in ranks:
            rank.ask(TOKENS)
        await asyncio.sleep(0.01)
        await ranks[number].die()
        refused = await ranks[1 - number].answer()
        assert link.UnloggedReason.RANK_MISSING is refused.reason
        bench.let_go()
        await bench.settled()
        assert 0 == len(bench.turns)


async def test_rank_that_writes_ends_the_turn_for_all_when_it_dies() -> None:
    """Nobody else has a ring that the rows could come from: both open it anew."""
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].write(opened[0], 0, TOKENS[:6])
        await ranks[0].die()
        await until(lambda: bool(ranks[1].said(link.TurnEnded)))
        assert link.EndedReason.RANK_LOST is ranks[1].said(link.TurnEnded)[0].reason
        back = await bench.rank(0)
        again = await bench.opened([back, ranks[1]], TOKENS, b"g")
        assert [(6, 6)] * 2 == [(one.log_from, one.attach_length) for one in again]


async def test_turn_goes_on_without_a_rank_that_only_reads_and_takes_it_in_again() -> None:
    """Its rows are the writer's: none is lost with it, and the writer is not told. It attaches nothing any more."""
    async with running(REPLICATED) as (bench, ranks):
        await logged_turn(bench, ranks, (5, 0), b"1")
        opened = await bench.opened(ranks, TOKENS, b"g")
        await ranks[1].die()
        bench.control.release(ranks[0].peer, link.Release(opened[0].turn))
        assert 0 == bench.pinned
        ranks[0].write(opened[0], 5, TOKENS[5:9])
        await until(lambda: bench.length == 9)
        back = await bench.rank(1)
        back.ask(TOKENS, b"g")
        again = await back.answer()
        assert (opened[0].turn, opened[0].epoch, 5, 0) == (
            again.turn,
            again.epoch,
            again.log_from,
            again.attach_length,
        )
        ranks[0].write(opened[0], 9, TOKENS[9:12])
        await until(lambda: bench.length == 12)
        assert ([], [12]) == (ranks[0].said(link.TurnEnded), [one.length for one in back.said(link.Acked)])
        back.close_turn(again)
        await asyncio.sleep(0.01)
        assert 1 == len(bench.turns)
        ranks[0].close_turn(opened[0])
        await until(lambda: not len(bench.turns))


@pytest.mark.parametrize("first", ["writer", "reader"])
async def test_turn_whose_reader_is_gone_is_over_with_its_writer(first: str) -> None:
    """Whoever is first to go: the session is free, and nothing stays pinned."""
    async with running(REPLICATED) as (bench, ranks):
        await logged_turn(bench, ranks, (5, 0), b"1")
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].write(opened[0], 5, TOKENS[5:9])
        if first == "reader":
            await ranks[1].die()
            await asyncio.sleep(0.01)
        ranks[0].close_turn(opened[0])
        if first == "writer":
            await until(lambda: bench.length == 9)
            assert 1 == len(bench.turns)
            await ranks[1].die()
        await until(lambda: not len(bench.turns))
        bench.control.release(ranks[0].peer, link.Release(opened[0].turn))
        assert (9, 0) == (bench.length, bench.pinned)


@pytest.mark.parametrize("first", ["close", "ask"])
async def test_reader_whose_answer_came_too_late_costs_the_writer_nothing(
    monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """It closes what it did not want, and asks again, in either order: the turn goes on, without it if need be."""
    monkeypatch.setattr(control, "_RANKS_CLOSE_SECONDS", 0.01)
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        for what in ("close", "ask") if first == "close" else ("ask", "close"):
            if what == "close":
                ranks[1].close_turn(opened[1])
            else:
                ranks[1].ask(TOKENS, b"g")
                assert opened[1].turn == (await ranks[1].answer(2)).turn
        await asyncio.sleep(0.05)
        ranks[0].write(opened[0], 0, TOKENS[:4])
        await until(lambda: bench.length == 4)
        assert [] == ranks[0].said(link.TurnEnded)
        for rank in ranks:
            rank.close_turn(opened[0])
        await until(lambda: not len(bench.turns))


async def test_reader_is_not_taken_into_a_turn_that_ends() -> None:
    """Its writer has gone or has lost it: both meet in the next one."""
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].write(opened[0], 0, TOKENS[:4])
        ranks[0].close_turn(opened[0])
        ranks[1].ask(TOKENS, b"g")
        ranks[0].ask(TOKENS, b"g")
        again = [await rank.answer(2) for rank in ranks]
        assert [(again[0].turn, 4)] * 2 == [(one.turn, one.log_from) for one in again]
        assert again[0].turn > opened[0].turn


async def test_reader_that_never_closes_is_not_waited_for_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its session must not be busy for ever."""
    monkeypatch.setattr(control, "_RANKS_CLOSE_SECONDS", 0.02)
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].close_turn(opened[0])
        await until(lambda: not len(bench.turns))
        assert link.EndedReason.RANK_LOST is ranks[1].said(link.TurnEnded)[0].reason


async def test_other_engines_rank_is_not_taken_into_a_turn_by_its_name() -> None:
    """A model of other weights that says the group's name ends the turn, as a writer's twin does: never mix them."""
    async with running(REPLICATED) as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        bench.identity = Identity(REPLICATED.weights, REPLICATED.model, REPLICATED.layout, 1)
        other = await bench.rank(1)
        other.ask(TOKENS, b"g", wait_ms=30)
        await until(lambda: bool(ranks[0].said(link.TurnEnded)))
        assert link.EndedReason.RANK_LOST is ranks[0].said(link.TurnEnded)[0].reason
        assert link.UnloggedReason.RANK_MISSING is (await other.answer()).reason
        assert opened[0].turn not in [entry.turn for entry in bench.turns._turns.values()]


async def test_fenced_is_told_to_all_ranks_that_are_alike() -> None:
    """Whoever loads could still be about to."""
    async with running(REPLICATED) as (bench, ranks):
        await bench.opened(ranks, TOKENS, b"g")
        bench.rival_claim()
        await until(lambda: all(len(rank.told) == 2 for rank in ranks))
        assert [link.TurnFenced] * 2 == [type(rank.told[1]) for rank in ranks]


async def test_engine_of_one_rank_goes_on_with_what_two_alike_have_logged_and_back() -> None:
    """The identity says nothing of how many compute the rows: they are the same."""
    async with running(REPLICATED) as (bench, ranks):
        await logged_turn(bench, ranks, (8, 0), b"1")
        alone = RankLink(bench, 0)
        alone.hello = replace(alone.hello, rank=link.EngineRank())
        await alone.connect()
        bench.links.append(alone)
        alone.ask(TOKENS, b"")
        opened: Any = await alone.answer()
        assert (8, 8, rows(0, 0, 8)) == (opened.log_from, opened.attach_length, alone.attached(opened))
        alone.write(opened, 8, TOKENS[8:13])
        alone.close_turn(opened)
        await until(lambda: not len(bench.turns))
        again = await bench.opened(ranks, TOKENS, b"2")
        assert [(13, 13)] * 2 == [(one.log_from, one.attach_length) for one in again]
        assert [rows(0, 0, 13)] * 2 == [rank.attached(one) for rank, one in zip(ranks, again, strict=True)]


async def test_engine_of_more_ranks_than_a_session_may_have_is_rejected_with_both_numbers() -> None:
    """It is told at once."""
    async with running(REPLICATED) as (bench, _):
        many = RankLink(bench, 0)
        many.hello = replace(many.hello, rank=link.EngineRank(0, 65))
        answer = await bench.control.hello(many.peer, many.hello)
        assert isinstance(answer, link.Rejected)
        assert (link.RejectReason.IDENTITY, True, True) == (
            answer.reason,
            "65" in answer.hint,
            "64" in answer.hint,
        )
