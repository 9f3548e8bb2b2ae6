"""Cutting: pieces are whole, in order, as large as a record takes and never larger."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from kvlog.checksums import checksum
from kvlog.errors import RowTooLarge
from kvlog.ids import Position
from kvlog.layout import DType
from kvlog.limits import DEFAULT, TINY, Limits
from kvlog.records import Codec
from kvlog.wire.codec import encode_payload
from kvlog.wire.cut import Piece, check_row, cut, delta_bytes_max, rows_a_record
from kvlog.wire.frame import PREAMBLE_BYTES
from kvlog.wire.header import header_bytes
from kvlog.wire.message import encode
from tests.unit.wire.samples import U64_MAX, WIDEST_DELTA

LLAMA_8B_ROW = 128 << 10
FIXED_BYTES = delta_bytes_max(0, row_bytes=1, codec=Codec.IDS)


def test_cut_reckons_with_the_widest_header() -> None:
    """The fixed estimate is an upper bound on the header of any delta, and not a loose one."""
    tokens = (0,) * DEFAULT.delta_tokens
    widest = WIDEST_DELTA._replace(tokens=tokens, start=Position(DEFAULT.session_tokens - len(tokens)))
    actual = PREAMBLE_BYTES + len(header_bytes(widest))
    assert actual <= FIXED_BYTES + 4 * len(tokens) <= actual + 16


@pytest.mark.parametrize("codec", [Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD])
@pytest.mark.parametrize("row_bytes", [4, 100, 23_040, 70_000, 900_000])
def test_cut_piece_of_incompressible_rows_fits_a_record(codec: Codec, row_bytes: int) -> None:
    """A full piece fits, whatever its rows and its session are; one position more would not surely fit."""
    count = rows_a_record(row_bytes, codec=codec)
    payload = encode_payload(np.random.default_rng(2).bytes(count * row_bytes), codec, DType.UINT8)
    record = WIDEST_DELTA._replace(
        codec=codec,
        tokens=(1,) * count,
        start=Position(0),
        payload_checksum=checksum(payload),
    )
    assert len(encode(record, chain=U64_MAX, payload=payload)) <= DEFAULT.record_bytes
    if count < DEFAULT.delta_tokens:
        assert delta_bytes_max(count + 1, row_bytes=row_bytes, codec=codec) > DEFAULT.record_bytes


def test_cut_of_a_large_model_fills_its_records() -> None:
    """Seven rows of 128 KiB make 896 KiB, and a record takes 900."""
    assert rows_a_record(LLAMA_8B_ROW, codec=Codec.RAW) == 7


def test_cut_of_token_ids_is_bounded_by_their_number() -> None:
    """Without rows the bound is `delta_tokens`."""
    assert rows_a_record(LLAMA_8B_ROW, codec=Codec.IDS) == DEFAULT.delta_tokens


def test_cut_gives_whole_pieces_and_a_rest() -> None:
    """Pieces are contiguous, all but the last full."""
    expected = [Piece(0, 7), Piece(7, 7), Piece(14, 3)]
    assert expected == list(cut(17, row_bytes=LLAMA_8B_ROW, codec=Codec.RAW))


def test_cut_of_what_fits_is_one_piece() -> None:
    """A delta that fits is not cut."""
    assert list(cut(7, row_bytes=LLAMA_8B_ROW, codec=Codec.RAW)) == [Piece(0, 7)]


def test_cut_of_nothing_is_nothing() -> None:
    """No positions, no pieces."""
    assert list(cut(0, row_bytes=LLAMA_8B_ROW, codec=Codec.RAW)) == []


@pytest.mark.parametrize("positions", [1, 2, 3, 4, 5, 63, 64])
@pytest.mark.parametrize("row_bytes", [1, 500, 1_500])
@pytest.mark.parametrize("codec", Codec)
def test_cut_pieces_cover_every_position_once(positions: int, row_bytes: int, codec: Codec) -> None:
    """No position is lost or doubled, and every piece keeps to both bounds."""
    pieces = list(cut(positions, row_bytes=row_bytes, codec=codec, limits=TINY))
    ends = itertools.accumulate(piece.count for piece in pieces)
    assert [piece.first for piece in pieces] == [0, *ends][:-1]
    assert sum(piece.count for piece in pieces) == positions
    assert all(1 <= piece.count <= TINY.delta_tokens for piece in pieces)
    sizes = [delta_bytes_max(piece.count, row_bytes=row_bytes, codec=codec) for piece in pieces]
    assert max(sizes) <= TINY.record_bytes


def test_cut_row_over_the_limit_names_both_numbers() -> None:
    """A row that no record can carry is refused before anything is encoded."""
    with pytest.raises(RowTooLarge) as refusal:
        cut(1, row_bytes=TINY.record_bytes, codec=Codec.RAW, limits=TINY)
    assert refusal.value.fields == {"row_bytes": 2048, "record_bytes_max": 2048}


def test_check_row_is_exact_to_the_byte() -> None:
    """At start a row is taken exactly if every codec can carry it, so that the codec may change later."""
    limits = Limits(record_bytes=100_000)

    def most(row_bytes: int) -> int:
        return max(delta_bytes_max(1, row_bytes=row_bytes, codec=codec) for codec in Codec)

    largest = max(size for size in range(99_000, 100_000) if most(size) <= limits.record_bytes)
    check_row(largest, limits)
    with pytest.raises(RowTooLarge, match=f"row_bytes: {largest + 1}, record_bytes_max: 100000"):
        check_row(largest + 1, limits)


def test_check_row_takes_the_models_of_the_sizing_table() -> None:
    """A 70B model's row of 320 KiB fits the default record."""
    check_row(320 << 10)
