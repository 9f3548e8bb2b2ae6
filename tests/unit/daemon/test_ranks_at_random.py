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
from tests.unit.daemon.ranks_bench import running, until
from tests.unit.daemon.rewriting_bench import S, rows

if TYPE_CHECKING:
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


class Schedule:
    """Draws what happens, and checks what must hold after each of it."""

    def __init__(self, bench: RanksBench, ranks: list[RankAtRandom], seed: int) -> None:
        self.bench = bench
        self.ranks = ranks
        self.turns: dict[int, list[tuple[int, int, tuple[int, int, int]]]] = {}
        self.groups = [0, 0]
        self._random = random.Random(seed)

    async def step(self) -> None:
        """One thing that happens to one rank."""
        rank = self._random.choice(self.ranks)
        what = self._random.choices(
            ("ask", "write", "close", "die", "claim", "rest"), weights=(30, 40, 8, 3, 1, 20)
        )[0]
        if what == "ask" and not rank.waits and rank.opened is None:
            rank.waits = True
            group = bytes([rank.engine, self.groups[rank.engine] % 256])
            rank.line.ask(TOKENS, group, wait_ms=15, take_over=True)
        elif what == "write" and rank.opened is not None and rank.cursor < len(TOKENS):
            end = min(len(TOKENS), rank.cursor + self._random.randint(1, 5))
            rank.line.write(rank.opened, rank.cursor, TOKENS[rank.cursor : end])
            rank.cursor = end
        elif what == "close" and rank.opened is not None:
            self.groups[rank.engine] += 1
            for each in self.ranks:
                if each.engine == rank.engine and self._random.random() < 0.8:
                    each.close()
        elif what == "die":
            await rank.line.die()
            shard = rank.line.shard
            self.ranks[self.ranks.index(rank)] = RankAtRandom(rank.engine, await self.bench.rank(shard))
        elif what == "claim":
            self.bench.rival_claim()
        elif what == "rest":
            await asyncio.sleep(self._random.choice((0, 0.001, 0.005)))
        self.check()

    def check(self) -> None:
        """INV-JOINT, and that no shard holds what its rank has not computed."""
        for rank in self.ranks:
            for opened in rank.hear():
                alike = (opened.epoch, opened.log_from, opened.attach_length)
                told = self.turns.setdefault(opened.turn, [])
                told.append((rank.engine, rank.line.shard, alike))
                assert 1 == len({(engine, said) for engine, _, said in told})
                assert len(told) == len({shard for _, shard, _ in told})
        assert len(self.bench.turns) <= 1
        state = self.bench.shell.core.state(S)
        for shard, held in enumerate(state.shards if state is not None else ()):
            assert TOKENS[: held.length] == tuple(held.tokens)
            present = self.bench.held(shard)
            assert rows(shard, 0, len(TOKENS))[: len(present)] == present


@pytest.mark.parametrize("seed", range(12))
async def test_turns_of_ranks_are_whole_and_of_one_engine_in_any_schedule(seed: int) -> None:
    """Ranks ask, write, close, die and come back in any order; rivals claim; afterwards the session can go on."""
    async with running() as (bench, first):
        second = [await bench.rank(shard) for shard in (0, 1)]
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
