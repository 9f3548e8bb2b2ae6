"""Mutants of rewriting: without a claim, from rows that are not held, against another's claim, before requests."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvlog.core import node, rewriting
from kvlog.core.primary import PrimaryCore
from kvlog.ids import NO_EPOCH
from tests.sim.faults import Fault
from tests.sim.mutants.mutant import Mutant
from tests.sim.rewriter import Rewriter, Work

if TYPE_CHECKING:
    from kvlog.core.inputs import RewriteSession
    from kvlog.core.node import NodeCore
    from kvlog.ids import SessionId
    from tests.sim.buffer import Pin

_begin = PrimaryCore.begin
_turn_of = rewriting.turn_of


def _under_the_old_claim(self: NodeCore, happened: RewriteSession) -> Any:
    primary = self._owned.get(happened.session)
    turn = _turn_of(happened, primary, self.state(happened.session))
    return (self._begin(primary, turn),) if primary is not None and turn is not None else ()


def _begin_in_mid_epoch(self: PrimaryCore, turn: Any, tokens: Any, context: Any, *, rewrites: bool) -> Any:
    log_from = _begin(self, turn, () if rewrites else tokens, context)
    if self._turn is not None:
        self._turn.rewrites = rewrites
    return log_from


def _claims_whatever_another_did(*what: Any) -> Any:
    turn = _turn_of(*what)
    return turn and replace(turn, continues=NO_EPOCH)


def _looked_at_only(self: Rewriter, session: SessionId, length: int, shards: int) -> Pin:
    """Remembers where the rows lie without keeping them there."""
    pin = self._daemon.buffer.pin(session, length, shards)
    self._daemon.buffer.release(pin)
    return pin


def _whatever_is_there(work: Work, shard: int, position: int) -> bytes:
    block = work.pin.blocks[shard][position // 4]
    return block.rows[position % 4] or bytes(16)


BUSY_NODES = (Fault.REWRITE, Fault.CONCURRENT)

MID_EPOCH = Mutant(
    "rewritten without a claim",
    ((node.NodeCore, "_rewrite", _under_the_old_claim), (PrimaryCore, "begin", _begin_in_mid_epoch)),
    (Fault.REWRITE,),
)
TAKES_BACK = Mutant(
    "a rewrite claims what another has claimed",
    ((node, "turn_of", _claims_whatever_another_did),),
    (Fault.REWRITE, Fault.MOVED),
)
UNPINNED = Mutant(
    "rewritten from rows that are not pinned",
    ((Rewriter, "_hold", _looked_at_only), (Rewriter, "_row", staticmethod(_whatever_is_there))),
    BUSY_NODES,
)
STANDS_IN_THE_WAY = Mutant("a rewrite gives no way", ((node, "give_way", lambda *_: ()),), BUSY_NODES)
