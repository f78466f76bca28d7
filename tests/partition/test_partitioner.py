"""`partition`: from a profile and a cluster to a plan."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.inside import dynamic as dynamic_module

from stagewright.partition import Cluster, Node, Plan, Profile, partition, read_pipedream_profile
from stagewright.schedules import Costs, build, simulate

DATA = Path(__file__).parents[1] / "data" / "pipedream"


def chain(*seconds: float, **figures: float) -> Profile:
    return Profile(
        nodes=tuple(
            Node(name=f"n{i}", forward_seconds=s, backward_seconds=2 * s, **figures) for i, s in enumerate(seconds)
        )
    )


def test_fifteen_and_one_for_vgg_on_four_by_four() -> None:
    """Four devices share their server's adapter of 10 Gbit/s, as in the paper's cluster A."""
    profile = read_pipedream_profile(DATA / "vgg16.txt")
    cluster = Cluster.from_levels([(4, 1e10), (4, 1.25e9 / 4)])
    plan = partition(profile, cluster)
    assert plan.replicas == (15, 1)
    assert plan.stages[0].ranks == tuple(range(15))
    assert plan.gap == 0
    assert plan == partition(profile, cluster)
    assert Plan.from_json(plan.to_json()) == plan
    named = [name for stage in plan.stages for name in stage.nodes]
    assert sorted(named) == sorted(node.name for node in profile.nodes)


def test_the_simulator_ranks_the_candidates() -> None:
    plan = partition(chain(1, 1, 1, 1), Cluster.from_levels([(2, 1e9)]), num_microbatches=4, straight=True)
    schedule = build("1f1b", num_ranks=2, num_microbatches=4)
    assert plan.replicas == (1, 1)
    assert plan.simulated_step_time == simulate(schedule, Costs(forward=2.0, backward=4.0)).makespan == 30.0
    assert plan.simulated_bubble == pytest.approx(0.2)
    times = [each.simulated_step_time for each in plan.runners_up if each.simulated_step_time is not None]
    assert times == sorted(times)
    assert all(time >= 30.0 for time in times)


@pytest.mark.parametrize("schedule", ["2bw", "pipedream"])
def test_without_a_flush_the_steady_state_counts(schedule: str) -> None:
    plan = partition(chain(1, 1), Cluster.from_levels([(2, 1e9)]), num_microbatches=4, schedule=schedule, straight=True)
    assert plan.simulated_step_time == 12.0
    assert plan.simulated_bubble == 0.0


def test_idle_devices_are_the_last_groups() -> None:
    profile = chain(1.0)
    flat = partition(profile, Cluster.from_levels([(4, 1e9)]), straight=True)
    assert flat.stages[0].ranks == (0,)
    nested = partition(profile, Cluster.from_levels([(2, 1e9), (3, 1e9)]), straight=True)
    assert nested.stages[0].ranks == (1,)  # the first node; a pipeline ends where its node ends


def test_a_node_too_large_is_named() -> None:
    nodes = (
        Node(name="small", forward_seconds=1, backward_seconds=1, parameter_bytes=10),
        Node(name="huge", forward_seconds=1, backward_seconds=1, parameter_bytes=1000, stash_bytes=5),
    )
    with pytest.raises(
        ValueError, match=r"node 'huge' needs 4,005 bytes on a device of 4,000, 5 too many, .* expected"
    ):
        partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)], memory_bytes=4000))
    assert partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)], memory_bytes=4005)).replicas


def test_a_model_too_large_for_all_devices() -> None:
    with pytest.raises(ValueError, match=r"no cut into stages on 2 devices of 500 bytes fits: .* 1,200 bytes"):
        partition(chain(1, 1, 1, parameter_bytes=100), Cluster.from_levels([(2, 1e9)]), memory_limit=500)


def test_a_graph_with_too_many_cuts_says_so_and_bounds_the_loss() -> None:
    names = [f"n{i}" for i in range(8)]
    nodes = tuple(Node(name=name, forward_seconds=1, backward_seconds=2) for name in ["in", *names, "out"])
    edges = tuple(pair for name in names for pair in (("in", name), (name, "out")))
    plan = partition(Profile(nodes=nodes, edges=edges), Cluster.from_levels([(4, 1e9)]), max_cuts=100)
    assert "more than 100 cuts" in plan.notes[0]
    assert plan.bound == 30 / 4


def test_of_what_is_too_large_some_cuts_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = read_pipedream_profile(DATA / "vgg16.txt"), Cluster.from_levels([(4, 1e10), (4, 1.25e9)])
    exact = partition(profile, cluster)
    monkeypatch.setattr(dynamic_module, "MAX_STEPS", 1e4)
    plan = partition(profile, cluster)
    assert plan.bound <= exact.bottleneck <= plan.bottleneck <= 1.2 * exact.bottleneck
    assert all(count % 4 == 0 for count in plan.replicas)
    (note,) = plan.notes
    assert re.fullmatch(
        r"too large for the exact dynamic program: \d+ of \d+ cuts were looked at, and replicas in multiples of 4", note
    )


@pytest.mark.parametrize("straight", [False, True])
def test_whatever_is_too_large_has_a_plan(monkeypatch: pytest.MonkeyPatch, straight: bool) -> None:
    monkeypatch.setattr(dynamic_module, "MAX_STEPS", 0)
    plan = partition(chain(*range(1, 9)), Cluster.from_levels([(13, 1e9)]), straight=straight)
    assert plan.replicas == ((1, 1) if straight else (12,))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cost_model": "best"}, "cost_model='best': expected one of default, pipedream"),
        ({"schedule": "gpipe"}, "schedule='gpipe': expected one of 1f1b, 2bw, paci, pipedream"),
        ({"num_microbatches": 0}, "num_microbatches: 0: expected a whole number of at least 1"),
        ({"num_candidates": 1.5}, "num_candidates: 1.5: expected a whole number of at least 1"),
        ({"memory_limit": -1}, "memory_limit: -1: expected a finite number above 0"),
        ({"activation_compression_ratio": 0}, "activation_compression_ratio: 0: expected a finite number above 0"),
        ({"optimizer_bytes": -2}, "optimizer_bytes: -2: expected a finite number of at least 0"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(chain(1, 1), Cluster.from_levels([(2, 1e9)]), **options)
