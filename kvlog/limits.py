"""Every bound of kvlog in one place, with its unit and the reason for its size; and a tiny preset for the simulator.

Relations between bounds are asserted where a Limits is made (INV-LIMITS).
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEFAULT", "TINY", "Limits"]

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Limits:
    """The bounds that cores, wire, link and shells obey.

    Args:
        record_bytes: one Kafka message's value; 900 KiB fits a broker's default of 1 MiB.
        header_bytes: a msgpack header; a claim is about 300 bytes, a delta 5 bytes a token.
        delta_tokens: positions in one delta; bounds the header.
        session_tokens: positions of one session; a longer one goes on unlogged.
        shards: tensor-parallel ranks of one session.
        sessions_a_partition: fold states kept; past it the least recently used idle one is dropped.
        primaries: sessions that one node owns; past it the least recently used idle one is let go, to be claimed again.
        reread_attempts: how often a record that breaks a session is read again before that is believed.
        reread_records: how far back a re-read goes at most, in offsets; a gap from further back breaks it.
        claim_attempts: how often one take-over claims before it gives up as fenced.
        claim_ns: how long a take-over that nobody waits for any more is kept; its claim may be lost without a word.
        takeovers_in_flight: claims that one node has on their way; paces the claims after an outage.
        decoded_bytes: the most that one payload may decompress to, whatever it says of itself.
        control_message_bytes: one message on the unix socket; a turn's token ids are the largest part.
        publish_queue_bytes: rows taken from rings and not yet appended; when full, rings are not read.
        pinned_blocks_share: the most of the pool that attaches may pin, in percent.
    """

    record_bytes: int = 900 * KIB
    header_bytes: int = 64 * KIB
    delta_tokens: int = 4096
    session_tokens: int = 1 << 20
    shards: int = 64
    sessions_a_partition: int = 100_000
    primaries: int = 4096
    reread_attempts: int = 2
    reread_records: int = 10_000
    claim_attempts: int = 4
    claim_ns: int = 60_000_000_000
    takeovers_in_flight: int = 64
    decoded_bytes: int = 64 * MIB
    control_message_bytes: int = 8 * MIB
    publish_queue_bytes: int = 64 * MIB
    pinned_blocks_share: int = 50

    def __post_init__(self) -> None:
        """INV-LIMITS: a header fits its record, and a full delta's token ids fit the header."""
        assert self.header_bytes < self.record_bytes, "a header must leave room for rows"
        assert 5 * self.delta_tokens + 1024 <= self.header_bytes, (
            "token ids of a full delta must fit the header"
        )
        assert self.record_bytes <= self.decoded_bytes, "a raw record must be decodable"


DEFAULT = Limits()

TINY = Limits(
    record_bytes=2048,
    header_bytes=1200,
    delta_tokens=4,
    session_tokens=64,
    shards=4,
    sessions_a_partition=3,
    primaries=64,
    reread_attempts=1,
    reread_records=8,
    claim_attempts=2,
    claim_ns=100_000_000,
    takeovers_in_flight=2,
    decoded_bytes=4096,
    control_message_bytes=4096,
    publish_queue_bytes=4096,
    pinned_blocks_share=50,
)
