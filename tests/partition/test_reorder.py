"""A plan's work in a better order: never slower, in no more memory, read back as it was written.

An order for each batch of it: laws of cost by size, and the memory of the plan and of its devices.
"""

from dataclasses import replace
from typing import Any

import pytest
from support.inside import (
    PlanRecord,
    Replanner,
    Size,
    costs_of_orders,
    fitted,
    one_pipeline,
    peak_held,
    planned_for,
    reorder,
    stage_laws,
)
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, Node, Plan, PlanStage, Profile, plan
from stagewright.schedules import Costs, MemoryLimitError, Op, Schedule, ScheduleError, check, simulate

from .small import chain

CLUSTER = Cluster.parse("1x4:nvlink=10GB/s@10us,net=1GB/s@10us")


def profile(*, split: bool = True) -> Profile:
    """Eight nodes; W takes 3/7 of I and W."""
    halves = {"input_grad_seconds": 0.012, "weight_grad_seconds": 0.009} if split else {}
    return chain(8, forward_seconds=0.01, backward_seconds=0.02, parameter_bytes=1e6, activation_bytes=1e5, **halves)


def planned(schedule: str, *, pipeline: int, data: int, chunks: int = 2, **options: Any) -> Plan:
    return plan(
        {1: profile()},
        CLUSTER,
        global_batch=8,
        schedules=(schedule,),
        pipeline_sizes=(pipeline,),
        data_sizes=(data,),
        chunk_sizes=(chunks,),
        optimizer_sharding=("none",),
        **options,
    )


@pytest.mark.thorough(but=["1f1b-2-2-2"])
@pytest.mark.parametrize(
    ("schedule", "pipeline", "data", "chunks"), [("1f1b", 4, 1, 2), ("1f1b", 2, 2, 2), ("interleaved", 4, 1, 2)]
)
def test_a_better_order_in_no_more_memory(schedule: str, pipeline: int, data: int, chunks: int) -> None:
    before = planned(schedule, pipeline=pipeline, data=data, chunks=chunks)
    after = reorder(before, profile(), seconds=400, evaluations=100)
    assert after.simulated_step_time < 0.97 * before.simulated_step_time
    assert Plan.from_json(after.to_json()) == after
    own, old = after.build_schedule(), before.build_schedule()
    assert simulated(after).timeline.batch_seconds == after.simulated_step_time
    held, least = check(own).peak_activations, check(old).peak_activations
    assert all(one <= other for one, other in zip(held, least, strict=True))
    assert any(action.op is Op.W for program in own.programs for action in program)
    assert "order: found by a search" in " ".join(after.explain().split())


def test_a_better_order_of_unequal_chunks_holds_no_more_bytes() -> None:
    """As many activations, more of them of the larger stage, would."""
    sizes = [(1e6, 1.0)] * 8 + [(9e6, 5.0)]
    nodes = [
        replace(profile().nodes[0], name=f"n{i}", stash_bytes=b, forward_seconds=s) for i, (b, s) in enumerate(sizes)
    ]
    ends = Profile(nodes=nodes, microbatch_size=1)
    options: dict[str, Any] = {"pipeline_sizes": (4,), "chunk_sizes": (2,), "data_sizes": (1,), "global_batch": 16}
    before = plan(ends, CLUSTER, schedules="interleaved", **options)
    after = reorder(before, ends, seconds=400, evaluations=100)
    assert after.simulated_step_time < before.simulated_step_time
    held = [[stage.held.activations] * 16 for stage in before.stages if stage.held is not None]
    for own, old in zip(after.build_schedule().programs, before.build_schedule().programs, strict=True):
        assert peak_held(own, held) <= peak_held(old, held) * (1 + 1e-9)


@pytest.mark.thorough
def test_halves_are_those_of_the_profile() -> None:
    before = planned("1f1b", pipeline=4, data=1)
    after = reorder(before, profile(), seconds=400, evaluations=100)
    assert after.seconds(Op.I)[1] == pytest.approx(after.seconds(Op.B)[1] * 0.6)  # W takes 0.45 of it
    after = reorder(before, profile(split=False), seconds=400, evaluations=100)
    assert after.seconds(Op.I)[1] == pytest.approx(after.seconds(Op.B)[1] / 2)
    before = planned("v-half", pipeline=4, data=1, recompute=("full",))  # I has what runs again
    after = reorder(before, profile(), seconds=400, evaluations=100)
    assert after.costs == before.costs
    assert after.simulated_step_time < before.simulated_step_time


@pytest.mark.thorough
def test_what_has_no_better_order_stays_as_it_is() -> None:
    single = planned("gpipe", pipeline=1, data=4)
    assert reorder(single, profile(), seconds=400, evaluations=100) is single
    stream = planned("2bw", pipeline=4, data=1)
    assert reorder(stream, profile(), seconds=400, evaluations=100) is stream
    once = reorder(planned("1f1b", pipeline=4, data=1), profile(), seconds=400, evaluations=100)
    assert reorder(once, profile(), seconds=400, evaluations=100) is once
    free = planned("1f1b", pipeline=2, data=1)
    free = replace(free, costs=replace(free.costs, forward=(0.0, 0.01)))
    assert reorder(free, profile(), seconds=400, evaluations=100) is free


def test_an_order_that_is_none_is_refused() -> None:
    found = reorder(planned("1f1b", pipeline=2, data=1), profile(), seconds=400, evaluations=100)
    with pytest.raises(ScheduleError, match="1 programs for 2 ranks"):
        replace(found, order=found.order[:1]).build_schedule()
    with pytest.raises(ScheduleError, match="order of a plan: cannot read the action 'x'"):
        replace(found, order=("x", found.order[1])).build_schedule()
    with pytest.raises(ScheduleError, match="missing"):
        replace(found, order=("0F0", found.order[1])).build_schedule()


def test_the_search_waits_for_sums_of_tied_weights() -> None:
    """Updates of both ends come behind the sum of what they share, which the first stage is the last to begin."""
    stages = tuple(PlanStage(nodes=(f"n{i}",), ranks=(i,), step_seconds=3.0) for i in range(3))
    plan = PlanRecord(
        stages=stages,
        num_devices=3,
        costs=Costs(forward=1.0, backward=2.0, update=(0.25, 0.5, 0.75), tied=(((0, 2), 5.0),)),
        cost_model="default",
        bottleneck=3.0,
        bound=0.0,
        schedule="1f1b",
        num_microbatches=4,
    )
    alone = replace(plan, costs=replace(plan.costs, tied=()))
    costs, schedule = costs_of_orders(plan), one_pipeline(plan, num_microbatches=4)
    assert list(costs.update) == [5.0 + 0.75, 0.5, 0.75]  # type: ignore[arg-type]
    assert simulate(schedule, costs).batch_seconds == simulated(plan).timeline.batch_seconds
    assert simulated(plan).timeline.batch_seconds == simulated(alone).timeline.batch_seconds + 5.5


MEASURED = [Size(1, 100), Size(1, 200), Size(1, 400)]
M = 6


def profile_of_size(size: Size) -> Profile:
    """F of 1 ms a token and attention; the last node has no attention, and half the W."""
    seconds = [1e-3 * size.tokens + attention * size.tokens * size.length for attention in (2e-6, 2e-6, 2e-6, 0.0)]
    nodes = [
        Node(
            name=f"n{number}",
            forward_seconds=f,
            backward_seconds=2 * f,
            input_grad_seconds=1.5 * f if number == 3 else f,
            weight_grad_seconds=0.5 * f if number == 3 else f,
            stash_bytes=100.0 * size.tokens,
            activation_bytes=8.0 * size.tokens,
            parameter_bytes=50.0,
        )
        for number, f in enumerate(seconds)
    ]
    return Profile(nodes=nodes, microbatch_size=size.samples)


PROFILES = {size: profile_of_size(size) for size in MEASURED}


def replanned(memory_limit: float | None = None) -> Plan:
    return plan(
        planned_for(PROFILES),
        Cluster.from_levels([(2, 1e12)]),
        global_batch=M,
        schedules=("1f1b",),
        pipeline_sizes=(2,),
        data_sizes=(1,),
        recompute=("none",),
        memory_limit=memory_limit,
    )


def test_laws_are_what_was_measured_and_go_on_beyond() -> None:
    laws = stage_laws(replanned(), PROFILES)
    whole = [s.nodes for s in replanned().stages]
    for law, names in zip(laws, whole, strict=True):
        for size in (*MEASURED, Size(1, 1000), Size(2, 150)):
            nodes = [node for node in profile_of_size(size).nodes if node.name in names]
            assert law["forward"](size) == pytest.approx(sum(n.forward_seconds for n in nodes), rel=1e-6)
            assert law["weight_grad"](size) == pytest.approx(sum(n.weight_grad_seconds for n in nodes), rel=1e-6)
            assert law["input_grad"](size) == pytest.approx(sum(n.input_grad_seconds for n in nodes), rel=1e-6)
            assert law["held"](size) == pytest.approx(sum(n.stash_bytes for n in nodes), rel=1e-6)
    one, two = fitted({Size(2, 10): 3.0}), fitted({Size(1, 10): 3.0, Size(1, 20): 4.0})
    assert one(Size(1, 10)) == pytest.approx(1.5)
    assert two(Size(1, 40)) == pytest.approx(6.0)
    assert fitted({Size(1, 10): 0.0})(Size(1, 10)) > 0  # every action takes some time


def peaks(schedule: Schedule, held: list[list[float]]) -> list[float]:
    return [peak_held(program, held) for program in schedule.programs]


def test_the_step_of_a_batch_ends_with_the_norm_and_sums_of_tied_weights_as_that_of_the_plan() -> None:
    sums: dict[str, Any] = {"norm": 0.25, "tied": (((0, 1), 0.5),), "update": (0.0, 1.0)}
    plans = [replace(found, costs=replace(found.costs, **more)) for found in [replanned()] for more in ({}, sums)]
    alone, whole = (Replanner(each, PROFILES, cold=1).find([Size(1, 400)] * M) for each in plans)
    assert whole.fixed_value == pytest.approx((alone.fixed_value or 0.0) + 0.25 + 0.5 + 1.0)


@pytest.mark.thorough
def test_no_more_memory_than_the_plan_or_its_own_order_and_never_more_than_the_device_has() -> None:
    short, long = Size(1, 100), Size(1, 400)
    replanner = Replanner(replanned(), PROFILES)
    sizes = [long, short, short, long, short, short]
    largest = peaks(replanner._own, replanner.held([long] * M))
    assert replanner.limits(sizes) == replanner.limits([short] * M) == largest
    found = replanner.find(sizes)
    assert found.value < 0.95 * found.fixed_value
    assert all(
        here <= most * (1 + 1e-9)
        for here, most in zip(peaks(found.schedule, replanner.held(sizes)), largest, strict=True)
    )
    beyond = [Size(1, 600)] * M  # longer than any that was measured: the plan's own order holds more
    assert replanner.limits(beyond) == pytest.approx([1.5 * each for each in largest])

    tight = replanned(memory_limit=1.1 * max(replanned().memory_bytes.values()))
    replanner = Replanner(tight, PROFILES)
    assert max(replanner.limits(beyond)) < 1.2 * max(largest)
    some = [Size(1, 600), *[short] * (M - 1)]
    found = replanner.find(some)
    held = peaks(found.schedule, replanner.held(some))
    assert all(here <= most * (1 + 1e-9) for here, most in zip(held, replanner.limits(some), strict=True))
    with pytest.raises(MemoryLimitError, match="one microbatch alone takes"):
        replanner.find([Size(1, 2000), *[short] * (M - 1)])
