"""The default model's dynamic program against all cuts and replica counts; its costs against the schedules' own.

`partition`: from a profile and a cluster to a plan.
"""

import math
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import SCHEDULES, RangeCosts, Ranges, Solution, all_cuts, solve
from support.inside import dynamic as dynamic_module

from stagewright.partition import Cluster, Node, Plan, Profile, partition, read_pipedream_profile
from stagewright.schedules import build, check

from . import small
from .small import CLUSTERS, least_bottleneck, profiles, stage_seconds

steady = settings(max_examples=250, deadline=None, derandomize=True)
OPTIONS = st.fixed_dictionaries(
    {
        "schedule": st.sampled_from(SCHEDULES),
        "num_microbatches": st.sampled_from([None, 1, 2, 3, 8]),
        "limit": st.sampled_from([math.inf, 6.0, 12.0, 20.0, 40.0]),
    }
)


def costs_of(profile: Profile, cluster: Cluster, options: dict) -> RangeCosts:
    limit = None if options["limit"] == math.inf else options["limit"]
    return RangeCosts(
        all_cuts(profile),
        cluster,
        schedule=options["schedule"],
        num_microbatches=options["num_microbatches"],
        memory_limit=limit,
    )


def check_solution(solution: Solution, costs: RangeCosts, profile: Profile, cluster: Cluster, options: dict) -> None:
    """The stages follow each other, and take what is claimed."""
    stages = solution.stages
    assert (stages[0].first, stages[-1].last) == (0, len(costs.cuts) - 1)
    assert [p.last for p in stages[:-1]] == [p.first for p in stages[1:]]
    assert [p.devices for p in stages] == [sum(solution.replicas[i:]) for i in range(len(stages))]
    sets = [frozenset(n.name for n, held in zip(profile.nodes, row, strict=True) if held) for row in costs.cuts.members]
    seconds = [
        stage_seconds(
            profile, cluster, (sets[p.first], sets[p.last]), range(p.devices - p.replicas, p.devices), **options
        )
        for p in stages
    ]
    assert max(seconds) == pytest.approx(solution.seconds, rel=1e-9, abs=1e-12)


@pytest.mark.thorough
@steady
@given(st.booleans().flatmap(lambda chain: profiles(chain=chain)), CLUSTERS, OPTIONS)
def test_never_worse_than_trying_everything(profile: Profile, cluster: Cluster, options: dict) -> None:
    costs = costs_of(profile, cluster, options)
    found = solve(costs, num_candidates=4)
    best = least_bottleneck(profile, cluster, **options)
    assert (found[0].seconds if found else math.inf) == pytest.approx(best, rel=1e-9, abs=1e-12)
    for solution in found:
        check_solution(solution, costs, profile, cluster, options)
        assert solution.bound == found[0].seconds
    assert [s.seconds for s in found] == sorted(s.seconds for s in found)
    assert len({s.replicas for s in found}) == len(found)


def chain(seconds: list[float], parameters: list[float], activations: list[float]) -> Profile:
    rows = enumerate(zip(seconds, parameters, activations, strict=True))
    return Profile(
        nodes=tuple(
            Node(name=f"n{i}", forward_seconds=s, backward_seconds=0, parameter_bytes=w, activation_bytes=a)
            for i, (s, w, a) in rows
        )
    )


def test_ties_take_the_fewest_devices_then_the_longest_first_stage() -> None:
    profile = chain([1.0, 1.0, 0.0, 2.0], [0.0] * 4, [0.0] * 4)
    costs = RangeCosts(all_cuts(profile), Cluster.from_levels([(5, 1e9)]), schedule="1f1b", num_microbatches=1)
    (best,) = solve(costs)
    assert [(p.first, p.last, p.replicas) for p in best.stages] == [(0, 3, 1), (3, 4, 1)]


def test_memory_counts_versions_and_microbatches_in_flight() -> None:
    profile = small.chain(2, backward_seconds=1, parameter_bytes=10, buffer_bytes=1, stash_bytes=3)
    expected = {"1f1b": (47, 44), "2bw": (57, 54), "paci": (47, 44), "pipedream": (57, 44)}
    for schedule, (first, last) in expected.items():

        def costs_with(limit: float, schedule: str = schedule) -> RangeCosts:
            cluster = Cluster.from_levels([(2, 1e9)])
            return RangeCosts(all_cuts(profile), cluster, schedule=schedule, num_microbatches=8, memory_limit=limit)

        costs = costs_with(first)
        stages = [costs.cuts.stages(0, 1), costs.cuts.stages(1, 2)]
        held = [float(costs.bytes(sums, costs.ranges(1, e))) for sums, e in zip(stages, (2, 1), strict=True)]
        assert held == [first, last]
        assert [s.replicas for s in solve(costs)] == [(1, 1)]
        assert solve(costs_with(first - 1)) == []


def range_costs(cluster: Cluster, *, schedule: str, num_microbatches: int | None) -> RangeCosts:
    cuts = all_cuts(small.chain(3, parameter_bytes=100, activation_bytes=10))
    return RangeCosts(cuts, cluster, schedule=schedule, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 1, 3), (4,)], ids=str)
def test_in_flight_is_what_the_checker_counts(schedule: str, replicas: tuple[int, ...]) -> None:
    options = {}
    if max(replicas) > 1:
        options = {"replicas": replicas}
    built = build(schedule, num_ranks=sum(replicas), num_microbatches=12, **options)
    counted = check(built).peak_activations
    costs = range_costs(Cluster.from_levels([(sum(replicas), 1.0)]), schedule=schedule, num_microbatches=12)
    expected: list[int] = []
    for stage, count in enumerate(replicas):
        expected += [int(costs.in_flight(count, sum(replicas[stage:])))] * count
    assert list(counted) == expected


def test_levels_count_from_the_end_of_the_pipeline() -> None:
    costs = range_costs(Cluster.from_levels([(2, 10.0), (2, 1.0)]), schedule="1f1b", num_microbatches=None)
    #    device 0 1 | 2 3: the stage on 1 and 2 spans both nodes, that on 2 and 3 only its own
    assert costs.topology.levels_between(1, 2) == 1
    assert costs.topology.levels_between(2, 3) == 0
    inside, across = costs.ranges(2, 4), costs.ranges(2, 3)
    assert (float(inside.on.rounds[0]), float(across.on.rounds[0])) == (2 * 1 / 2 / 2 / 10, 2 * 1 / 2 / 2 / 1)
    sent = float(inside.on.outward), float(inside.on.inward)
    assert sent == (1 / 2, 1 / 10 / 2)  # no producer above the last device


def lanes(costs: RangeCosts, first: int, last: int, at: Ranges) -> tuple[float, float]:
    sums = costs.cuts.stages(first, last)
    work, links = costs.lanes(sums, costs.stage_seconds(sums, first, last, at), at)
    return float(work), float(links)


def test_the_busiest_replica_counts() -> None:
    costs = range_costs(Cluster.from_levels([(5, 1e9)]), schedule="1f1b", num_microbatches=8)
    even = costs.per_replica()
    assert lanes(costs, 0, 1, costs.ranges(3, 3))[0] == 3 * 3 / 8
    assert lanes(even, 0, 1, costs.ranges(4, 4))[0] == 3 * 2 / 8
    assert lanes(even, 0, 1, even.ranges(3, 3))[0] == 3 / 3


DATA = Path(__file__).parents[1] / "data" / "pipedream"


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


def test_idle_devices_are_the_last_groups() -> None:
    profile = small.chain(1)
    flat = partition(profile, Cluster.from_levels([(4, 1e9)]), straight=True)
    assert flat.stages[0].ranks == (0,)
    nested = partition(profile, Cluster.from_levels([(2, 1e9), (3, 1e9)]), straight=True)
    assert nested.stages[0].ranks == (1,)  # the first node; a pipeline ends where its node ends


def test_what_is_too_large_is_named() -> None:
    nodes = (
        Node(name="small", forward_seconds=1, backward_seconds=1, parameter_bytes=10),
        Node(name="huge", forward_seconds=1, backward_seconds=1, parameter_bytes=1000, stash_bytes=5),
    )
    with pytest.raises(
        ValueError, match=r"node 'huge' needs 4,005 bytes on a device of 4,000, 5 too many, .* expected"
    ):
        partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)], memory_bytes=4000))
    assert partition(Profile(nodes=nodes), Cluster.from_levels([(4, 1e9)], memory_bytes=4005)).replicas
    with pytest.raises(ValueError, match=r"no cut into stages on 2 devices of 500 bytes fits: .* 1,200 bytes"):
        partition(small.chain(3, parameter_bytes=100.0), Cluster.from_levels([(2, 1e9)]), memory_limit=500)


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
    plan = partition(small.chain(8), Cluster.from_levels([(13, 1e9)]), straight=straight)
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
        partition(small.chain(2), Cluster.from_levels([(2, 1e9)]), **options)
