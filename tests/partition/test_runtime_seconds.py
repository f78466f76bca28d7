"""Seconds that the runtime takes around actions and messages, in profiles, clusters, plans and simulations."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from stagewright.partition import Cluster, Level, Node, Plan, Profile, partition, plan
from stagewright.partition.planner.bounds import LeastSeconds
from stagewright.partition.planner.cuts import candidate_ends
from stagewright.partition.planner.evaluate import Evaluator
from stagewright.partition.planner.model import Model
from stagewright.partition.planner.space import Configuration
from stagewright.partition.plans.reorder import reorder
from stagewright.partition.plans.simulated import simulated
from stagewright.partition.stage_cost import overheads
from stagewright.partition.stage_memory import MemoryRules
from stagewright.partition.topology import Topology
from stagewright.schedules import Costs, build, simulate
from stagewright.schedules.synthesis.synthesize import Synthesis, synthesize

NODES = tuple(
    Node(name=f"n{i}", forward_seconds=1.0, backward_seconds=2.0, activation_bytes=5, parameter_bytes=20)
    for i in range(8)
)


def cluster(num_devices: int = 2, *, message_seconds: float = 0.0, bandwidth: float = 1e3) -> Cluster:
    """Devices on one level of links."""
    link = Level(name="net", size=num_devices, bandwidth=bandwidth, latency=0.125, message_seconds=message_seconds)
    return Cluster(levels=(link,))


def profile(action_seconds: float) -> Profile:
    """Eight equal nodes."""
    return Profile(nodes=NODES, action_seconds=action_seconds)


@pytest.mark.parametrize(("action", "message", "chunks"), [(0.0, 0.0, 4), (0.25, 0.0, 2), (0.0, 0.5, 1), (2.0, 0.0, 1)])
def test_chunks_cost_actions_and_messages(action: float, message: float, chunks: int) -> None:
    """More chunks fill the pipeline sooner, and have more actions and messages: the planner takes what is fastest."""

    def with_chunks(number: int) -> Plan:
        name = "1f1b" if number == 1 else "interleaved"
        return plan(
            profile(action),
            cluster(message_seconds=message),
            global_batch=4,
            schedules=(name,),
            chunk_sizes=(max(2, number),),
            pipeline_sizes=(2,),
            data_sizes=(1,),
        )

    each = {number: with_chunks(number).simulated_step_time or 0.0 for number in (1, 2, 4)}
    found = plan(
        profile(action), cluster(message_seconds=message), global_batch=4, pipeline_sizes=(2,), data_sizes=(1,)
    )
    assert min(each, key=lambda number: each[number]) == found.num_chunks == chunks
    assert found.simulated_step_time == each[chunks]


def test_seconds_by_hand() -> None:
    """Two stages, one microbatch: F0, message, F1, B1, message, B0; each action has one end of a message."""
    found = plan(
        Profile(nodes=NODES[:2], action_seconds=0.5),
        cluster(message_seconds=0.25),
        global_batch=1,
        pipeline_sizes=(2,),
        data_sizes=(1,),
        schedules=("1f1b",),
    )
    assert found.overheads == (0.75, 0.75)
    assert found.simulated_step_time == pytest.approx(2 * (1 + 2) + 4 * (0.5 + 0.25) + 2 * (0.125 + 5 / 1e3))
    assert found.predicted_step_time == pytest.approx(1 + 2 + 2 * 0.75)
    assert "runtime: 500 ms around each action, 250 ms at either end of a message" in found.explain()


def test_stages_of_one_rank_send_each_other_nothing() -> None:
    """Back and forth over two ranks: the second and third stage stand on one."""
    found = plan(
        profile(0.5),
        cluster(message_seconds=0.25),
        global_batch=4,
        schedules=("zb-v",),
        pipeline_sizes=(2,),
        data_sizes=(1,),
    )
    assert found.overheads == (0.75, 0.75, 0.75, 0.75)
    assert overheads([0.5] * 4, [0.25, 0.0, 0.25]) == found.overheads
    assert [each.message_seconds for each in found.traffic] == [0.25, 0.0, 0.25, 0.0]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "zb-h1", "interleaved", "hanayo", "zb-v"])
@pytest.mark.parametrize("data", [1, 2])
@pytest.mark.parametrize("M", [8, 64])
def test_a_plan_keeps_them(schedule: str, data: int, M: int) -> None:
    """Its file, simulated again, takes the same seconds as the planner's simulation, and more than without."""
    found = plan(
        profile(0.1),
        cluster(2 * data, message_seconds=0.2, bandwidth=50.0),
        global_batch=M,
        schedules=(schedule,),
        chunk_sizes=(2,),
        pipeline_sizes=(2,),
        data_sizes=(data,),
    )
    again = Plan.from_json(found.to_json())
    assert again == found
    whole = simulated(again)
    assert whole.timeline.batch_seconds == pytest.approx(found.simulated_step_time, rel=1e-12)
    assert max(0.0, whole.timeline.bubble) == pytest.approx(found.simulated_bubble, abs=1e-3)
    free = replace(whole.costs, overhead=0.0)
    assert simulate(whole.timeline.schedule, free, whole.links).batch_seconds < whole.timeline.batch_seconds


def test_unequal_replicas() -> None:
    light = replace(NODES[0], parameter_bytes=1e5)
    heavy = Profile(nodes=(light, replace(NODES[1], forward_seconds=3.0, backward_seconds=6.0)), action_seconds=0.1)
    found = partition(heavy, cluster(4, message_seconds=0.05), schedule="1f1b", num_microbatches=3)
    assert found.replicas == (1, 3)
    assert simulated(Plan.from_json(found.to_json())).timeline.batch_seconds == found.simulated_step_time
    assert found.overheads == pytest.approx((0.15, 0.15))
    assert found.bound <= found.predicted_step_time


def test_the_search_for_an_order_knows_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is gained is gained with them: in the search, and where the order found is simulated."""
    searched: list[Costs] = []

    def search(*, costs: Costs, **options: Any) -> Synthesis:
        searched.append(costs)
        return synthesize(costs=costs, **options)

    monkeypatch.setattr(f"{reorder.__module__}.synthesize", search)
    found = plan(
        profile(0.3), cluster(message_seconds=0.1), global_batch=6, schedules=("1f1b",), pipeline_sizes=(2,),
        data_sizes=(1,),
    )  # fmt: skip
    better = reorder(found, seconds=10.0, evaluations=200)
    assert simulated(better).timeline.batch_seconds == better.simulated_step_time
    assert [each.overhead for each in (*searched, simulated(better).costs)] == [found.overheads] * 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "2bw", "zb-h1", "interleaved", "looped-bfs", "zb-v", "hanayo"])
def test_bounds_stay_below_what_is_simulated(schedule: str) -> None:
    """The search's first bound, that of a candidate with cuts, and the simulation: none is above the next one."""
    random_ = random.Random(0)
    for trial, data in product(range(6), (1, 2)):
        nodes = tuple(
            replace(node, forward_seconds=random_.uniform(0, 2), backward_seconds=random_.uniform(0, 3))
            for node in NODES
        )
        model = Model(Profile(nodes=nodes, action_seconds=random_.choice((0.0, 0.1, 5.0))), optimizer_ratio=2.0)
        links = Topology(
            cluster(4, message_seconds=random_.choice((0.0, 0.3, 4.0)), bandwidth=random_.choice((10, 1e3)))
        )
        rules = MemoryRules(optimizer_ratio=2.0)
        evaluator = Evaluator(links, lambda _, rules=rules: rules, lambda _size, _tensor, model=model: model)
        c = Configuration(
            pipeline=2,
            data=data,
            tensor=1,
            schedule=schedule,
            num_chunks=1 if schedule in ("1f1b", "gpipe", "2bw", "zb-h1") else 2,
            microbatch_size=1,
            num_microbatches=(4, 8)[trial % 2],
        )
        least = LeastSeconds(links).of(c, model)
        for ends in candidate_ends(evaluator, rules, c):
            evaluated = evaluator.evaluate(c, ends, exact=True)
            seconds = evaluator.simulate(evaluated).seconds
            assert evaluated.bound <= seconds * (1 + 1e-9)
            assert least <= seconds * (1 + 1e-9)
            assert evaluated.bottleneck * c.batch <= seconds * (1 + 1e-9)


def test_files_keep_them() -> None:
    known, links = profile(3e-4), cluster(message_seconds=1e-4)
    assert Profile.from_json(known.to_json()) == known
    assert Cluster.from_json(links.to_json()) == links
    assert replace(known, slowdown=2.0).typical().action_seconds == 3e-4
    old = known.to_json().replace('"action_seconds": 0.0003,', ""), links.to_json()
    assert "action_seconds" not in old[0]
    assert Profile.from_json(old[0]).action_seconds == 0.0


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_what_cannot_be_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="action_seconds"):
        profile(value)
    with pytest.raises(ValueError, match="message_seconds"):
        cluster(message_seconds=value)


def test_overhead_is_that_of_the_simulator() -> None:
    """Without links: Costs(overhead=) alone says the same."""
    found = plan(
        profile(0.5), cluster(bandwidth=1e15), global_batch=4, schedules=("1f1b",), pipeline_sizes=(2,), data_sizes=(1,)
    )
    costs = Costs(forward=4.0, backward=8.0, overhead=0.5, latency=0.125)
    own = simulate(build("1f1b", num_ranks=2, num_microbatches=4), costs).makespan
    assert found.simulated_step_time == pytest.approx(own)
