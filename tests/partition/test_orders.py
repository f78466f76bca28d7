"""Unequal devices, against all orders of them."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import Topology, device_orders, level_orders, node_orders
from support.inside import dynamic as dynamic_module

from stagewright.partition import Cluster, DeviceKind, Level, Node, Plan, Profile, partition, plan

from .small import least_bottleneck, profiles


def cluster_of(speeds: tuple[float, ...], *, size: int = 1, bandwidth: float = 2.0) -> Cluster:
    levels = (
        Level(name="inner", size=size, bandwidth=bandwidth),
        Level(name="outer", size=len(speeds), bandwidth=bandwidth),
    )
    kinds = tuple(DeviceKind(name=f"x{speed}", speed=speed) for speed in sorted(set(speeds)))
    return Cluster(levels=levels, kinds=kinds, nodes=tuple(f"x{speed}" for speed in speeds))


@pytest.mark.thorough
@settings(max_examples=60, deadline=None, derandomize=True)
@given(profiles(max_nodes=5), st.lists(st.sampled_from([1.0, 2.0, 0.3]), min_size=1, max_size=4), st.booleans())
def test_best_of_all_orders(profile: Profile, speeds: list[float], limited: bool) -> None:
    options = {"num_microbatches": 3} if limited else {}
    best = min(
        least_bottleneck(profile, cluster_of(order), speeds=order, **options) for order in set(permutations(speeds))
    )
    plan = partition(profile, cluster_of(tuple(speeds)))
    if not limited:
        assert plan.bottleneck == pytest.approx(best, rel=1e-9, abs=1e-12)
        assert plan.bound <= plan.bottleneck
        return
    # With M the simulated step decides; the bottleneck is then no smaller than the least.
    plan = partition(profile, cluster_of(tuple(speeds)), **options)
    assert plan.bottleneck >= best * (1 - 1e-9)


@pytest.mark.thorough(but=["1", "None"])
@pytest.mark.parametrize("pipeline", [1, 2, None])
def test_runners_up_that_differ_in_the_devices_alone_are_named_once(pipeline: int | None) -> None:
    """Mirrored on nodes of two kinds stages take the same; of two or three such rows one says it all."""
    nodes = [Node(name=n, forward_seconds=1, backward_seconds=2, parameter_bytes=1e6) for n in "abcdef"]
    others: list[Plan] = []
    found = plan(
        Profile(nodes=nodes),
        cluster_of((1.0, 0.5, 0.5), size=2, bandwidth=1e9),
        global_batch=24,
        schedules=("1f1b",),
        pipeline_sizes=None if pipeline is None else (pipeline,),
        on_runners_up=others.extend,
    )
    rows = [(each.label, each.replicas, each.num_nodes, each.simulated_step_time) for each in found.runners_up]
    assert len(set(rows)) == len(rows) == len(others) >= 3
    assert (found.replicas, found.simulated_step_time) not in [(row[1], row[3]) for row in rows]


def test_memory_of_each_kind() -> None:
    kinds = (DeviceKind(name="small", memory_bytes=10.0), DeviceKind(name="big", memory_bytes=100.0))
    levels = (Level(name="a", size=1, bandwidth=1e9), Level(name="b", size=2, bandwidth=1e9))
    cluster = Cluster(levels=levels, kinds=kinds, nodes=("small", "big"))
    nodes = (
        Node(name="a", forward_seconds=1, backward_seconds=1, parameter_bytes=20),
        Node(name="b", forward_seconds=1, backward_seconds=1, parameter_bytes=2),
    )
    plan = partition(Profile(nodes=nodes), cluster)
    assert [(stage.nodes, stage.ranks) for stage in plan.stages] == [(("a",), (1,)), (("b",), (0,))]
    with pytest.raises(ValueError, match=r"node 'a' needs 120 bytes on a device of 100, 20 too many"):
        partition(Profile(nodes=(Node(name="a", forward_seconds=1, backward_seconds=1, parameter_bytes=30),)), cluster)


def test_idle_devices_are_the_slow_ones() -> None:
    profile = Profile(nodes=(Node(name="a", forward_seconds=1, backward_seconds=2),))
    plan = partition(profile, cluster_of((1.0, 2.0, 1.0)), straight=True)
    assert (plan.stages[0].ranks, plan.bottleneck) == ((1,), 1.5)
    with pytest.raises(ValueError, match=r"device kind 'x1\.0' of speed 1\.0 with cost_model='pipedream': expected"):
        partition(profile, cluster_of((1.0, 2.0)), cost_model="pipedream")


def test_orders() -> None:
    levels = cluster_of((1.0, 1.0, 1.0)).levels
    apart = Cluster(levels=levels, node_links=((0, 1, 1e-3, 1.0),))  # as good as of other kinds
    assert len(node_orders(apart)[0]) == 6
    assert node_orders(cluster_of((1.0, 2.0, 1.0))) == ([(0, 2, 1), (0, 1, 2), (1, 0, 2)], None)
    assert Topology(cluster_of((1.0, 2.0, 1.0), size=4)).total_speed == 16.0
    orders, note = node_orders(cluster_of((1.0, 2.0) * 8))
    assert len(orders) == 3
    assert note == "unequal nodes: 3 of their many orders were tried"
    nested = Cluster(
        levels=(*cluster_of((1.0, 2.0)).levels, Level(name="far", size=1, bandwidth=1.0)),
        kinds=cluster_of((1.0, 2.0)).kinds,
        nodes=("x1.0", "x2.0"),
    )
    orders, note = node_orders(nested)
    assert orders == [(0, 1)]
    assert "only the given order was tried" in str(note)


def test_too_large_for_unequal_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamic_module, "MAX_STEPS", 0)
    profile = Profile(nodes=tuple(Node(name=name, forward_seconds=1, backward_seconds=1) for name in "abcd"))
    with pytest.raises(ValueError, match="5 cuts on 2 devices of several kinds: too large for unequal devices"):
        partition(profile, cluster_of((1.0, 2.0)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(profiles(max_nodes=5), st.lists(st.sampled_from([1.0, 0.25]), min_size=1, max_size=4))
def test_best_of_all_orders_of_slow_links(profile: Profile, links: list[float]) -> None:
    def cluster(order: tuple[float, ...]) -> Cluster:
        kinds = tuple(DeviceKind(name=f"x{link}", link_speed=link) for link in sorted(set(order)))
        plain = cluster_of(tuple(1.0 for _ in order))
        return Cluster(levels=plain.levels, kinds=kinds, nodes=tuple(f"x{link}" for link in order))

    # Devices count from the end of the pipeline in the reference, and every order is tried.
    best = min(least_bottleneck(profile, cluster(order), links=order) for order in set(permutations(links)))
    plan = partition(profile, cluster(tuple(links)))
    assert plan.bottleneck == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (2, 3), (2, 2, 2)])
def test_every_order_of_devices_is_one_of_these_but_for_an_exchange_of_equal_groups(sizes: tuple[int, ...]) -> None:
    """Of n! orders, as many as there are ways to exchange devices of a node, nodes of a group and so on are alike."""
    cluster = Cluster.from_levels([(size, 1.0) for size in sizes])
    exchanges, groups = 1, cluster.num_devices
    for size in sizes:
        groups //= size
        exchanges *= math.factorial(size) ** groups
    orders = device_orders(cluster, 1000)
    assert len({*orders}) == len(orders) == math.factorial(cluster.num_devices) // exchanges
    assert {tuple(sorted(order)) for order in orders} == {tuple(range(cluster.num_devices))}
    assert device_orders(cluster, len(orders) - 1) == []


def test_nodes_of_several_kinds_are_not_exchanged_and_shared_cards_neither() -> None:
    cluster = cluster_of((1.0, 2.0))
    assert len(device_orders(cluster, 1000)) == 2 * len(device_orders(cluster_of((1.0, 1.0)), 1000))
    level = Level(name="net", size=2, bandwidth=1.0, devices_per_card=2)
    assert device_orders(Cluster(levels=(Level(name="in", size=4, bandwidth=9.0), level)), 1000) == []


def test_orders_along_other_levels() -> None:
    assert level_orders(Cluster.from_levels([(3, 2.0), (2, 1.0)])) == [(0, 3, 1, 4, 2, 5)]
    assert level_orders(Cluster.from_levels([(4, 2.0)])) == level_orders(cluster_of((1.0, 1.0))) == []
    assert (0, 2, 1, 3, 4, 6, 5, 7) in level_orders(Cluster.from_levels([(2, 4.0), (2, 2.0), (2, 1.0)]))
