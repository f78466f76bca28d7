"""Clocks of hosts: bounds of their offsets that hold whatever the ways take, and messages that go back in time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.inside import (
    MAX_DRIFT,
    ClockReading,
    Ping,
    assemble_timeline,
    clock_note,
    early_messages,
    offset_at,
    read_clock,
)

from stagewright.schedules import Costs, build, simulate

from .random_schedules import steady
from .test_records import records_of


class Apart:
    """Two hosts: this one's clock shows `ahead + (1 + drift) * t` where that of rank 0 shows t."""

    def __init__(self, *, ahead: float, drift: float = 0.0) -> None:
        self.ahead, self.drift = ahead, drift

    def here(self, t: float) -> float:
        return self.ahead + (1 + self.drift) * t

    def ping(self, t: float, *, there: float, back: float) -> Ping:
        """A ping at time t that takes so long there, and so long back [s]."""
        return self.here(t), t + there, self.here(t + there + back)

    def offset(self, t: float) -> float:
        """To add to this host's clock at time t."""
        return t - self.here(t)


def test_the_quickest_ping_counts_and_an_uneven_way_stays_within_its_error() -> None:
    """All of the round trip may be the way there, or the way back: the offset is off by half of it, never by more."""
    hosts = Apart(ahead=1000.0)
    slow = hosts.ping(0.0, there=0.25, back=0.25)
    assert read_clock([slow]) == ClockReading(1000.25, -1000.0, 0.25)
    assert read_clock([slow, hosts.ping(1.0, there=0.125, back=0.0)]).error == 0.0625
    for there, back, off in ((0.125, 0.0, 0.0625), (0.0, 0.125, -0.0625), (0.0625, 0.0625, 0.0)):
        reading = read_clock([slow, hosts.ping(2.0, there=there, back=back)])
        assert (reading.offset, reading.error) == (-1000.0 + off, 0.0625)
    with pytest.raises(ValueError, match="no ping: expected at least one round trip"):
        read_clock([])


seconds = st.floats(0, 0.1, allow_subnormal=False)


@steady
@given(
    st.floats(-1e6, 1e6),
    st.floats(-5e-5, 5e-5),
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    st.lists(st.tuples(seconds, seconds), min_size=1, max_size=5),
    st.floats(0, 1),
)
def test_what_lies_between_two_readings_is_within_the_error(
    ahead: float, drift: float, first: list[tuple[float, float]], last: list[tuple[float, float]], part: float
) -> None:
    hosts = Apart(ahead=ahead, drift=drift)
    ends = [
        read_clock(hosts.ping(at + k, there=a, back=b) for k, (a, b) in enumerate(pings))
        for at, pings in ((0.0, first), (3600.0, last))
    ]
    t = 5 + part * 3590
    offset, error = offset_at(ends, hosts.here(t))
    assert abs(offset - hosts.offset(t)) <= error * (1 + 1e-3) + 1e-6  # seconds of a drifting clock, and of floats
    assert error <= max(end.error for end in ends) * (1 + 1e-12)


def test_drift_is_taken_out_between_readings_and_allowed_for_outside() -> None:
    readings = [ClockReading(10.0, 1.0, 0.25), ClockReading(20.0, 3.0, 0.75)]
    assert offset_at(readings, 10.0) == (1.0, 0.25)
    assert offset_at(readings, 15.0) == (2.0, 0.5)
    assert offset_at(readings, 17.5) == (2.5, 0.625)
    assert offset_at(readings, 120.0) == (3.0, 0.75 + 100 * MAX_DRIFT)
    assert offset_at(readings, 0.0) == (1.0, 0.25 + 10 * MAX_DRIFT)
    assert offset_at(readings[:1], 1010.0) == (1.0, 0.25 + 1000 * MAX_DRIFT)
    assert offset_at([], 5.0) == (0.0, 0.0)
    three = [*readings, ClockReading(30.0, 0.0, 0.0)]
    assert (offset_at(three, 15.0), offset_at(three, 25.0)) == ((2.0, 0.5), (1.5, 0.375))
    twice = [readings[0], readings[0]]
    assert offset_at(twice, 10.0) == (1.0, 0.25)


def test_a_message_before_its_time_is_told_with_what_the_clocks_explain() -> None:
    schedule = build("1f1b", num_ranks=2, num_microbatches=2)
    records = records_of(simulate(schedule, Costs(latency=0.25)))
    wrong = replace(records[1], offset=-0.5)  # the truth is 0: rank 1 seems half a second early
    within = assemble_timeline(schedule, [records[0], replace(wrong, error=0.5)])
    early = early_messages(within)
    assert [(tuple(message), *seconds) for message, *seconds in early] == [(("act", 0, 1, 0), 0.25, 0.5)]
    assert clock_note(within) == (
        "clocks of hosts aligned to ±500 ms; by them 1 message came up to 250 ms before being sent, which that explains"
    )
    beyond = assemble_timeline(schedule, [records[0], replace(wrong, error=0.125)])
    assert clock_note(beyond).endswith("before being sent, 1 of them by more than that explains")
    for rank in within.ranks:  # nothing is drawn backwards
        assert all(start <= end for _, start, end in (*rank.compute, *rank.comm))
    assert clock_note(assemble_timeline(schedule, [records[0], replace(records[1], error=1e-5)])) == (
        "clocks of hosts aligned to ±10.0 us"
    )
    assert clock_note(assemble_timeline(schedule, records)) == ""
