"""In what an engine differs from a session's bytes: the first field, with both values."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvlog.checksums import digest
from kvlog.layout import DType, Identity, Layout

LAYOUT = Layout(layers=2, planes=2, kv_heads=2, head_dim=4, dtype=DType.FLOAT16)
HAS = Identity(digest(b"model"), digest(b"weights"), LAYOUT, shards=1)


@pytest.mark.parametrize(
    ("other", "field"),
    [
        (replace(HAS, model=digest(b"another")), "model"),
        (replace(HAS, weights=digest(b"newer")), "weights"),
        (replace(HAS, layout=replace(LAYOUT, dtype=DType.BFLOAT16)), "layout"),
        (replace(HAS, layout=replace(LAYOUT, layers=3)), "layout"),
        (replace(HAS, layout=replace(LAYOUT, planes=1)), "layout"),
        (replace(HAS, layout=replace(LAYOUT, kv_heads=1)), "layout"),
        (replace(HAS, layout=replace(LAYOUT, head_dim=8)), "layout"),
        (replace(HAS, shards=2), "shards"),
        (replace(HAS, model=digest(b"another"), shards=2), "model"),
    ],
)
def test_difference_names_the_field_and_both_values(other: Identity, field: str) -> None:
    """Whatever makes bytes unusable has a name: an operator must not have to guess which node to change."""
    assert (field, getattr(HAS, field), getattr(other, field)) == HAS.difference(other)


def test_equal_identities_have_no_difference() -> None:
    """Equal values, not the same object."""
    assert HAS.difference(replace(HAS)) is None
