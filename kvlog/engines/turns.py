"""One request's turn as its engine sees it: what to attach, how far the log has it, and whether it was fenced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.engines.stepwrite import rows_behind
from kvlog.engines.turn_state import Asking, Logged, may_write_later
from kvlog.ids import Position
from kvlog.link.messages import Release

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from kvlog.engines.base import RowCache
    from kvlog.engines.turn_state import TurnState
    from kvlog.ids import Epoch
    from kvlog.link.messages import EndedReason, UnloggedReason

__all__ = ["LoadCounts", "PendingTurn", "TurnHandle"]


@dataclass(slots=True)
class LoadCounts:
    """Attaches of one replicator: rows that verified, and attaches that were cut short because one did not."""

    rows_verified: int = 0
    failed: int = 0


class PendingTurn:
    """Made by `Replicator.begin_turn`, for engines that must not wait: asked again and again until it is answered.

    Args:
        turn: what the replicator keeps of it.
        row_bytes: of the engine's layout.
        counts: where loads are counted.
    """

    def __init__(self, turn: TurnState, row_bytes: int, counts: LoadCounts) -> None:
        self._turn = turn
        self._row_bytes = row_bytes
        self._counts = counts

    def is_answered(self, now: float) -> bool:
        """Nothing is being waited for: opened, refused, late, or there is no daemon to ask."""
        self._turn.unanswered(now)
        return not isinstance(self._turn.phase, Asking)

    def settle(self) -> TurnHandle:
        """Stop waiting: what has been opened by now can be attached; what opens later is only logged."""
        return TurnHandle(self._turn, self._row_bytes, self._counts)


class TurnHandle:
    """Made by `Replicator.open_turn`; used by the request's own thread.

    Args:
        turn: what the replicator keeps of it.
        row_bytes: of the engine's layout.
        counts: where loads are counted.
    """

    def __init__(self, turn: TurnState, row_bytes: int, counts: LoadCounts) -> None:
        self.turn = turn
        self._counts = counts
        self._attach: Logged | None = turn.settle()
        self._attach_length = 0
        if self._attach is not None and self._attach.opened.row_bytes == row_bytes:
            # The last token's logits are needed, so at least its row is computed, whatever can be attached.
            self._attach_length = max(0, min(self._attach.opened.attach_length, len(turn.tokens) - 1))

    @property
    def attach_length(self) -> int:
        """Rows that could be attached when it was opened: fewer than the tokens that were asked for."""
        return self._attach_length

    @property
    def logged(self) -> bool:
        """Rows go to the log now, of this rank or of the one that has the same."""
        return isinstance(self.turn.phase, Logged)

    @property
    def was_logged(self) -> bool:
        """Rows went to the log at some time: the log may hold something of the session."""
        return self.turn.epoch > 0

    @property
    def epoch(self) -> Epoch:
        """The newest epoch under which it was logged; 0: never."""
        return self.turn.epoch

    @property
    def reason(self) -> UnloggedReason | EndedReason | None:
        """Why they do not; None if they do."""
        return self.turn.reason

    @property
    def log_from(self) -> Position | None:
        """The first row that this turn logs, as of the last time it was opened; None if it is not logged now."""
        phase = self.turn.phase
        return phase.opened.log_from if isinstance(phase, Logged) else None

    @property
    def cursor(self) -> Position | None:
        """The first row that is not in the ring; None if it is not logged now, or by another rank."""
        phase = self.turn.phase
        if self.turn.only_reads or not isinstance(phase, Logged):
            return None
        return Position(phase.cursor.position)

    def may_write_more(self, cache: RowCache) -> bool:
        """Rows of a finished request's cache are not in a ring, and there is one, or may soon be, to write them to."""
        turn, phase = self.turn, self.turn.phase
        if isinstance(phase, Logged):
            return rows_behind((phase.cursor, cache, turn.tokens)) > 0
        return may_write_later(turn, phase)

    @property
    def acked_length(self) -> Position:
        """The log holds the rows below, as far as the daemon has said."""
        return self.turn.acked_length

    def watch(self, watcher: Callable[[], None]) -> None:
        """Call it whenever this handle may say something else, from any thread: it must neither block nor raise."""
        self.turn.watcher = watcher

    @property
    def fenced(self) -> threading.Event:
        """Set once another node has taken the session: end the request, emit nothing more."""
        return self.turn.fenced

    def load_into(self, cache: RowCache) -> int:
        """Copy the attached rows, verify the copy, append them to an empty cache, and give the daemon its blocks back.

        Returns: rows loaded: `attach_length`, or fewer if a row did not verify; never a wrong one.
        """
        assert cache.length == 0, "rows are attached from position 0"
        wanted, rows = self.attach_length, 0
        if self._attach is not None and wanted:
            rows = self._attach.link.load(self._attach.opened, wanted, cache.load_rows)
            self._counts.rows_verified += rows
            self._counts.failed += rows < wanted
        self.release()
        return rows

    def release(self) -> None:
        """Let the daemon have the attach's blocks back; may be called twice."""
        attach, self._attach = self._attach, None
        if attach is not None:
            attach.link.client.send(Release(attach.cursor.turn))
