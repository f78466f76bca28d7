"""Messages and sums over ranks of a cluster, beside what a person works out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Topology

from stagewright.partition import Cluster, DeviceKind, Level

from .small import ring


def test_messages_between_ranks() -> None:
    topology = Topology(Cluster.parse("2x4:in=10B/s@1s,out=2B/s@3s"))
    near, far = topology.between((0,), (1,), tensor=1), topology.between((0, 1), (4, 5), tensor=1)
    assert (near.seconds(20), far.seconds(20)) == (3.0, 13.0)
    assert topology.between((0, 1, 2), (3,), tensor=1) == near
    assert topology.between((2, 3), (4, 5), tensor=2) == far
    assert topology.ring(range(4)).seconds(20) == pytest.approx(6 * 1 + 6 / 4 * 2)
    slow_inside = Topology(Cluster.parse("2x4:in=10B/s@3s,out=2B/s@1s"))  # a message goes through both
    assert slow_inside.between((0,), (4,), tensor=1).seconds(20) == 13.0


def test_a_slow_network_card() -> None:
    kinds = (DeviceKind(name="fast"), DeviceKind(name="slow", link_speed=0.25))
    levels = (Level(name="in", size=2, bandwidth=8.0), Level(name="out", size=2, bandwidth=4.0))
    topology = Topology(Cluster(levels=levels, kinds=kinds, nodes=("fast", "slow")))
    assert topology.between((0,), (1,), tensor=1).seconds_a_byte == 1 / 8
    assert topology.between((2,), (3,), tensor=1).seconds_a_byte == 1 / 8
    assert topology.between((1,), (2,), tensor=1).seconds_a_byte == 1.0
    # Both halves of the buffer cross at the pace of the slow card, after a sum inside each node.
    assert topology.ring((0, 1, 2, 3)).seconds_a_byte == 2 * 1 / 2 / 8 + 2 * 1 / 2 / 2 * 1.0


def test_a_sum_keeps_its_ranks_from_computing_as_its_outermost_level_does() -> None:
    levels = (Level(name="in", size=2, bandwidth=8.0, sum_busy=0.9), Level(name="out", size=2, bandwidth=4.0))
    topology = Topology(Cluster(levels=(levels[0], replace(levels[1], sum_busy=0.2))))
    assert [topology.ring(ranks).busy_share for ranks in ((0,), (0, 1), (0, 2), range(4))] == [0.0, 0.9, 0.2, 0.2]


def test_a_flat_ring_goes_at_the_pace_of_its_slowest_hop() -> None:
    """Two hosts of two ranks each: all of the vector crosses the network in six steps, not half of it in two."""
    levels = (
        Level(name="host", size=2, bandwidth=1e9, latency=5e-5),
        Level(name="network", size=2, bandwidth=1.25e8, latency=2e-3, reduce_latency=4e-3, sum_busy=0.5),
    )
    flat = Topology(Cluster(levels=levels, rings="flat"))
    four, pair = flat.ring(range(4)), flat.ring((1, 2))
    assert four.seconds(0.55e6) == pytest.approx(6 * 4e-3 + 0.55e6 / 1.25e8)
    assert four.seconds(8e6) == pytest.approx(2 * 4e-3 + 6 / 4 * 8e6 / 1.25e8)
    assert four.seconds(0.55e6, number=3) == pytest.approx(2 * 6 * 4e-3 + 0.55e6 / 1.25e8)  # two at a time
    assert pair.seconds(0.55e6) == pytest.approx(2 * (4e-3 + 0.55e6 / 2 / 1.25e8))
    assert (four.busy_share, flat.ring((2, 3)).busy_share, flat.ring((2,)).seconds(1e9)) == (0.5, 0.0, 0.0)
    by_levels = Topology(Cluster(levels=levels))
    assert by_levels.ring(range(4)).latency == pytest.approx(2 * 5e-5 + 2 * 4e-3)
    for members in ((0, 1), (2, 3), (0, 2), (0, 3)):  # nobody shares a host with another, or all do
        assert flat.ring(members).seconds(1e5) == pytest.approx(by_levels.ring(members).seconds(1e5))


def test_an_exchange_sends_every_other_rank_its_part() -> None:
    """Nothing is summed on the way: of two nodes with two ranks each, half of the bytes cross from each rank."""
    levels = (
        Level(name="in", size=2, bandwidth=8.0, latency=0.5),
        Level(name="out", size=2, bandwidth=2.0, latency=3.0),
    )
    topology, flat = Topology(Cluster(levels=levels)), Topology(Cluster(levels=levels, rings="flat"))
    assert topology.exchange(range(4)).seconds(80.0) == pytest.approx(3.0 + 20 / 8 + 2 * 20 / 2)
    assert topology.exchange((0, 1)).seconds(80.0) == pytest.approx(0.5 + 40 / 8) == flat.exchange((2, 3)).seconds(80.0)
    assert topology.exchange((1, 2)).seconds(80.0) == pytest.approx(3.0 + 40 / 2)
    assert topology.exchange((0, 1, 2)).seconds(90.0) == pytest.approx(3.0 + 2 * 30 / 2)  # the one that is alone
    assert topology.exchange((2,)).seconds(80.0) == 0.0
    assert flat.exchange(range(4)).seconds(80.0) == pytest.approx(3.0 + 20 / 8 + 2 * 2 * 20 / 2)  # one card a host
    assert flat.exchange(range(4)).seconds(80.0, number=3) == pytest.approx(6.0 + 20 / 8 + 2 * 2 * 20 / 2)


def test_a_number_goes_round_a_flat_ring_hop_by_hop() -> None:
    """From the last member to the first, and on to the second: each hop at the pace of its own link."""
    levels = (
        Level(name="host", size=2, bandwidth=1e9, latency=1e-4, message_seconds=1e-5),
        Level(name="network", size=3, bandwidth=1.25e8, latency=2e-3, reduce_latency=4e-3, message_seconds=3e-4),
    )
    flat, by_levels = (Topology(Cluster(levels=levels, rings=rings)) for rings in ("flat", "levels"))
    inside, across = 1.2e-4, 2.6e-3
    assert flat.small_sum(range(4)) == pytest.approx(3 * inside + 3 * across)  # 3-2-1-0, 0-3-2-1
    assert flat.small_sum(range(6)) == pytest.approx(5 * inside + 5 * across)
    assert flat.small_sum(range(3)) == pytest.approx(1 * inside + 3 * across)  # 2-1-0, 0-2-1
    assert flat.small_sum((1, 2, 3)) == pytest.approx(2 * inside + 2 * across)  # 3-2-1, 1-3-2
    assert flat.small_sum((0, 2, 4)) == pytest.approx(4 * across)
    assert flat.small_sum((1, 2)) == pytest.approx(2 * across)
    assert flat.small_sum((3,)) == 0.0
    assert by_levels.small_sum(range(4)) == pytest.approx(2 * 1e-4 + 2 * 4e-3)


def test_a_flat_ring_over_a_slow_network_card() -> None:
    kinds = (DeviceKind(name="fast"), DeviceKind(name="slow", link_speed=0.25))
    levels = (Level(name="in", size=2, bandwidth=8.0), Level(name="out", size=2, bandwidth=4.0))
    topology = Topology(Cluster(levels=levels, kinds=kinds, nodes=("fast", "slow"), rings="flat"))
    assert topology.ring(range(4)).seconds_a_byte == 2 * 3 / 4 * 1.0
    assert topology.ring((2, 3)).seconds_a_byte == 2 * 1 / 2 / 8
    assert topology.ring_of_ranges([0, 2], [3, 3], 4.0).tolist() == [2 * 3 / 4 * 1.0, 2 * 1 / 2 / 8]


@pytest.mark.parametrize("number", [2, 3, 5])
def test_latency_is_that_of_empty_sums_and_no_sum_has_fewer_seconds_a_byte(number: int) -> None:
    """On a long and fast link segments wait, which takes more, less of it where two sums are under way."""
    for bandwidth, waits in ((1e9, True), (1e7, False)):
        level = Level(name="net", size=number, bandwidth=bandwidth, latency=1e-3, reduce_latency=4e-3)
        topology = Topology(Cluster(levels=(level,), rings="flat"))
        ring = topology.ring(range(number))
        assert ring.seconds(0.0) == ring.latency == 2 * (number - 1) * 4e-3
        assert topology.ring_of_ranges(0, number - 1, 1.0) == pytest.approx(ring.seconds_a_byte)
        one, two, more = (ring.seconds(1e15, number=at_once) / 1e15 for at_once in (1, 2, 6))
        assert more == pytest.approx(two)
        assert one >= two >= ring.seconds_a_byte * (1 - 1e-12)
        assert (two > 1.1 * ring.seconds_a_byte) == waits


def test_sums_have_a_bandwidth_of_their_own() -> None:
    levels = (Level(name="in", size=4, bandwidth=100.0, reduce_bandwidth=10.0),)
    assert Topology(Cluster(levels=levels)).ring(range(4)).seconds_a_byte == pytest.approx(2 * 3 / 4 / 10)


@pytest.mark.thorough
@settings(max_examples=300, deadline=None)
@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=3), data=st.data())
def test_ranges_of_devices_are_rings_of_their_members(sizes: list[int], data: st.DataObject) -> None:
    cluster = Cluster.from_levels([(size, speed) for size, speed in zip(sizes, (8.0, 3.0, 1.0), strict=False)])
    rings = data.draw(st.sampled_from(["levels", "flat"]))
    share = data.draw(st.sampled_from([1.0, 0.5])) if rings == "levels" else 1.0  # of the cards of partly used nodes
    levels = tuple(replace(level, partial_reduce=share) for level in cluster.levels)
    cluster = replace(cluster, levels=levels, rings=rings)
    topology, last_device = Topology(cluster), cluster.num_devices - 1
    first = data.draw(st.integers(0, last_device))
    last = data.draw(st.integers(first, last_device))
    found = topology.ring(range(first, last + 1)).seconds_a_byte
    assert found == pytest.approx(ring(cluster, range(first, last + 1)), rel=1e-12)
    assert float(topology.ring_of_ranges(np.array([first]), np.array([last]), 1.0)[0]) == pytest.approx(found)
    # Never faster than one ring over the fastest links, never slower than one over the slowest.
    flat = 2 * (last - first) / (last - first + 1)
    assert flat / 8 <= found * (1 + 1e-12)
