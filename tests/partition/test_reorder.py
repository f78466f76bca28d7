"""A plan's work in a better order: never slower, in no more memory, read back as it was written."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.inside import PlanRecord, costs_of_orders, one_pipeline, reorder
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, Node, Plan, PlanStage, Profile, plan
from stagewright.schedules import Costs, Op, ScheduleError, check, simulate

CLUSTER = Cluster.parse("1x4:nvlink=10GB/s@10us,net=1GB/s@10us")


def profile(*, split: bool = True) -> Profile:
    """Eight nodes; W takes 3/7 of I and W."""
    halves = {"input_grad_seconds": 0.012, "weight_grad_seconds": 0.009} if split else {}
    nodes = [
        Node(
            name=f"n{i}",
            forward_seconds=0.01,
            backward_seconds=0.02,
            parameter_bytes=1e6,
            activation_bytes=1e5,
            **halves,
        )
        for i in range(8)
    ]
    return Profile(nodes=nodes, microbatch_size=1)


def planned(schedule: str, *, pipeline: int, data: int, chunks: int = 2) -> Plan:
    return plan(
        {1: profile()},
        CLUSTER,
        global_batch=8,
        schedules=(schedule,),
        pipeline_sizes=(pipeline,),
        data_sizes=(data,),
        chunk_sizes=(chunks,),
        optimizer_sharding=("none",),
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
    assert "order: synthesised" in " ".join(after.explain().split())


@pytest.mark.thorough
def test_halves_are_those_of_the_profile() -> None:
    before = planned("1f1b", pipeline=4, data=1)
    after = reorder(before, profile(), seconds=400, evaluations=100)
    assert after.seconds(Op.I)[1] == pytest.approx(after.seconds(Op.B)[1] * 0.6)  # W takes 0.45 of it
    after = reorder(before, profile(split=False), seconds=400, evaluations=100)
    assert after.seconds(Op.I)[1] == pytest.approx(after.seconds(Op.B)[1] / 2)


@pytest.mark.thorough
def test_what_has_no_better_order_stays_as_it_is() -> None:
    single = planned("gpipe", pipeline=1, data=4)
    assert reorder(single, profile(), seconds=400, evaluations=100) is single
    stream = planned("2bw", pipeline=4, data=1)
    assert reorder(stream, profile(), seconds=400, evaluations=100) is stream
    once = reorder(planned("1f1b", pipeline=4, data=1), profile(), seconds=400, evaluations=100)
    assert reorder(once, profile(), seconds=400, evaluations=100) is once


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
