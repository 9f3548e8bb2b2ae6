"""Golden messages of each released format version: what lies in a log today can be read tomorrow."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlog.wire.header import READ_VERSIONS
from kvlog.wire.message import decode, encode
from tests.golden.hex_files import check_golden, may_write, read_golden
from tests.unit.wire.samples import SAMPLES

FOLDER = Path(__file__).parent / "wire" / "v1"


@pytest.mark.parametrize("name", SAMPLES)
def test_wire_golden_bytes_are_what_we_write(name: str) -> None:
    """The bytes of each record kind and codec are those of the day it was released."""
    sample = SAMPLES[name]
    message = encode(sample.record, chain=sample.chain, payload=sample.payload, version=1)
    check_golden(FOLDER / f"{name}.hex", message, write=may_write())


@pytest.mark.parametrize("name", SAMPLES)
def test_wire_golden_bytes_decode_to_the_record(name: str) -> None:
    """The bytes in the file, not those that we have just written, give the record's values."""
    sample, entry = SAMPLES[name], decode(read_golden(FOLDER / f"{name}.hex"))
    assert (sample.record, sample.chain, sample.payload) == (entry.record, entry.chain, bytes(entry.payload))


def test_wire_golden_files_are_all_tested() -> None:
    """No file is left behind when a sample is renamed, and every version that we read has its folder."""
    assert sorted(SAMPLES) == sorted(path.stem for path in FOLDER.iterdir())
    assert [f"v{version}" for version in READ_VERSIONS] == [
        path.name for path in sorted(FOLDER.parent.iterdir())
    ]
