"""What the nodes table says of other daemons: who is busy with what, and whether one of them has our name. Pure.

Only hints: nothing here fences anybody. Freshness is told by our own clock and by beats that change, never by another
machine's clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.errors import DecodeError
from kvlog.wire.tables import decode_node

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvlog.ids import NodeId
    from kvlog.log.base import TableRow
    from kvlog.wire.tables import NodeRow

__all__ = ["FRESH_SECONDS", "Neighbours"]

FRESH_SECONDS = 3.0
"""A node whose beat has not changed for so long says nothing any more: it beats once a second."""
_NODES_MAX = 1000
_TWIN_BEATS = 3
"""So many beats of an older daemon under our name, while we run: it lives, and one of us must go."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """The newest row of one node, and when it changed (monotonic seconds)."""

    row: NodeRow
    busy: frozenset[int]
    at: float


class Neighbours:
    """The other daemons, as far as their heartbeats say."""

    def __init__(self, node: NodeId, incarnation: str) -> None:
        """Args: node, incarnation: our own, as in our row."""
        self._node = node
        self._incarnation = incarnation
        self._heard: dict[str, _Heard] = {}
        self._twin_seen: tuple[str, int] | None = None
        self._twin_beats = 0
        self._looked = False

    def look(self, rows: Iterable[TableRow], now: float, *, own_beat: int) -> None:
        """Take the rows that changed since the last look; the first look is history, and tells only what was.

        Args:
            rows: of the nodes table.
            now: monotonic seconds.
            own_beat: how often we have beaten.
        """
        twin: NodeRow | None = None
        for each in rows:
            if each.value is None:
                self._heard.pop(each.key.decode(errors="replace"), None)
                continue
            try:
                row = decode_node(each.value)
            except DecodeError:
                continue  # a newer build's, or junk: it is only a hint
            if each.key != row.node.encode():
                continue
            if row.node != self._node:
                self._hear(row, now)
            elif row.incarnation != self._incarnation:
                twin = row
        if twin is not None:
            self._count_twin(twin, own_beat)
        self._looked = True

    def is_busy(self, node: str, session_hash: int, now: float) -> bool:
        """Whether a node that lives says that it has a turn of this session in progress."""
        heard = self._heard.get(node)
        return heard is not None and now - heard.at < FRESH_SECONDS and session_hash in heard.busy

    @property
    def twin(self) -> str | None:
        """The incarnation of a daemon that had our name before us and still beats; None: there is none."""
        if self._twin_beats < _TWIN_BEATS or self._twin_seen is None:
            return None
        return self._twin_seen[0]

    def _hear(self, row: NodeRow, now: float) -> None:
        known = self._heard.get(row.node)
        if known is not None and known.row == row:
            return  # the same words again prove no life
        if row.leaving or (known is None and len(self._heard) >= _NODES_MAX):
            self._heard.pop(row.node, None)
            return
        self._heard[row.node] = _Heard(row, frozenset(row.busy), now if self._looked else float("-inf"))

    def _count_twin(self, row: NodeRow, own_beat: int) -> None:
        """A beat counts when it is new, and its daemon older than we are: the later one goes."""
        seen, self._twin_seen = self._twin_seen, (row.incarnation, row.beat)
        if seen is None or seen[0] != row.incarnation or row.leaving:
            self._twin_beats = 0
            return
        older = (row.beat, row.incarnation) > (own_beat, self._incarnation)
        self._twin_beats += older and row.beat > seen[1]
