"""Verified rows in waiting: which are kept, and what keeping them costs the steps beside."""

from __future__ import annotations

import itertools
import resource

import pytest

from kvlog.engines.staged_rows import StagedRows
from tests.python_lock import counted_turns

MIB = 1 << 20


def faults() -> int:
    """Pages that this thread has touched first."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("cuts", [(0, 6), (0, 1, 6), (0, 2, 4, 6), (0, 3, 6)])
def test_staged_rows_are_those_beyond_what_is_skipped(cuts: tuple[int, ...]) -> None:
    """However they come; the skipped ones are counted, and not kept."""
    rows = b"".join(bytes([n]) * 10 for n in range(6))
    staged = StagedRows(10, skip=2, length=6)
    for begin, end in itertools.pairwise(cuts):
        staged.load_rows(memoryview(rows)[10 * begin : 10 * end])
    assert 6 == staged.length
    assert rows[20:] == bytes(staged.rows(2, 6))
    out = bytearray(20)
    staged.copy_rows(3, memoryview(out))
    assert rows[30:50] == out
    staged.cut(4)
    assert 4 == staged.length
    staged.close()


def test_staged_rows_of_an_attach_that_brings_nothing_new_are_none() -> None:
    """All of it is skipped."""
    staged = StagedRows(10, skip=3, length=2)
    staged.load_rows(memoryview(bytes(20)))
    assert 2 == staged.length
    staged.close()


def test_staged_rows_take_no_memory_before_they_come() -> None:
    """Clearing it would keep the steps waiting: it is done page by page, where rows come to lie."""
    before = faults()
    staged = StagedRows(MIB, skip=0, length=64)
    assert faults() - before < 100
    staged.close()


def test_steps_go_on_while_rows_come_to_be_staged_and_are_given_back() -> None:
    """Python's lock is free during the copies, and while the memory is given back."""
    staged = StagedRows(MIB, skip=0, length=64)
    rows = memoryview(bytes(16 * MIB))
    with counted_turns() as turns:
        for _ in range(4):
            staged.load_rows(rows)
    assert 5 <= turns.count
    staged.close()
