"""What of the pool the ranks of a turn may copy: one length for all, or nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from daemon.leases import AttachLeases
from kvlog.core.effects import TurnOpened
from kvlog.errors import PoolFull
from kvlog.ids import Epoch, Position, SessionId, Shard, Turn
from kvlog.limits import DEFAULT

OPENED = TurnOpened(1, SessionId("s"), Turn(5), Epoch(1), Position(10), Position(10))


class FakePool:
    """Has so many rows of each shard, and gives so many pins."""

    def __init__(self, present: tuple[int, ...], pins: int = 9) -> None:
        self.present, self.pins = present, pins
        self.pinned: list[tuple[int, int]] = []
        self.released: list[int] = []
        self.blocks = SimpleNamespace(touch=lambda *_: None)

    def present_prefix(self, key: Any) -> int:
        return self.present[int(key.shard)]

    def pin(self, key: Any, length: Position) -> Any:
        if len(self.pinned) == self.pins:
            raise PoolFull(wanted_blocks=1)
        self.pinned.append((key.shard, length))
        return SimpleNamespace(lease=key.shard)

    def release(self, lease: int) -> None:
        self.released.append(lease)


def asks() -> list[Any]:
    """Two ranks."""
    return [SimpleNamespace(shard=Shard(shard), peer=f"peer {shard}") for shard in (0, 1)]


def test_ranks_attach_what_bytes_of_every_shard_are_here() -> None:
    """One shard's blocks may have been evicted: a longer attach of the other could not be used."""
    pool: Any = FakePool((10, 4))
    assert AttachLeases(pool, DEFAULT).pin(OPENED, asks()) is not None
    assert [(0, 4), (1, 4)] == pool.pinned


def test_ranks_attach_nothing_when_one_shard_is_not_here() -> None:
    """And nothing is pinned for it."""
    pool: Any = FakePool((10, 0))
    assert AttachLeases(pool, DEFAULT).pin(OPENED, asks()) is None
    assert [] == pool.pinned


def test_ranks_attach_nothing_when_the_pool_has_pins_for_one_only() -> None:
    """The one that was pinned is given back."""
    pool: Any = FakePool((10, 10), pins=1)
    assert AttachLeases(pool, DEFAULT).pin(OPENED, asks()) is None
    assert [0] == pool.released


def test_lease_is_released_once_by_its_rank_or_with_its_link() -> None:
    """A turn's number that the rank does not hold is ignored."""
    pool: Any = FakePool((10, 10))
    leases, (first, second) = AttachLeases(pool, DEFAULT), asks()
    leases.pin(OPENED, [first, second])
    for turn in (Turn(4), Turn(5), Turn(5)):
        leases.release(first.peer, turn)
    leases.release_all(first.peer)
    leases.release_all(second.peer)
    assert [0, 1] == pool.released
