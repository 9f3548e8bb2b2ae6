"""The messages in fetched bytes, whatever is in them."""

from __future__ import annotations

import gzip
import struct

import pytest
from aiokafka.errors import KafkaError
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from hypothesis import given
from hypothesis import strategies as st

from kvlog.log.kafka_records import FetchedMessage, read_records

BASE_AT, LENGTH_AT, EPOCH_AT, MAGIC_AT, ATTRIBUTES_AT, DELTA_AT = 0, 8, 12, 16, 21, 23
CONTROL = 0x20
LOG_APPEND_TIME = 0x08


def batch(base: int, *values: bytes | None, epoch: int = 7) -> bytearray:
    """A batch as a broker stores it: with its offset and leader epoch."""
    builder = DefaultRecordBatchBuilder(
        magic=2, compression_type=0, is_transactional=0, producer_id=1, producer_epoch=0, base_sequence=0,
        batch_size=1 << 20,
    )  # fmt: skip
    for n, value in enumerate(values):
        builder.append(n, 1_700_000_000_000 + n, b"key", value, [("kind", b"2")])
    data = bytearray(builder.build())
    struct.pack_into(">q", data, BASE_AT, base)
    struct.pack_into(">i", data, EPOCH_AT, epoch)
    return data


def offsets_and_values(messages: list[FetchedMessage]) -> list[tuple[int, bytes | memoryview | None]]:
    """What matters of messages."""
    return [(message.offset, message.value) for message in messages]


def test_messages_of_batches_come_in_order_with_the_last_epoch() -> None:
    """Offsets are the batch's base and on; the epoch is the last batch's; reading goes on behind the last one."""
    found = read_records(bytes(batch(10, b"a", b"b", epoch=3) + batch(12, b"c", epoch=4)), 10)
    assert [(10, b"a"), (11, b"b"), (12, b"c")] == offsets_and_values(found.messages)
    assert (13, 4) == (found.next_offset, found.epoch)
    assert [b"key"] * 3 == [message.key for message in found.messages]


def test_messages_below_the_offset_are_left_out() -> None:
    """A broker returns whole batches; what was read before is not returned again."""
    found = read_records(bytes(batch(10, b"a", b"b", b"c")), 11)
    assert [(11, b"b"), (12, b"c")] == offsets_and_values(found.messages)


def test_tombstone_is_none() -> None:
    """A deleted key's value is None, and an empty one is empty."""
    assert [(0, None), (1, b"")] == offsets_and_values(read_records(bytes(batch(0, None, b"")), 0).messages)


def test_log_append_time_is_the_batches() -> None:
    """With LogAppendTime every message has the time at which the broker took its batch."""
    data = batch(0, b"a", b"b")
    struct.pack_into(">h", data, ATTRIBUTES_AT, LOG_APPEND_TIME)
    stamps = {message.timestamp_ms for message in read_records(bytes(data), 0).messages}
    assert {1_700_000_000_001} == stamps


def test_batch_cut_off_by_the_fetch_size_comes_again() -> None:
    """An incomplete last batch is left for the next fetch."""
    whole, cut = batch(0, b"a"), batch(1, b"b")
    for size in (0, 5, 11, 12, 60, len(cut) - 1):
        found = read_records(bytes(whole + cut[:size]), 0)
        assert ([(0, b"a")], 1) == (offsets_and_values(found.messages), found.next_offset)


def test_control_batch_is_passed_over() -> None:
    """A foreign transaction's marker is no message, but takes an offset."""
    data = batch(0, b"commit marker")
    struct.pack_into(">h", data, ATTRIBUTES_AT, CONTROL)
    found = read_records(bytes(data + batch(1, b"a")), 0)
    assert ([(1, b"a")], 2) == (offsets_and_values(found.messages), found.next_offset)


def test_batch_emptied_by_compaction_is_passed_over() -> None:
    """Compaction leaves a batch's header behind; reading goes on after the offsets that it had."""
    data = batch(4)
    struct.pack_into(">i", data, DELTA_AT, 5)
    found = read_records(bytes(data), 4)
    assert ([], 10) == (found.messages, found.next_offset)


def test_compressed_batch_becomes_empty_messages() -> None:
    """We compress nothing in batches; a foreign one may be a bomb, so it is not unpacked, and not skipped either."""
    plain = batch(0, b"x" * 1000, b"y")
    packed = plain[:61] + gzip.compress(bytes(plain[61:]))
    struct.pack_into(">h", packed, ATTRIBUTES_AT, 1)
    struct.pack_into(">i", packed, LENGTH_AT, len(packed) - 12)
    found = read_records(bytes(packed + batch(2, b"a")), 0)
    assert [(0, b""), (1, b""), (2, b"a")] == offsets_and_values(found.messages)


def test_damaged_batch_becomes_empty_messages() -> None:
    """A batch whose records cannot be taken apart is refused record by record, by the fold."""
    data = batch(0, b"a", b"b")
    data[61:] = b"\xff" * (len(data) - 61)
    found = read_records(bytes(data + batch(2, b"c")), 0)
    assert [(0, b""), (1, b""), (2, b"c")] == offsets_and_values(found.messages)


def test_batch_of_another_format_becomes_an_empty_message() -> None:
    """A format that we do not read is refused."""
    data = batch(3, b"a")
    data[MAGIC_AT] = 1
    found = read_records(bytes(data), 3)
    assert ([(3, b"")], 4) == (offsets_and_values(found.messages), found.next_offset)


def test_damaged_batch_with_a_huge_range_stays_bounded() -> None:
    """A header that lies about its range cannot make us fill the memory."""
    data = batch(0, b"a")
    data[61:] = b"\xff" * (len(data) - 61)
    struct.pack_into(">i", data, DELTA_AT, (1 << 31) - 2)
    found = read_records(bytes(data), 0)
    assert (1 << 16, (1 << 31) - 1) == (len(found.messages), found.next_offset)


@given(st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4), st.integers(0, 6))
def test_any_damage_gives_messages_and_never_goes_back(flips: list[tuple[int, int]], offset: int) -> None:
    """Whatever bytes change, reading ends without an error, offsets do not decrease, and nothing below comes back."""
    data = batch(0, b"a" * 20, b"b" * 20) + batch(2, b"c" * 30, None, b"d")
    for at, value in flips:
        data[at % len(data)] = value
    # Offsets of a damaged header may be any number; the range is bounded by the test above.
    found = read_records(bytes(data), offset)
    assert found.next_offset >= offset
    assert all(message.offset >= offset for message in found.messages)


@given(st.lists(st.tuples(st.integers(61, 220), st.integers(0, 255)), max_size=3), st.binary(max_size=3))
def test_batch_is_read_and_refused_as_by_aiokafka(flips: list[tuple[int, int]], tail: bytes) -> None:
    """Its own reader, which copies each value, finds the same messages in any bytes, and refuses the same batches."""
    data = batch(0, b"a" * 20, None, b"b" * 70, b"") + tail
    struct.pack_into(">i", data, LENGTH_AT, len(data) - 12)
    for at, value in flips:
        data[61 + at % (len(data) - 61)] = value
    try:
        expected = [(r.offset, r.timestamp, r.key, r.value) for r in DefaultRecordBatch(bytes(data))]
    except (KafkaError, ValueError, IndexError):
        expected = [(offset, 0, None, b"") for offset in range(4)]
    expected = [message for message in expected if message[0] >= 0]
    assert expected == [tuple(message) for message in read_records(bytes(data), 0).messages]


def test_value_is_a_view_of_what_was_fetched() -> None:
    """Records are large: none is copied before its rows go to their place."""
    data = memoryview(bytes(batch(0, b"a" * 1000)))
    (message,) = read_records(data, 0).messages
    assert isinstance(message.value, memoryview)
    assert message.value.obj is data.obj


@pytest.mark.parametrize("data", [b"", b"\0", bytes(12), bytes(61), b"\xff" * 200])
def test_bytes_that_are_no_batch_give_nothing(data: bytes) -> None:
    """Rubbish moves nothing."""
    found = read_records(data, 5)
    assert 5 <= found.next_offset <= 6
