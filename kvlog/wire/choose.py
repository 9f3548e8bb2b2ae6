"""Which codec: a choice from measured figures, with its reason in one sentence.

    rate of a codec = min(network x ratio, encode x cores, decode x cores)        rate of raw = network

Compression is worth its CPU only where the network is the limit, so raw is the answer unless a codec
carries clearly more rows a second. Everything that is measured comes in as numbers or by a clock that is a
parameter, so the same figures give the same choice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvlog.records import Codec
from kvlog.wire.codec import decode_payload_into, encode_payload

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvlog.layout import DType

__all__ = ["GAIN_MIN", "Choice", "CodecFigures", "choose", "measure"]

GAIN_MIN = 1.1
"""A codec must carry this many times raw's rows; figures measured on a busy machine move by more than 5 %."""

_ROUNDS = 3
"""Each codec is timed this often and the best round counts: the others were disturbed."""

_NS = 1_000_000_000
_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class CodecFigures:
    """One codec on one sample of real rows.

    Args:
        codec: which.
        ratio: bytes of rows / bytes of payload; below 1 where it makes them larger.
        encode_bytes_per_second: of rows, on one core.
        decode_bytes_per_second: of rows, on one core.
    """

    codec: Codec
    ratio: float
    encode_bytes_per_second: float
    decode_bytes_per_second: float


@dataclass(frozen=True, slots=True)
class Choice:
    """A codec, why, and what it was chosen from.

    Args:
        codec: to write with from now on.
        reason: one sentence for the operator.
        figures: all that were looked at.
        rows_bytes_per_second: what the chosen codec should carry; None while the network has not been
            measured.
    """

    codec: Codec
    reason: str
    figures: tuple[CodecFigures, ...]
    rows_bytes_per_second: float | None


def choose(
    figures: Sequence[CodecFigures],
    *,
    append_bytes_per_second: float | None,
    cores: float,
) -> Choice:
    """The codec that carries most rows a second, or raw where none carries clearly more.

    Args:
        figures: of the codecs that may be chosen; raw needs none. Measured on rows of the model that is
            served.
        append_bytes_per_second: what the log took while appends were waiting, in message bytes; an idle
            network's throughput says nothing. None: not measured yet.
        cores: what compression may use, in cores, 0 and up; standbys are taken to have as much.
    """
    asked = tuple(figures)
    if append_bytes_per_second is None:
        return Choice(Codec.RAW, "raw: the log's throughput has not been measured yet", asked, None)
    network = append_bytes_per_second
    rates = {each: _rate(each, network, cores) for each in asked if each.codec not in {Codec.RAW, Codec.IDS}}
    best = max(rates, key=lambda each: (rates[each], each.encode_bytes_per_second), default=None)
    if best is None:
        return Choice(Codec.RAW, "raw: no other codec was measured", asked, network)
    if rates[best] < GAIN_MIN * network:
        return Choice(Codec.RAW, _reason_raw(best, rates[best], network, cores), asked, network)
    return Choice(best.codec, _reason_codec(best, rates[best], network), asked, rates[best])


def measure(
    rows: memoryview,
    dtype: DType,
    *,
    clock_ns: Callable[[], int],
    codecs: Sequence[Codec] = (Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD),
) -> tuple[CodecFigures, ...]:
    """Encode and decode a sample with each codec, on the calling thread.

    Args:
        rows: whole rows, C-contiguous, at least one; 1 MiB is enough and takes some 30 ms.
        dtype: the element type of the cache.
        clock_ns: a monotonic clock, for example time.perf_counter_ns.
        codecs: which to try; not IDS, which has no payload.
    """
    assert Codec.IDS not in codecs, "token ids have no payload to measure"
    return tuple(_measure_one(rows, dtype, codec, clock_ns) for codec in codecs)


def _measure_one(rows: memoryview, dtype: DType, codec: Codec, clock_ns: Callable[[], int]) -> CodecFigures:
    size = rows.nbytes
    out = memoryview(bytearray(size))
    payload = encode_payload(rows, codec, dtype)

    def encode() -> None:
        encode_payload(rows, codec, dtype)

    def decode() -> None:
        decode_payload_into(payload, codec, dtype, out)

    return CodecFigures(
        codec=codec,
        ratio=size / len(payload),
        encode_bytes_per_second=size * _NS / _best_ns(encode, clock_ns),
        decode_bytes_per_second=size * _NS / _best_ns(decode, clock_ns),
    )


def _best_ns(work: Callable[[], None], clock_ns: Callable[[], int]) -> int:
    """At least 1: a coarse clock may not have moved."""

    def once() -> int:
        began = clock_ns()
        work()
        return clock_ns() - began

    return max(1, min(once() for _ in range(_ROUNDS)))


def _rate(figures: CodecFigures, network: float, cores: float) -> float:
    slower = min(figures.encode_bytes_per_second, figures.decode_bytes_per_second)
    return min(network * figures.ratio, slower * cores)


def _reason_raw(best: CodecFigures, rate: float, network: float, cores: float) -> str:
    limit = f"its ratio is {best.ratio:.2f}"
    if rate < network * best.ratio:
        limit = f"{cores:g} cores are its limit"
    return (
        f"raw: {_name(best)} would carry {_megabytes(rate)} of rows and raw carries {_megabytes(network)}, "
        f"because {limit}; less than {GAIN_MIN:g} times is not worth the CPU"
    )


def _reason_codec(best: CodecFigures, rate: float, network: float) -> str:
    limit = "the network is still the limit"
    if rate < network * best.ratio:
        limit = "the CPU is then the limit"
    return (
        f"{_name(best)}: it carries {_megabytes(rate)} of rows and raw carries {_megabytes(network)}, "
        f"because its ratio is {best.ratio:.2f}; {limit}"
    )


def _name(figures: CodecFigures) -> str:
    return figures.codec.name.lower()


def _megabytes(bytes_per_second: float) -> str:
    return f"{bytes_per_second / _MB:.0f} MB/s"
