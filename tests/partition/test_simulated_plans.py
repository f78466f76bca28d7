"""Plans simulated from what their files keep: the same seconds as the planner's own simulation.

Long batches that a short one stands for: the same seconds as all of the batch simulated.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.inside import (
    Configuration,
    MemoryRules,
    Model,
    PlanEvaluator,
    SimulatedPlan,
    Topology,
    count_in_flight,
    exhibit_of_plan,
    long_batch,
    sampled,
    short_batches,
    simulated_batch,
)
from support.inside import simulated_simulated as simulated
from support.sizes import fitting

from stagewright.partition import Cluster, GivenStage, Node, Plan, Profile, evaluate, partition, plan
from stagewright.schedules import FAMILIES, Costs, Timeline, build, simulate

from . import small

SLOW = Cluster.parse("4:net=10B/s@0.25s")
NODES = []
for i, node in enumerate(small.chain(8, update_seconds=0.3).nodes):
    seconds = {"forward_seconds": 1 + i % 3 / 7, "backward_seconds": 2 + i % 2 / 3}
    NODES.append(replace(node, activation_bytes=5 + i, parameter_bytes=20 + i, **seconds))


def planned(cluster: Cluster = SLOW, M: int = 8, **options: Any) -> Plan:
    return plan(Profile(nodes=NODES), cluster, global_batch=M, **options)


def read_again(found: Plan) -> SimulatedPlan:
    again = Plan.from_json(found.to_json())
    assert again == found
    return simulated(again)


@pytest.mark.parametrize(("M", "cards"), [(7, None), (4, 3), (200, None)])
def test_equal_replicas_of_which_some_have_a_microbatch_more(M: int, cards: int | None) -> None:
    """Of three the planner simulated the one with the most, or, where they share cards, all."""
    fast, slow = Cluster.parse("2x3:nvlink=100B/s,net=10B/s@0.25s").levels
    cluster = Cluster(levels=(fast, replace(slow, devices_per_card=cards)))
    names = [node.name for node in NODES]
    stages = [GivenStage(names[:5], range(3)), GivenStage(names[5:], range(3, 6))]
    found = evaluate(Profile(nodes=NODES, microbatch_size=1), cluster, stages, num_microbatches=M)
    whole = read_again(found).timeline
    assert len(whole.schedule.programs) == 6
    assert whole.batch_seconds == pytest.approx(found.simulated_step_time, rel=1e-12)
    assert whole.bubble == pytest.approx(found.simulated_bubble, rel=1e-9)


def test_updates_that_wait_for_sums_are_deferred_as_in_the_plan() -> None:
    found = planned(schedules="2bw", pipeline_sizes=(2,), data_sizes=(2,))
    whole = read_again(found)
    assert whole.timeline.schedule != found.build_schedule()
    at_once = simulate(found.build_schedule(), whole.costs, whole.links).batch_seconds
    assert at_once > whole.timeline.batch_seconds == found.simulated_step_time


def test_tensor_groups_send_a_part_each() -> None:
    """Two of every two ranks send half a message: the way is twice as fast, and a rank of the picture is a group."""
    profiles = [Profile(nodes=NODES, tensor=size, microbatch_size=1) for size in (1, 2)]
    found = plan(profiles, SLOW, global_batch=8, tensor_sizes=(2,), pipeline_sizes=(2,), data_sizes=(1,))
    assert found.tensor == 2
    whole = read_again(found)
    assert whole.timeline.batch_seconds == found.simulated_step_time
    assert whole.links.way(0, 1).seconds_per_byte == 1 / 10 / 2
    exhibit = exhibit_of_plan(found)
    assert exhibit.predicted_peak == (found.memory_bytes[0], found.memory_bytes[2])


def test_the_exhibit_brings_links_limits_and_peaks_or_a_note() -> None:
    found = planned(schedules="1f1b", pipeline_sizes=(2,), data_sizes=(2,), memory_limit=1e6)
    exhibit = exhibit_of_plan(found)
    assert (exhibit.notes, exhibit.memory_limit) == ((), (1e6,) * 4)
    assert exhibit.predicted_peak == tuple(found.memory_bytes[rank] for rank in range(4))
    assert simulate(exhibit.simulated.schedule, exhibit.costs, exhibit.links) == exhibit.simulated
    found = planned(schedules="1f1b", pipeline_sizes=(2,), data_sizes=(2,))
    old = Plan.from_json(replace(found, links=None).to_json())
    exhibit = exhibit_of_plan(old, name="old")
    assert exhibit.links is None
    (note,) = exhibit.notes
    assert note == (
        "old: messages take no time in this picture, since the plan does not keep its links; with them the planner "
        f"simulated {found.simulated_step_time:.4g} s a batch"
    )
    timeline = simulated(old).timeline
    assert timeline.batch_seconds < (found.simulated_step_time or 0)
    assert timeline == simulate(old.build_schedule(), simulated(old).costs)


def edited(change: Callable[[dict[str, Any]], None], **options: Any) -> str:
    data = json.loads(planned(schedules="interleaved", chunk_sizes=(2,), pipeline_sizes=(2,), **options).to_json())
    change(data)
    return json.dumps(data)


@pytest.mark.thorough(
    but=[
        "<lambda>-update has 1 numbers for 4 stages: expected one number, or",
        "<lambda>-no route between the places \\\\(0, 1\\\\): expected one in the",
        "<lambda>-links: routes\\\\[0\\\\]: places: \\\\[0\\\\]: expected 2 whole numbers",
        "<lambda>-activation_bytes=\\\\(1.0,\\\\): expected one for eac",
        "<lambda>-a sum of 1.0 s of stage 0: expected a stage with replicas",
    ]
)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan: plan.pop("costs"), "costs: missing: expected an object"),
        (lambda plan: plan.update(costs=3), "costs: costs with int: expected an object with some of forward, "),
        (lambda plan: plan["costs"].update(speed=1), "costs: costs with .*'speed'.*: expected an object with some of"),
        (lambda plan: plan["costs"].update(update=[1.0]), "update has 1 numbers for 4 stages: expected one number, or"),
        (lambda plan: plan["costs"].update(tied=[[[0, 4], 1.0]]), r"tied=\(0, 4\): expected stages below 4"),
        (lambda plan: plan["links"].pop("routes"), "links: routes: missing: expected a list"),
        (lambda plan: plan["links"].update(routes=[]), r"no route between the places \(0, 1\): expected one in the"),
        (
            lambda plan: plan["links"]["routes"][0].update(places=[0]),
            r"links: routes\[0\]: places: \[0\]: expected 2 whole numbers",
        ),
        (lambda plan: plan["links"]["routes"][0].update(latency=-1), r"links: routes\[0\]: latency: -1: expected a fi"),
        (lambda plan: plan["links"].update(wires=1), "links: unknown field wires"),
        (lambda plan: plan["links"].update(activation_bytes=[1.0]), r"activation_bytes=\(1.0,\): expected one for eac"),
        (
            lambda plan: plan["links"].update(sums=[{"stage": 0, "seconds": 1.0, "gather": 0.0}]),
            "a sum of 1.0 s of stage 0: expected a stage with replicas",
        ),
    ],
)
def test_costs_and_links_that_cannot_be(change: Callable[[dict[str, Any]], None], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^p\.json: {message}"):
        Plan.from_json(edited(change, data_sizes=(1,)), source="p.json")


def varied() -> Plan:
    spreads = [("a", 1.0, 0.1), ("b", 3.0, 0.02), ("c", 4.0, 0.3)]
    nodes = [Node(name=n, forward_seconds=f, backward_seconds=2 * f, spread=s) for n, f, s in spreads]
    links = Cluster.parse("2:net=1TB/s")
    return plan(Profile(nodes=nodes), links, global_batch=4, data_sizes=(1,), schedules=("1f1b",))


def test_a_plan_varies_as_the_actions_of_its_profile() -> None:
    """Stages by the seconds of their nodes; the range stands in what `explain` says, in JSON and in what is drawn."""
    found = varied()
    assert [stage.spread for stage in found.stages] == [pytest.approx((1 * 0.1 + 3 * 0.02) / 4), 0.3]
    again = Plan.from_json(found.to_json())
    assert again == found
    taken = sampled(again)
    low, high = taken.range()
    assert low < taken.median < high
    assert taken.median > (found.simulated_step_time or 0)  # a maximum over ranks
    assert f"predicted, with actions that vary as in the profile: {taken}" in " ".join(found.explain().split())
    assert exhibit_of_plan(found).sampled == taken
    fixed = replace(found, stages=tuple(replace(stage, spread=0.0) for stage in found.stages))
    assert sampled(fixed) is None
    assert "predicted, with" not in " ".join(fixed.explain().split())
    with pytest.raises(ValueError, match="spread=-1"):
        replace(found.stages[0], spread=-1.0)


@pytest.mark.thorough
def test_large_plans_vary_too_as_far_as_their_actions_can_be_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    monkeypatch.setattr(
        f"{sampled.__module__}.simulate_spread", lambda schedule, *_: sizes.append(len(schedule.owners))
    )
    found = varied()
    for num_microbatches, known in ((2_500, 1), (26_000, 2), (27_000, 2)):
        sampled(replace(found, num_microbatches=num_microbatches))
        assert len(sizes) == known


# Sums of these are exact: ties between messages on a link stay ties.
EIGHTHS = st.integers(0, 24).map(lambda n: n / 8)
NEAR = st.sampled_from([1.0, 1 + 2.0**-10, 1 - 2.0**-12, 1 + 2.0**-20, 3.0])  # steady after many rounds only


def configuration(schedule: str, P: int, V: int, M: int) -> Configuration:
    return small.configuration(pipeline=P, schedule=schedule, num_chunks=V, num_microbatches=M)


FLUSH = [each for each in FAMILIES.values() if each.full_after is not None and not each.rule.is_asynchronous]


@pytest.mark.thorough(but=["eager-1f1b"])
@pytest.mark.parametrize("each", FLUSH, ids=lambda each: each.name)
def test_more_microbatches_are_more_rounds_in_the_middle(each: Any) -> None:
    """Programs of a short batch are those of a long one without its middle; so the drains are alike."""
    for P, V in product((1, 2, 3, 4), (2, 3) if each.takes_chunks else (1,)):
        for M in range(12 * P, 14 * P):
            if fitting(each.name, P, M) != (P, M):
                continue  # an odd P, where it must be even
            c = configuration(each.name, P, V, M)
            for size in short_batches(c, M):
                options = {"num_ranks": P, "num_chunks": V if V > 1 else None}
                whole, short = (build(each.name, num_microbatches=m, **options) for m in (M, size))
                for all_of_it, part in zip(whole.programs, short.programs, strict=True):
                    half = len(part) // 2
                    moved = [(a.stage, a.op, a.index + M - size) for a in part[-half:]]
                    assert all_of_it[:half] == part[:half]
                    assert [(a.stage, a.op, a.index) for a in all_of_it[-half:]] == moved


def evaluator_of(profile: Profile, bandwidth: float, num_ranks: int) -> PlanEvaluator:
    model = Model(profile, MemoryRules(optimizer_ratio=2.0))
    cluster = Cluster.parse(f"{num_ranks}:net={bandwidth}B/s@0.25s")
    return PlanEvaluator(Topology(cluster), lambda _size, _tensor: model)


@pytest.mark.thorough
@settings(max_examples=80, deadline=None, derandomize=True)
@given(st.data())
def test_the_same_as_all_of_the_batch(data: st.DataObject) -> None:
    P, V = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([1, 1, 2]))
    figure = data.draw(st.sampled_from([EIGHTHS, NEAR]))
    nodes = tuple(
        Node(
            name=f"n{i}",
            forward_seconds=data.draw(figure) + 0.125,
            backward_seconds=data.draw(figure),
            activation_bytes=data.draw(EIGHTHS),
            parameter_bytes=data.draw(EIGHTHS),
            update_seconds=data.draw(EIGHTHS),
        )
        for i in range(P * V)
    )
    M = data.draw(st.integers(20, 60)) * P + (data.draw(st.integers(0, P - 1)) if V == 1 else 0)
    c = configuration("1f1b" if V == 1 else "interleaved", P, V, M)
    evaluator = evaluator_of(Profile(nodes=nodes), data.draw(st.sampled_from([0.5, 2.0, 2.0**30])), P)
    found = evaluator.choices(c, tuple(range(P * V + 1)), exact=True)[0]
    whole, folded = simulated_batch(c, found.costs, found.links, evaluator.schedules, M), evaluator.simulate(found)
    assert folded.simulated_seconds == whole.makespan
    assert folded.bubble == pytest.approx(whole.bubble, abs=1e-9)


def folded(c: Configuration, M: int, costs: Costs) -> tuple[float | None, list[int]]:
    """Seconds, and the sizes of the batches that were simulated for them."""
    sizes = []

    def simulated(m: int) -> Timeline:
        sizes.append(m)
        chunks = c.num_chunks if c.num_chunks > 1 else None
        return simulate(build(c.schedule, num_ranks=c.pipeline, num_microbatches=m, num_chunks=chunks), costs)

    found = long_batch(simulated, c, M)
    return None if found is None else found[0], sizes


@pytest.mark.thorough(but=["3.0-1-1-100000", "3.0-4-3-100000"])
@pytest.mark.parametrize(("P", "V", "M"), [(1, 1, 10**5), (4, 1, 10**5 + 3), (4, 3, 10**5), (16, 1, 1000)])
@pytest.mark.parametrize("latency", [0.0, 0.5, 3.0])
def test_it_is_found_and_short(P: int, V: int, M: int, latency: float) -> None:
    """Equal stages are steady at once, though not each microbatch where messages take time; unequal ones after some."""
    c = configuration("1f1b" if V == 1 else "interleaved", P, V, M)
    for costs in (
        Costs(forward=1, backward=2, latency=latency),
        Costs(forward=1, backward=[2] * (P * V - 1) + [3], latency=latency),
    ):
        seconds, sizes = folded(c, M, costs)
        assert seconds is not None
        assert max(sizes) < 14 * P


def test_what_slowly_gets_out_of_step_is_not_steady() -> None:
    """The first rank is a thousandth slower than the last, which runs at its own pace while there is work in stock."""
    costs = Costs(forward=[1 + 2.0**-10, 0.5, 0.5, 1], backward=[2, 1, 1, 2])
    assert folded(configuration("1f1b", 4, 1, 300), 300, costs)[0] is None


@pytest.mark.parametrize(("schedule", "P", "V"), [("1f1b", 3, 1), ("2bw", 3, 1), ("interleaved", 4, 3)])
def test_what_is_in_flight_is_that_of_the_whole_batch(schedule: str, P: int, V: int) -> None:
    """Memory of a short batch where it holds exactly as much; interleaved groups of other sizes hold more."""
    evaluator = evaluator_of(small.chain(P * V), 1e9, P)
    for M in range(5 * P, 7 * P):
        counted = evaluator.schedules.in_flight(configuration(schedule, P, V, M), exact=True)
        chunks = V if V > 1 else None
        whole = count_in_flight(build(schedule, num_ranks=P, num_microbatches=M, num_chunks=chunks))
        for a, b in zip(counted, whole, strict=True):
            for is_backward in (False, True):
                ours, theirs = (
                    np.unique(
                        each.counts[each.num_forwards :] if is_backward else each.counts[: each.num_forwards], axis=0
                    )
                    for each in (a, b)
                )
                assert np.array_equal(ours, theirs), (M, is_backward)


def test_very_long_batches_are_planned_by_short_ones() -> None:
    assert short_batches(configuration("gpipe", 4, 1, 10**6), 10**6) == ()
    assert short_batches(configuration("2bw", 4, 1, 10**6), 10**6) == ()
    assert short_batches(configuration("interleaved", 4, 2, 10**6 + 1), 10**6 + 1) == ()
    assert short_batches(configuration("1f1b", 4, 1, 40), 40) == ()
    # A million microbatches: every layout is simulated, and the plan's seconds are its work and its fill.
    profile, cluster = small.chain(4, parameter_bytes=1e9), Cluster.from_levels([(4, 1e3)])
    found = plan(profile, cluster, global_batch=10**6, schedules="1f1b", data_sizes=(1,))
    assert len(found.stages) == 4
    assert found.simulated_step_time == pytest.approx((10**6 + 3) * 3, rel=1e-9)
    assert found.searched.too_long == 0
    many = partition(profile, cluster, num_microbatches=10**12, straight=True)
    assert many.simulated_step_time == pytest.approx((10**12 + 3) * 3, rel=1e-9)
