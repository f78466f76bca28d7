"""Figures that measured steps put into a plan: steps that are simulated from other figures give those figures back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log1p
from random import Random
from statistics import median
from typing import Any

import pytest
from support.inside import around_actions, expected, sampled, with_measured
from support.inside import simulated_simulated as simulated

from stagewright.partition import Cluster, Level, Node, Plan, Profile, plan
from stagewright.schedules import Costs, simulate

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


def planned(shape: str) -> Plan:
    return plan(PROFILE, CLUSTER, global_batch=8, microbatch_sizes=(1,), optimizer_sharding=("none",), **SHAPES[shape])


def known(found: Plan) -> Costs:
    """As a run measures what goes on between actions: with the messages."""
    return Costs(overhead=around_actions(simulated(found).costs, len(found.stages)))


def as_it_is(found: Plan, *, compute: float = 1.2, sums: float = 2.0) -> Plan:
    """The same plan on a machine that is otherwise than planned."""
    stages = []
    for number, stage in enumerate(found.stages):
        assert stage.traffic is not None
        ratio = compute + 0.1 * (number % len(found.stages))
        way = stage.traffic
        traffic = replace(
            way,
            latency=3 * way.latency,
            seconds_per_byte=3 * way.seconds_per_byte,
            sum_seconds=sums * way.sum_seconds,
            optimizer_seconds=1.5 * way.optimizer_seconds,
        )
        stages.append(
            replace(
                stage,
                forward_seconds=ratio * stage.forward_seconds,
                backward_seconds=1.1 * ratio * stage.backward_seconds,
                action_seconds=2.5 * stage.action_seconds,
                traffic=traffic,
            )
        )
    return replace(found, stages=tuple(stages))


@pytest.mark.parametrize("shape", SHAPES)
def test_steps_give_back_what_they_took(shape: str) -> None:
    found = planned(shape)
    truth = as_it_is(found)
    step = replace(simulated(truth).timeline, around=4e-3)
    # Spans of a measured timeline are those of actions alone; in a simulated one they hold the overhead, too.
    took = with_measured(found, [step] * 3, Costs(overhead=[1e-30] * len(found.stages)))
    arounds = around_actions(simulated(truth).costs, len(truth.stages))
    way = truth.stages[0].traffic
    assert way is not None
    message = way.latency + way.seconds_per_byte * way.message_bytes  # that sums may have queued behind
    for own, real, around in zip(took.stages, truth.stages, arounds, strict=True):
        assert own.forward_seconds == pytest.approx(real.forward_seconds + around, rel=1e-6)
        assert own.backward_seconds == pytest.approx(real.backward_seconds + around, rel=1e-6)
        assert own.traffic is not None
        assert real.traffic is not None
        assert own.traffic.optimizer_seconds == pytest.approx(real.traffic.optimizer_seconds, rel=1e-6)
        assert own.traffic.latency == pytest.approx(real.traffic.latency, rel=1e-6)
        if own.replicas > 1:
            assert own.traffic.sum_seconds / real.traffic.sum_seconds > 0.999999
            assert own.traffic.sum_seconds <= real.traffic.sum_seconds + message * 1.001
    assert took.around_seconds == 4e-3
    assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=0.01)
    assert simulated(took).timeline.batch_seconds == took.simulated_step_time
    assert Plan.from_json(took.to_json()) == took


@pytest.mark.parametrize("measured", [0.5, 4.0])
def test_measured_sums_of_tied_weights_take_the_place_of_predicted_ones(measured: float) -> None:
    """Also where an older profile knew nothing of them."""
    profile = replace(PROFILE, tied=((("0", "7"), 4e6),), nodes=[replace(n, parameter_bytes=8e6) for n in NODES])
    options = {"microbatch_sizes": (1,), "optimizer_sharding": ("none",), **SHAPES["pipeline"]}
    found = plan(profile, CLUSTER, global_batch=8, **options)
    ((stages, seconds),) = found.tied
    assert stages == (0, 3)
    step = simulated(replace(found, tied=((stages, measured * seconds),))).timeline
    for before in (found, replace(found, tied=())):
        took = with_measured(before, [step] * 3, Costs(overhead=[1e-30] * len(found.stages)))
        assert took.tied == ((stages, pytest.approx(measured * seconds)),)
        assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=1e-6)


def test_sums_of_tied_weights_of_one_place_belong_to_the_first_of_its_stages() -> None:
    profile = replace(PROFILE, tied=((("0", "7"), 1e5),))
    options = {"microbatch_sizes": (1,), "optimizer_sharding": ("none",), "chunk_sizes": (2,)}
    sizes = {"pipeline_sizes": (2,), "data_sizes": (2,), "schedules": "zb-v"}
    found = plan(profile, CLUSTER, global_batch=8, **options, **sizes)  # type: ignore[arg-type]
    assert found.tied == ()
    first, *others = found.stages
    assert first.traffic is not None
    own = first.traffic.sum_seconds
    truth = replace(
        found,
        stages=(replace(first, traffic=replace(first.traffic, sum_seconds=own / 2)), *others),
        tied=(((0, 3), own),),
    )
    took = with_measured(found, [simulated(truth).timeline] * 3, Costs(overhead=[1e-30] * 4))
    assert took.tied == ()
    assert took.stages[0].traffic is not None
    assert took.stages[0].traffic.sum_seconds == pytest.approx(1.5 * own)


def test_a_measured_norm_takes_the_place_of_the_predicted_one() -> None:
    options = {"microbatch_sizes": (1,), "optimizer_sharding": ("none",), **SHAPES["pipeline"]}
    found = plan(PROFILE, CLUSTER, global_batch=8, max_grad_norm=1.0, **options)
    assert found.norm_seconds == 6 * 1e-4  # of an empty sum over four ranks, level by level
    truth = replace(found, norm_seconds=5e-3)
    step = simulated(truth).timeline
    took = with_measured(found, [step] * 3, Costs(overhead=[1e-30] * len(found.stages), norm=5e-3))
    assert took.norm_seconds == pytest.approx(5e-3)
    assert took.simulated_step_time == pytest.approx(step.batch_seconds, rel=1e-6)


def test_what_was_not_measured_is_corrected_by_the_step() -> None:
    found = planned("pipeline")
    step = simulated(as_it_is(found)).timeline
    took = with_measured(found, [step], known(found))
    ratio = (took.simulated_step_time or 0.0) / (found.simulated_step_time or 1.0)
    assert ratio > 1.1
    assert took.bound == pytest.approx(found.bound * ratio)
    assert took.predicted_step_time == pytest.approx(found.predicted_step_time * ratio)
    assert [each.predicted_step_time for each in took.runners_up] == [
        pytest.approx(each.predicted_step_time * ratio) for each in found.runners_up
    ]
    assert [each.simulated_step_time for each in took.runners_up] == [
        pytest.approx((each.simulated_step_time or 0.0) * ratio) for each in found.runners_up
    ]
    assert found.searched is not None
    assert took.searched is not None
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
    forward = [[stage.forward_seconds * (1 + k / 10) for k in range(8)] for stage in found.stages]
    step = simulate(predicted.schedule, replace(costs, forward=forward), links)
    steps = [replace(step, around=around) for around in (1e-3, 9e-3, 2e-3)]
    took = with_measured(found, steps, known(found))
    assert took.tried_seconds == steps[2].batch_seconds != took.simulated_step_time
    assert took.around_seconds == 2e-3
    for own, was, around in zip(took.stages, found.stages, around_actions(costs, 4), strict=True):
        whole = 1.35 * was.forward_seconds + was.backward_seconds + 2 * around
        assert own.spread == pytest.approx(0.175 * was.forward_seconds / whole)


def test_causes_of_a_hundredth_of_the_step_are_named() -> None:
    found = planned("pipeline")
    took = with_measured(found, [simulated(as_it_is(found, compute=0.5)).timeline], known(found))
    assert "compute -" in took.notes[-1]
    assert "update +6.00 ms" in took.notes[-1]
    assert "messages" not in took.notes[-1]  # thrice as slow, but 1 ms of 292


def scaled(found: Plan, names: tuple[str, ...], ratio: float) -> Plan:
    """The plan with these figures of its stages, or of their traffic, so many times."""
    stages = []
    for stage in found.stages:
        way: Any = stage.traffic
        own = {name: getattr(stage, name) * ratio for name in names if hasattr(stage, name)}
        sent = {name: getattr(way, name) * ratio for name in names if hasattr(way, name)}
        stages.append(replace(stage, traffic=replace(way, **sent), **own))
    return replace(found, stages=tuple(stages))


def test_measured_halves_of_a_backward() -> None:
    """I and W by themselves where the schedule runs them, B in their proportion where it does not."""
    options = {"microbatch_sizes": (1,), "optimizer_sharding": ("none",), "pipeline_sizes": (4,), "data_sizes": (1,)}
    split, whole = (
        plan(PROFILE, CLUSTER, global_batch=8, schedules=(schedule,), **options) for schedule in ("zb-h1", "1f1b")
    )
    split = scaled(split, ("action_seconds", "message_seconds"), 0.0)
    half = replace(split, stages=tuple(replace(s, input_grad_seconds=0.5 * s.backward_seconds) for s in split.stages))
    truth = replace(split, stages=tuple(replace(s, input_grad_seconds=0.3 * s.backward_seconds) for s in split.stages))
    took = with_measured(half, [simulated(truth).timeline] * 3, Costs())
    for own, real in zip(took.stages, truth.stages, strict=True):
        assert own.input_grad_seconds == pytest.approx(real.input_grad_seconds)
        assert own.backward_seconds == pytest.approx(real.backward_seconds)
    third = replace(whole, stages=tuple(replace(s, input_grad_seconds=0.3 * s.backward_seconds) for s in whole.stages))
    took = with_measured(third, [simulated(as_it_is(third)).timeline] * 3, known(third))
    for own, was in zip(took.stages, third.stages, strict=True):
        assert own.backward_seconds > 1.2 * was.backward_seconds
        assert own.input_grad_seconds == pytest.approx(0.3 * own.backward_seconds)
        computed = (own.forward_seconds + own.backward_seconds) / (was.forward_seconds + was.backward_seconds)
        assert own.step_seconds == pytest.approx(was.step_seconds * computed)


def two_replicas(*, microbatches: int = 6) -> Plan:
    """One stage on two ranks, nothing but F, B, a sum and an update."""
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
    (stage,) = took.stages
    assert stage.forward_seconds == pytest.approx(2.25e-3)
    assert stage.backward_seconds == pytest.approx(5.5e-3)
    assert stage.forward_ratios == pytest.approx((1.5 / 2.25, 3.0 / 2.25))
    assert stage.backward_ratios == pytest.approx((4.0 / 5.5, 7.0 / 5.5))
    assert stage.replica_ratios == pytest.approx((5.5 / 7.75, 10.0 / 7.75))
    way = stage.traffic
    assert way is not None
    whole = 3 * sum(slow) + way.sum_seconds + way.optimizer_seconds
    assert took.simulated_step_time == pytest.approx(whole)
    assert took.bubble == pytest.approx(1 - 3 * (sum(fast) + sum(slow)) / (2 * whole))
    assert took.tried_seconds == pytest.approx(whole)
    assert Plan.from_json(took.to_json()) == took


@pytest.mark.parametrize("ratios", [(1.0,), (1.0, 0.0), (1.0, -1.0), (1.0, float("inf")), (1.0, "2")])
@pytest.mark.parametrize("name", ["forward_ratios", "backward_ratios"])
def test_ratios_of_replicas_are_refused(name: str, ratios: Any) -> None:
    (stage,) = two_replicas().stages
    with pytest.raises(ValueError, match=rf"{name}=.* of a stage with 2 replicas: expected as many finite numbers"):
        replace(stage, **{name: ratios})


def test_replicas_that_vary_are_expected_to_wait_for_each_other() -> None:
    """Half of all steps take longer than the longer one of two sums of F and B, drawn here by other means."""
    found = two_replicas(microbatches=2)
    assert expected(found) == (found.simulated_step_time, found.bubble)  # nobody knows that they vary
    (stage,) = found.stages
    way = stage.traffic
    assert way is not None
    varied = replace(found, stages=(replace(stage, spread=0.2),))
    sigma, random = log1p(0.2) / 0.6745, Random(1)

    def ran() -> float:
        return 2e-3 * random.lognormvariate(0, sigma) + 5e-3 * random.lognormvariate(0, sigma)

    pairs = [(ran(), ran()) for _ in range(4000)]
    beside = way.sum_seconds + way.optimizer_seconds
    step = expected(varied)
    assert step is not None
    assert step.seconds == pytest.approx(median(map(max, pairs)) + beside, rel=0.04)
    assert step.seconds > 1.05 * (found.simulated_step_time or 0.0)
    assert step.bubble == pytest.approx(median(1 - sum(p) / (2 * (max(p) + beside)) for p in pairs), rel=0.1)
    assert f"predicted, with actions that vary as in the profile: {sampled(varied)}, bubble {step.bubble:.1%}" in (
        varied.explain()
    )
    slower = replace(varied, tried_seconds=0.01, stages=(replace(varied.stages[0], backward_ratios=(0.8, 1.2)),))
    assert "with actions that vary as in the trial: " in slower.explain()
    assert "replicas of stage 0 on ranks 0-1 take 0.86, 1.14 times these F and B" in slower.explain()
    assert expected(replace(varied, simulated_step_time=None)) is None
