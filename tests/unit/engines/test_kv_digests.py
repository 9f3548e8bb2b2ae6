"""Digests of a cache's rows: equal where the bytes are equal, layer by layer, and nowhere else."""

from __future__ import annotations

import hashlib

import numpy as np

from kvlog.engines.kv_digests import digests_at, layer_digests
from kvlog.engines.synthetic import SyntheticCache
from kvlog.layout import DType, Layout

LAYOUT = Layout(layers=4, planes=2, kv_heads=1, head_dim=8, dtype=DType.UINT8)
ROWS = np.random.default_rng(5).integers(0, 256, (30, LAYOUT.layers, 16), np.uint8)


def cache_of(rows: np.ndarray) -> SyntheticCache:
    """A cache with these rows."""
    cache = SyntheticCache(LAYOUT.row_bytes)
    cache.load_rows(memoryview(rows.tobytes()))
    return cache


def test_layer_digests_are_of_each_layers_bytes_in_order():
    """A layer's digest is blake2b over its part of row 0, 1, 2 … and of nothing else."""
    expected = [
        hashlib.blake2b(ROWS[:20, layer].tobytes(), digest_size=16).hexdigest()
        for layer in range(LAYOUT.layers)
    ]
    assert expected == layer_digests(cache_of(ROWS), LAYOUT, 20)


def test_layer_digests_from_a_row_on_leave_out_those_before_it():
    """What is not sure is not told."""
    assert layer_digests(cache_of(ROWS[10:]), LAYOUT, 15) == layer_digests(
        cache_of(ROWS), LAYOUT, 25, first=10
    )


def test_layer_digests_in_pieces_equal_those_in_one(monkeypatch):
    """How many rows are copied at a time changes no digest."""
    whole = layer_digests(cache_of(ROWS), LAYOUT, 30)
    monkeypatch.setattr("kvlog.engines.kv_digests._CHUNK_BYTES", 7 * LAYOUT.row_bytes)
    assert whole == layer_digests(cache_of(ROWS), LAYOUT, 30)


def test_layer_digests_of_one_flipped_bit_differ_in_its_layer_only():
    """One bit of one row changes the digest of its layer, and of no other."""
    flipped = ROWS.copy()
    flipped[11, 2, 5] ^= 1
    mine, theirs = (layer_digests(cache_of(rows), LAYOUT, 30) for rows in (ROWS, flipped))
    assert [True, True, False, True] == [one == other for one, other in zip(mine, theirs, strict=True)]
    assert layer_digests(cache_of(ROWS), LAYOUT, 11) == layer_digests(cache_of(flipped), LAYOUT, 11)


def test_digests_at_lengths_are_cut_to_what_the_cache_has():
    """A length beyond the cache is the cache's own; 0 has no digest."""
    digests = digests_at(cache_of(ROWS), LAYOUT, (0, 5, 30, 999))
    assert [5, 30] == list(digests)
    assert digests[5] == layer_digests(cache_of(ROWS), LAYOUT, 5)
