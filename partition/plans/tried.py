"""A plan with what its steps took: their seconds in place of those that a profile and links predicted.

    inputs of the simulation, as steps show them  ->  F, B, I, W, runtime, messages, sums, update; around a step
    simulated again                               ->  step, bubble, range

What a trial did not show (a message that nobody waited for) stays as predicted. F, B, I and W of a stage's replicas are
the mean of theirs, and by how much each differs from it; sums and updates have one figure for all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import add
from statistics import fmean, median, quantiles
from typing import TypeVar

from ...schedules.ir import COMPUTE_OPS
from ...schedules.timing.costs import Costs
from ...schedules.timing.inputs import Input, around_actions, predicted_inputs
from ...schedules.timing.measured_inputs import measured_inputs
from ...schedules.timing.prediction import check_prediction
from ...schedules.timing.timeline import Timeline
from ...schedules.wording import count, duration
from .record import PlanRecord, PlanStage
from .simulated import simulated
from .traffic import StageTraffic

P = TypeVar("P", bound=PlanRecord)

_LEAST_SPREAD = 8  # durations of a stage that tell how they vary
_SHOWN = 0.01  # of the step, from which on a cause is named


def with_measured(plan: P, steps: Sequence[Timeline], known: Costs) -> P:
    """The plan with what its own steps took, simulated again; a note says how far the prediction was off, and where.

    Bottlenecks, runners-up and bounds, which were not measured, are corrected by the ratio of the steps.

    Arguments:
        steps: measured ones of the plan's own schedule.
        known: costs that the same run measured itself: what goes on between actions, and whether there is a norm.
    """
    predicted, costs, links = simulated(plan)
    seen = measured_inputs(steps, known, planned=costs)
    before = predicted_inputs(predicted.schedule, costs, links)
    own = _SeenOfStages(seen)
    stages = _with_overheads(plan, known)
    if plan.traffic:
        stages = _with_messages(stages, plan, _by_places(plan, before, seen))
        stages = [_with_sums_and_update(stage, own, s) for s, stage in enumerate(stages)]
    tied = dict(plan.tied)
    for at, seconds in own.tied().items():
        places = {plan.positions[s] for s in at}
        if len(places) > 1:
            tied[at] = seconds
        elif plan.traffic:  # its stages stand on the same ranks, and the first has such weights
            own_sum = own("sum", at[0]) or 0.0
            stages[at[0]] = _with_sum(stages[at[0]], own_sum + seconds)
    spreads = _spreads(steps)
    owners = predicted.schedule.owners
    stages = [_with_actions(stage, own, s, owners[s], spreads.get(s, stage.spread)) for s, stage in enumerate(stages)]
    alone = {each.kind: seconds for each, seconds in seen.items() if not each.at}
    measured = replace(
        plan,
        stages=tuple(stages),
        around_seconds=alone.get("around", plan.around_seconds),
        norm_seconds=alone.get("norm", plan.norm_seconds),
        tied=tuple(tied.items()),
    )
    after = simulated(measured).timeline
    took = median(step.batch_seconds for step in steps)
    check = check_prediction(predicted, steps, costs=costs, links=links, known=known)
    causes = [
        f"{each.name} {'-' if each.seconds < 0 else '+'}{duration(abs(each.seconds))}"
        for each in check.causes
        if abs(each.seconds) >= _SHOWN * took
    ]
    note = (
        f"tried for {count(len(steps), 'step')}: {duration(took)} a batch, predicted from the profile "
        f"{duration(predicted.batch_seconds)}{': ' if causes else ''}{', '.join(causes)}"
    )
    return _scaled(
        replace(
            measured,
            simulated_step_time=after.batch_seconds,
            simulated_bubble=max(0.0, after.bubble),
            tried_seconds=took,
            notes=(*plan.notes, note),
        ),
        after.batch_seconds / predicted.batch_seconds,
    )


class _SeenOfStages:
    """Measured inputs by stage."""

    def __init__(self, seen: Mapping[Input, float]) -> None:
        self._seen = seen

    def __call__(self, kind: str, stage: int) -> float | None:
        """Of what all replicas have in common [s]; None where nothing was seen."""
        found = [seconds for each, seconds in self._seen.items() if each.kind == kind and each.at == (stage,)]
        return found[0] if found else None

    def tied(self) -> dict[tuple[int, ...], float]:
        """Sums of weights that several stages share, by these [s]."""
        return {each.at: s for each, s in self._seen.items() if each.kind == "sum" and len(each.at) > 1}

    def of_ranks(self, kind: str, stage: int, ranks: Sequence[int]) -> tuple[float, ...] | None:
        """Of an op on each of these ranks [s]; None where one of them showed nothing."""
        at = [(stage,)] if len(ranks) == 1 else [(stage, rank) for rank in ranks]
        found = {each.at: seconds for each, seconds in self._seen.items() if each.kind == kind}
        return tuple(found[each] for each in at) if all(each in found for each in at) else None


def _with_actions(stage: PlanStage, own: _SeenOfStages, number: int, ranks: Sequence[int], spread: float) -> PlanStage:
    """The stage with seconds of F, B, I and W as these ranks showed them, its replicas."""
    forward, whole, i, w = (own.of_ranks(kind, number, ranks) for kind in ("F", "B", "I", "W"))
    if i is not None and w is not None:
        whole = tuple(map(add, i, w))
    given = stage.forward_seconds + stage.backward_seconds
    forward_seconds = stage.forward_seconds if forward is None else fmean(forward)
    backward_seconds = stage.backward_seconds if whole is None else fmean(whole)
    input_grad_seconds = stage.input_grad_seconds
    if i is not None and w is not None:
        input_grad_seconds = fmean(i)
    elif input_grad_seconds is not None and stage.backward_seconds > 0:
        input_grad_seconds = backward_seconds * (input_grad_seconds / stage.backward_seconds)
    return replace(
        stage,
        forward_seconds=forward_seconds,
        backward_seconds=backward_seconds,
        input_grad_seconds=input_grad_seconds,
        forward_ratios=stage.forward_ratios if forward is None else _ratios(forward),
        backward_ratios=stage.backward_ratios if whole is None else _ratios(whole),
        step_seconds=stage.step_seconds * (forward_seconds + backward_seconds) / given
        if given > 0
        else stage.step_seconds,
        spread=spread,
    )


def _ratios(seconds: Sequence[float]) -> tuple[float, ...]:
    """By replica over their mean; none where one took no time, or there is one alone."""
    mean = fmean(seconds)
    return tuple(each / mean for each in seconds) if len(seconds) > 1 and min(seconds) > 0 else ()


def _with_overheads(plan: PlanRecord, known: Costs) -> list[PlanStage]:
    """Stages whose actions and messages together keep a rank as busy as measured.

    Of both the messages keep what was predicted of them, as far as there is room for it at every stage.
    """
    measured = around_actions(known, len(plan.stages))
    if not all(measured):
        return list(plan.stages)  # a process that runs several ranks sees none
    busy = plan.message_overheads
    part = min([1.0, *(seen / each for seen, each in zip(measured, busy, strict=True) if each > 0)])
    return [
        replace(
            stage,
            action_seconds=max(0.0, seen - part * each),
            traffic=None
            if stage.traffic is None
            else replace(stage.traffic, message_seconds=part * stage.traffic.message_seconds),
        )
        for stage, seen, each in zip(plan.stages, measured, busy, strict=True)
    ]


def _by_places(
    plan: PlanRecord, before: Mapping[Input, float], seen: Mapping[Input, float]
) -> dict[frozenset[int], tuple[float, float]]:
    """Predicted and measured seconds of a message between two places, means over their ranks, both ways."""
    width = len(plan.stages) // plan.num_chunks
    place = {
        group: p for p, stage in enumerate(plan.stages[:width]) for group in (r // plan.tensor for r in stage.ranks)
    }
    found: dict[frozenset[int], list[tuple[float, float]]] = defaultdict(list)
    for each, seconds in seen.items():
        if each.kind == "message" and each in before and set(each.at) <= place.keys():
            found[frozenset(place[rank] for rank in each.at)].append((before[each], seconds))
    return {pair: (fmean(a for a, _ in both), fmean(b for _, b in both)) for pair, both in found.items()}


def _with_messages(
    stages: Sequence[PlanStage], plan: PlanRecord, ways: Mapping[frozenset[int], tuple[float, float]]
) -> list[PlanStage]:
    made = list(stages)
    for s, pair in enumerate(zip(plan.positions, plan.positions[1:], strict=False)):
        way = made[s].traffic
        if frozenset(pair) in ways and way is not None:
            was, now = ways[frozenset(pair)]
            made[s] = replace(made[s], traffic=_slower(way, now / was) if was > 0 else replace(way, latency=now))
    return made


def _slower(way: StageTraffic, ratio: float) -> StageTraffic:
    return replace(way, latency=way.latency * ratio, seconds_per_byte=way.seconds_per_byte * ratio)


def _with_sums_and_update(stage: PlanStage, own: _SeenOfStages, number: int) -> PlanStage:
    way = stage.traffic
    assert way is not None
    added, held, gather, update = (own(kind, number) for kind in ("sum", "held", "gather", "update"))
    way = replace(
        way,
        sum_seconds=way.sum_seconds if added is None or stage.replicas == 1 else added,
        sum_busy=way.sum_busy if held is None or not added or stage.replicas == 1 else min(1.0, held / added),
        gather_seconds=way.gather_seconds if gather is None or not way.gather_seconds else gather,
        optimizer_seconds=way.optimizer_seconds if update is None else update,
    )
    return replace(stage, traffic=way, update_seconds=way.sum_seconds + way.gather_seconds + way.optimizer_seconds)


def _with_sum(stage: PlanStage, seconds: float) -> PlanStage:
    way = stage.traffic
    assert way is not None
    more = seconds - way.sum_seconds
    return replace(stage, traffic=replace(way, sum_seconds=seconds), update_seconds=stage.update_seconds + more)


def _spreads(steps: Sequence[Timeline]) -> dict[int, float]:
    """By stage half the interquartile range of its actions over the median, weighted by their seconds."""
    durations: dict[tuple[int, object, int], list[float]] = defaultdict(list)
    for step in steps:
        for rank, trace in enumerate(step.ranks):
            for (stage, op, _), start, end in trace.compute:
                if op in COMPUTE_OPS:
                    durations[stage, op, rank].append(end - start)
    found: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for (stage, _, _), own in durations.items():
        if len(own) >= _LEAST_SPREAD and (middle := median(own)) > 0:
            low, _, high = quantiles(own, n=4, method="inclusive")
            found[stage].append((middle, (high - low) / 2 / middle))
    return {stage: sum(w * s for w, s in own) / sum(w for w, _ in own) for stage, own in found.items()}


def _scaled(plan: P, ratio: float) -> P:
    """The plan with bottlenecks, runners-up and bounds, which nothing measured, corrected by what the step was off."""
    searched = plan.searched
    return replace(
        plan,
        predicted_step_time=plan.predicted_step_time * ratio,
        bound=plan.bound * ratio,
        runners_up=tuple(
            replace(
                each,
                predicted_step_time=each.predicted_step_time * ratio,
                simulated_step_time=None if (s := each.simulated_step_time) is None else s * ratio,
            )
            for each in plan.runners_up
        ),
        searched=None
        if searched is None
        else replace(
            searched,
            least=searched.least * ratio,
            least_left=None if searched.least_left is None else searched.least_left * ratio,
        ),
    )
