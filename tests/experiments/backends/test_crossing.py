"""The wire's arithmetic: when packets arrive that queue at cards and travel for a while."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Crossing, Link

PLAIN = Link()


def crossing(*, sites=(0, 0, 0), near=PLAIN, far=PLAIN, room=10**9):
    return Crossing(sites=sites, near=near, far=far, room=room)


def arrivals(wire, until=1e9):
    """Packets in the order in which they come out, with their times."""
    return [(packet, pytest.approx(due)) for due, _, packet in wire.leave(until)]


def test_a_packet_takes_its_own_length_and_the_latency():
    wire = crossing(near=Link(latency=0.5, seconds_per_byte=0.01))
    wire.enter("a", size=100, source=0, target=1, now=10.0)
    assert wire.next_time() == pytest.approx(11.5)
    assert list(wire.leave(11.4)) == []
    assert arrivals(wire, 11.6) == [("a", 11.5)]
    assert wire.next_time() is None


def test_two_senders_share_the_card_of_the_receiver():
    wire = crossing(near=Link(seconds_per_byte=0.01))
    for name, source in (("a", 0), ("b", 1), ("c", 0), ("d", 1)):
        wire.enter(name, size=100, source=source, target=2, now=0.0)
    # Each sender alone has its second packet out at 2; together they take 4.
    assert arrivals(wire) == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]


def test_what_goes_to_another_site_is_slower_at_both_ends_and_does_not_hold_up_neighbours():
    wire = crossing(
        sites=(0, 0, 1), near=Link(latency=0.1, seconds_per_byte=0.01), far=Link(latency=5.0, seconds_per_byte=0.1)
    )
    wire.enter("far", size=100, source=0, target=2, now=0.0)
    wire.enter("far too", size=100, source=0, target=2, now=0.0)
    wire.enter("near", size=100, source=0, target=1, now=0.0)
    wire.enter("from a neighbour", size=100, source=1, target=2, now=0.0)
    # The card sends three packets in 3 s; those for the other site leave it 10 s apart, and meet the neighbour's there.
    assert arrivals(wire) == [("near", 3.1), ("far", 15.0), ("from a neighbour", 25.0), ("far too", 35.0)]


def test_what_does_not_fit_is_dropped_and_room_comes_back():
    wire = crossing(near=Link(latency=1.0), room=250)
    assert [wire.enter(name, size=100, source=0, target=1, now=0.0) for name in "abc"] == [True, True, False]
    assert wire.dropped == 1
    assert arrivals(wire) == [("a", 1.0), ("b", 1.0)]
    assert wire.enter("d", size=100, source=0, target=1, now=2.0)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 1000), st.floats(0, 1)), max_size=30),
    st.booleans(),
)
def test_order_is_kept_and_no_card_is_faster_than_it_is(packets, at_once):
    near, far = Link(latency=0.2, seconds_per_byte=0.001), Link(latency=2.0, seconds_per_byte=0.004)
    sites = (0, 0, 1, 1)
    wire = crossing(sites=sites, near=near, far=far)
    now, out = 0.0, []
    for number, (source, target, size, pause) in enumerate(packets):
        now += 0.0 if at_once else pause
        out += wire.leave(now)
        wire.enter((number, source, target, size, now), size=size, source=source, target=target, now=now)
    out += wire.leave(1e9)
    assert len(out) == len(packets)
    assert [due for due, _, _ in out] == sorted(due for due, _, _ in out)
    last, received = {}, {}
    for due, target, (number, source, aim, size, sent) in out:
        is_far = sites[source] != sites[target]
        link = far if is_far else near
        assert target == aim
        assert last.get((source, target), -1) < number
        last[source, target] = number
        assert due >= sent + link.latency + size * link.seconds_per_byte - 1e-9
        received.setdefault((target, link), []).append((due, size))
    for (_, link), packets_there in received.items():
        for (before, _), (after, size) in itertools.pairwise(packets_there):
            assert after - before >= size * link.seconds_per_byte - 1e-9
