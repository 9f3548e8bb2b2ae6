"""How OpenTurns of an engine's ranks become one."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from daemon.joining import JointAsk, RankAsk, RankJoiner
from kvlog.checksums import digest
from kvlog.ids import Epoch, SessionId
from kvlog.layout import DType, Identity, Layout
from kvlog.link import messages as link
from kvlog.modes import FULL, IDS

if TYPE_CHECKING:
    from collections.abc import Callable

IDENTITY = Identity(digest(b"m"), digest(b"w"), Layout(1, 2, 1, 4, DType.FLOAT32), 3)
ALIKE = replace(IDENTITY, shards=1)
"""Of ranks that all have the same rows."""
TOKENS = link.pack_tokens([1, 2, 3, 4])
MESSAGE = link.OpenTurn(
    link.RequestNumber(7),
    SessionId("s"),
    TOKENS,
    link.DIGEST_NONE,
    Epoch(0),
    None,
    1000,
    take_over=False,
    group=b"group",
)


def ask(
    rank: int, message: link.OpenTurn = MESSAGE, identity: Identity = IDENTITY, ranks: int = 3
) -> RankAsk:
    """One rank's question, on a link of its own."""
    hello = link.Hello(link.PROTOCOL, "test", 1, identity, link.EngineRank(rank, ranks))
    peer: Any = SimpleNamespace(hello=hello)
    answer: asyncio.Future[link.TurnUnlogged | None] = asyncio.get_running_loop().create_future()
    return RankAsk(peer, message, 10.0 + rank, 11.0 + rank, answer)


def reason(asked: RankAsk) -> link.UnloggedReason | None:
    """Why a question was refused; None: it waits."""
    said = asked.answer.result() if asked.answer.done() else None
    return said.reason if said is not None else None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
async def test_ranks_are_one_when_the_last_has_asked_in_any_order(order: tuple[int, ...]) -> None:
    """Before that some are missing, whoever comes first."""
    joiner, joints = RankJoiner(), []
    for count, shard in enumerate(order, 1):
        joints.append(joiner.join(ask(shard)))
        assert (3 - count, count == 3) == (len(joints[-1].missing), joints[-1].whole.is_set())
    assert joints[0] is joints[1] is joints[2]
    assert 11.0 + min(order) == joints[0].deadline


async def test_engine_of_one_process_waits_for_nobody() -> None:
    """It needs no group."""
    joint = RankJoiner().join(ask(0, replace(MESSAGE, group=b""), ALIKE, 1))
    assert ((), False, True) == (joint.missing, joint.over, joint.whole.is_set())


async def test_ranks_that_have_the_same_rows_wait_for_each_other_too() -> None:
    """There is one shard to log, and each of them has to load it."""
    joiner = RankJoiner()
    joints = [joiner.join(ask(rank, MESSAGE, ALIKE)) for rank in (2, 0, 1)]
    assert joints[0] is joints[2]
    assert ((), True, [2, 0, 1]) == (joints[0].missing, joints[0].whole.is_set(), list(joints[0].asks))
    assert [0, 0, 0] == [asked.shard for asked in joints[0].asks.values()]
    assert ALIKE == joints[0].question(1).identity


@pytest.mark.parametrize("identity", [IDENTITY, ALIKE], ids=["shards", "alike"])
async def test_rank_without_a_group_is_refused_for_good(identity: Identity) -> None:
    """Nobody could say whose rank it is."""
    alone = ask(0, replace(MESSAGE, group=b""), identity)
    assert RankJoiner().join(alone).over
    assert link.UnloggedReason.NOT_SUPPORTED is reason(alone)


async def test_groups_and_sessions_are_kept_apart() -> None:
    """Ranks of another turn, or of another session by the same name, are not waited for."""
    joiner = RankJoiner()
    messages = (MESSAGE, replace(MESSAGE, group=b"other"), replace(MESSAGE, session=SessionId("t")))
    joints: list[JointAsk] = [joiner.join(ask(0, message)) for message in messages]
    assert 3 == len({id(joint) for joint in joints})
    assert [(1, 2)] * 3 == [joint.missing for joint in joints]


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda: ask(1, replace(MESSAGE, context=digest(b"lora"))), link.UnloggedReason.RANKS_DIFFER),
        (lambda: ask(1, replace(MESSAGE, mode=IDS)), link.UnloggedReason.RANKS_DIFFER),
        (
            lambda: ask(1, replace(MESSAGE, tokens=link.pack_tokens([1, 2, 4]))),
            link.UnloggedReason.RANKS_DIFFER,
        ),
        (lambda: ask(1, MESSAGE, replace(IDENTITY, weights=digest(b"x"))), link.UnloggedReason.RANKS_DIFFER),
        (lambda: ask(1, MESSAGE, ALIKE), link.UnloggedReason.RANKS_DIFFER),
        (lambda: ask(1, MESSAGE, ALIKE, 2), link.UnloggedReason.RANKS_DIFFER),
        (lambda: ask(0), link.UnloggedReason.RANK_MISSING),
    ],
    ids=["context", "mode", "tokens", "weights", "shards", "ranks", "twin"],
)
async def test_rank_that_does_not_fit_is_refused_with_all_others(
    change: Callable[[], RankAsk], refused: link.UnloggedReason
) -> None:
    """Which of them is right nobody can know: none is logged, and the next question begins anew."""
    joiner, first, misfit = RankJoiner(), ask(0), change()
    joint = joiner.join(first)
    assert joint is joiner.join(misfit)
    assert (True, refused, refused) == (joint.over, reason(first), reason(misfit))
    assert joint is not joiner.join(ask(0))


async def test_question_has_what_all_ranks_know() -> None:
    """Ranks ask again at different steps, and one may have missed an answer: the fewest ids, the newest epoch."""
    joiner = RankJoiner()
    joiner.join(ask(0, replace(MESSAGE, continues=Epoch(5))))
    joiner.join(ask(1, replace(MESSAGE, tokens=link.pack_tokens([1, 2, 3]), take_over=True)))
    joint = joiner.join(ask(2, replace(MESSAGE, continues=Epoch(9))))
    question = joint.question(4)
    assert (4, (1, 2, 3), 9) == (question.request, tuple(question.tokens), question.continues)
    assert (11_000_000_000, True) == (question.deadline_ns, joint.take_over)


async def test_joined_ranks_are_refused_once() -> None:
    """An answer that was given stays."""
    joiner, asked = RankJoiner(), [ask(0), ask(1)]
    for one in asked:
        joint = joiner.join(one)
    asked[0].answer.set_result(None)
    joiner.refuse(joint, link.UnloggedReason.RANK_MISSING, "")
    joiner.refuse(joint, link.UnloggedReason.BUSY, "")
    assert (None, link.UnloggedReason.RANK_MISSING) == (reason(asked[0]), reason(asked[1]))


def test_modes_of_these_tests_differ() -> None:
    """None is another mode than one that is said, even if it is the daemon's own."""
    assert FULL != IDS
