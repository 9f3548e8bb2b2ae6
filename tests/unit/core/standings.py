"""Every way in which a reader may stand to a session, each with an owner of the same epoch: fixtures of the tables.

The session has two shards of 3 and 2 positions wherever it has a history; its newest claim is `claim(20)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvlog.core.session import SessionState, fold
from kvlog.ids import Offset
from tests.unit.core.logbook import ONE_SHARD, claim, delta, end, seal, truncate

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvlog.layout import Identity
    from kvlog.records import Record

__all__ = ["STANDINGS", "with_history"]


def unrooted() -> SessionState:
    """A claim was read, and nothing before it."""
    newest = claim(20)
    return SessionState.from_claim(newest, seal(None, newest).header, Offset(19))


def whole() -> SessionState:
    """The newest claim's writer has written: next seq 3."""
    return with_history(20)


def claimed() -> SessionState:
    """A history of an older epoch, and the newest claim after it: next seq 0."""
    return _claimed_again(with_history(10))


def broken() -> SessionState:
    """A record of the newest epoch was refused for good: next seq 3."""
    state = with_history(20)
    state.break_here()
    return state


def healable() -> SessionState:
    """A record of an older epoch was refused for good; the newest claim may heal it."""
    state = with_history(10)
    state.break_here()
    return _claimed_again(state)


def hopeless() -> SessionState:
    """Like `healable`, but no history was ever known: only a Truncate(0) can heal it."""
    older = claim(10)
    state = SessionState.from_claim(older, seal(None, older).header, Offset(9))
    state.break_here()
    return _claimed_again(state)


def ended() -> SessionState:
    """The newest claim's writer has ended the session: next seq 4."""
    state = with_history(20)
    _write(state, end(state))
    return state


def reborn() -> SessionState:
    """The session ended in an older epoch and was claimed again: whole, with no shard yet."""
    state = with_history(10)
    _write(state, end(state))
    return _claimed_again(state)


def resharded() -> SessionState:
    """A history of two shards, claimed by an engine that has one."""
    return _claimed_again(with_history(10), ONE_SHARD)


def with_history(epoch: int) -> SessionState:
    """A session of two shards with 3 and 2 positions, all written under this epoch."""
    first = claim(epoch)
    state = SessionState.from_claim(first, seal(None, first).header, Offset(epoch - 1))
    for record in (
        lambda: truncate(state, 0),
        lambda: delta(state, (1, 2, 3)),
        lambda: delta(state, (1, 2), shard=1),
    ):
        _write(state, record())
    return state


def _claimed_again(state: SessionState, identity: Identity | None = None) -> SessionState:
    _write(state, claim(20, identity=identity or state.claim.identity))
    return state


def _write(state: SessionState, record: Record) -> None:
    fold(state, Offset(state.last_offset + 1), seal(state, record))


STANDINGS: dict[str, Callable[[], SessionState]] = {
    make.__name__: make
    for make in (unrooted, whole, claimed, broken, healable, hopeless, ended, reborn, resharded)
}
