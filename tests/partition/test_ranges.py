"""The default cost model beside what the schedules themselves say."""

from __future__ import annotations

import pytest
from support.inside import RangeCosts, all_cuts

from stagewright.partition import Cluster, Node, Profile
from stagewright.schedules import build, check


def costs_of(cluster: Cluster, *, schedule: str, num_microbatches: int | None) -> RangeCosts:
    nodes = tuple(
        Node(name=n, forward_seconds=1, backward_seconds=2, parameter_bytes=100, activation_bytes=10) for n in "abc"
    )
    cuts = all_cuts(Profile(nodes=nodes))
    return RangeCosts(cuts, cluster, schedule=schedule, num_microbatches=num_microbatches)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw", "pipedream"])
@pytest.mark.parametrize("replicas", [(1, 1, 1), (2, 1), (3, 1), (1, 2), (2, 1, 1), (1, 1, 3), (4,)], ids=str)
def test_in_flight_is_what_the_checker_counts(schedule: str, replicas: tuple[int, ...]) -> None:
    options = {}
    if max(replicas) > 1:
        options = {"replicas": replicas}
    built = build(schedule, num_ranks=sum(replicas), num_microbatches=12, **options)
    counted = check(built).peak_activations
    costs = costs_of(Cluster.from_levels([(sum(replicas), 1.0)]), schedule=schedule, num_microbatches=12)
    expected: list[int] = []
    for stage, count in enumerate(replicas):
        expected += [int(costs.in_flight(count, sum(replicas[stage:])))] * count
    assert list(counted) == expected


def test_levels_count_from_the_end_of_the_pipeline() -> None:
    costs = costs_of(Cluster.from_levels([(2, 10.0), (2, 1.0)]), schedule="1f1b", num_microbatches=None)
    #    device 0 1 | 2 3: the stage on 1 and 2 spans both nodes, that on 2 and 3 only its own
    assert costs.topology.levels_between(1, 2) == 1
    assert costs.topology.levels_between(2, 3) == 0
    inside, across = costs.ranges(2, 4), costs.ranges(2, 3)
    assert (float(inside.ring), float(across.ring)) == (2 * 1 / 2 / 2 / 10, 2 * 1 / 2 / 2 / 1)
    assert (float(inside.outward), float(inside.inward)) == (1 / 2, 1 / 10 / 2)  # no producer above the last device


def test_compute_and_communication_overlap() -> None:
    costs = costs_of(Cluster.from_levels([(4, 10.0)]), schedule="1f1b", num_microbatches=4)
    at, sums = costs.ranges(2, 3), costs.cuts.stages(1, 2)
    compute, talk = 3 * 2 / 4, 2 * 1 / 2 * 100 / 10 / 4 + 2 * 10 / 10 / 2
    assert float(costs.compute(sums, at)) == compute
    assert float(costs.communication(sums, at)) == talk
    assert float(costs.seconds(1, 2, at)) == max(compute, talk)


def test_the_busiest_replica_counts() -> None:
    costs = costs_of(Cluster.from_levels([(5, 1e9)]), schedule="1f1b", num_microbatches=8)
    sums, even = costs.cuts.stages(0, 1), costs.per_replica()
    assert float(costs.compute(sums, costs.ranges(3, 3))) == 3 * 3 / 8
    assert float(even.compute(sums, costs.ranges(4, 4))) == 3 * 2 / 8
    assert float(even.compute(sums, even.ranges(3, 3))) == 3 / 3
