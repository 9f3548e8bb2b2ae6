"""The engine's side of an attach: verified rows or a shorter prefix, never wrong bytes."""

from __future__ import annotations

import pytest

from kvlog.buffers.attach import Attachment, copy_attached
from kvlog.buffers.geometry import PinnedBlock, PoolGeometry
from kvlog.checksums import row_checksums
from kvlog.errors import DecodeError
from tests.python_lock import counted_turns

GEOMETRY = PoolGeometry(block_bytes=45, blocks=4, device="cpu")
ROWS = [bytes([n + 1]) * 10 for n in range(6)]


def setting() -> tuple[bytearray, Attachment]:
    """A pool whose blocks 2 and 0 hold rows 0 to 5."""
    pool = bytearray(GEOMETRY.size_bytes)
    pool[90:130] = b"".join(ROWS[:4])
    pool[0:20] = b"".join(ROWS[4:])
    checksums = row_checksums(memoryview(b"".join(ROWS)), 10)
    return pool, Attachment(10, (PinnedBlock(2, 4), PinnedBlock(0, 2)), checksums)


def copied(pool: bytearray, attachment: Attachment) -> tuple[int, bytes]:
    """What was reported and what was handed on."""
    got: list[bytes] = []
    count = copy_attached(
        memoryview(pool).toreadonly(), GEOMETRY, attachment, lambda rows: got.append(bytes(rows))
    )
    return count, b"".join(got)


def test_attach_of_whole_rows_hands_them_on_in_order():
    """Block by block, position by position."""
    assert copied(*setting()) == (6, b"".join(ROWS))


def test_attach_hands_on_private_memory():
    """Whatever happens to the pool afterwards, what was verified is what is used."""
    pool, attachment = setting()
    seen = []

    def change_then_look(rows: memoryview) -> None:
        pool[:] = bytes(len(pool))
        seen.append(bytes(rows))
        assert rows.readonly

    assert copy_attached(memoryview(pool), GEOMETRY, attachment, change_then_look) == 4
    assert seen == [b"".join(ROWS[:4])]


@pytest.mark.parametrize("bad", range(6))
def test_attach_with_a_flipped_byte_ends_before_its_row(bad: int):
    """A shorter prefix, never wrong bytes."""
    pool, attachment = setting()
    at = 90 + bad * 10 if bad < 4 else (bad - 4) * 10
    pool[at + 3] ^= 1
    assert copied(pool, attachment) == (bad, b"".join(ROWS[:bad]))


@pytest.mark.parametrize("rows", range(8))
def test_attach_cut_to_some_rows_hands_on_those(rows: int):
    """An engine computes the last token itself, so it takes fewer."""
    pool, attachment = setting()
    assert copied(pool, attachment.first(rows)) == (min(rows, 6), b"".join(ROWS[:rows]))


@pytest.mark.parametrize(
    ("row_bytes", "blocks", "sums"),
    [
        (10, (PinnedBlock(4, 1),), 1),
        (10, (PinnedBlock(-1, 1),), 1),
        (10, (PinnedBlock(0, 5),), 5),
        (10, (PinnedBlock(0, 0),), 0),
        (10, (PinnedBlock(0, -1),), 0),
        (10, (PinnedBlock(0, 1),), 2),
        (0, (), 0),
        (-1, (PinnedBlock(0, 1),), 1),
        (46, (PinnedBlock(0, 1),), 1),
    ],
)
def test_attach_that_does_not_fit_is_refused_before_anything_is_copied(row_bytes, blocks, sums):
    """It comes from another process, so nothing in it is believed."""
    pool, _ = setting()
    with pytest.raises(DecodeError):
        copied(pool, Attachment(row_bytes, blocks, [0] * sums))


def test_attach_from_memory_that_is_too_short_is_refused():
    """The geometry is believed no more than the rest."""
    _, attachment = setting()
    with pytest.raises(DecodeError):
        copied(bytearray(GEOMETRY.size_bytes - 1), attachment)


def test_steps_go_on_while_small_rows_are_attached():
    """Rows of 4 KiB are hashed with Python's lock held; whoever waits for it gets it every MiB."""
    geometry = PoolGeometry(block_bytes=1 << 16, blocks=256, device="cpu")
    pool = memoryview(bytes(geometry.size_bytes))
    checksums = row_checksums(pool, 4096)
    attachment = Attachment(4096, tuple(PinnedBlock(index, 16) for index in range(256)), checksums)
    with counted_turns() as turns:
        assert copy_attached(pool, geometry, attachment, lambda _: None) == 4096
    assert turns.count >= 5
