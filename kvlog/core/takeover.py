"""TakeOver: claim a session, read the claim back, be primary. Pure; one object per attempt to get one session.

    ASKING ──watermark h──▶ CLAIMED(h + 1) ──own claim admitted──▶ WON
      ▲                        │ own claim refused, or its append failed
      └────────────────────────┘  at most limits.claim_attempts times, then FENCED or UNAVAILABLE

Stopping it anywhere is safe: a claim that lands without its claimer leaves the session owned by a node that writes
nothing, and anybody can claim a newer epoch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from kvlog.core.effects import AppendRecord, ReadWatermark
from kvlog.ids import Epoch
from kvlog.records import Claim

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.core.effects import WriteEffect
    from kvlog.ids import Digest, NodeId, Nonce, Offset, Partition, SessionId, Writer
    from kvlog.layout import Identity
    from kvlog.limits import Limits
    from kvlog.records import Record

__all__ = ["TRANSITIONS", "Claimant", "Phase", "TakeOver"]


class Phase(StrEnum):
    """Where a take-over stands; the last three are final."""

    ASKING = "asking"
    CLAIMED = "claimed"
    WON = "won"
    FENCED = "fenced"
    UNAVAILABLE = "unavailable"


TRANSITIONS: dict[Phase, dict[str, Phase]] = {
    Phase.ASKING: {
        "watermark read": Phase.CLAIMED,
        "no watermark, attempts left": Phase.ASKING,
        "no watermark, no attempt left": Phase.UNAVAILABLE,
    },
    Phase.CLAIMED: {
        "own claim admitted": Phase.WON,
        "own claim refused, attempts left": Phase.ASKING,
        "own claim refused, no attempt left": Phase.FENCED,
        "append failed, attempts left": Phase.ASKING,
        "append failed, no attempt left": Phase.UNAVAILABLE,
    },
}
"""phase → what happens → the next phase; whatever is not listed changes nothing. For docs/fencing.md and the tests."""


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who claims, and for bytes of what identity."""

    node: NodeId
    writer: Writer
    identity: Identity
    context: Digest


class TakeOver:
    """One attempt to become primary of one session."""

    __slots__ = (
        "_attempts",
        "_claim",
        "_claimant",
        "_header_bytes",
        "_limits",
        "_partition",
        "_phase",
        "_session",
        "_since_ns",
        "newer_epoch",
    )

    def __init__(
        self,
        session: SessionId,
        partition: Partition,
        claimant: Claimant,
        header_bytes: Callable[[Record], bytes],
        limits: Limits,
    ) -> None:
        """Nothing is done before `start`."""
        self._session = session
        self._partition = partition
        self._claimant = claimant
        self._header_bytes = header_bytes
        self._limits = limits
        self._phase = Phase.ASKING
        self._attempts = 0
        self._claim: Claim | None = None
        self._since_ns: int | None = None
        self.newer_epoch: Epoch | None = None

    @property
    def phase(self) -> Phase:
        """Where it stands."""
        return self._phase

    @property
    def claim(self) -> Claim | None:
        """The newest claim that was appended."""
        return self._claim

    @property
    def claimant(self) -> Claimant:
        """Who claims."""
        return self._claimant

    def start(self) -> tuple[WriteEffect, ...]:
        """Ask for the high watermark."""
        self._phase = Phase.ASKING
        return (ReadWatermark(self._session, self._partition),)

    def watermark_read(self, high_watermark: Offset, nonce: Nonce) -> tuple[WriteEffect, ...]:
        """Claim the epoch that follows from the watermark.

        Args:
            high_watermark: read after `start` or the last retry asked for it; an older value loses to a newer claim.
            nonce: 16 fresh random bytes.
        """
        if self._phase is not Phase.ASKING:
            return ()
        me = self._claimant
        claim = Claim(
            session=self._session,
            epoch=Epoch(high_watermark + 1),
            writer=me.writer,
            nonce=nonce,
            node=me.node,
            identity=me.identity,
            context=me.context,
        )
        # Before anything is changed: it may refuse what no record can carry.
        header = self._header_bytes(claim)
        self._attempts += 1
        self._claim = claim
        self._phase = Phase.CLAIMED
        return (AppendRecord(self._partition, claim, header, 0, memoryview(b"")),)

    def admitted(self, claim: Claim) -> bool:
        """A claim of the session was folded; true if it is ours: primary from here on."""
        if self._claim is None or claim.nonce != self._claim.nonce:
            return False
        self._phase = Phase.WON
        return True

    def refused(self, claim: Claim, current: Epoch | None) -> tuple[WriteEffect, ...]:
        """A claim of the session was refused by the fold; if it is ours, try once more or give up."""
        if self._phase is not Phase.CLAIMED or self._claim is None or claim.nonce != self._claim.nonce:
            return ()
        self.newer_epoch = current
        return self._again(Phase.FENCED)

    def failed(self) -> tuple[WriteEffect, ...]:
        """The watermark could not be read, or the claim's append failed or may have; call after a pause.

        A claim of unknown outcome may land later: it is older than the next one, and nothing was written under it.
        """
        if self._phase in (Phase.ASKING, Phase.CLAIMED):
            self._attempts += self._phase is Phase.ASKING
            return self._again(Phase.UNAVAILABLE)
        return ()

    def is_overdue(self, now_ns: int) -> bool:
        """Whether it has had its time, counted from the first call: its claim may be lost without a word."""
        if self._since_ns is None:
            self._since_ns = now_ns
        return now_ns - self._since_ns >= self._limits.claim_ns

    def _again(self, otherwise: Phase) -> tuple[WriteEffect, ...]:
        if self._attempts >= self._limits.claim_attempts:
            self._phase = otherwise
            return ()
        return self.start()
