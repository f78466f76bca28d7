"""Speeds of hosts as kinds of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inside import host_speeds, with_host_speeds

from stagewright.partition import Cluster, Node, Profile

CHAIN = Profile(nodes=tuple(Node(name=name, forward_seconds=1, backward_seconds=2) for name in "abcd"))
PAIRS = ((0, 1), (2, 3), (4, 5))


def profile(factor: float) -> Profile:
    """One whose host takes so many times as long."""
    nodes = (
        replace(node, forward_seconds=node.forward_seconds * factor, backward_seconds=node.backward_seconds * factor)
        for node in CHAIN.nodes
    )
    return replace(CHAIN, nodes=tuple(nodes))


def test_hosts_of_other_speeds_are_kinds() -> None:
    cluster = Cluster.parse("3x2:host=10GB/s,network=1GB/s")
    found = with_host_speeds(cluster, PAIRS, [profile(1), profile(2), profile(1.02)])
    assert found.nodes == ("device 0", "device 1", "device 0")
    assert [kind.speed for kind in found.kinds] == [1.0, 0.5]
    assert found.levels == cluster.levels


def test_each_rank_is_a_node_where_hosts_are_no_groups() -> None:
    """One rank a host; one and two ranks; hosts whose ranks are not neighbours."""
    for hosts, nodes in ((((0,), (1,)), "01"), (((0,), (1, 2)), "011"), (((0, 2), (1, 3)), "0101")):
        cluster = Cluster.parse(f"{len(nodes)}:network=1GB/s")
        found = with_host_speeds(cluster, hosts, [profile(1), profile(0.5)])
        assert [level.size for level in found.levels] == [1, len(nodes)]
        assert found.nodes == tuple(f"device {kind}" for kind in nodes)
        assert [kind.speed for kind in found.kinds] == [1.0, 2.0]


def test_what_profiles_cannot_say_is_refused() -> None:
    cluster = Cluster.parse("3x2:host=10GB/s,network=1GB/s")
    with pytest.raises(ValueError, match=r"--profiles a: 1 for 3 hosts \(of ranks 0, 1; 2, 3; 4, 5\): expected one a"):
        with_host_speeds(cluster, PAIRS, [profile(1)], names=("a",))
    other = replace(CHAIN, microbatch_size=4)
    with pytest.raises(ValueError, match="b: another model or microbatch than a"):
        with_host_speeds(Cluster.parse("2:network=1GB/s"), ((0,), (1,)), [CHAIN, other], names=("a", "b"))


def test_what_steps_vary_by_is_no_other_speed() -> None:
    profiles = [profile(1), profile(1.25), profile(2)]
    assert host_speeds(profiles) == (1.0, 0.8, 0.5)
    assert host_speeds([replace(profiles[0], step_spread=0.3), *profiles[1:]]) == (1.0, 1.0, 0.5)
