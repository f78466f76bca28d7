"""A better order for a plan's own work: the same stages on the same ranks, in no more memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from ...schedules.families.registry import canonical_name
from ...schedules.ir import Op, Schedule
from ...schedules.liveness import peak_held
from ...schedules.search.synthesize import synthesize
from ...schedules.timing.costs import Costs, by_stage, columns
from ...schedules.wording import duration
from ..profile import Profile
from ..stage_cost import OFFLOAD
from .as_schedule import one_pipeline, simulated
from .record import OWN, PlanRecord, PlanStage, order_of

P = TypeVar("P", bound=PlanRecord)

WORTH = 0.002  # of the step: less is within a profile's accuracy
_LEAST_PART = 0.05  # of a backward, that either half takes at least


def reorder(plan: P, profile: Profile | None = None, *, seconds: float, evaluations: int | None = None) -> P:
    """The plan with a synthesised order where that is faster; else as it is, with a note of how far from optimal.

    No rank holds more bytes of activations at once than under the plan's own schedule.

    Arguments:
        plan: of a named flush schedule, over equal replicas, without offloading, slices, pairs, and stages whose
            forward takes no time; any other is returned as it is.
        profile: with seconds of I and W, where the plan's schedule does not split the backward; without, or without
            those, each is half of a backward.
        seconds: of the search, at most.
        evaluations: orders that it tries, at most; None: as many as there is time for.
    """
    M = plan.num_microbatches
    alike = len(set(plan.replicas)) == 1 and len({stage.tensor for stage in plan.stages}) == 1
    alike &= (
        not plan.slice_lengths and all(plan.seconds(Op.F)) and all(stage.recompute != OFFLOAD for stage in plan.stages)
    )
    was_tried = plan.schedule == OWN or any(note.startswith("order: ") for note in plan.notes)
    if M is None or len(plan.firsts) == 1 or not alike or plan.is_asynchronous or was_tried or plan.overlaps:
        return plan
    name = canonical_name(plan.schedule or "1f1b")
    split = replace(plan, costs=_split(plan, profile))
    before = simulated(split).timeline.batch_seconds
    own = one_pipeline(split, num_microbatches=M)
    held = _held(plan, own)
    found = synthesize(
        placement=own.placement,
        num_microbatches=own.num_microbatches,
        costs=costs_of_orders(split),
        memory_limit=[peak_held(program, [[each] * M for each in held]) for program in own.programs],
        activations=held,
        links=split.links,
        start=own if _is_plain(own) else None,
        seconds=seconds,
        evaluations=evaluations,
    )
    better = replace(split, order=order_of(found.schedule))
    after = simulated(better).timeline
    if after.batch_seconds >= before * (1 - WORTH):
        note = (
            f"order: {name} as it is; a search of {duration(found.seconds)} found none that is faster, and no order is "
            f"more than {found.gap:.1%} faster"
        )
        return replace(plan, notes=(*plan.notes, note))
    note = (
        f"order: found by a search, {duration(after.batch_seconds)} a batch compared with {duration(before)} under "
        f"{name}; no order is more than {found.gap:.1%} faster"
    )
    return replace(
        better,
        simulated_step_time=after.batch_seconds,
        simulated_bubble=max(0.0, after.bubble),
        notes=(*plan.notes, note),
    )


def input_grad_share(stage: PlanStage, profile: Profile | None) -> float:
    """Share of I in the stage's backward: what the W of its nodes do not take."""
    input_grad, weight_grad = _split_seconds(stage, profile)
    return input_grad / (input_grad + weight_grad)


def _split_seconds(stage: PlanStage, profile: Profile | None) -> tuple[float, float]:
    """Seconds of I and W if they run apart, as fractions of the stage's whole backward; their sum is at least 1."""
    nodes = {} if profile is None else {node.name: node for node in profile.nodes}
    own = [nodes[name] for name in stage.nodes if name in nodes]
    measured = sum(node.backward_seconds for node in own if node.input_grad_seconds or node.weight_grad_seconds)
    if not own or measured <= 0 or stage.recompute == "full":
        return 0.5, 0.5
    halves = sum(node.input_grad_seconds + node.weight_grad_seconds for node in own)
    weight = sum(node.weight_grad_seconds for node in own) / max(halves, 1e-30)
    weight, both = min(max(weight, _LEAST_PART), 1 - _LEAST_PART), max(halves / measured, 1.0)
    return (1 - weight) * both, weight * both


def _split(plan: PlanRecord, profile: Profile | None) -> Costs:
    """Costs with I and W: the planner's own if its schedule splits the backward, which have in I what runs again."""
    if plan.costs.input_grad is not None and any(plan.seconds(Op.I)) and any(plan.seconds(Op.W)):
        return plan.costs
    backward = plan.costs.free_of_overhead.table(num_stages=len(plan.stages)).rows[Op.B]
    parts = [_split_seconds(stage, profile) for stage in plan.stages]
    input_grad, weight_grad = (
        [[part[half] * seconds for seconds in row] for part, row in zip(parts, backward, strict=True)]
        for half in (0, 1)
    )
    return replace(plan.costs, input_grad=columns(input_grad), weight_grad=columns(weight_grad))


def costs_of_orders(plan: PlanRecord, **seconds: Any) -> Costs:
    """Costs of a plan's orders as a search of them knows them; with other `seconds` of F, I and W where given."""
    planned = {"forward": plan.seconds(Op.F), "input_grad": plan.seconds(Op.I), "weight_grad": plan.seconds(Op.W)}
    return Costs(
        **(seconds or planned),
        update=_updates(plan),
        overhead=plan.costs.overhead,
        message_overhead=plan.costs.message_overhead,
        norm=plan.costs.norm,
    )


def _held(plan: PlanRecord, schedule: Schedule) -> list[float]:
    """[S] what stages keep of a microbatch, as a part of the most that one on their rank keeps; 1 where not known."""
    kept = [0.0 if stage.held is None else stage.held.activations for stage in plan.stages]
    most = [max(kept[s] for s in own) for own in schedule.placement]
    return [kept[s] / most[p] if most[p] > 0 else 1.0 for s, (p, *_) in enumerate(schedule.owners)]


def _updates(plan: PlanRecord) -> list[float]:
    """[S] seconds from the last backward of a stage until its ranks have updated. The first of several that share
    weights is the last to begin their sum, after which all of them update; the search knows no such sums."""
    found, steps = list(plan.update_seconds), by_stage(plan.costs.update, len(plan.stages))
    for stages, seconds in plan.costs.tied:
        found[stages[0]] = max(found[stages[0]], seconds + max(steps[s] for s in stages))
    return found


def _is_plain(schedule: Schedule) -> bool:
    return schedule.num_slices == 1 and all(len(ranks) == 1 for ranks in schedule.owners)
