"""Clusters and their links: levels, the short form, JSON, speeds of hosts, seconds of messages and sums."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import DeviceModel, Topology, host_speeds, with_host_speeds

from stagewright.partition import Cluster, DeviceKind, Level, Node, Profile

from .small import ring


def test_the_short_form_and_json_there_and_back() -> None:
    cluster = Cluster.parse("4x8:nvlink=300GB/s@2us,net=100Gbit/s@1.5ms:80GiB")
    assert cluster.levels == (
        Level(name="nvlink", size=8, bandwidth=300e9, latency=2e-6),
        Level(name="net", size=4, bandwidth=12.5e9, latency=1.5e-3),
    )
    assert cluster.num_devices == 32
    assert cluster.used_kinds[0].memory_bytes == 80 * 2**30
    assert Cluster.parse("2:net=1e3MB/s").levels[0].bandwidth == 1e9
    cluster = Cluster(
        levels=(
            Level(name="a", size=2, bandwidth=1.0),
            Level(name="b", size=2, bandwidth=0.5, message_seconds=0.1, message_bandwidth=3.0, sum_busy=0.75),
        ),
        kinds=(DeviceKind(name="new", speed=2.0, memory_bytes=5.0), DeviceKind(name="old")),
        nodes=("new", "old"),
    )
    assert Cluster.from_json(cluster.to_json()) == cluster
    assert [kind.name for kind in cluster.used_kinds] == ["new", "old"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("4x8", r"cluster '4x8': 0 links for 2 sizes: expected one a size"),
        ("4x0:a=1GB/s,b=1GB/s", r"sizes '4x0': expected 4x8:nvlink"),
        ("4:net=12", r"link 'net': bandwidth: '12': expected a number and a unit, such as 12GB/s"),
        ("4:net=12Gb/s", r"'12Gb/s': expected a number and a unit"),
        ("4:net=0GB/s", r"bandwidth: 0.0: expected a finite number above 0"),
        ("4:net=1GB/s@5", r"latency: '5': expected a number and a unit, such as 5us"),
        ("4:net=1GB/s:80", r"memory: '80': expected a number and a unit, such as 12GB,"),
    ],
)
def test_bad_short_form(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.parse(text)


GOOD = json.loads(Cluster.from_levels([(2, 1.0), (2, 0.5)]).to_json())


def of_level(**figures: float) -> dict[str, list[dict[str, object]]]:
    return {"levels": [{"name": "a", "size": 2, "bandwidth": 1, **figures}]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"levels": []}, r"c\.json: cluster with levels=\(\)"),
        ({"levels": [{"name": "a", "size": 2}]}, r"c\.json: levels\[0\]: bandwidth: missing"),
        ({"levels": [{"name": "a", "size": 1.5, "bandwidth": 1}]}, r"levels\[0\]: size: 1.5: expected a whole number"),
        ({"levels": [{"name": "a", "size": 2, "bandwidth": 1, "b": 1}]}, r"levels\[0\]: unknown field b"),
        ({"kinds": [{"name": "a"}, {"name": "a"}]}, r"device kinds a, a: expected unique names"),
        ({"nodes": ["device", "tpu"]}, r"c\.json: node 1: unknown device kind 'tpu': expected one of device"),
        ({"nodes": ["device"]}, r"1 kinds of nodes for 2 nodes"),
        ({"nodes": "device"}, r"nodes: 'device': expected the name of a kind for each node"),
        (of_level(message_seconds=-1), r"levels\[0\]: message_seconds: -1: expected a finite number"),
        (of_level(sum_busy=1.5), r"sum_busy: 1.5: expected a number of at least 0 and at most 1"),
        ({"rings": "tree"}, r"c\.json: rings: 'tree': expected one of levels, flat"),
        ({"version": 0}, r"c\.json: version: 0: expected 1"),
    ],
)
def test_bad_json(fields: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_json(json.dumps({**GOOD, **fields}), source="c.json")


def test_sums_may_be_slower_than_messages_or_in_one_ring() -> None:
    levels = (Level(name="in", size=2, bandwidth=8.0, reduce_bandwidth=2.0), Level(name="out", size=2, bandwidth=4.0))
    cluster = Cluster(levels=levels)
    assert (cluster.path_bandwidths, cluster.ring_bandwidths) == ((8.0, 4.0), (2.0, 2.0))
    assert Cluster.from_json(cluster.to_json()) == cluster
    with pytest.raises(ValueError, match="level 'in': reduce_bandwidth: -1: expected a finite number above 0"):
        Level(name="in", size=2, bandwidth=8.0, reduce_bandwidth=-1)
    steps = replace(
        cluster, levels=(replace(levels[0], latency=1.0, reduce_latency=0.5), replace(levels[1], latency=0.2))
    )
    assert steps.ring_latencies == (0.5, 0.5)
    assert Cluster.from_json(steps.to_json()) == steps
    with pytest.raises(ValueError, match="level 'in': reduce_latency: -1: expected a finite number of at least 0"):
        Level(name="in", size=2, bandwidth=8.0, reduce_latency=-1)
    for text in ("2x2:in=1GB/s,out=1MB/s:flat", "2x2:in=1GB/s,out=1MB/s:4GB:flat"):
        flat = Cluster.parse(text)
        assert flat == replace(Cluster.parse(text.removesuffix(":flat")), rings="flat")
        assert Cluster.from_json(flat.to_json()) == flat
        assert flat.reordered((1, 0)).rings == "flat"
    assert Cluster.from_levels([(2, 1.0)]).rings == "levels"
    old = {name: value for name, value in GOOD.items() if name != "rings"}  # written before there was a choice
    assert Cluster.from_json(json.dumps(old)).rings == "levels"
    with pytest.raises(ValueError, match="rings='tree': expected one of levels, flat"):
        replace(flat, rings="tree")
    shared = replace(flat.levels[-1], partial_reduce=0.5)
    with pytest.raises(ValueError, match=r"partial_reduce=0\.5 with rings='flat': expected 1, since one ring comes"):
        replace(flat, levels=(*flat.levels[:-1], shared))


CHAIN = Profile(nodes=tuple(Node(name=name, forward_seconds=1, backward_seconds=2) for name in "abcd"))
PAIRS = ((0, 1), (2, 3), (4, 5))


def profile(factor: float) -> Profile:
    """One whose host takes so many times as long."""
    nodes = (
        replace(node, forward_seconds=node.forward_seconds * factor, backward_seconds=node.backward_seconds * factor)
        for node in CHAIN.nodes
    )
    return replace(CHAIN, nodes=tuple(nodes))


def test_hosts_of_other_speeds_are_kinds_as_far_as_profiles_say() -> None:
    cluster = Cluster.parse("3x2:host=10GB/s,network=1GB/s")
    found = with_host_speeds(cluster, PAIRS, [profile(1), profile(2), profile(1.02)])
    assert found.nodes == ("device 0", "device 1", "device 0")
    assert [kind.speed for kind in found.kinds] == [1.0, 0.5]
    assert found.levels == cluster.levels
    # One rank a host; one and two ranks; hosts whose ranks are not neighbours.
    for hosts, nodes in ((((0,), (1,)), "01"), (((0,), (1, 2)), "011"), (((0, 2), (1, 3)), "0101")):
        cluster = Cluster.parse(f"{len(nodes)}:network=1GB/s@5us")
        found = with_host_speeds(cluster, hosts, [profile(1), profile(0.5)])
        assert found.levels == (replace(cluster.levels[0], name="host", size=1), *cluster.levels)
        assert found.nodes == tuple(f"device {kind}" for kind in nodes)
        assert [kind.speed for kind in found.kinds] == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"--profiles a: 1 for 3 hosts \(of ranks 0, 1; 2, 3; 4, 5\): expected one a"):
        with_host_speeds(cluster, PAIRS, [profile(1)], names=("a",))
    other = replace(CHAIN, microbatch_size=4)
    with pytest.raises(ValueError, match="b: another model or microbatch than a"):
        with_host_speeds(Cluster.parse("2:network=1GB/s"), ((0,), (1,)), [CHAIN, other], names=("a", "b"))
    profiles = [profile(1), profile(1.25), profile(2)]
    assert host_speeds(profiles) == (1.0, 0.8, 0.5)
    assert host_speeds([replace(profiles[0], step_spread=0.3), *profiles[1:]]) == (1.0, 1.0, 0.5)


def test_messages_between_ranks_and_over_a_slow_network_card() -> None:
    topology = Topology(Cluster.parse("2x4:in=10B/s@1s,out=2B/s@3s"))
    near, far = topology.between((0,), (1,), tensor=1), topology.between((0, 1), (4, 5), tensor=1)
    assert (near.seconds(20), far.seconds(20)) == (3.0, 13.0)
    assert topology.between((0, 1, 2), (3,), tensor=1) == near
    assert topology.between((2, 3), (4, 5), tensor=2) == far
    assert topology.ring(range(4)).seconds(20) == pytest.approx(6 * 1 + 6 / 4 * 2)
    slow_inside = Topology(Cluster.parse("2x4:in=10B/s@3s,out=2B/s@1s"))  # a message goes through both
    assert slow_inside.between((0,), (4,), tensor=1).seconds(20) == 13.0
    kinds = (DeviceKind(name="fast"), DeviceKind(name="slow", link_speed=0.25))
    levels = (Level(name="in", size=2, bandwidth=8.0), Level(name="out", size=2, bandwidth=4.0))
    topology = Topology(Cluster(levels=levels, kinds=kinds, nodes=("fast", "slow")))
    assert topology.between((0,), (1,), tensor=1).seconds_a_byte == 1 / 8
    assert topology.between((2,), (3,), tensor=1).seconds_a_byte == 1 / 8
    assert topology.between((1,), (2,), tensor=1).seconds_a_byte == 1.0
    # Both rings, of half of the buffer each, go at the pace of the slow card, inside the nodes, too.
    assert topology.ring((0, 1, 2, 3)).seconds_a_byte == 2 * 3 / 4 * max(1 / 8, 1 / 2 / 1.0)
    flat = Topology(replace(topology.cluster, rings="flat"))
    assert flat.ring(range(4)).seconds_a_byte == 2 * 3 / 4 * 1.0
    assert flat.ring((2, 3)).seconds_a_byte == 2 * 1 / 2 / 8
    assert flat.ring_of_ranges([0, 2], [3, 3], 4.0).tolist() == [2 * 3 / 4 * 1.0, 2 * 1 / 2 / 8]


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
    far = Topology(Cluster(levels=(replace(levels[1], size=4, reduce_latency=0.02),), rings="flat")).ring(range(4))
    for number, waits in ((1, 0.02), (2, 0.01), (6, 0.01)):  # of segments of 1 MiB, while the other sum is under way
        assert far.seconds(1e12, number=number) == pytest.approx(3 / 4 * 1e12 * (1 / 1.25e8 + waits / 2**20))
    by_levels = Topology(Cluster(levels=levels))
    assert by_levels.ring(range(4)).latency == pytest.approx(2 * 2 * 5e-5 + 2 * 4e-3)  # two hops inside, one between
    for members in ((0, 1), (2, 3), (0, 2), (0, 3)):  # nobody shares a host with another, or all do
        assert flat.ring(members).seconds(1e5) == pytest.approx(by_levels.ring(members).seconds(1e5))


def test_exchanges_and_halves_of_sums() -> None:
    """Nothing is summed on the way: of two nodes with two ranks each, half of the bytes cross from each rank."""
    levels = (
        Level(name="in", size=2, bandwidth=8.0, latency=0.5),
        Level(name="out", size=2, bandwidth=2.0, latency=3.0),
    )
    topology, flat = Topology(Cluster(levels=levels)), Topology(Cluster(levels=levels, rings="flat"))
    assert topology.all_to_all(range(4)).seconds(80.0) == pytest.approx(3.0 + 20 / 8 + 2 * 20 / 2)
    assert (
        topology.all_to_all((0, 1)).seconds(80.0)
        == pytest.approx(0.5 + 40 / 8)
        == flat.all_to_all((2, 3)).seconds(80.0)
    )
    assert topology.all_to_all((1, 2)).seconds(80.0) == pytest.approx(3.0 + 40 / 2)
    assert topology.all_to_all((0, 1, 2)).seconds(90.0) == pytest.approx(3.0 + 2 * 30 / 2)  # the one that is alone
    assert topology.all_to_all((2,)).seconds(80.0) == 0.0
    assert flat.all_to_all(range(4)).seconds(80.0) == pytest.approx(3.0 + 20 / 8 + 2 * 2 * 20 / 2)  # one card a host
    assert flat.all_to_all(range(4)).seconds(80.0, number=3) == pytest.approx(6.0 + 20 / 8 + 2 * 2 * 20 / 2)
    # Four rings of 7 hops, one of them between nodes, each with an eighth of its fourth of the bytes.
    topology = Topology(Cluster.parse("2x4:a=8B/s@1s,b=2B/s@5s"))
    assert topology.exchange(range(8)).seconds(80.0) == pytest.approx(6 * 1 + 5 + 7 / 8 * 80 / min(8, 4 * 2))
    assert topology.exchange((0, 4)).seconds(80.0) == pytest.approx(5 + 80 / 2 / 2)
    assert topology.exchange((3,)).seconds(80.0) == 0.0
    large = Topology(Cluster.parse("80x64:nvlink=900GB/s,net=50GB/s"))  # 1.9 to 13 times as long, once
    for stride in (64, 32, 8, 1):
        ranks = range(0, 640, stride)
        assert 2 * large.exchange(ranks).seconds(1e10) == pytest.approx(large.ring(ranks).seconds(1e10))
    flat = Topology(replace(large.cluster, rings="flat"))  # gloo sends each part on its own
    assert flat.exchange(range(16)) == flat.all_to_all(range(16))


def test_rings_over_nodes_go_as_fast_as_nccls() -> None:
    """All-reduces of 8 GB by nccl-tests on nodes of eight H100, GB/s of bus bandwidth: 2 (N-1) / N b over seconds
    (crazyguitar/aws-gpu-communication-benchmark at 4fdb5a4, data/nccl_all_reduce.csv; EFA, 400 Gbit/s a GPU)."""
    device, num_bytes = DeviceModel.preset("H100-80GB"), 8 * 2.0**30
    for nodes, measured in ((4, 357), (8, 355), (16, 356)):
        cluster = Cluster.parse(f"{nodes}x8:nvlink=450GB/s@1.9us,net=50GB/s@22us")
        ring = Topology(device.summed(cluster)).ring(range(8 * nodes))
        bus = 2 * (1 - 1 / (8 * nodes)) * num_bytes / ring.seconds(num_bytes) / 1e9
        assert bus == pytest.approx(measured, rel=0.05)
    cluster = Cluster.parse("4x8:nvlink=450GB/s@1.9us,net=50GB/s@22us")  # what a tensor group sums doesn't fill them
    (ring,) = Topology(device.summed(cluster)).rings_of_groups(32)
    assert 2 * 31 / 32 * 2.0**26 / ring.seconds(2.0**26) / 1e9 == pytest.approx(152, rel=0.1)  # 64 MB


def test_the_sums_of_a_tensor_group_wait_for_slow_cards_as_others_do() -> None:
    """Those over nodes took no notice of them, nor of cards that the rings of several groups share."""
    levels = (Level(name="a", size=4, bandwidth=8.0), Level(name="b", size=2, bandwidth=2.0, partial_reduce=0.5))
    kinds = tuple(DeviceKind(name=name, link_speed=speed) for name, speed in (("x", 1.0), ("y", 0.25)))
    for nodes, speed in ((("x", "x"), 1), (("x", "y"), 4)):
        topology = Topology(Cluster(levels=levels, kinds=kinds, nodes=nodes))
        for size, share in ((8, 4), (6, 2 * 0.5)):
            (ring,) = topology.rings_of_groups(size)
            assert ring.seconds_a_byte == 2 * 3 / 4 / 8 + 2 * 1 / 2 / 2 * speed / share


@pytest.mark.parametrize(
    "cluster",
    [
        Cluster.parse("4x3:a=8B/s,b=2B/s"),
        Cluster.parse("2x2x3:a=8B/s,b=4B/s,c=1B/s"),
        Cluster(
            levels=(Level(name="a", size=3, bandwidth=8.0), Level(name="b", size=4, bandwidth=2.0)),
            kinds=(DeviceKind(name="x"), DeviceKind(name="y", link_speed=0.25), DeviceKind(name="z", link_speed=0.5)),
            nodes=("y", "x", "z", "x"),
        ),
        Cluster(
            levels=(Level(name="a", size=2, bandwidth=8.0), Level(name="b", size=6, bandwidth=2.0)),
            node_links=((1, 2, 0.5, 0.0), (2, 1, 0.5, 0.0)),
        ),
    ],
)
def test_groups_of_members_have_the_rings_of_all_places(cluster: Cluster) -> None:
    """Of nodes with slow cards or links the last was priced; of groups inside each other those of the first members."""
    topology = Topology(cluster)
    for tensor, context in ((1, 2), (1, 3), (2, 2), (2, 3), (3, 2), (4, 3), (1, 12), (5, 2)):
        width = tensor * context
        starts = [s + t for s in range(0, cluster.num_devices - width + 1, width) for t in range(tensor)]
        everywhere = [range(first, first + width - tensor + 1, tensor) for first in starts]
        for find in (topology.ring, topology.all_to_all):
            assert {*map(find, topology.groups(context, stride=tensor))} == {*map(find, everywhere)}


def test_groups_off_a_link_of_its_own_are_listed_once() -> None:
    """Of 5,000 groups, each place in a node once; of groups of two nodes, those with a link of their own as well."""
    levels = (Level(name="a", size=8, bandwidth=8.0), Level(name="b", size=1250, bandwidth=2.0))
    topology = Topology(Cluster(levels=levels, node_links=((2, 3, 0.5, 0.0), (5, 6, 0.5, 0.0), (8, 9, 0.4, 0.0))))
    assert [len(topology.groups(size)) for size in (1, 2, 8, 16)] == [8, 4, 1, 3]


def test_a_number_goes_up_a_tree_of_nodes_or_round_a_flat_ring_hop_by_hop() -> None:
    topology = Topology(Cluster.parse("5x4:a=8B/s@1s,b=2B/s@5s"))
    assert topology.small_sum(range(20)) == 2 * (3 * 1 + 3 * 5)
    assert topology.small_sum((0, 1, 4)) == 2 * (1 * 1 + 1 * 5)
    assert topology.small_sum((7,)) == 0
    # From the last member to the first, and on to the second: each hop at the pace of its own link.
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
