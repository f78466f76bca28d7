"""Figures that measured steps put into a plan: steps that are simulated from other figures give those figures back."""

from collections.abc import Mapping
from dataclasses import replace
from math import log1p
from operator import add, mul
from random import Random
from statistics import median
from typing import Any

import pytest
from support.inside import around_actions, expected, sampled, with_measured
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, Level, Node, Plan, Profile, plan
from stagewright.schedules import Costs, Op, Timeline, simulate

NODES = [
    Node(
        name=str(i),
        forward_seconds=(2 + i) * 1e-3,
        backward_seconds=(5 + i) * 1e-3,
        activation_bytes=1e5,
        parameter_bytes=4e5,
        update_seconds=4e-3,
    )
    for i in range(8)
]
PROFILE = Profile(nodes=NODES, microbatch_size=1, action_seconds=2e-4)
CLUSTER = Cluster(levels=(Level(name="host", size=4, bandwidth=1e9, latency=1e-4, message_seconds=1e-4),))
SHAPES: Mapping[str, Mapping[str, Any]] = {
    "pipeline": {"pipeline_sizes": (4,), "data_sizes": (1,), "schedules": ("1f1b",)},
    "chunks": {"pipeline_sizes": (4,), "data_sizes": (1,), "schedules": ("interleaved",), "chunk_sizes": (2,)},
    "replicas": {"pipeline_sizes": (2,), "data_sizes": (2,), "schedules": ("1f1b",)},
    "data": {"pipeline_sizes": (1,), "data_sizes": (4,), "schedules": ("1f1b",)},
}


def planned(shape: str, profile: Profile = PROFILE, **options: Any) -> Plan:
    sizes = {"microbatch_sizes": (1,), "optimizer_sharding": ("none",), **SHAPES[shape], **options}
    return plan(profile, CLUSTER, global_batch=8, **sizes)


def measured_as(truth: Timeline, found: Plan, **costs: Any) -> Plan:
    """Spans of a measured timeline are those of actions alone; in a simulated one they hold the overhead, too."""
    return with_measured(found, [truth] * 3, Costs(overhead=[1e-30] * len(found.stages), **costs))


def known(found: Plan) -> Costs:
    """As a run measures what goes on between actions: with the messages."""
    return Costs(overhead=around_actions(simulated(found).costs, len(found.stages)))


def times(row: Any, ratio: float) -> Any:
    return [ratio * each for each in row]


def as_it_is(found: Plan) -> Plan:
    """The same plan on a machine that is otherwise than planned."""
    costs, links = found.costs, found.links
    ratios = [1.2 + 0.1 * number for number in range(len(found.stages))]

    def slower(op: Op, known: object = True) -> list[float] | None:
        return None if known is None else [1.1 * r * each for r, each in zip(ratios, found.seconds(op), strict=True)]

    routes = {
        pair: replace(way, latency=3 * way.latency, seconds_per_byte=3 * way.seconds_per_byte)
        for pair, way in links.network.routes.items()
    }
    return replace(
        found,
        costs=replace(
            costs,
            forward=list(map(mul, ratios, found.seconds(Op.F))),
            backward=slower(Op.B),
            input_grad=slower(Op.I, costs.input_grad),
            weight_grad=slower(Op.W, costs.weight_grad),
            overhead=times(costs.overhead, 2.5),
            update=times(costs.update, 1.5),
        ),
        links=replace(
            links,
            network=replace(links.network, routes=routes),
            sums=tuple(replace(each, seconds=2.0 * each.seconds) for each in links.sums),
        ),
    )


@pytest.mark.thorough(but=["data"])
@pytest.mark.parametrize("shape", SHAPES)
def test_steps_give_back_what_they_took(shape: str) -> None:
    found = planned(shape)
    truth = as_it_is(found)
    step = replace(simulated(truth).timeline, around=4e-3)
    took = measured_as(step, found)
    arounds = around_actions(truth.costs, len(truth.stages))
    for op in (Op.F, Op.B):
        assert took.seconds(op) == pytest.approx(list(map(add, truth.seconds(op), arounds)), rel=1e-6)
    assert took.costs.update == pytest.approx(truth.costs.update, rel=1e-6)
    way = None
    for pair, way in truth.links.network.routes.items():
        assert took.links.network.routes[pair].latency == pytest.approx(way.latency, rel=1e-6)
        assert took.links.network.routes[pair].seconds_per_byte == pytest.approx(way.seconds_per_byte, rel=1e-6)
    message = 0.0 if way is None else way.latency + way.seconds_per_byte * 1e5  # that sums may have queued behind
    for own, real in zip(took.links.sums, truth.links.sums, strict=True):
        assert own.seconds / real.seconds > 0.999999
        assert own.seconds <= real.seconds + message * 1.001
    assert took.costs.around == 4e-3
    assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=0.01)
    assert simulated(took).timeline.batch_seconds == took.simulated_step_time
    assert Plan.from_json(took.to_json()) == took


@pytest.mark.thorough(but=["4.0"])
@pytest.mark.parametrize("measured", [0.5, 4.0])
def test_measured_sums_of_tied_weights_take_the_place_of_predicted_ones(measured: float) -> None:
    """Also where an older profile knew nothing of them."""
    profile = replace(PROFILE, tied=((("0", "7"), 4e6),), nodes=[replace(n, parameter_bytes=8e6) for n in NODES])
    found = planned("pipeline", profile)
    ((stages, seconds),) = found.costs.tied
    assert stages == (0, 3)
    step = simulated(replace(found, costs=replace(found.costs, tied=((stages, measured * seconds),)))).timeline
    for before in (found, replace(found, costs=replace(found.costs, tied=()))):
        took = measured_as(step, before)
        assert took.costs.tied == ((stages, pytest.approx(measured * seconds)),)
        assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=1e-6)


def test_measured_norms_and_sums_take_the_place_of_predicted_ones() -> None:
    found = planned("replicas", replace(PROFILE, tied=((("0", "7"), 1e5),)), chunk_sizes=(2,), schedules="zb-v")
    assert found.costs.tied == ()  # its first stage has such weights
    first, *others = found.links.sums
    links = replace(found.links, sums=(replace(first, seconds=first.seconds / 2), *others))
    truth = replace(found, costs=replace(found.costs, tied=(((0, 3), first.seconds),)), links=links)
    step = simulated(truth).timeline
    took = measured_as(step, found)
    assert took.costs.tied == (((0, 3), pytest.approx(first.seconds)),)
    assert took.links.sums[0].seconds == pytest.approx(first.seconds / 2)
    assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=0.01)
    found = planned("pipeline", max_grad_norm=1.0)
    assert found.costs.norm == 6 * 1e-4  # of an empty sum over four ranks, level by level
    truth = replace(found, costs=replace(found.costs, norm=5e-3))
    step = simulated(truth).timeline
    took = measured_as(step, found, norm=5e-3)
    assert took.costs.norm == pytest.approx(5e-3)
    assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=1e-6)


def test_what_was_not_measured_is_corrected_by_the_step() -> None:
    found = planned("pipeline")
    step = simulated(as_it_is(found)).timeline
    took = with_measured(found, [step], known(found))
    ratio = (took.simulated_step_time or 0.0) / (found.simulated_step_time or 1.0)
    assert ratio > 1.1
    assert took.bound == pytest.approx(found.bound * ratio)
    assert took.bottleneck == pytest.approx(found.bottleneck * ratio)
    assert [each.bottleneck for each in took.runners_up] == [
        pytest.approx(each.bottleneck * ratio) for each in found.runners_up
    ]
    assert [each.simulated_step_time for each in took.runners_up] == [
        pytest.approx((each.simulated_step_time or 0.0) * ratio) for each in found.runners_up
    ]
    assert took.searched.least == pytest.approx(found.searched.least * ratio)
    assert known(took).overhead == pytest.approx(known(found).overhead)  # as the run says
    assert "tried for 1 step: " in took.notes[-1]
    assert found.tried_seconds is None
    assert took.tried_seconds is not None
    assert Plan.from_json(took.to_json()) == took
    with pytest.raises(ValueError, match="tried_seconds"):
        Plan.from_json(took.to_json().replace(f'"tried_seconds": {took.tried_seconds!r}', '"tried_seconds": -1.0'))
    assert "predicted from the profile" in took.notes[-1]
    assert "compute +" in took.notes[-1]


def test_the_middle_step_is_told_and_how_far_actions_varied() -> None:
    """F of the n-th of eight microbatches takes n tenths more: its quartiles are 0.35 apart around 1.35."""
    found = planned("pipeline")
    predicted, costs, links = simulated(found)
    forward = [[seconds * (1 + k / 10) for k in range(8)] for seconds in found.seconds(Op.F)]
    step = simulate(predicted.schedule, replace(costs, forward=forward), links)
    steps = [replace(step, around=around) for around in (1e-3, 9e-3, 2e-3)]
    took = with_measured(found, steps, known(found))
    assert took.tried_seconds == steps[2].batch_seconds != took.simulated_step_time
    assert took.costs.around == 2e-3
    was = zip(found.seconds(Op.F), found.seconds(Op.B), around_actions(costs, 4), strict=True)
    for own, (f, b, around) in zip(took.stages, was, strict=True):
        assert own.spread == pytest.approx(0.175 * f / (1.35 * f + b + 2 * around))


def test_a_step_takes_the_sum_of_its_actions_means() -> None:
    """Each fifth action or so is hit by other work and takes up to half as long again; the medians know nothing of it.
    One burst of a hundred actions' seconds says nothing of the next steps."""
    found, random = planned("pipeline"), Random(1)
    predicted, costs, links = simulated(found)

    def hit(op: Op) -> list[list[float]]:
        return [
            [seconds * (1 + (random.random() < 0.25) * random.random() / 2) for _ in range(8)]
            for seconds in found.seconds(op)
        ]

    steps = [
        simulate(predicted.schedule, replace(costs, forward=hit(Op.F), backward=hit(Op.B)), links) for _ in range(12)
    ]
    usual = median(step.batch_seconds for step in steps)
    took = with_measured(found, steps, known(found))
    assert usual > 1.03 * predicted.batch_seconds
    assert took.simulated_step_time == pytest.approx(usual, rel=0.02)
    burst = replace(costs, forward=[[100 * found.seconds(Op.F)[0], *row[1:]] for row in hit(Op.F)])
    again = with_measured(found, [*steps, simulate(predicted.schedule, burst, links)], known(found))
    assert again.simulated_step_time == pytest.approx(took.simulated_step_time, rel=0.01)


def with_halves(found: Plan, share: float) -> Plan:
    backward = found.seconds(Op.B)
    halves = {"input_grad": times(backward, share), "weight_grad": times(backward, 1 - share)}
    return replace(found, costs=replace(found.costs, **halves))


def test_measured_halves_of_a_backward() -> None:
    """I and W by themselves where the schedule runs them, B in their proportion where it does not."""
    split, whole = (planned("pipeline", schedules=(schedule,)) for schedule in ("zb-h1", "1f1b"))
    split = replace(split, costs=split.costs.free_of_overhead)
    half, truth = with_halves(split, 0.5), with_halves(split, 0.3)
    took = with_measured(half, [simulated(truth).timeline] * 3, Costs())
    for op in (Op.I, Op.W, Op.B):
        assert took.seconds(op) == pytest.approx(truth.seconds(op))
    third = with_halves(whole, 0.3)
    took = with_measured(third, [simulated(as_it_is(third)).timeline] * 3, known(third))
    for number, (own, was) in enumerate(zip(took.stages, third.stages, strict=True)):
        (f, b, i), (f0, b0, _) = ([each.seconds(op)[number] for op in (Op.F, Op.B, Op.I)] for each in (took, third))
        assert b > 1.2 * b0
        assert i == pytest.approx(0.3 * b)
        assert own.step_seconds == pytest.approx(was.step_seconds * (f + b) / (f0 + b0))


def two_replicas(*, microbatches: int = 6) -> Plan:
    nodes = [Node(name="a", forward_seconds=2e-3, backward_seconds=5e-3, parameter_bytes=4e5, update_seconds=1e-3)]
    return plan(
        Profile(nodes=nodes, microbatch_size=1),
        Cluster.parse("2:net=1GB/s"),
        global_batch=microbatches,
        microbatch_sizes=(1,),
        optimizer_sharding=("none",),
        pipeline_sizes=(1,),
        data_sizes=(2,),
        schedules=("1f1b",),
    )


def test_replicas_keep_their_own_seconds() -> None:
    """The slower one ends last; the sum begins when it does, and the other one waits meanwhile."""
    found = two_replicas()
    fast, slow = (1.5e-3, 4e-3), (3e-3, 7e-3)  # F, B: of even microbatches, of odd ones
    predicted, costs, links = simulated(found)
    rows = replace(
        costs,
        forward=[[(slow if k % 2 else fast)[0] for k in range(6)]],
        backward=[[(slow if k % 2 else fast)[1] for k in range(6)]],
        input_grad=None,
        weight_grad=None,
    )
    step = simulate(predicted.schedule, rows, links)
    took = with_measured(found, [step] * 3, Costs())
    assert took.seconds(Op.F) == pytest.approx([2.25e-3])
    assert took.seconds(Op.B) == pytest.approx([5.5e-3])
    assert took.replica_seconds(Op.F) == [pytest.approx((1.5e-3, 3e-3))]
    assert took.replica_seconds(Op.B) == [pytest.approx((4e-3, 7e-3))]
    assert "replicas of stage 0 on ranks 0-1 take 0.71, 1.29 times these F and B" in " ".join(took.explain().split())
    whole = 3 * sum(slow) + took.update_seconds[0]
    assert took.simulated_step_time == pytest.approx(whole)
    assert took.bubble == pytest.approx(1 - 3 * (sum(fast) + sum(slow)) / (2 * whole))
    assert took.tried_seconds == pytest.approx(whole)
    assert Plan.from_json(took.to_json()) == took


def test_replicas_that_vary_are_expected_to_wait_for_each_other() -> None:
    """Half of all steps take longer than the longer one of two sums of F and B, drawn here by other means."""
    found = two_replicas(microbatches=2)
    assert expected(found) == (found.simulated_step_time, found.bubble)  # nobody knows that they vary
    (stage,) = found.stages
    varied = replace(found, stages=(replace(stage, spread=0.2),))
    sigma, random = log1p(0.2) / 0.6745, Random(1)

    def ran() -> float:
        return 2e-3 * random.lognormvariate(0, sigma) + 5e-3 * random.lognormvariate(0, sigma)

    pairs = [(ran(), ran()) for _ in range(4000)]
    beside = found.update_seconds[0]
    step = expected(varied)
    seconds, bubble = step
    assert seconds == pytest.approx(median(map(max, pairs)) + beside, rel=0.04)
    assert seconds > 1.05 * (found.simulated_step_time or 0.0)
    assert bubble == pytest.approx(median(1 - sum(p) / (2 * (max(p) + beside)) for p in pairs), rel=0.1)
    assert f"predicted, with actions that vary as in the profile: {sampled(varied)}, bubble {bubble:.1%}" in (
        " ".join(varied.explain().split())
    )
    slower = replace(varied, tried_seconds=0.01, costs=replace(varied.costs, backward=[(4e-3, 6e-3)]))
    assert "with actions that vary as in the trial: " in " ".join(slower.explain().split())
    assert "replicas of stage 0 on ranks 0-1 take 0.86, 1.14 times these F and B" in " ".join(slower.explain().split())
    assert expected(replace(varied, simulated_step_time=None)) is None
