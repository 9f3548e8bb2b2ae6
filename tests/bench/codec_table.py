"""Codec table: ratio, encode and decode GB/s of each payload codec on given rows, one thread.

    python -m tests.bench.codec_table                               synthetic bfloat16 rows
    python -m tests.bench.codec_table --dtype float16 --file rows   a file of real rows

Rounds of all codecs are interleaved, so that a disturbance hits each alike; medians count, and the spread is shown.
Figures of synthetic rows say little about ratio on a real model: channel scales decide, and these are a guess.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvlog.layout import DType
from kvlog.records import Codec
from kvlog.wire.choose import measure

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["CodecRow", "codec_table", "synthetic_rows"]

CODECS = (Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD)
CHANNELS = 64
NO_WORK_GB_PER_SECOND = 200
"""Faster than any memory: nothing was copied."""


@dataclass(frozen=True, slots=True)
class CodecRow:
    """One line of the table; GB/s of rows (10**9), medians over the rounds, with the quickest and slowest round."""

    codec: str
    ratio: float
    encode: tuple[float, float, float]
    decode: tuple[float, float, float]


def codec_table(rows: memoryview, dtype: DType, *, rounds: int = 7) -> list[CodecRow]:
    """Measures every codec on these rows.

    Args:
        rows: whole rows, C-contiguous.
        dtype: their element type.
        rounds: each has three tries of each codec, of which the best counts.
    """
    seen = [measure(rows, dtype, clock_ns=time.perf_counter_ns, codecs=CODECS) for _ in range(rounds)]
    return [
        CodecRow(
            codec=figures[0].codec.name.lower(),
            ratio=figures[0].ratio,
            encode=_spread([each.encode_bytes_per_second for each in figures]),
            decode=_spread([each.decode_bytes_per_second for each in figures]),
        )
        for figures in zip(*seen, strict=True)
    ]


def synthetic_rows(size: int, dtype: DType) -> memoryview:
    """Makes rows whose channels differ in scale by a log-normal factor, as keys and values do; seeded."""
    random = np.random.default_rng(7)
    scales = np.exp(random.normal(0.0, 1.0, CHANNELS)).astype(np.float32)
    values = random.normal(0.0, 1.0, (size // CHANNELS, CHANNELS)).astype(np.float32) * scales
    return memoryview(_CONVERT[dtype](values).tobytes()[:size])


def _bfloat16(values: np.ndarray) -> np.ndarray:
    return ((values.view(np.uint32) + 0x8000) >> 16).astype(np.uint16)


_CONVERT: dict[DType, Callable[[np.ndarray], np.ndarray]] = {
    DType.BFLOAT16: _bfloat16,
    DType.FLOAT16: lambda values: values.astype(np.float16),
    DType.FLOAT32: lambda values: values,
    DType.UINT8: lambda values: np.clip(values * 16, -127, 127).astype(np.int8).view(np.uint8),
}


def _spread(rates: Sequence[float]) -> tuple[float, float, float]:
    return tuple(round(each / 1e9, 3) for each in (statistics.median(rates), min(rates), max(rates)))  # type: ignore[return-value]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a file of rows; without it they are synthetic")
    parser.add_argument("--dtype", type=DType, default=DType.BFLOAT16, choices=list(DType))
    parser.add_argument("--bytes", type=int, default=1 << 20, help="how much of it to use (default 1 MiB)")
    given = parser.parse_args()
    rows = (
        memoryview(given.file.read_bytes())[: given.bytes]
        if given.file
        else synthetic_rows(given.bytes, given.dtype)
    )
    print(
        f"{given.dtype}, {len(rows)} bytes, {'rows of ' + str(given.file) if given.file else 'synthetic rows'}"
    )
    print(f"{'codec':<12}{'ratio':>7}{'encode GB/s':>24}{'decode GB/s':>24}")
    for row in codec_table(rows, given.dtype):
        print(f"{row.codec:<12}{row.ratio:>7.3f}{_cell(row.encode):>24}{_cell(row.decode):>24}")


def _cell(spread: tuple[float, float, float]) -> str:
    median, low, high = spread
    if median > NO_WORK_GB_PER_SECOND:
        return "a view, no copy"
    return f"{median:.2f} ({low:.2f}-{high:.2f})"


if __name__ == "__main__":
    main()
