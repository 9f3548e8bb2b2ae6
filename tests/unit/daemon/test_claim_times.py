"""The parts of a claim's time, from marks that are set in any order and sometimes not at all."""

from __future__ import annotations

from daemon.claim_times import ClaimTimes
from kvlog.ids import SessionId

S = SessionId("s")


def test_claim_times_are_to_durable_and_from_there_to_read_back():
    """The two parts add up to the time from the first asking."""
    times = ClaimTimes()
    times.asked(S, 1.0)
    times.asked(S, 1.5)  # the first watermark could not be read
    times.durable(S, 1.75)
    assert {"claim_ms": 750.0, "read_back_ms": 250.0} == times.read_back(S, 2.0)


def test_claim_times_of_a_claim_read_before_its_writer_knew_have_no_second_part():
    """A reader may see a claim before the append has been answered."""
    times = ClaimTimes()
    times.asked(S, 1.0)
    assert {"claim_ms": 1000.0, "read_back_ms": 0.0} == times.read_back(S, 2.0)


def test_claim_times_of_an_unknown_claim_are_absent():
    """What was not measured is not said, and a claim is told once."""
    times = ClaimTimes()
    times.durable(S, 1.0)
    assert {} == times.read_back(S, 2.0)
    times.asked(S, 3.0)
    times.read_back(S, 4.0)
    assert {} == times.read_back(S, 5.0)


def test_claim_times_of_claims_that_never_return_are_bounded():
    """The oldest of too many marks goes."""
    times = ClaimTimes()
    for number in range(2000):
        times.asked(SessionId(str(number)), 1.0)
    assert {} == times.read_back(SessionId("0"), 2.0)
    assert {} != times.read_back(SessionId("1999"), 2.0)
