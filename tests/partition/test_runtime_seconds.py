"""Seconds that the runtime takes around actions and messages, in profiles, clusters, plans and simulations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.inside import (
    LeastSeconds,
    MemoryRules,
    Model,
    PlanSearch,
    RangeCosts,
    Synthesis,
    Topology,
    all_cuts,
    message_seconds,
    reorder,
)
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, Level, Plan, Profile, partition, plan
from stagewright.schedules import Costs, simulate, synthesize

from .small import chain, configuration

NODES = chain(8, activation_bytes=5, parameter_bytes=20).nodes


def cluster(num_devices: int = 2, *, bandwidth: float = 1e3, **figures: Any) -> Cluster:
    return Cluster(levels=(Level(name="net", size=num_devices, bandwidth=bandwidth, latency=0.125, **figures),))


def profile(action_seconds: float, around_seconds: float = 0.0) -> Profile:
    return Profile(nodes=NODES, action_seconds=action_seconds, around_seconds=around_seconds)


def planned(source: Profile, links: Cluster, **options: Any) -> Plan:
    """Four microbatches on one pipeline of two, unless options say otherwise."""
    return plan(source, links, **{"global_batch": 4, "pipeline_sizes": (2,), "data_sizes": (1,)} | options)


@pytest.mark.thorough(but=["0.0-0.0-4"])
@pytest.mark.parametrize(("action", "message", "chunks"), [(0.0, 0.0, 4), (0.25, 0.0, 2), (0.0, 0.5, 1), (2.0, 0.0, 1)])
def test_chunks_cost_actions_and_messages(
    action: float, message: float, chunks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More chunks fill the pipeline sooner, and have more actions and messages: the planner takes what is fastest, of
    orders as named; of others two chunks are."""
    free = planned(profile(action), cluster(message_seconds=message)).simulated_step_time or 0.0
    monkeypatch.setattr(PlanSearch, "with_orders", lambda _, found: found)

    def with_chunks(number: int) -> Plan:
        name = "1f1b" if number == 1 else "interleaved"
        return planned(
            profile(action), cluster(message_seconds=message), schedules=(name,), chunk_sizes=(max(2, number),)
        )

    each = {number: with_chunks(number).simulated_step_time or 0.0 for number in (1, 2, 4)}
    found = planned(profile(action), cluster(message_seconds=message))
    assert min(each, key=lambda number: each[number]) == found.num_chunks == chunks
    assert free <= found.simulated_step_time == each[chunks]


@pytest.mark.parametrize(("message", "a_second"), [(0.25, None), (0.0, 20.0), (0.15, 50.0)])
def test_seconds_by_hand(message: float, a_second: float | None) -> None:
    """Two stages, one microbatch: F0, message, F1, B1, message, B0; each action has one end of a message of 5 bytes."""
    links = cluster(message_seconds=message, message_bandwidth=a_second)
    found = planned(Profile(nodes=NODES[:2], action_seconds=0.5), links, global_batch=1, schedules=("1f1b",))
    assert (found.costs.overhead, found.costs.message_overhead) == ((0.5, 0.5), (0.25, 0.25))
    assert found.simulated_step_time == pytest.approx(2 * (1 + 2) + 4 * (0.5 + 0.25) + 2 * (0.125 + 5 / 1e3))
    assert found.bottleneck == pytest.approx(1 + 2 + 2 * 0.75)
    assert "runtime: 500 ms around each action, 250 ms at either end of a message" in " ".join(found.explain().split())


@pytest.mark.parametrize(("schedule", "seconds"), [("1f1b", 2 * 0.75 + 0.0), ("zb-h1", 3 * 0.5 + 2 * 0.25)])
def test_weight_gradients_have_no_message_and_cost_nothing_beside_their_i(schedule: str, seconds: float) -> None:
    """Rank 0 runs I and W as one, rank 1 sends the gradient in between."""
    found = planned(Profile(nodes=NODES[:2], action_seconds=0.5), cluster(message_seconds=0.25), schedules=(schedule,))
    ranks = simulated(Plan.from_json(found.to_json())).timeline.ranks
    assert [rank.busy for rank in ranks] == pytest.approx([4 * (3 + 1.5), 4 * (3 + seconds)])
    assert max(0.0, 1 - sum(rank.busy for rank in ranks) / 2 / found.simulated_step_time) == found.simulated_bubble


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    """Back and forth over two ranks: the second and third stage stand on one."""
    found = planned(profile(0.5), cluster(message_seconds=0.25), schedules=("zb-v",))
    assert (found.costs.overhead, found.costs.message_overhead) == ((0.5,) * 4, (0.25,) * 4)
    assert found.costs.message_overhead == (0.25,) * 4
    assert message_seconds((0.25,) * 4) == (0.25, 0.0, 0.25)


@pytest.mark.thorough(but=["8-1-1f1b"])
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "zb-h1", "interleaved", "hanayo", "zb-v"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("M", [8, 64])
def test_a_plan_keeps_them(schedule: str, data: int, M: int) -> None:
    """Its file, simulated again, takes the same seconds as the planner's simulation, and more than without."""
    found = planned(
        profile(0.1, 7.0),
        cluster(2 * data, message_seconds=0.1, message_bandwidth=50.0, bandwidth=50.0),
        global_batch=M,
        schedules=(schedule,),
        chunk_sizes=(2,),
        data_sizes=(data,),
    )
    again = Plan.from_json(found.to_json())
    assert again == found
    whole = simulated(again)
    assert whole.timeline.batch_seconds == pytest.approx(found.simulated_step_time, rel=1e-12)
    assert max(0.0, whole.timeline.bubble) == pytest.approx(found.simulated_bubble, abs=1e-3)
    free = whole.costs.free_of_overhead
    assert simulate(whole.timeline.schedule, free, whole.links).batch_seconds < whole.timeline.batch_seconds
    step = simulate(whole.timeline.schedule, replace(whole.costs, around=0.0), whole.links).batch_seconds
    assert found.simulated_step_time == pytest.approx(step + 7.0)
    assert "7.00 s around each step" in " ".join(found.explain().split())


def test_cuts_know_that_a_stage_between_others_has_twice_the_messages() -> None:
    """Ten equal nodes on three ranks, 3 s for an end of a message: 18 s each as 4-2-4, 21 as 4-3-3."""
    nodes = tuple(replace(NODES[0], name=f"n{i}", parameter_bytes=0) for i in range(10))
    equal, links = Profile(nodes=nodes), cluster(3, message_seconds=2.0, message_bandwidth=5.0)
    found = partition(equal, links, schedule="1f1b", num_microbatches=32, straight=True)
    assert [len(stage.nodes) for stage in found.stages] == [4, 2, 4]
    stream = partition(equal, links, schedule="1f1b", straight=True)
    assert found.bottleneck == stream.bottleneck == stream.bound == pytest.approx(18.0)
    busy = RangeCosts(all_cuts(equal), cluster(3), schedule="1f1b", num_microbatches=32, action_seconds=0.25)
    assert [float(each) for each in busy.seconds(0, [5, 10], busy.ranges(np.array([1, 2]), 3))] == [15.5, 15.25]


def test_the_search_for_an_order_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[Costs] = []

    def search(*, costs: Costs, **options: Any) -> Synthesis:
        searched.append(costs)
        return synthesize(costs=costs, **options)

    monkeypatch.setattr(f"{reorder.__module__}.synthesize", search)
    found = planned(profile(0.3), cluster(message_seconds=0.1), global_batch=6, schedules=("1f1b",), max_grad_norm=1.0)
    better = reorder(found, seconds=400.0, evaluations=200)
    assert simulated(better).timeline.batch_seconds == better.simulated_step_time
    around = [(each.overhead, each.message_overhead) for each in (*searched, simulated(better).costs)]
    assert around == [(found.costs.overhead, found.costs.message_overhead)] * 2
    assert [each.norm for each in (*searched, simulated(better).costs)] == [found.costs.norm] * 2


@pytest.mark.thorough
def test_ranks_wait_for_the_norm_that_they_clip_by() -> None:
    """A small sum over all devices, between the last of all backwards and the first update, once a batch."""
    devices = replace(cluster(4, message_seconds=0.5), rings="flat")
    nodes = tuple(replace(node, update_seconds=1.0) for node in NODES)

    def found(**options: Any) -> Plan:
        return planned(Profile(nodes=nodes), devices, global_batch=8, pipeline_sizes=(4,), **options)

    def without_updates(found: Plan) -> float:
        known = simulated(found)
        return simulate(known.timeline.schedule, replace(known.costs, update=0.0), known.links).batch_seconds

    plain, clipped = (found(schedules="1f1b", **options) for options in ({}, {"max_grad_norm": 1.0}))
    assert plain.costs.norm is found(schedules="1f1b", max_grad_norm=0.0).costs.norm is None
    assert clipped.costs.norm == 6 * (0.125 + 2 * 0.5)
    assert clipped.simulated_step_time == pytest.approx(without_updates(plain) + 6 * 1.125 + 2 * 1.0)
    assert simulated(clipped).timeline.batch_seconds == pytest.approx(clipped.simulated_step_time)
    assert Plan.from_json(clipped.to_json()) == clipped
    assert "6.75 s for the norm of all gradients" in " ".join(clipped.explain().split())
    assert found(schedules=("2bw",), max_grad_norm=1.0).costs.norm is None  # a stream has its own way
    with pytest.raises(ValueError, match="max_grad_norm: -1: expected a finite number of at least 0"):
        found(max_grad_norm=-1)


@pytest.mark.thorough(but=["0.5-1"])
@pytest.mark.parametrize("chunks", [1, 2, 4])
@pytest.mark.parametrize("busy", [0.0, 0.5, 1.0])
def test_sums_that_keep_ranks_busy_are_no_time_beside_compute(busy: float, chunks: int) -> None:
    """Two replicas of the whole model, 4 microbatches of 24 s each, sums of 160 bytes at 20 bytes/s over all chunks."""
    found = planned(
        profile(0.0),
        cluster(bandwidth=20.0, sum_busy=busy),
        global_batch=8,
        pipeline_sizes=(1,),
        data_sizes=(2,),
        schedules=("1f1b",) if chunks == 1 else ("interleaved",),
        chunk_sizes=(max(2, chunks),),
    )
    assert found.num_chunks == chunks
    work, total = 4 * 24.0, 160 / 20 + chunks * 2 * 0.125
    # The first chunk's B is the last: nothing is beside its sum.
    last = len(found.stages[0].nodes) * 20 / 20 + 2 * 0.125
    assert found.simulated_step_time == pytest.approx(work + busy * total + (1 - busy) * last)
    assert simulated(found).timeline.batch_seconds == pytest.approx(found.simulated_step_time)
    # The bound before cuts are known: all of it in one chunk, of several what keeps the ranks busy; latencies apart.
    c = configuration(pipeline=1, data=2, schedule=found.schedule or "", num_chunks=chunks, num_microbatches=8)
    least = LeastSeconds(Topology(cluster(bandwidth=20.0, sum_busy=busy))).of_configuration(
        c, Model(profile(0.0), MemoryRules(optimizer_ratio=2.0))
    )
    assert least == pytest.approx(work + 8 * (1.0 if chunks == 1 else busy))
