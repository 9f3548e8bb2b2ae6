"""The automatic choice of a codec: from figures alone, with a reason that an operator can read."""

from __future__ import annotations

import itertools

import pytest

from kvlog.layout import DType
from kvlog.records import Codec
from kvlog.wire.choose import GAIN_MIN, Choice, CodecFigures, choose, measure

GB = 1e9
MB = 1e6
RAW = CodecFigures(Codec.RAW, 1.0, 1000 * GB, 20 * GB)
LZ4 = CodecFigures(Codec.LZ4, 0.996, 5 * GB, 10 * GB)
SPLIT = CodecFigures(Codec.SPLIT_ZSTD, 1.44, 1.0 * GB, 2.0 * GB)
ALL = (RAW, LZ4, SPLIT)


def test_choose_slow_network_takes_the_best_ratio() -> None:
    """Where the network is the limit, rows flow faster by the ratio."""
    expected = Choice(
        codec=Codec.SPLIT_ZSTD,
        reason=(
            "split_zstd: it carries 86 MB/s of rows and raw carries 60 MB/s, because its ratio is 1.44; "
            "the network is still the limit"
        ),
        figures=ALL,
        rows_bytes_per_second=60 * MB * 1.44,
    )
    assert expected == choose(ALL, append_bytes_per_second=60 * MB, cores=1.0)


def test_choose_fast_network_stays_raw() -> None:
    """Where the CPU would be the limit, raw carries more."""
    choice = choose(ALL, append_bytes_per_second=1.2 * GB, cores=0.5)
    assert choice.codec is Codec.RAW
    assert choice.rows_bytes_per_second == 1.2 * GB
    assert choice.reason == (
        "raw: lz4 would carry 1195 MB/s of rows and raw carries 1200 MB/s, because its ratio is 1.00; "
        "less than 1.1 times is not worth the CPU"
    )


def test_choose_with_few_cores_says_that_they_are_the_limit() -> None:
    """The reason names the cores where they decide."""
    choice = choose([SPLIT], append_bytes_per_second=200 * MB, cores=0.1)
    assert choice.reason == (
        "raw: split_zstd would carry 100 MB/s of rows and raw carries 200 MB/s, because 0.1 cores are its limit; "
        "less than 1.1 times is not worth the CPU"
    )


def test_choose_with_the_cpu_as_the_limit_may_still_compress() -> None:
    """A codec that the CPU limits is right as long as it carries clearly more than raw."""
    choice = choose([SPLIT], append_bytes_per_second=800 * MB, cores=1.0)
    assert choice.codec is Codec.SPLIT_ZSTD
    assert choice.rows_bytes_per_second == 1.0 * GB
    assert choice.reason.endswith("the CPU is then the limit")


def test_choose_counts_the_slower_side() -> None:
    """A standby that cannot decode as fast is no gain."""
    slow_to_decode = CodecFigures(Codec.SPLIT_ZSTD, 1.44, 2 * GB, 0.1 * GB)
    assert choose([slow_to_decode], append_bytes_per_second=400 * MB, cores=1.0).codec is Codec.RAW


def test_choose_gain_is_taken_from_the_bound_on() -> None:
    """A codec is chosen exactly from the least gain on."""
    just = CodecFigures(Codec.LZ4, GAIN_MIN, 5 * GB, 5 * GB)
    below = CodecFigures(Codec.LZ4, GAIN_MIN - 0.001, 5 * GB, 5 * GB)
    assert choose([just], append_bytes_per_second=100 * MB, cores=1.0).codec is Codec.LZ4
    assert choose([below], append_bytes_per_second=100 * MB, cores=1.0).codec is Codec.RAW


def test_choose_between_equal_rates_takes_the_cheaper() -> None:
    """Of two codecs that carry as much, the one that needs less CPU."""
    cheap = CodecFigures(Codec.LZ4, 1.44, 5 * GB, 5 * GB)
    for order in itertools.permutations([cheap, SPLIT]):
        assert choose(order, append_bytes_per_second=100 * MB, cores=1.0).codec is Codec.LZ4


def test_choose_without_a_measured_network_stays_raw() -> None:
    """Unknown is not zero: nothing is decided from a throughput that nobody has seen."""
    expected = Choice(Codec.RAW, "raw: the log's throughput has not been measured yet", ALL, None)
    assert expected == choose(ALL, append_bytes_per_second=None, cores=1.0)


@pytest.mark.parametrize("figures", [(), (RAW,), (CodecFigures(Codec.IDS, 1e9, 1e12, 1e12),)])
def test_choose_without_another_codec_stays_raw(figures: tuple[CodecFigures, ...]) -> None:
    """Token ids only is a policy, never a codec that is chosen for its ratio."""
    expected = Choice(Codec.RAW, "raw: no other codec was measured", figures, 100 * MB)
    assert expected == choose(figures, append_bytes_per_second=100 * MB, cores=1.0)


def test_measure_takes_time_from_the_clock_that_it_is_given() -> None:
    """Each codec is timed by the clock alone: the same readings give the same figures."""
    ticks = itertools.count(step=1_000_000)
    rows = memoryview(bytes(4096))
    figures = measure(rows, DType.BFLOAT16, clock_ns=lambda: next(ticks))
    assert [each.codec for each in figures] == [Codec.RAW, Codec.LZ4, Codec.SPLIT_ZSTD]
    assert {each.encode_bytes_per_second for each in figures} == {4096 * 1000.0}
    assert {each.decode_bytes_per_second for each in figures} == {4096 * 1000.0}
    assert figures[0].ratio == 1.0
    assert figures[1].ratio > 50


def test_measure_counts_the_best_round() -> None:
    """A round that was disturbed does not count."""
    readings = iter([0, 900, 1000, 1100, 2000, 2500] * 2)
    (raw,) = measure(memoryview(bytes(100)), DType.UINT8, clock_ns=lambda: next(readings), codecs=[Codec.RAW])
    assert raw.encode_bytes_per_second == raw.decode_bytes_per_second == 1 * GB


def test_measure_by_a_clock_that_stands_still_divides_by_nothing() -> None:
    """A coarse clock may not move within a round."""
    (raw,) = measure(memoryview(bytes(100)), DType.UINT8, clock_ns=lambda: 7, codecs=[Codec.RAW])
    assert raw.encode_bytes_per_second == 100 * GB


def test_measure_of_token_ids_is_the_callers_fault() -> None:
    """There is no payload to measure."""
    with pytest.raises(AssertionError, match="no payload"):
        measure(memoryview(b"ab"), DType.UINT8, clock_ns=lambda: 0, codecs=[Codec.IDS])
