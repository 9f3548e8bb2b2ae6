"""Two engines of two ranks that do everything in any order: whatever happens, a turn is of one engine, and whole.

The schedule is drawn from a seed; a failure names it.
"""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from kvlog.link import messages as link
from tests.unit.daemon.ranks_bench import REPLICATED, running, until
from tests.unit.daemon.rewriting_bench import IDENTITY, S, rows

if TYPE_CHECKING:
    from kvlog.layout import Identity
    from tests.unit.daemon.ranks_bench import RankLink, RanksBench

TOKENS = tuple(range(100, 220))
STEPS = 150


@dataclass
class RankAtRandom:
    """One rank of an engine: what it knows of its turn is what it was told."""

    engine: int
    line: RankLink
    heard: int = 0
    waits: bool = False
    opened: link.TurnOpened | None = None
    cursor: int = 0

    def hear(self) -> list[link.TurnOpened]:
        """Take what the daemon has said since. Returns: turns that were opened."""
        said, self.heard = self.line.told[self.heard :], len(self.line.told)
        opened = []
        for one in said:
            if isinstance(one, link.TurnOpened):
                self.waits, self.opened, self.cursor = False, one, one.log_from
                opened.append(one)
            elif isinstance(one, link.TurnUnlogged):
                self.waits = False
            elif isinstance(one, link.TurnEnded | link.TurnFenced) and self.opened is not None:
                self.opened = None if one.turn == self.opened.turn else self.opened
        return opened

    def close(self) -> None:
        """End its part."""
        if self.opened is not None:
            self.line.close_turn(self.opened, self.cursor)
            self.opened = None


@dataclass(frozen=True)
class Told:
    """One answer that opened a turn."""

    engine: int
    rank: int
    only_reads: bool
    where: tuple[int, int]
    attach: int


class Schedule:
    """Draws what happens, and checks what must hold after each of it."""

    def __init__(self, bench: RanksBench, ranks: list[RankAtRandom], seed: int) -> None:
        self.bench = bench
        self.ranks = ranks
        self.turns: dict[int, list[Told]] = {}
        self.groups = [0, 0]
        self.taken_in_again = 0
        self._random = random.Random(seed)

    async def step(self) -> None:
        """One thing that happens to one rank."""
        rank = self._random.choice(self.ranks)
        what = self._random.choices(
            ("ask", "write", "close", "die", "claim", "rest"), weights=(30, 40, 8, self._deaths(rank), 1, 20)
        )[0]
        if what == "ask" and not rank.waits and rank.opened is None:
            rank.waits = True
            group = bytes([rank.engine, self.groups[rank.engine] % 256])
            rank.line.ask(TOKENS, group, wait_ms=15, take_over=True)
        elif what == "write" and rank.opened is not None and rank.cursor < len(TOKENS):
            end = min(len(TOKENS), rank.cursor + self._random.randint(1, 5))
            wrong = (7,) * (end - rank.cursor)  # what nobody may ever see in the log
            tokens = wrong if rank.line.hello.only_reads else TOKENS[rank.cursor : end]
            rank.line.write(rank.opened, rank.cursor, tokens)
            rank.cursor = end
        elif what == "close" and rank.opened is not None:
            self.groups[rank.engine] += 1
            for each in self.ranks:
                if each.engine == rank.engine and self._random.random() < 0.8:
                    each.close()
        elif what == "die":
            await rank.line.die()
            number = rank.line.hello.rank.rank
            self.ranks[self.ranks.index(rank)] = RankAtRandom(rank.engine, await self.bench.rank(number))
        elif what == "claim":
            self.bench.rival_claim()
        elif what == "rest":
            await asyncio.sleep(self._random.choice((0, 0.001, 0.005)))
        self.check()

    @staticmethod
    def _deaths(rank: RankAtRandom) -> int:
        """One that only reads comes back to its turn, which is worth a try more often."""
        return 15 if rank.line.hello.only_reads else 3

    def check(self) -> None:
        """INV-JOINT, and that no shard holds what its rank has not computed."""
        for rank in self.ranks:
            for opened in rank.hear():
                hello, where = rank.line.hello, (opened.epoch, opened.log_from)
                told = self.turns.setdefault(opened.turn, [])
                one = Told(rank.engine, hello.rank.rank, hello.only_reads, where, opened.attach_length)
                told.append(one)
                assert 1 == len({(each.engine, each.where) for each in told})
                assert len({each.attach for each in told if not each.only_reads}) <= 1
                assert len({each.attach for each in told} - {0}) <= 1
                if any(each.rank == one.rank for each in told[:-1]):  # it was taken in again
                    assert (True, 0) == (one.only_reads, one.attach)
                    self.taken_in_again += 1
        assert len(self.bench.turns) <= 1
        state = self.bench.shell.core.state(S)
        for shard, held in enumerate(state.shards if state is not None else ()):
            assert TOKENS[: held.length] == tuple(held.tokens)
            present = self.bench.held(shard)
            assert rows(shard, 0, len(TOKENS))[: len(present)] == present


@pytest.mark.parametrize("identity", [IDENTITY, REPLICATED], ids=["shards", "alike"])
@pytest.mark.parametrize("seed", range(12))
async def test_turns_of_ranks_are_whole_and_of_one_engine_in_any_schedule(
    seed: int, identity: Identity
) -> None:
    """Ranks ask, write, close, die and come back in any order; rivals claim; afterwards the session can go on.

    Of ranks that have the same rows, the one that only reads writes nonsense into its ring.
    """
    async with running(identity) as (bench, first):
        second = [await bench.rank(number) for number in (0, 1)]
        ranks = [RankAtRandom(engine, one) for engine, pair in enumerate((first, second)) for one in pair]
        schedule = Schedule(bench, ranks, seed)
        for _ in range(STEPS):
            await schedule.step()
        assert schedule.turns, f"seed {seed} opened nothing: it proves nothing"
        for rank in schedule.ranks:
            rank.hear()
            rank.close()
        await until(lambda: not any(rank.waits and not rank.hear() and rank.waits for rank in schedule.ranks))
        for rank in schedule.ranks:
            rank.close()
        await until(lambda: not len(bench.turns))
        pair = [rank.line for rank in schedule.ranks if rank.engine == 0]
        opened = await bench.opened(pair, TOKENS, b"last")
        assert all(isinstance(one, link.TurnOpened) for one in opened)
        assert opened[0].log_from == opened[1].log_from
