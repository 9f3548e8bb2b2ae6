"""Turns that several links of one engine join: opened for all ranks or for none, closed at what all of them have.

INV-JOINT; the ranks' links, rings and blocks are real, the log is a list.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from daemon import control
from kvlog.link import messages as link
from kvlog.records import Delta, Truncate
from tests.unit.daemon.ranks_bench import TOKENS, RankLink, RanksBench, logged_turn, running, until
from tests.unit.daemon.rewriting_bench import CONTEXT, rows


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
async def test_turn_of_two_ranks_opens_for_both_alike_whoever_asks_first(order: tuple[int, int]) -> None:
    """One turn, epoch, length and position; the bytes are each rank's own shard's."""
    async with running() as (bench, ranks):
        await logged_turn(bench, ranks, (10, 10), b"1")
        answers = await bench.opened([ranks[shard] for shard in order], TOKENS, b"2", apart=0.01)
        opened = dict(zip(order, answers, strict=True))
        alike = [(one.turn, one.epoch, one.log_from, one.attach_length) for one in opened.values()]
        assert alike[0] == alike[1]
        assert (10, 10) == (opened[0].log_from, opened[0].attach_length)
        assert [rows(0, 0, 10), rows(1, 0, 10)] == [ranks[shard].attached(opened[shard]) for shard in (0, 1)]


async def test_rows_of_both_ranks_are_deltas_of_their_shards_under_one_seq() -> None:
    """One Truncate, then each ring's rows, numbered as they came."""
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"1")
        for start in (0, 5):
            for rank, one in zip(ranks, opened, strict=True):
                rank.write(one, start, TOKENS[start : start + 5])
        await until(lambda: len(bench.log) >= 6)
        await bench.settled()
        kinds = [type(entry.record) for entry in bench.log[1:]]
        assert [Truncate, Delta, Delta, Delta, Delta] == kinds
        assert list(range(5)) == [entry.record.seq for entry in bench.log[1:]]  # type: ignore[union-attr]
        assert (10, rows(0, 0, 10), rows(1, 0, 10)) == (bench.length, bench.held(0), bench.held(1))


async def test_acknowledged_is_what_both_ranks_have_and_both_are_told() -> None:
    """A row of one shard alone restores nothing."""
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"1")
        ranks[0].write(opened[0], 0, TOKENS[:9])
        ranks[1].write(opened[1], 0, TOKENS[:4])
        await until(lambda: bool(ranks[0].said(link.Acked)))
        acked = [[one.length for one in rank.said(link.Acked)] for rank in ranks]
        assert [[4], [4]] == acked


async def test_rank_that_lags_only_makes_the_prefix_shorter() -> None:
    """The next turn attaches and logs from what both have."""
    async with running() as (bench, ranks):
        await logged_turn(bench, ranks, (12, 7), b"1")
        assert 7 == bench.length
        opened = await bench.opened(ranks, TOKENS, b"2")
        assert [(7, 7)] * 2 == [(one.log_from, one.attach_length) for one in opened]
        assert [rows(0, 0, 7), rows(1, 0, 7)] == [
            rank.attached(one) for rank, one in zip(ranks, opened, strict=True)
        ]
        for rank, one in zip(ranks, opened, strict=True):
            rank.write(one, 7, TOKENS[7:15])
        await until(lambda: bench.length == 15)
        assert (rows(0, 0, 15), rows(1, 0, 15)) == (bench.held(0), bench.held(1))


@pytest.mark.parametrize("shard", [0, 1])
async def test_missing_rank_leaves_the_others_unlogged_and_claims_nothing(shard: int) -> None:
    """The wait is bounded, the reason is clear, and passes; a session of another node is left where it is."""
    async with running() as (bench, ranks):
        ranks[shard].ask(TOKENS, wait_ms=30)
        refused = await ranks[shard].answer()
        assert (link.UnloggedReason.RANK_MISSING, True) == (refused.reason, refused.reason.passes)
        assert f"rank {1 - shard}" in refused.detail
        assert [] == bench.log
        assert 1 == bench.figure("kvlog_turns_unlogged_total", reason="rank_missing")
        assert all(isinstance(one, link.TurnOpened) for one in await bench.opened(ranks, TOKENS, b"g"))


async def test_rank_without_a_group_is_refused() -> None:
    """One process cannot log a session of two shards."""
    async with running() as (_, ranks):
        ranks[0].ask(TOKENS, b"")
        assert link.UnloggedReason.NOT_SUPPORTED is (await ranks[0].answer()).reason


async def open_anew(bench: RanksBench, other: RankLink, shard: int) -> list[link.TurnOpened]:
    """The rank that died comes back, and both ask again by the name that they had."""
    back = await bench.rank(shard)
    pair = [other, back] if shard else [back, other]
    return await bench.opened(pair, TOKENS, b"g")


@pytest.mark.parametrize("shard", [0, 1])
@pytest.mark.parametrize("moment", ["alone", "claiming", "opened", "written", "closing"])
async def test_rank_that_dies_ends_the_turn_for_all_at_every_moment(moment: str, shard: int) -> None:
    """The others hear of it at once; what both had written is in the log; all ask again, and go on."""
    async with running() as (bench, ranks):
        dying, other = ranks[shard], ranks[1 - shard]
        bench.holds_back = moment == "claiming"
        dying.ask(TOKENS)
        if moment != "alone":
            other.ask(TOKENS)
        await asyncio.sleep(0.01)
        opened: list[Any] = [] if moment in ("alone", "claiming") else [await rank.answer() for rank in ranks]
        length = 0
        if moment in ("written", "closing"):
            length = 6
            ranks[0].write(opened[0], 0, TOKENS[:8])
            ranks[1].write(opened[1], 0, TOKENS[:6])
        if moment == "closing":
            dying.close_turn(opened[shard])
        await dying.die()
        if moment == "claiming":
            refused = await other.answer()
            assert link.UnloggedReason.RANK_MISSING is refused.reason
            bench.let_go()
        elif opened:
            await until(lambda: bool(other.said(link.TurnEnded)))
            (ended,) = other.said(link.TurnEnded)
            assert (opened[0].turn, link.EndedReason.RANK_LOST) == (ended.turn, ended.reason)
            assert ended.reason.passes
        again = await open_anew(bench, other, shard)
        assert [length, length] == [one.log_from for one in again]


async def test_rank_that_asks_for_an_open_turn_has_lost_it_for_all() -> None:
    """Its answer came too late, say: the others are told, and all of them begin anew where they stood."""
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        for rank, one in zip(ranks, opened, strict=True):
            rank.write(one, 0, TOKENS[:5])
        ranks[1].ask(TOKENS)
        await until(lambda: bool(ranks[0].said(link.TurnEnded)))
        assert link.EndedReason.RANK_LOST is ranks[0].said(link.TurnEnded)[0].reason
        ranks[0].ask(TOKENS)
        again = [await rank.answer(2) for rank in ranks]
        assert [5, 5] == [one.log_from for one in again]
        assert again[0].turn == again[1].turn > opened[0].turn


async def test_twin_question_refuses_all_and_is_asked_again() -> None:
    """Two links that say that they are one rank: nobody can know which, so neither is."""
    async with running() as (bench, ranks):
        twin = await bench.rank(0)
        ranks[0].ask(TOKENS)
        await asyncio.sleep(0)
        twin.ask(TOKENS)
        reasons = [(await rank.answer()).reason for rank in (ranks[0], twin)]
        assert [link.UnloggedReason.RANK_MISSING] * 2 == reasons
        assert 1 == bench.figure("kvlog_turns_unlogged_total", reason="rank_missing"), (
            "one turn, not two ranks"
        )
        await twin.die()
        assert all(isinstance(one, link.TurnOpened) for one in await bench.opened(ranks, TOKENS, b"g"))


async def test_twin_question_while_the_claim_is_on_its_way_opens_nothing() -> None:
    """The claim that comes back finds nobody: the session is ours and idle."""
    async with running() as (bench, ranks):
        twin = await bench.rank(0)
        bench.holds_back = True
        for rank in (*ranks, twin):
            rank.ask(TOKENS)
        reasons = [(await rank.answer()).reason for rank in (*ranks, twin)]
        assert [link.UnloggedReason.RANK_MISSING] * 3 == reasons
        bench.let_go()
        await bench.settled()
        assert (0, True) == (len(bench.turns), bench.shell.core.primary(bench.state.session) is not None)


async def test_two_engines_by_one_name_never_share_a_turn() -> None:
    """Both ranks of both engines ask: none is logged, or two of one engine are."""
    async with running() as (bench, ranks):
        others = [await bench.rank(shard) for shard in (0, 1)]
        for rank in (ranks[0], others[0], ranks[1], others[1]):
            rank.ask(TOKENS, wait_ms=30)
        answers = [await rank.answer() for rank in (*ranks, *others)]
        assert [link.UnloggedReason.RANK_MISSING] * 4 == [one.reason for one in answers]
        assert [] == bench.log


async def test_request_of_another_group_finds_the_session_busy() -> None:
    """INV-ONE-TURN, for all of its ranks."""
    async with running() as (bench, ranks):
        await bench.opened(ranks, TOKENS, b"g")
        for rank in ranks:
            rank.ask(TOKENS, b"other")
        assert [link.UnloggedReason.BUSY] * 2 == [(await rank.answer(2)).reason for rank in ranks]
        assert [] == ranks[0].said(link.TurnEnded)


async def test_turn_is_over_when_its_last_rank_has_closed_it() -> None:
    """Until then the other's rows are logged, and the session is not free."""
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].write(opened[0], 0, TOKENS[:5])
        ranks[0].close_turn(opened[0])
        await until(lambda: len(bench.log) >= 3)
        ranks[1].write(opened[1], 0, TOKENS[:5])
        for rank in ranks:
            rank.ask(TOKENS, b"next")
        await until(lambda: bench.length == 5)
        assert [1, 1] == [len(rank.answers) for rank in ranks]
        ranks[1].close_turn(opened[1])
        assert [5, 5] == [(await rank.answer(2)).log_from for rank in ranks]


async def test_rank_that_never_closes_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its session must not be busy for ever; it is told, and asks again if it still wants."""
    monkeypatch.setattr(control, "_RANKS_CLOSE_SECONDS", 0.02)
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        ranks[0].close_turn(opened[0])
        await until(lambda: not len(bench.turns))
        assert [] == ranks[0].said(link.TurnEnded)
        assert link.EndedReason.RANK_LOST is ranks[1].said(link.TurnEnded)[0].reason


async def test_blocks_are_released_rank_by_rank_and_with_the_link() -> None:
    """One that copies slowly keeps only its own."""
    async with running() as (bench, ranks):
        await logged_turn(bench, ranks, (10, 10), b"1")
        opened = await bench.opened(ranks, TOKENS, b"2")
        pinned = [bench.pinned]
        bench.control.release(ranks[0].peer, link.Release(opened[0].turn))
        pinned.append(bench.pinned)
        await ranks[1].die()
        pinned.append(bench.pinned)
        assert [2, 1, 0] == pinned


async def test_fenced_is_told_to_all_ranks_and_never_before_their_opening() -> None:
    """A rival's claim that is read in the same moment: a rank that heard of it first would write on for ever."""
    async with running() as (bench, ranks):
        bench.holds_back = True
        for rank in ranks:
            rank.ask(TOKENS)
        await until(lambda: len(bench.log) == 1)
        bench.rival_claim()
        await until(lambda: len(bench._held) == 2)
        bench.let_go()
        await until(lambda: all(len(rank.told) == 2 for rank in ranks))
        for rank in ranks:
            assert [link.TurnOpened, link.TurnFenced] == [type(one) for one in rank.told]


async def test_request_that_was_fenced_is_not_claimed_back_though_one_rank_has_not_heard() -> None:
    """INV-NO-CLAIM-BACK: the newest epoch that any rank was logged under counts for the request."""
    async with running() as (bench, ranks):
        opened = await bench.opened(ranks, TOKENS, b"g")
        bench.rival_claim()
        await bench.settled()
        for rank, continues in zip(ranks, (opened[0].epoch, 0), strict=True):
            rank.ask(TOKENS, continues=continues)
        reasons = [(await rank.answer(2)).reason for rank in ranks]
        assert [link.UnloggedReason.FENCED] * 2 == reasons


def test_bench_speaks_of_the_context_that_it_claims() -> None:
    """Or nothing could be attached."""
    assert CONTEXT != link.DIGEST_NONE
