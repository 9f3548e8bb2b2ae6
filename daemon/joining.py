"""OpenTurns of an engine's ranks become one: they are gathered by session and group until every rank has asked.

    rank 0 ──OpenTurn──▶ ┐
    rank 1 ──OpenTurn──▶ ┴─ whole ─▶ the core is asked once ─▶ each rank is answered, with its own shard's blocks
    a rank is missing, leaves, or asks twice ─▶ all of them are refused, and ask again
    the ranks ask for different things       ─▶ all of them are refused for good

Where all ranks have the same rows (latent attention), there is one shard: rank 0 logs it, and every rank has a lease of
its own on that shard's blocks.

INV-JOINT: a turn has each rank of one engine once, all of one group, and is opened for all of them or for none; each
shard is written by one of them. Nothing is claimed before all have asked: a claim takes the session from a node that
can log it. No I/O, no clock.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvlog.core.inputs import OpenTurn
from kvlog.ids import Epoch
from kvlog.link import messages as link

if TYPE_CHECKING:
    from kvlog.ids import SessionId, Shard
    from kvlog.link.server import Peer

__all__ = ["JointAsk", "RankAsk", "RankJoiner"]

_UNASKED = 0


@dataclass(slots=True, eq=False)
class RankAsk:
    """One rank's OpenTurn.

    Args:
        peer: its link.
        message: what it asks.
        began: when, monotonic seconds.
        deadline: until when it waits, monotonic seconds.
        answer: a refusal that is still to be sent; None: it was told that its turn is open.
    """

    peer: Peer
    message: link.OpenTurn
    began: float
    deadline: float
    answer: asyncio.Future[link.TurnUnlogged | None]

    @property
    def shard(self) -> Shard:
        """Whose rows it has."""
        return self.peer.hello.shard

    @property
    def rank(self) -> int:
        """Which of its engine's processes it is."""
        return self.peer.hello.rank.rank


@dataclass(slots=True, eq=False)
class JointAsk:
    """What the ranks of one group ask together; of an engine of one process: what it asks.

    Args:
        asks: by rank.
        number: under which the core was asked; 0: it was not yet.
        whole: set once every rank has asked, or all have been answered.
        over: all have been answered.
        counted: it was said that it was refused.
    """

    asks: dict[int, RankAsk] = field(default_factory=dict)
    number: int = _UNASKED
    whole: asyncio.Event = field(default_factory=asyncio.Event)
    over: bool = False
    counted: bool = False

    @property
    def first(self) -> RankAsk:
        """Who asked first; what does not differ between them is read of this one."""
        return next(iter(self.asks.values()))

    @property
    def session(self) -> SessionId:
        """Whose turn they want."""
        return self.first.message.session

    @property
    def deadline(self) -> float:
        """When the first of them stops to wait."""
        return min(ask.deadline for ask in self.asks.values())

    @property
    def take_over(self) -> bool:
        """One of them knows that the answer was begun before."""
        return any(ask.message.take_over for ask in self.asks.values())

    @property
    def missing(self) -> tuple[int, ...]:
        """Ranks that have not asked."""
        ranks = self.first.peer.hello.rank.ranks
        return tuple(rank for rank in range(ranks) if rank not in self.asks)

    def question(self, number: int) -> OpenTurn:
        """For the core.

        Ranks that ask again do so at different steps: what all of them know are the fewest token ids. The newest epoch
        that any of them was logged under is the request's (INV-NO-CLAIM-BACK): another rank may have missed the answer.
        """
        said = [ask.message for ask in self.asks.values()]
        self.number = number
        return OpenTurn(
            request=number,
            session=self.session,
            tokens=link.unpack_tokens(min((one.tokens for one in said), key=len)),
            context=said[0].context,
            identity=self.first.peer.hello.identity,
            continues=Epoch(max(one.continues for one in said)),
            deadline_ns=int(self.deadline * 1e9),
        )

    def refuse(self, reason: link.UnloggedReason, detail: str) -> None:
        """Answer all of them; those that were answered are left alone."""
        self.over = True
        self.whole.set()
        for ask in self.asks.values():
            _refuse(ask, reason, detail)


class RankJoiner:
    """All groups that wait for ranks or for the core; as many as there are OpenTurns without an answer at most."""

    def __init__(self) -> None:
        self._joints: dict[tuple[SessionId, bytes], JointAsk] = {}

    def join(self, ask: RankAsk) -> JointAsk:
        """Add one rank's question to those of its group. Returns: all of them; `over` if they were refused by it."""
        message, ranks = ask.message, ask.peer.hello.rank.ranks
        if ranks == 1:
            return _whole(JointAsk({ask.rank: ask}))
        if not message.group:
            joint = JointAsk({ask.rank: ask})
            joint.refuse(link.UnloggedReason.NOT_SUPPORTED, f"one of {ranks} ranks asks without a group")
            return joint
        joint = self._joints.setdefault((message.session, message.group), JointAsk())
        refusal = _misfit(joint, ask)
        if refusal is not None:
            self.refuse(joint, *refusal)
            _refuse(ask, *refusal)
            return joint
        joint.asks[ask.rank] = ask
        return joint if joint.missing else _whole(joint)

    def refuse(self, joint: JointAsk, reason: link.UnloggedReason, detail: str) -> None:
        """Answer all of them: none of them is logged."""
        self.forget(joint)
        joint.refuse(reason, detail)

    def forget(self, joint: JointAsk) -> None:
        """They have their answer: whoever asks from now on is another turn's."""
        key = (joint.session, joint.first.message.group)
        if self._joints.get(key) is joint:
            del self._joints[key]


def _whole(joint: JointAsk) -> JointAsk:
    joint.whole.set()
    return joint


def _refuse(ask: RankAsk, reason: link.UnloggedReason, detail: str) -> None:
    if not ask.answer.done():
        ask.answer.set_result(link.TurnUnlogged(ask.message.request, reason, detail))


def _misfit(joint: JointAsk, ask: RankAsk) -> tuple[link.UnloggedReason, str] | None:
    """Why this rank cannot be one of them; None: it fits."""
    if not joint.asks:
        return None
    if ask.rank in joint.asks:  # a link that is about to end, or two engines by one name: never mix them
        return link.UnloggedReason.RANK_MISSING, f"rank {ask.rank} asks twice"
    mine, theirs = ask.message, joint.first.message
    differing = {
        "number of ranks": (ask.peer.hello.rank.ranks, joint.first.peer.hello.rank.ranks),
        "identity": (ask.peer.hello.identity, joint.first.peer.hello.identity),
        "context": (mine.context, theirs.context),
        "mode": (mine.mode, theirs.mode),
    }
    for name, (one, other) in differing.items():
        if one != other:
            return link.UnloggedReason.RANKS_DIFFER, f"the ranks of one turn differ in their {name}"
    known = min(len(mine.tokens), len(theirs.tokens))
    if mine.tokens[:known] != theirs.tokens[:known]:
        return link.UnloggedReason.RANKS_DIFFER, "the ranks of one turn differ in their token ids"
    return None
