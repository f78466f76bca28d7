"""One test a fault that the planner once had."""

from __future__ import annotations

import warnings
from dataclasses import replace
from itertools import permutations

import pytest
from support.inside import DeviceModel, Topology, Transformer, TransformerSource

from stagewright.partition import Cluster, DeviceKind, Level, Node, Profile, partition, plan
from stagewright.schedules import Op

from .small import chain


def test_tensor_groups_on_two_nodes_pay_for_the_link_between_them() -> None:
    """Groups of six on nodes of eight: 0-5 and 18-23 stand on one, 6-11 and 12-17 on two; the slowest sets the pace."""
    cluster = Cluster.parse("3x8:nvlink=300GB/s,net=2.5GB/s")
    model = Transformer(layers=4, hidden=96 * 16, heads=96, vocabulary=1000, length=512)
    device = replace(DeviceModel.preset("A100-80GB"), link_efficiency=1.0)
    source = TransformerSource(transformer=model, device=device, cluster=cluster)
    inside = replace(source, cluster=Cluster.parse("8:nvlink=300GB/s"))
    across = Topology(cluster).ring(range(6, 12)).seconds_a_byte - Topology(cluster).ring(range(6)).seconds_a_byte
    sizes = {"microbatch_size": 1, "tensor": 6}
    layer, fast = (each.profile(**sizes).nodes[1] for each in (source, inside))
    assert layer.forward_seconds - fast.forward_seconds == pytest.approx(2 * 2 * 512 * model.hidden * across)
    assert source.profile(microbatch_size=1, tensor=8) == inside.profile(microbatch_size=1, tensor=8)


def test_layouts_that_leave_much_idle_are_tried_where_nothing_else_fits() -> None:
    """More than 64 devices, and five microbatches: 5 replicas of 11 nodes at most, of 128 devices."""
    found = plan(chain(11), Cluster.from_levels([(128, 1e9)]), global_batch=5, schedules=("1f1b",))
    assert sum(stage.replicas for stage in found.stages) <= 55


def test_one_large_workspace_is_charged_to_its_own_stage() -> None:
    """Forty nodes, the last of which needs a lot for a while; the first keep most, so that an even cut does not fit."""
    stash = [10.0] * 20 + [1.0] * 20
    nodes = tuple(
        Node(
            name=f"n{i}",
            forward_seconds=1.0,
            backward_seconds=2.0,
            stash_bytes=kept,
            workspace_bytes=300.0 if i == 39 else 0.0,
        )
        for i, kept in enumerate(stash)
    )
    options = {"global_batch": 16, "pipeline_sizes": (4,), "data_sizes": (1,), "schedules": "1f1b"}
    cluster = Cluster.from_levels([(4, 1e9)])
    profile = Profile(nodes=nodes, microbatch_size=1)
    found = plan(profile, cluster, memory_limit=330.0, recompute=("none",), **options)  # type: ignore[arg-type]
    assert max(found.memory_bytes.values()) <= 330.0


def unequal(order: tuple[str, ...]) -> Cluster:
    kinds = (DeviceKind(name="slow", speed=0.5), DeviceKind(name="mid"), DeviceKind(name="fast", speed=2.0))
    levels = (Level(name="in", size=2, bandwidth=1e3), Level(name="out", size=len(order), bandwidth=10.0))
    return Cluster(levels=levels, kinds=kinds, nodes=order)


@pytest.mark.thorough
@pytest.mark.parametrize("names", [("slow", "mid", "fast"), ("slow", "slow", "fast", "mid")], ids=str)
def test_the_order_in_which_nodes_are_listed_does_not_matter(names: tuple[str, ...]) -> None:
    profile = chain(6, parameter_bytes=20.0, activation_bytes=5.0)
    orders = sorted(set(permutations(names)))[::3]
    found = [plan(profile, unequal(order), global_batch=12) for order in orders]
    assert len({round(each.simulated_step_time or 0, 9) for each in found}) == 1
    for each, order in zip(found, orders, strict=True):
        speeds = {"slow": 0.5, "mid": 1.0, "fast": 2.0}
        slowest = [min(speeds[order[rank // 2]] for rank in stage.ranks) for stage in each.stages]
        assert each.seconds(Op.F) == pytest.approx(
            [len(stage.nodes) / speed for stage, speed in zip(each.stages, slowest, strict=True)]
        )


def test_the_gap_of_the_bottleneck_is_called_so() -> None:
    found = plan(chain(3), Cluster.from_levels([(2, 1e9)]), global_batch=3)
    assert "the least bottleneck of any plan is at least" in found.explain().replace("\n  ", " ").splitlines()[1]
    assert "above the least possible" not in " ".join(found.explain().split())


def test_a_batch_that_nobody_can_simulate_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="global_batch=99999999999999: expected at most"):
        plan(chain(4), Cluster.from_levels([(4, 1e9)]), global_batch=99999999999999, schedules="2bw")
    with pytest.raises(ValueError, match="num_microbatches=99999999999999: expected at most"):
        partition(chain(4), Cluster.from_levels([(4, 1e9)]), num_microbatches=99999999999999, schedule="2bw")
    rounds = partition(chain(4), Cluster.from_levels([(4, 1e9)]), num_microbatches=99999999999999)
    assert rounds.simulated_step_time == pytest.approx(rounds.predicted_step_time * 99999999999999)


def test_seconds_beyond_all_reason_are_refused() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ValueError, match=r"node n0: forward_seconds: 1e\+300: expected .* at most 1e\+100"):
            chain(3, forward_seconds=1e300)
        assert partition(chain(3, forward_seconds=1e99), Cluster.from_levels([(2, 1e9)]), num_microbatches=4)


@pytest.mark.parametrize("name", ["a\nb", "a\tb", "\x1b[1m"])
def test_names_are_printable(name: str) -> None:
    with pytest.raises(ValueError, match="expected printable text in one line"):
        Node(name=name, forward_seconds=1, backward_seconds=1)
    with pytest.raises(ValueError, match="expected printable text in one line"):
        DeviceKind(name=name)
    with pytest.raises(ValueError, match="expected printable text in one line"):
        Level(name=name, size=1, bandwidth=1.0)
